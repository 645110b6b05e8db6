"""Constrained decoding: which tokens a JSON schema or regex allows next, by llguidance (the extra `constrained`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mlaforge.engine.sampling.grammar import PATIENCE, Grammars, Place, wait_for
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.runtime import UserError


class Constraint:
    """What may come next in one continuation, by the grammar of its parameters, which was checked.

    The end of text is allowed only where the grammar may end; after it nothing else is.
    """

    def __init__(self, grammars: Grammars, params: SamplingParams):
        self._grammars, self._params = grammars, params
        self._place: Place | None = None
        # Whether an end of text was taken. The grammar never sees one.
        self._ended = False

    @property
    def place(self) -> Place:
        """Where it stands in the grammar, which is compiled from the first time on that this is asked for."""
        if self._place is None:
            self._place = self._grammars.follow(self._params)
        return self._place

    @property
    def ready(self) -> bool:
        """`mask` need not wait."""
        return self._ended or self.place.mask is not None

    @property
    def finished(self) -> bool:
        """Nothing but the end of text is allowed; known once the mask is."""
        return self._ended or self.place.last

    def mask(self, vocab_size: int | None = None) -> Tensor:
        """bool [vocab_size] on the host: the tokens allowed next. Logits beyond the tokenizer's tokens never are.

        Waits for it where it has not come. Raises UserError where it never will.
        """
        if not self.ready:
            wait_for([self.place], PATIENCE)
        packed, known = self.place.mask, self._grammars.vocab_size
        size = known if vocab_size is None else vocab_size
        allowed = np.zeros(size, dtype=bool)
        if self._ended:
            allowed[[token for token in self._grammars.eos_token_ids if token < size]] = True
        elif packed is None:
            raise UserError(self.place.error or f"the grammar's next mask did not come within {PATIENCE:g} s")
        else:
            bits = np.unpackbits(np.frombuffer(packed, np.uint8), count=min(size, known), bitorder="little")
            allowed[: len(bits)] = bits
        return torch.from_numpy(allowed)

    def advance(self, token_ids: Sequence[int]) -> None:
        """These tokens were drawn, each under its mask."""
        going = [token for token in token_ids if token not in self._grammars.eos_token_ids]
        assert not (self._ended and going), f"token {going} after the end of the text"
        if going:
            self.place.advance(going)
        self._ended = self._ended or len(going) < len(token_ids)

    def close(self) -> None:
        """The continuation is over."""
        if self._place is not None:
            self._place.close()
            self._place = None
