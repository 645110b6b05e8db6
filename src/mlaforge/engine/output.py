"""What the engine hands out: per step and request only what is new."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Logprobs:
    """One position: the token that stands there, its natural log probability, and the likeliest alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass
class Completion:
    """What is new of one of a request's `n` continuations. `finish_reason` is set once, in its last output."""

    index: int
    token_ids: list[int]
    text: str
    logprobs: list[Logprobs] | None = None
    # "stop" (end of text, stop id or stop string), "length", "abort", or None while it goes on.
    finish_reason: str | None = None
    # The stop string or token id that ended it; None for the model's own end of text.
    stop_reason: str | int | None = None


@dataclasses.dataclass
class RequestOutput:
    """What is new of a request since its last output.

    `prompt_logprobs` comes once, with the first output; its first entry is None (nothing precedes it).
    `num_cached_tokens` counts the prompt tokens that prefix reuse saved. Times are seconds of time.perf_counter().
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[Completion]
    finished: bool = False
    prompt_logprobs: list[Logprobs | None] | None = None
    num_cached_tokens: int = 0
    arrived: float = 0.0
    first_token: float | None = None
