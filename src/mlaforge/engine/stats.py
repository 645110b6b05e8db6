"""Engine statistics: counters since the start, and what is held now."""

from __future__ import annotations

import dataclasses

from mlaforge.engine.speculation.statistics import SpeculationStats


@dataclasses.dataclass
class EngineStats:
    """Counters since the start; `running`, `waiting`, `cache_blocks_used` and `cache_bytes_used` are as of now.

    `computed_tokens` counts the rows that went through the model: with finished sequences costing nothing it is the
    prompt tokens that were not cached, plus one per generated token, plus what preemption computed again.
    `weight_bytes_read` and `cache_bytes_read` are what those rows, and those of partial steps, need to read at the
    least (engine/execution/step_bytes.py).
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
    # Of these, those that ended because their logits had NaN or infinity.
    non_finite_requests: int = 0
    weight_bytes_read: float = 0.0
    cache_bytes_read: float = 0.0
    cache_blocks: int = 0
    cache_blocks_used: int = 0
    cache_bytes: int = 0
    cache_bytes_used: int = 0
    # What speculation came to; None where nothing drafts.
    speculation: SpeculationStats | None = None
