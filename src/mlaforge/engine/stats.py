"""Engine statistics: counters since the start, and the current usage."""

from __future__ import annotations

import dataclasses

from mlaforge.engine.speculation.statistics import SpeculationStats


@dataclasses.dataclass
class EngineStats:
    """Counters since the start; `running`, `waiting`, `cache_blocks_used` and `cache_bytes_used` are current values.

    `computed_tokens` counts the rows that the model has computed: the prompt tokens that were not cached, plus one per
    generated token, plus the tokens recomputed after preemptions. `weight_bytes_read` and `cache_bytes_read` are lower
    bounds of what those rows, and those of sparse-view steps, read (engine/execution/step_bytes.py).
    """

    running: int = 0
    waiting: int = 0
    steps: int = 0
    computed_tokens: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    finished_requests: int = 0
    aborted_requests: int = 0
    # The aborted requests whose logits had NaN or infinity.
    non_finite_requests: int = 0
    weight_bytes_read: float = 0.0
    cache_bytes_read: float = 0.0
    cache_blocks: int = 0
    cache_blocks_used: int = 0
    cache_bytes: int = 0
    cache_bytes_used: int = 0
    # Calls of kernels since this process loaded the tuned tables (ops/tuned.py).
    tuned_hits: int = 0
    tuned_defaults: int = 0
    tuned_misses: int = 0
    # None without a drafter.
    speculation: SpeculationStats | None = None

    @property
    def tuned_ratio(self) -> float | None:
        """Share of the kernels' calls that had a tuned configuration; None before the first call."""
        calls = self.tuned_hits + self.tuned_defaults + self.tuned_misses
        return self.tuned_hits / calls if calls else None
