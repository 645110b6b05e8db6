"""Interface of drafters, which propose tokens for the next step to verify.

Drafts change the speed only: every token that a request gets is the target's own (verification.py).

Legend: K drafted tokens, V vocabulary of the target, N rows of a step, S captured states of a row.
"""

from __future__ import annotations

import dataclasses
from collections import abc
from typing import Protocol, runtime_checkable

from torch import Tensor

from mlaforge.engine.request.sequence import Sequence


@dataclasses.dataclass(frozen=True)
class Draft:
    """Proposed tokens that continue a sequence: a chain or a tree.

    token_ids       K tokens
    q_KV            fp32 distributions over the target's vocabulary that the tokens were sampled from; None where each
                    token was chosen deterministically (q is 1 on the token)
    parents         of a tree: for each token the index of its parent in `token_ids`, -1 for the sequence's newest
                    token. Parents come before children, siblings differ, and q_KV is None. None for a chain.
    sparse_steps    sparse-view steps that verified these tokens, all but the last `lookup_tokens` (sparse_view.py)
    lookup_tokens   tokens at the end that were copied from earlier text (lookup.py)
    lossy           keep the tokens even where the target disagrees
    """

    token_ids: list[int]
    q_KV: Tensor | None = None
    parents: list[int] | None = None
    sparse_steps: int = 0
    lookup_tokens: int = 0
    lossy: bool = False

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
        levels: list[int] = []
        for i in range(len(self.token_ids)):
            parent = i - 1 if self.parents is None else self.parents[i]
            levels.append(1 + (levels[parent] if parent >= 0 else 0))
        return max(levels)


def ancestry(parents: abc.Sequence[int]) -> list[list[int]]:
    """Ancestor matrix of a forest. `parents` has -1 for roots; parents come before children.

    Row i, column j: number of edges from node i up to its ancestor j (0 for i itself), -1 where j is not an ancestor.
    """
    rows: list[list[int]] = []
    for i, parent in enumerate(parents):
        row = [-1] * len(parents) if parent < 0 else [edges + (edges >= 0) for edges in rows[parent]]
        row[i] = 0
        rows.append(row)
    return rows


class Drafter(Protocol):
    """Proposes tokens before a step (`propose`) and sees the target's states after it (`observe`).

    Sequences start and end without notice."""

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Layers whose input, the target's residual stream, is captured for `observe`."""
        ...

    def propose(self, budgets: abc.Sequence[tuple[Sequence, int]], min_probability: float) -> list[Draft | None]:
        """Draft at most k tokens for each (sequence, k); the cache has room for them.

        A drafter that knows probabilities ends a draft before the first token whose path is less likely than
        `min_probability`; an empty draft is possible. The decision must not depend on the sampled token, or drafted
        tokens would not follow q."""
        ...

    def observe(self, starts: abc.Sequence[tuple[Sequence, int]], states_NS: Tensor) -> None:
        """Called after a step that computed positions [start, sequence.computed) of each (sequence, start), rejected
        tokens excluded. `states_NS`: captured states of these positions, concatenated over the sequences."""
        ...


@runtime_checkable
class TreeDrafter(Drafter, Protocol):
    """Drafter that can propose several candidates for a position."""

    def propose_tree(self, sequence: Sequence, tokens: int, depth: int) -> Draft | None:
        """Draft a tree of at most `tokens` tokens and `depth` levels; the cache has room for them."""
        ...
