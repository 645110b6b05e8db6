"""An oracle drafter: it proposes what plain decoding gave. No drafter of so many tokens is faster."""

from __future__ import annotations

from typing import Any

from mlaforge.engine.speculation.drafter import Draft


class Replay:
    """Proposes the true continuation: `texts` are prompt and answer of each request, by the request's id."""

    boundaries: tuple[int, ...] = ()

    def __init__(self, texts: dict[str, list[int]]):
        self.texts = texts

    def propose(self, budgets: Any, min_probability: float) -> list[Draft | None]:
        """As Drafter.propose; None at the end of the text."""
        drafts: list[Draft | None] = []
        for sequence, count in budgets:
            length = len(sequence.token_ids)
            draft = self.texts[sequence.request.id][length : length + count]
            drafts.append(Draft(draft) if draft else None)
        return drafts

    def observe(self, starts: Any, states_NS: Any) -> None:
        """Nothing."""
