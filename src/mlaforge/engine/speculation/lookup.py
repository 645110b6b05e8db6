"""Prompt lookup: draft the tokens that followed the newest tokens where they occurred before, in prompt or answer.

It needs no training and reads no weights. A model that has a document before it repeats runs of it, longer ones than a
draft head guesses (docs/notes/speculation.md).
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence as Items

from mlaforge.engine.request.sequence import Sequence
from mlaforge.engine.speculation.drafter import Acceptance, Draft, Drafter

# Lengths of the n-grams that are looked up, the longest first.
MAX_NGRAM, MIN_NGRAM = 4, 2


class PromptLookupDrafter(Drafter):
    """Drafts by prompt lookup, alone (`propose`) or before another drafter (`propose_confident`)."""

    def __init__(self) -> None:
        self.confident_acceptance = Acceptance()
        self._indices: weakref.WeakKeyDictionary[Sequence, _NgramIndex] = weakref.WeakKeyDictionary()

    def propose(self, budgets: Items[tuple[Sequence, int]], min_probability: float) -> list[Draft | None]:
        """As Drafter.propose, for matches of any length; None where the newest tokens have not occurred before."""
        return [self._draft(sequence, count, MIN_NGRAM) for sequence, count in budgets]

    def propose_confident(self, sequence: Sequence, count: int) -> Draft | None:
        """Draft `count` tokens after a match of MAX_NGRAM tokens, None if there is none. Such a match is more reliable
        than a draft head, so it goes first; its acceptance is measured in `confident_acceptance`."""
        draft = self._draft(sequence, count, MAX_NGRAM) if count else None
        return None if draft is None else dataclasses.replace(draft, copied=True)

    def _draft(self, sequence: Sequence, count: int, least: int) -> Draft | None:
        match = self._index(sequence).find(sequence.token_ids)
        if match is None or match[1] < least:
            return None
        return Draft(_continuation(sequence.token_ids, match[0], count))

    def _index(self, sequence: Sequence) -> _NgramIndex:
        """Index of all tokens of the sequence. Amortised O(1) per token, provisional copies of a sequence included."""
        index = self._indices.get(sequence)
        if index is None:
            index = _NgramIndex(None if sequence.original is None else self._index(sequence.original))
            self._indices[sequence] = index
        index.extend(sequence.token_ids)
        return index


def proposals(
    drafter: Drafter, lookup: PromptLookupDrafter | None, budgets: Items[tuple[Sequence, int, int]], lookup_tokens: int,
    min_probability: float,
) -> dict[Sequence, Draft]:  # fmt: skip
    """Draft by prompt lookup, up to `lookup_tokens`, where it is confident, else by `drafter`. budgets: (sequence,
    tokens for which there is room, tokens for `drafter`)."""
    drafts: dict[Sequence, Draft | None] = {}
    for sequence, room, _ in budgets if lookup else ():
        assert lookup is not None
        drafts[sequence] = lookup.propose_confident(sequence, min(room, lookup_tokens))
    rest = [(s, min(room, count)) for s, room, count in budgets if not drafts.get(s) and min(room, count)]
    if rest:
        drafts |= zip((s for s, _ in rest), drafter.propose(rest, min_probability), strict=True)
    return {sequence: draft for sequence, draft in drafts.items() if draft is not None}


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
