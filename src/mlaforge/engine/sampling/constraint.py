"""Constrained decoding: which tokens a JSON schema or regex allows next, by llguidance (the extra `constrained`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mlaforge.engine.sampling.grammar import PATIENCE, Grammar, wait_for
from mlaforge.runtime import UserError


class Constraint:
    """Where one continuation of a request, the one of this number, stands in the request's grammar.

    The end of text is allowed only where the grammar may end; after it nothing else is.
    """

    def __init__(self, grammar: Grammar, continuation: int = 0):
        self.grammar, self._continuation = grammar, continuation
        self._begun = False
        # Whether an end of text was taken. The grammar never sees one.
        self._ended = False

    def begin(self) -> None:
        """Has the first mask made, unless it was before."""
        if not self._begun:
            self._begun = True
            self.grammar.ask(self._continuation, ())

    @property
    def ready(self) -> bool:
        """`mask` need not wait."""
        return self._ended or self._continuation in self.grammar.masks

    @property
    def finished(self) -> bool:
        """Nothing but the end of text is allowed; asked for after `mask`."""
        return self._ended or self._newest()[1]

    def _newest(self) -> tuple[bytes, bool]:
        self.begin()
        if not self.ready:
            wait_for([self.grammar], PATIENCE)
        if not self.ready:
            raise UserError(self.grammar.error or f"{self.grammar.name}: no mask within {PATIENCE:g} s")
        return self.grammar.masks[self._continuation]

    def mask(self, vocab_size: int | None = None) -> Tensor:
        """bool [vocab_size] on the host: the tokens allowed next. Logits beyond the tokenizer's tokens never are.

        Waits for it where it has not come. Raises UserError where it never will.
        """
        packed = None if self._ended else np.frombuffer(self._newest()[0], dtype=np.uint8)
        owner = self.grammar.owner
        size = owner.vocab_size if vocab_size is None else vocab_size
        allowed = np.zeros(size, dtype=bool)
        if packed is None:
            allowed[[token for token in owner.eos_token_ids if token < size]] = True
        else:
            bits = np.unpackbits(packed, count=min(size, owner.vocab_size), bitorder="little")
            allowed[: len(bits)] = bits
        return torch.from_numpy(allowed)

    def advance(self, token_ids: Sequence[int]) -> None:
        """These tokens were drawn, each under its mask."""
        ends = self.grammar.owner.eos_token_ids
        going = [token for token in token_ids if token not in ends]
        assert not (self._ended and going), f"token {going} after the end of the text"
        if going:
            self.grammar.ask(self._continuation, going)
        self._ended = self._ended or len(going) < len(token_ids)
