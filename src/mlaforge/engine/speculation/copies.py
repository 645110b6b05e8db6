"""Copied drafts: where the newest tokens stood in the text before, what followed them there, beside any drafter.

A model that has a document before it writes runs of it again, longer ones than a head can guess, and finding one reads
no weights. Of SmolLM2's summaries of 8,000 tokens 0.64 of the tokens follow four that stood in the text, and 0.89 of
these are what followed there (docs/notes/speculation.md).
"""

from __future__ import annotations

from mlaforge.engine.request.sequence import Sequence
from mlaforge.engine.speculation.drafter import LONGEST_MATCH, Draft, PromptLookupDrafter
from mlaforge.engine.speculation.policy import Acceptance


class Copies:
    """Drafts of at most `most` tokens for texts whose newest LONGEST_MATCH tokens stood in them before, as long as they
    pay by how many of them were accepted so far. A copy is surer than what a drafter of few weights proposes, so it
    comes first; `lookup` finds them."""

    def __init__(self, most: int, lookup: PromptLookupDrafter):
        self.most, self.lookup = most, lookup
        self.acceptance = Acceptance(most)

    def propose(self, sequence: Sequence, room: int, min_probability: float) -> Draft | None:
        """At most `room` tokens, ended before a path less likely than `min_probability`; None where nothing is left."""
        count = sum(1 for likely in self.acceptance.paths(room) if likely >= min_probability)
        copy = self.lookup.copy(sequence, count) if count else None
        if copy is None or copy[1] < LONGEST_MATCH:
            return None
        return Draft(copy[0], copied=count)
