"""What the engine has done and holds right now, as counters and gauges."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """Counts since the start, except the gauges: running, waiting, cache_blocks, cache_blocks_used, cache_bytes.

    `cached_prompt_tokens` were not computed because a prefix was reused; blocks are summed over cache groups.
    """

    running: int = 0
    waiting: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    finished_requests: int = 0
    aborted_requests: int = 0
    cache_blocks: int = 0
    cache_blocks_used: int = 0
    cache_bytes: int = 0
