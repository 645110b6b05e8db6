"""Sampling state of one continuation, carried from step to step."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor

from mlaforge.engine.sampling.constraint import Constraint
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.runtime import on_device


def derived_seed(seed: int | None, index: int) -> int:
    """Return the seed of a request's continuation `index`: the request's seed for index 0; fresh entropy without a
    seed."""
    if seed is None:
        return int.from_bytes(os.urandom(8))
    if index == 0:
        return seed
    # Requests with neighbouring seeds must not share the seeds of their continuations.
    return int.from_bytes(hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest())


class Seen(NamedTuple):
    """`counts_V`, int32 [V]: how often each token was generated. `in_prompt_V`, bool [V]: whether it was in the
    prompt."""

    counts_V: Tensor
    in_prompt_V: Tensor


class SamplingState:
    """One continuation's penalties, bias, random numbers, length and grammar.

    Call `append` for every accepted token. Raises UserError where the parameters name a token id that the vocabulary
    lacks.

    prompt_ids      counted by the repetition penalty
    vocab_size      width of the logits
    eos_token_ids   ends of text: not drawn before min_tokens
    index           which of the request's `n` continuations this is
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        vocab_size: int,
        eos_token_ids: Sequence[int],
        device: torch.device | str,
        constraint: Constraint | None = None,
        index: int = 0,
    ):
        params.check_vocabulary(vocab_size)
        device = torch.device(device)
        self.params = params
        self.constraint = constraint
        self.token_ids: list[int] = []
        self.generator = torch.Generator(device).manual_seed(derived_seed(params.seed, index))
        # Token counts for the penalties; None without penalties.
        self.seen: Seen | None = None
        if params.penalised:
            self.seen = Seen(
                torch.zeros(vocab_size, dtype=torch.int32, device=device),
                torch.zeros(vocab_size, dtype=torch.bool, device=device),
            )
            prompt = on_device(sorted(set(prompt_ids)), torch.int64, device)
            self.seen.in_prompt_V.index_fill_(0, prompt, True)
        # int64 and fp32 [number of biased tokens].
        self.bias: tuple[Tensor, Tensor] | None = None
        if params.logit_bias:
            ids, values = zip(*params.logit_bias.items(), strict=True)
            self.bias = on_device(ids, torch.int64, device), on_device(values, torch.float32, device)
        # int64: tokens suppressed before min_tokens. A model's config may name ends of text without a logit.
        self._stops = sorted({*params.stop_token_ids, *(token for token in eos_token_ids if token < vocab_size)})
        self.stop_ids = on_device(self._stops, torch.int64, device) if params.min_tokens and self._stops else None
        self._vocab_size = vocab_size
        self._never_plain = not params.greedy or params.penalised or bool(params.logit_bias) or constraint is not None

    @property
    def generated(self) -> int:
        """Number of tokens generated."""
        return len(self.token_ids)

    @property
    def too_short(self) -> bool:
        """Whether the text may not end yet: fewer than min_tokens were generated."""
        return len(self.token_ids) < self.params.min_tokens

    @property
    def plain(self) -> bool:
        """Whether the next token is the argmax of the raw logits, without adjustment or draw."""
        return not self._never_plain and not (self.too_short and self._stops)

    def append(self, token_ids: Sequence[int]) -> None:
        """Record generated tokens, each drawn under its mask where there is a constraint."""
        if self.constraint is not None:
            self.constraint.advance(token_ids)
        if self.seen is not None and token_ids:
            counts_V = self.seen.counts_V
            ids = on_device(token_ids, torch.int64, counts_V.device)
            counts_V.index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
        self.token_ids.extend(token_ids)

    def provisional_copy(self) -> SamplingState:
        """Return a copy for provisional tokens. It draws from the same random numbers, so that none of them is used
        twice, and follows no grammar, whose place cannot be copied."""
        other = copy(self)
        other.token_ids, other.constraint = list(self.token_ids), None
        if self.seen is not None:
            other.seen = self.seen._replace(counts_V=self.seen.counts_V.clone())
        return other

    @property
    def ready(self) -> bool:
        """Whether the next token can be drawn: `allowed` returns without waiting."""
        return self.constraint is None or self.constraint.ready

    def allowed(self) -> Tensor | None:
        """Return the tokens that the constraint allows now, bool [V] on the host; None without a constraint.

        min_tokens suppresses the ends of text only where the grammar allows anything else.
        """
        if self.constraint is None:
            return None
        mask_V = self.constraint.mask(self._vocab_size)
        if self.too_short and self._stops:
            without_ends_V = mask_V.clone()
            without_ends_V[self._stops] = False
            if without_ends_V.any():
                return without_ends_V
        return mask_V
