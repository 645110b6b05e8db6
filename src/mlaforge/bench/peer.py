"""Interface of the engines that a run compares, their decoding variants and their measured repetitions."""

from __future__ import annotations

import dataclasses
from typing import Protocol

from mlaforge.engine.speculation.statistics import SpeculationStats


@dataclasses.dataclass
class Repetition:
    """One repetition; times in seconds. `tokens` were decoded in `seconds` after all requests had their first token.

    ttft: time to first token, None unless the whole prompts were computed. ttft_cached: the same with cached prompts,
    None without a prefix cache. token_seconds: time per decoded token of each request.
    """

    ttft: float | None
    tokens: int
    seconds: float
    token_seconds: list[float]
    token_ids: list[list[int]]
    ttft_cached: float | None = None
    cache_bytes: int | None = None
    speculation: SpeculationStats | None = None


@dataclasses.dataclass(frozen=True)
class Variant:
    """Way of decoding: `count` tokens drafted per step by `draft` (ngram, replay, head, tree); 0 is plain decoding.
    `default` is what the engine does with the head, or without one, by default: prompt lookup first, and as many tokens
    as measurements say, whatever `count` is. specpv: partial verification, as the engine's option."""

    count: int = 0
    draft: str = "none"
    specpv: str = "off"


PLAIN = Variant()


class DoesNotFit(Exception):
    """A case exceeds the machine or the model. what: the exceeded limit; change: the setting to change; tokens: how
    many tokens of all requests together would fit, if known."""

    def __init__(self, what: str, change: str, tokens: int | None = None):
        super().__init__(what)
        self.what, self.change, self.tokens = what, change, tokens


class Peer(Protocol):
    """An engine that continues prompts and can be timed."""

    name: str
    model: str
    dtype: str
    weight_bytes: int | None

    def run(self, prompts: list[list[int]], tokens: int, variant: Variant) -> Repetition:
        """Run one repetition: prefill, then `tokens` greedy tokens after the first of each prompt, ignoring EOS. Raise
        DoesNotFit if it exceeds the machine."""
        ...

    def close(self) -> None:
        """Release memory and processes."""
        ...
