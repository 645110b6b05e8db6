"""Drafters propose tokens for the next step to verify: the interface, and prompt lookup, which needs no training.

Whatever a drafter proposes, the tokens that come out are the target's own (verification.py): a bad one costs
time only.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import abc
from typing import Protocol, runtime_checkable

from torch import Tensor

from mlaforge.engine.request.sequence import Sequence

# Prompt lookup: lengths of the token runs that are looked for, the longest first.
LONGEST_MATCH, SHORTEST_MATCH = 4, 2


@dataclasses.dataclass(frozen=True)
class Draft:
    """Proposed tokens that continue a sequence. `q_KV`, fp32 over the target's whole vocabulary, are the distributions
    that they were drawn from; None where nothing was drawn: all of q is on the token itself.

    `parents`: of a tree which token each one follows, by its place; -1 for the sequence's own newest. A parent comes
    before what follows it, nothing is followed by the same token twice, and nothing was drawn. None for a chain.

    `partial_steps`: in how many steps the target has judged them by a part of the cache (partial.py), all but the last
    `copied`, which were copied from the text (copies.py). `final`: they stay, whatever the target says now.
    """

    token_ids: list[int]
    q_KV: Tensor | None = None
    parents: list[int] | None = None
    partial_steps: int = 0
    final: bool = False
    copied: int = 0

    def after(self, node: int, token: int) -> int | None:
        """The place of `token` behind that of `node` (-1 for the sequence's newest); None where it was not proposed."""
        if self.parents is None:
            return node + 1 if self.token_ids[node + 1 : node + 2] == [token] else None
        places = range(node + 1, len(self.token_ids))
        return next((at for at in places if self.parents[at] == node and self.token_ids[at] == token), None)

    def drawn(self, place: int) -> tuple[int, Tensor] | None:
        """The token there and what it was drawn from; None behind the last, and where nothing was drawn."""
        if self.q_KV is None or place == len(self.token_ids):
            return None
        return self.token_ids[place], self.q_KV[place]

    @property
    def tree(self) -> list[list[int]] | None:
        """As Chunk.tree, the sequence's newest token being the root; None for a chain."""
        return None if self.parents is None else ancestry([-1, *(parent + 1 for parent in self.parents)])

    @property
    def length(self) -> int:
        """Tokens of the longest path."""
        levels: list[int] = []
        for at in range(len(self.token_ids)):
            before = at - 1 if self.parents is None else self.parents[at]
            levels.append(1 + (levels[before] if before >= 0 else 0))
        return max(levels)


def ancestry(parents: abc.Sequence[int]) -> list[list[int]]:
    """Of every node of a forest (-1: it has no parent; parents come first) how far back each node is on its own path: 0
    for itself, 1 for its parent, -1 for all that are on other paths."""
    rows: list[list[int]] = []
    for at, parent in enumerate(parents):
        row = [-1] * len(parents) if parent < 0 else [back + (back >= 0) for back in rows[parent]]
        row[at] = 0
        rows.append(row)
    return rows


class Drafter(Protocol):
    """`observe` is called after every step, `propose` before one. Sequences come and go without notice."""

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Where the target's residual stream is captured for `observe`: boundary b is the input of layer b."""
        ...

    def propose(self, budgets: abc.Sequence[tuple[Sequence, int]], min_probability: float) -> list[Draft | None]:
        """Per (sequence, k) at most k tokens that may follow its `token_ids`. There is room in the cache for them.

        A drafter that knows how likely its tokens are ends a draft before one whose path is less likely than
        `min_probability`, which may leave nothing of it. It must not ask which token was drawn: what is drafted would
        no longer be drawn from q."""
        ...

    def observe(self, starts: abc.Sequence[tuple[Sequence, int]], states_NS: Tensor) -> None:
        """The step computed positions `start` to `computed` of these sequences (sequence, start), none of them of
        refused tokens; `states_NS` are their captured states side by side, one sequence after another."""
        ...


@runtime_checkable
class TreeDrafter(Drafter, Protocol):
    """One that can propose several tokens for a place."""

    def propose_tree(self, sequence: Sequence, tokens: int, depth: int) -> Draft | None:
        """At most `tokens` tokens on paths of at most `depth`, of which the target may follow one. There is room for
        them in the cache."""
        ...


class PromptLookupDrafter:
    """Prompt lookup: what followed the last time that the newest tokens stood in the text, prompt or answer."""

    boundaries: tuple[int, ...] = ()

    def __init__(self) -> None:
        self._indices: weakref.WeakKeyDictionary[Sequence, _Index] = weakref.WeakKeyDictionary()

    def propose(self, budgets: abc.Sequence[tuple[Sequence, int]], min_probability: float) -> list[Draft | None]:
        """As Drafter.propose; None where the newest tokens are new to the text."""
        copies = [self.copy(sequence, count) for sequence, count in budgets]
        return [None if copy is None else Draft(copy[0]) for copy in copies]

    def copy(self, sequence: Sequence, count: int) -> tuple[list[int], int] | None:
        """`count` tokens, and how many of the newest ones stood before them; None where those are new to the text."""
        found = self._index(sequence).find(sequence.token_ids)
        return None if found is None else (_copied(sequence.token_ids, found[0], count), found[1])

    def _index(self, sequence: Sequence) -> _Index:
        """That of all its tokens. Every token of a text is looked at once, whoever runs ahead of it how often."""
        index = self._indices.get(sequence)
        if index is None:
            index = _Index(None if sequence.original is None else self._index(sequence.original))
            self._indices[sequence] = index
        index.grow(sequence.token_ids)
        return index

    def observe(self, starts: abc.Sequence[tuple[Sequence, int]], states_NS: Tensor) -> None:
        """Nothing: the text is all that counts."""


class _Index:
    """Where each run of tokens ended the last time that something followed it. `before`: that of the text's beginning,
    which is not written to, because the rest may be refused."""

    def __init__(self, before: _Index | None = None) -> None:
        self._after: list[dict[tuple[int, ...], int]] = [{} for _ in range(SHORTEST_MATCH, LONGEST_MATCH + 1)]
        self._before = before
        self._length: int = 0 if before is None else before._length

    def grow(self, token_ids: list[int]) -> None:
        for end in range(max(1, self._length), len(token_ids)):
            for length, after in enumerate(self._after, start=SHORTEST_MATCH):
                if end >= length:
                    after[tuple(token_ids[end - length : end])] = end
        self._length = len(token_ids)

    def find(self, token_ids: list[int]) -> tuple[int, int] | None:
        """Where the longest run of its newest tokens ended before, and its length."""
        for length in range(LONGEST_MATCH, SHORTEST_MATCH - 1, -1):
            run = tuple(token_ids[-length:])
            index: _Index | None = self
            while index is not None:
                # What stands behind a text's beginning ends later.
                if (at := index._after[length - SHORTEST_MATCH].get(run)) is not None:
                    return at, length
                index = index._before
        return None


def _copied(token_ids: list[int], at: int, count: int) -> list[int]:
    """`count` tokens from `at` on. Where the text ends before, it goes on as the copy does: a loop goes round."""
    copied: list[int] = []
    for position in range(at, at + count):
        copied.append(token_ids[position] if position < len(token_ids) else copied[position - len(token_ids)])
    return copied
