"""Prompt lookup: draft the tokens that followed the newest tokens where they occurred before, in prompt or answer.

It needs no training and reads no weights. A model that has a document before it repeats runs of it, longer ones than a
draft head guesses (docs/notes/speculation.md).
"""

from __future__ import annotations

import weakref
from collections import abc

from torch import Tensor

from mlaforge.engine.request.sequence import Sequence
from mlaforge.engine.speculation.drafter import Draft
from mlaforge.engine.speculation.policy import Acceptance

# Lengths of the n-grams that are looked up, the longest first.
MAX_NGRAM, MIN_NGRAM = 4, 2


class PromptLookupDrafter:
    """Drafts by prompt lookup, alone (`propose`) or before another drafter (`propose_confident`).

    `max_tokens`: longest draft of `propose_confident`, whose acceptance is measured in `acceptance`."""

    boundaries: tuple[int, ...] = ()

    def __init__(self, max_tokens: int = 0) -> None:
        self.max_tokens, self.acceptance = max_tokens, Acceptance(max_tokens)
        self._indices: weakref.WeakKeyDictionary[Sequence, _NgramIndex] = weakref.WeakKeyDictionary()

    def propose(self, budgets: abc.Sequence[tuple[Sequence, int]], min_probability: float) -> list[Draft | None]:
        """As Drafter.propose, for matches of any length; None where the newest tokens have not occurred before."""
        matches = [self._index(sequence).find(sequence.token_ids) for sequence, _ in budgets]
        return [
            None if match is None else Draft(_continuation(sequence.token_ids, match[0], count))
            for (sequence, count), match in zip(budgets, matches, strict=True)
        ]

    def propose_confident(self, sequence: Sequence, count: int, min_probability: float) -> Draft | None:
        """Draft at most `count` tokens after a match of MAX_NGRAM tokens, ended before a path whose measured
        acceptance is below `min_probability`; None if there is no such match or nothing remains.

        Such a match is more reliable than a draft head, so it goes first."""
        count = sum(1 for probability in self.acceptance.paths(count) if probability >= min_probability)
        match = self._index(sequence).find(sequence.token_ids) if count else None
        if match is None or match[1] < MAX_NGRAM:
            return None
        return Draft(_continuation(sequence.token_ids, match[0], count), lookup_tokens=count)

    def _index(self, sequence: Sequence) -> _NgramIndex:
        """Index of all tokens of the sequence. Amortised O(1) per token, provisional copies of a sequence included."""
        index = self._indices.get(sequence)
        if index is None:
            index = _NgramIndex(None if sequence.original is None else self._index(sequence.original))
            self._indices[sequence] = index
        index.extend(sequence.token_ids)
        return index

    def observe(self, starts: abc.Sequence[tuple[Sequence, int]], states_NS: Tensor) -> None:
        """Nothing: drafts depend on token ids only."""


class _NgramIndex:
    """Maps each n-gram to the position after its last occurrence that has a successor.

    `prefix`: index of the sequence that this one continues provisionally; it is read, never written, because the
    continuation may be rejected."""

    def __init__(self, prefix: _NgramIndex | None = None) -> None:
        self._ends: list[dict[tuple[int, ...], int]] = [{} for _ in range(MIN_NGRAM, MAX_NGRAM + 1)]
        self._prefix = prefix
        self._length: int = 0 if prefix is None else prefix._length

    def extend(self, token_ids: list[int]) -> None:
        for end in range(max(1, self._length), len(token_ids)):
            for n, ends in enumerate(self._ends, start=MIN_NGRAM):
                if end >= n:
                    ends[tuple(token_ids[end - n : end])] = end
        self._length = len(token_ids)

    def find(self, token_ids: list[int]) -> tuple[int, int] | None:
        """Position after the last earlier occurrence of the longest suffix of `token_ids`, and that suffix's length."""
        for n in range(MAX_NGRAM, MIN_NGRAM - 1, -1):
            ngram = tuple(token_ids[-n:])
            index: _NgramIndex | None = self
            while index is not None:
                # Occurrences in the continuation come after those in the prefix.
                if (end := index._ends[n - MIN_NGRAM].get(ngram)) is not None:
                    return end, n
                index = index._prefix
        return None


def _continuation(token_ids: list[int], start: int, count: int) -> list[int]:
    """`count` tokens from position `start`; past the end of `token_ids` the continuation repeats itself."""
    tokens: list[int] = []
    for position in range(start, start + count):
        tokens.append(token_ids[position] if position < len(token_ids) else tokens[position - len(token_ids)])
    return tokens
