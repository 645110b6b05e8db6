"""Constrained decoding: masks of the tokens that a JSON schema or regex allows, by llguidance (extra `constrained`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mlaforge.engine.sampling.grammar import TIMEOUT, Grammars, Place, wait_for
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.runtime import UserError


class Constraint:
    """The allowed next tokens of one continuation, by the grammar of its parameters, which must have been checked.

    The end of text is allowed only where the grammar may end; after it nothing else is.
    """

    def __init__(self, grammars: Grammars, params: SamplingParams):
        self._grammars, self._params = grammars, params
        self._place: Place | None = None
        # Whether an end of text was drawn. The grammar itself never consumes one.
        self._ended = False

    @property
    def place(self) -> Place:
        """Position in the grammar. The first access starts to compile the grammar."""
        if self._place is None:
            self._place = self._grammars.follow(self._params)
        return self._place

    @property
    def ready(self) -> bool:
        """Whether `mask` returns without waiting."""
        return self._ended or self.place.mask is not None

    @property
    def finished(self) -> bool:
        """Whether only the end of text is allowed; valid once the mask is computed."""
        return self._ended or self.place.last

    def mask(self, vocab_size: int | None = None) -> Tensor:
        """Return the tokens allowed next: bool [vocab_size] on the host. Logits beyond the tokenizer's tokens are never
        allowed.

        Waits for the mask. Raises UserError where it is not computed.
        """
        if not self.ready:
            wait_for([self.place], TIMEOUT)
        packed_mask, tokenizer_size = self.place.mask, self._grammars.vocab_size
        size = tokenizer_size if vocab_size is None else vocab_size
        allowed = np.zeros(size, dtype=bool)
        if self._ended:
            allowed[[token for token in self._grammars.eos_token_ids if token < size]] = True
        elif packed_mask is None:
            raise UserError(self.place.error or f"the grammar's next mask was not computed within {TIMEOUT:g} s")
        else:
            bits = np.unpackbits(
                np.frombuffer(packed_mask, np.uint8), count=min(size, tokenizer_size), bitorder="little"
            )
            allowed[: len(bits)] = bits
        return torch.from_numpy(allowed)

    def advance(self, token_ids: Sequence[int]) -> None:
        """Record tokens that were drawn, each under its mask."""
        text_ids = [token for token in token_ids if token not in self._grammars.eos_token_ids]
        assert not (self._ended and text_ids), f"token {text_ids} after the end of the text"
        if text_ids:
            self.place.advance(text_ids)
        self._ended = self._ended or len(text_ids) < len(token_ids)

    def close(self) -> None:
        """End the continuation."""
        if self._place is not None:
            self._place.close()
            self._place = None
