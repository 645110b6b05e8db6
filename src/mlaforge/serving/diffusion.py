"""`generate --diffusion`, experimental: how a block head fills masked places, and what the target makes of them.

The text is the target's, as without a draft; only the drafting is a diffusion process. Every step prints its block
masked, filled, refined by later passes, changed by prompt lookup, and verified: accepted tokens, the first refused one,
and the target's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlaforge.engine.llm import LLM
from mlaforge.engine.request.sequence import Sequence
from mlaforge.engine.speculation.block import BlockDrafter
from mlaforge.engine.speculation.drafter import Draft
from mlaforge.runtime import UserError, log

# Prints a row: its name, and the text and style of each place.
ShowPlaces = Callable[[str, list[tuple[str, str]]], None]
MASKED = "░"
# Styles of places.
DRAFTED, ACCEPTED, REFUSED, TARGET = "drafted", "accepted", "refused", "target"


class Diffusion:
    """Prints the drafts of a model's block head by `show`.

    Raises UserError for a model without a block head."""

    def __init__(self, llm: LLM, denoise_steps: int, show: ShowPlaces):
        drafter: Any = llm.engine.speculation.drafter if llm.engine.speculation else None
        if not isinstance(drafter, BlockDrafter):
            raise UserError("diffusion shows the drafts of a block head: give its directory as --speculative")
        log("experimental: drafts are shown as a diffusion process; the text is the model's, as without them")
        self.tokenizer, self.show, self.passes = llm.tokenizer, show, 0
        self.last: list[int] = []
        drafter.denoise_steps, drafter.watcher = denoise_steps, self

    def filled(self, sequence: Sequence, token_ids: list[int]) -> None:
        """Show the tokens of a pass."""
        if not self.passes:
            self.show("masked", [(MASKED, DRAFTED)] * len(token_ids))
        self.passes += 1
        name = "filled" if self.passes == 1 else f"pass {self.passes}"
        self._show_draft(name, token_ids)

    def verified(self, sequence: Sequence, draft: Draft, accepted: int) -> None:
        """Show the accepted tokens, the first refused one, and the target's own."""
        if not self.passes:
            return
        self.passes = 0
        if draft.token_ids != self.last[: len(draft.token_ids)]:
            self._show_draft("looked up", draft.token_ids)
        places = [(self._text(token), ACCEPTED) for token in draft.token_ids[:accepted]]
        places += [(self._text(token), REFUSED) for token in draft.token_ids[accepted : accepted + 1]]
        self.show("verified", [*places, (self._text(sequence.token_ids[-1]), TARGET)])

    def _show_draft(self, name: str, token_ids: list[int]) -> None:
        self.last = token_ids
        self.show(name, [(self._text(token), DRAFTED) for token in token_ids])

    def _text(self, token: int) -> str:
        return repr(self.tokenizer.decode([token]))[1:-1]
