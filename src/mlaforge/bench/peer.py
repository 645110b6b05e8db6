"""What a run's peers have in common: how one decodes, and what a repetition of it took."""

from __future__ import annotations

import dataclasses
from typing import Protocol

from mlaforge.engine.speculation.statistics import SpeculationStats


@dataclasses.dataclass
class Repetition:
    """One repetition. Seconds; `tokens` were decoded in `seconds` after all requests had their first token. `first` is
    None where not all of the prompts was computed, `first_cached` where nothing of them was found in a cache."""

    first: float | None
    tokens: int
    seconds: float
    gaps: list[float]
    token_ids: list[list[int]]
    first_cached: float | None = None
    cache_bytes: int | None = None
    speculation: SpeculationStats | None = None


@dataclasses.dataclass(frozen=True)
class Variant:
    """How a peer decodes: `count` drafted tokens a step by `draft` (ngram, replay, head); 0 is plain decoding.
    `specpv`: whether a part of the cache judges them first, as the engine's option."""

    count: int = 0
    draft: str = "none"
    specpv: str = "off"


PLAIN = Variant()


class DoesNotFit(Exception):
    """A case is beyond the machine or the model: `what` is too much, which setting to `change`, and how many `tokens`
    of all requests together would fit, where that is known."""

    def __init__(self, what: str, change: str, tokens: int | None = None):
        super().__init__(what)
        self.what, self.change, self.tokens = what, change, tokens


class Peer(Protocol):
    """Something that continues prompts and can be timed."""

    name: str
    model: str
    dtype: str
    weight_bytes: int | None

    def run(self, prompts: list[list[int]], tokens: int, variant: Variant) -> Repetition:
        """One repetition: every prompt and `tokens` decoded tokens after its first, greedily, whatever ends a text.
        DoesNotFit where that is beyond the machine."""
        ...

    def close(self) -> None:
        """Gives everything back."""
        ...
