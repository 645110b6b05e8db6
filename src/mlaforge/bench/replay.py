"""Oracle drafter that proposes the output of plain decoding: the upper bound of any drafter of as many tokens."""

from __future__ import annotations

from typing import Any

from mlaforge.engine.speculation.drafter import Draft, Drafter


class Replay(Drafter):
    """Propose the true continuation. texts: request id -> token ids of prompt and answer."""

    def __init__(self, texts: dict[str, list[int]]):
        self.texts = texts

    def propose(self, budgets: Any, min_probability: float) -> list[Draft | None]:
        """See Drafter.propose. None at the end of the text."""
        drafts: list[Draft | None] = []
        for sequence, count in budgets:
            length = len(sequence.token_ids)
            draft = self.texts[sequence.request.id][length : length + count]
            drafts.append(Draft(draft) if draft else None)
        return drafts
