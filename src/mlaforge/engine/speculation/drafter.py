"""Interface of drafters, which propose tokens for the next step to verify.

Drafts change the speed only: every token that a request gets is the target's own (verification.py).

Legend: K drafted tokens, V vocabulary of the target, N rows of a step, S captured states of a row.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
import operator
from collections import defaultdict
from collections.abc import Sequence as Items
from typing import Any

from torch import Tensor

from mlaforge.engine.request.sequence import Sequence

# Acceptance of a drafted token before any measurement, the measurements as which it weighs, and the least weight of a
# new one, which is a yes or no. Behind them the score of policy.py.
PRIOR = 0.7  # 0.915, 0.922, 0.920
PRIOR_DRAFTS = 4  # 0.917, 0.922, 0.918
ACCEPTANCE_WEIGHT = 0.02  # 0.922, 0.922, 0.923


@dataclasses.dataclass(frozen=True)
class Draft:
    """Proposed tokens that continue a sequence: a chain or a tree.

    token_ids   K tokens; none where the drafter considers no token likely enough
    q_KV        fp32 distributions over the target's vocabulary that the tokens were sampled from; None where each token
                was chosen deterministically (q is 1 on the token)
    parents     of a tree: for each token the index of its parent in `token_ids`, -1 for the sequence's newest token.
                Parents come before children, siblings differ, and q_KV is None. None for a chain.
    steps       sparse-view steps that verified these tokens (sparse_view.py)
    copied      whether prompt lookup proposed it (lookup.py)
    """

    token_ids: list[int]
    q_KV: Tensor | None = None
    parents: list[int] | None = None
    steps: int = 0
    copied: bool = False

    def child(self, node: int, token: int) -> int | None:
        """Index of `token` among the children of `node` (-1: the sequence's newest token); None if not proposed."""
        if self.parents is None:
            return node + 1 if self.token_ids[node + 1 : node + 2] == [token] else None
        nodes = range(node + 1, len(self.token_ids))
        return next((i for i in nodes if self.parents[i] == node and self.token_ids[i] == token), None)

    def sampled(self, index: int) -> tuple[int, Tensor] | None:
        """Token `index` of a sampled chain and its distribution [V]; None past the end or without distributions."""
        if self.q_KV is None or index == len(self.token_ids):
            return None
        return self.token_ids[index], self.q_KV[index]

    @property
    def tree(self) -> list[list[int]] | None:
        """Tree mask as in Chunk.tree, the sequence's newest token being the root; None for a chain."""
        return None if self.parents is None else ancestry([-1, *(parent + 1 for parent in self.parents)])

    @property
    def depth(self) -> int:
        """Tokens on the longest path."""
        if self.parents is None:
            return len(self.token_ids)
        levels: list[int] = []
        for parent in self.parents:
            levels.append(1 + (levels[parent] if parent >= 0 else 0))
        return max(levels, default=0)


def ancestry(parents: Items[int]) -> list[list[int]]:
    """Ancestor matrix of a forest. `parents` has -1 for roots; parents come before children.

    Row i, column j: number of edges from node i up to its ancestor j (0 for i itself), -1 where j is not an ancestor.
    """
    rows: list[list[int]] = []
    for i, parent in enumerate(parents):
        row = [-1] * len(parents) if parent < 0 else [edges + (edges >= 0) for edges in rows[parent]]
        row[i] = 0
        rows.append(row)
    return rows


class Acceptance:
    """Share of drafted tokens that are accepted, by position, given that the tokens before were accepted."""

    def __init__(self) -> None:
        # By position: the share, and the measurements behind it.
        self._shares: defaultdict[int, tuple[float, int]] = defaultdict(lambda: (PRIOR, PRIOR_DRAFTS))

    def paths(self, count: int) -> list[float]:
        """Probabilities that the first 1, 2, ..., `count` tokens of a draft are all accepted."""
        return list(itertools.accumulate((self._shares[position][0] for position in range(count)), operator.mul))

    def discount(self) -> None:
        """Move the shares half way back to the prior: another text begins."""
        for position, (share, _) in self._shares.items():
            self._shares[position] = (share + PRIOR) / 2, PRIOR_DRAFTS

    def record(self, budget: int, accepted: int) -> None:
        """Add a draft of at most `budget` tokens, the first `accepted` of which were accepted."""
        for position in range(min(budget, accepted + 1)):
            share, count = self._shares[position]
            weight = max(ACCEPTANCE_WEIGHT, 1 / (count + 1))
            self._shares[position] = share + weight * ((position < accepted) - share), count + 1


class Drafter(abc.ABC):
    """Proposes tokens before a step (`propose`), sees the target's states after it (`observe`) and what was accepted
    (`record`). Sequences start and end without notice. A subclass must define `propose` only.

    name               the mode's name
    boundaries         layers whose input, the target's residual stream, is captured for `observe`
    longest            tokens of its longest draft, and by default of any; None: as the options say
    parallel_drafting  whether it drafts all tokens at once, without knowing the ones before
    """

    name = "chain"
    boundaries: tuple[int, ...] = ()
    longest: int | None = None
    parallel_drafting = False

    @functools.cached_property
    def acceptance(self) -> Acceptance:
        """Measured acceptance of the drafts."""
        return Acceptance()

    def applies(self, decoding: Items[Sequence], alone: bool) -> bool:
        """Whether it can draft for a step with these decoding sequences; `alone`: a single one, no other runs or
        waits."""
        return True

    def room(self, sequence: Sequence, length: int) -> int:
        """Tokens to reserve for a draft whose paths have up to `length` tokens."""
        return length

    @abc.abstractmethod
    def propose(self, budgets: Items[tuple[Sequence, int]], min_probability: float) -> list[Draft | None]:
        """Draft at most k tokens for each (sequence, k); the cache has room for them. None: no proposal.

        A drafter that knows probabilities ends a draft before the first token whose path is less likely than
        `min_probability`; an empty draft is possible. The decision must not depend on the sampled token, or drafted
        tokens would not follow q."""

    def observe(self, starts: Items[tuple[Sequence, int]], states_NS: Tensor) -> None:  # noqa: B027
        """Called after a step that computed positions [start, sequence.computed) of each (sequence, start), rejected
        tokens excluded, where `boundaries` is not empty. `states_NS`: captured states of these positions, concatenated
        over the sequences."""

    def record(self, sequence: Sequence, draft: Draft, budget: int, accepted: int) -> None:
        """The target accepted the first `accepted` tokens of a draft that could have had `budget` tokens."""
        self.acceptance.record(budget, accepted)


class TreeDrafter(Drafter):
    """The trees of a drafter that has `propose_tree`, for a sequence that runs alone. They have at most `tokens` tokens
    and paths of `depth`."""

    name = "tree"

    def __init__(self, drafter: Any, tokens: int, depth: int):
        self.drafter, self.tokens, self.depth = drafter, tokens, depth

    def applies(self, decoding: Items[Sequence], alone: bool) -> bool:
        return alone

    def room(self, sequence: Sequence, length: int) -> int:
        return self.tokens

    def propose(self, budgets: Items[tuple[Sequence, int]], min_probability: float) -> list[Draft | None]:
        return [self.drafter.propose_tree(sequence, count, min(count, self.depth)) for sequence, count in budgets]
