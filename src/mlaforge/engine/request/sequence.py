"""A request and its continuations, as the scheduler and the engine see them."""

from __future__ import annotations

import dataclasses
import time

from mlaforge.engine.request.stopping import Stopping
from mlaforge.engine.sampling.logprobs import Logprobs
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.engine.sampling.state import SamplingState


@dataclasses.dataclass(eq=False)
class Request:
    """What was asked for. `unfinished` counts continuations; the first one computes the prompt for all."""

    id: str
    prompt_ids: list[int]
    params: SamplingParams
    arrived: float = dataclasses.field(default_factory=time.perf_counter)
    first_token: float | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: list[Logprobs | None] | None = None
    sequences: list[Sequence] = dataclasses.field(default_factory=list)
    unfinished: int = 0


@dataclasses.dataclass(eq=False)
class Sequence:
    """One continuation. The cache holds the first `computed` of its tokens; `number` is its name in block tables."""

    number: int
    request: Request
    index: int
    token_ids: list[int]
    state: SamplingState
    stopping: Stopping
    computed: int = 0
    # Whether a full prompt pass was ever finished: what comes after it is recomputation.
    prefilled: bool = False

    @property
    def reuse(self) -> bool:
        """Whether cached blocks may stand for its first tokens: not while the prompt's own logits are wanted."""
        return self.prefilled or self.request.params.prompt_logprobs is None

    @property
    def decoding(self) -> bool:
        """Whether all but the newest token is in the cache."""
        return self.prefilled and self.computed == len(self.token_ids) - 1
