"""Prompt lookup: draft the tokens that followed the newest tokens where they occurred before, in prompt or answer.

It needs no training and reads no weights. A model that has a document before it repeats runs of it, longer ones than a
draft head guesses (docs/notes/speculation.md).
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Sequence as Items

from mlaforge.engine.request.sequence import Sequence
from mlaforge.engine.speculation.drafter import Acceptance, Draft, Drafter

# Lengths of the n-grams that are looked up, the longest first.
MAX_NGRAM, MIN_NGRAM = 4, 2


class PromptLookupDrafter(Drafter):
    """Drafts by prompt lookup, alone (`propose`), before another drafter (`propose_confident`) or after the first token
    of one (`replace_after_first`)."""

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

    def replace_after_first(self, sequence: Sequence, draft: Draft, count: int) -> Draft:
        """Return a greedy chain of a head that drafts in one pass, with every token after the first replaced by what
        followed the newest tokens, drafted ones included, where they occurred before: the head drafts without knowing
        its first token. Matches extend a chain that the head ended early, to at most `count` tokens."""
        if not draft.token_ids or draft.q_KV is not None or draft.parents is not None:
            return draft
        index, text, length = self._index(sequence), list(sequence.token_ids), len(sequence.token_ids)
        text.append(draft.token_ids[0])
        for place in range(1, count):
            if (start := index.find(text, MIN_NGRAM)) is not None:
                text.append(text[start])
            elif place < len(draft.token_ids):
                text.append(draft.token_ids[place])
            else:
                break
        return dataclasses.replace(draft, token_ids=text[length:])

    def _index(self, sequence: Sequence) -> _NgramIndex:
        # Of a provisional copy its original is indexed: what it appends may be rejected.
        known = sequence.original or sequence
        index = self._indices.setdefault(known, _NgramIndex())
        index.extend(known.token_ids)
        return index

    def _draft(self, sequence: Sequence, count: int, least: int) -> Draft | None:
        start = self._index(sequence).find(sequence.token_ids, least)
        if start is None:
            return None
        # Past the end of the text the continuation repeats itself.
        return Draft(list(itertools.islice(itertools.cycle(sequence.token_ids[start:]), count)))


def proposals(
    drafter: Drafter, lookup: PromptLookupDrafter | None, budgets: Items[tuple[Sequence, int, int]], lookup_tokens: int,
    min_probability: float,
) -> dict[Sequence, Draft]:  # fmt: skip
    """Draft by prompt lookup, up to `lookup_tokens`, where it is confident, else by `drafter`, and by both where that
    drafts in one pass. budgets: (sequence, tokens for which there is room, tokens for `drafter`)."""
    drafts: dict[Sequence, Draft | None] = {}
    if lookup is not None:
        drafts = {s: lookup.propose_confident(s, min(room, lookup_tokens)) for s, room, _ in budgets}
    rest = [(s, min(room, count)) for s, room, count in budgets if not drafts.get(s) and min(room, count)]
    if rest:
        drafted = drafter.propose(rest, min_probability)
        if lookup is not None and drafter.parallel_drafting:
            drafted = [
                draft and lookup.replace_after_first(sequence, draft, count)
                for (sequence, count), draft in zip(rest, drafted, strict=True)
            ]
        drafts |= zip((s for s, _ in rest), drafted, strict=True)
    return {sequence: draft for sequence, draft in drafts.items() if draft is not None}


class _NgramIndex:
    """Maps each n-gram of a text to the position after its last occurrence that has a successor. Amortised O(1) per
    token."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}
        self._length = 1

    def extend(self, token_ids: list[int]) -> None:
        for end in range(self._length, len(token_ids)):
            for n in range(MIN_NGRAM, min(MAX_NGRAM, end) + 1):
                self._ends[tuple(token_ids[end - n : end])] = end
        self._length = len(token_ids)

    def find(self, token_ids: list[int], least: int) -> int | None:
        """Position after the last earlier occurrence of the longest suffix of `token_ids`, of `least` tokens or more.
        `token_ids`: the text, or a continuation of it, whose few tokens are searched."""
        for n in range(MAX_NGRAM, least - 1, -1):
            suffix = token_ids[-n:]
            for end in range(len(token_ids) - 1, max(n, self._length) - 1, -1):
                if token_ids[end - n : end] == suffix:
                    return end
            if tuple(suffix) in self._ends:
                return self._ends[tuple(suffix)]
        return None
