"""Timed decoding on an engine, of this checkout or another: run as a program with mlaforge of another checkout on the
path, it answers a line of JSON, [prompts, tokens], with a line of JSON (checkout_peer.py).

It imports no part of mlaforge by itself and uses only what older engines have as well.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


def decode(
    engine: Any, params: Any, prompts: list[list[int]], tokens: int, after_step: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Compute the prompts (cached prefixes are reused) and decode `tokens` tokens after the first of each. params:
    makes SamplingParams. Return fields of bench.peer.Repetition."""
    sampling = params(temperature=0.0, max_tokens=tokens + 1, ignore_eos=True)
    start = time.perf_counter()
    for index, prompt in enumerate(prompts):
        engine.add(str(index), prompt, sampling)
    last_times: dict[str, float] = {}
    token_ids: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    decode_start, token_seconds, count = 0.0, [], 0
    while engine.has_work:
        outputs = engine.step()
        now = time.perf_counter()
        decoding = len(last_times) == len(prompts)
        for output in outputs:
            if hasattr(output, "raise_for_error"):
                output.raise_for_error()
            new = output.outputs[0].token_ids
            token_ids[output.request_id] += new
            if decoding:
                token_seconds += [(now - last_times[output.request_id]) / len(new)] * len(new)
                count += len(new)
            last_times[output.request_id] = now
        if not decoding and len(last_times) == len(prompts):
            decode_start = now
        after_step()
    return {
        "ttft": decode_start - start, "tokens": count, "seconds": time.perf_counter() - decode_start,
        "token_seconds": token_seconds, "token_ids": list(token_ids.values()),
    }  # fmt: skip


def main() -> None:
    """Answer requests on the engine that `LLM(**options)` of a checkout loads. Arguments: the checkout's folder of
    packages, which must be first on the path, and options as JSON."""
    # Libraries that print must not add to the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import mlaforge

    packages, options = sys.argv[1:]
    if not os.path.samefile(os.path.dirname(mlaforge.__path__[0]), packages):
        sys.exit(f"mlaforge is imported from {mlaforge.__path__[0]}")
    from mlaforge.engine.llm import LLM

    try:
        from mlaforge.engine.sampling.params import SamplingParams
    except ImportError:
        # Its place in versions before the 25th of November 2026.
        from mlaforge.engine.params import SamplingParams  # type: ignore[import-untyped, no-redef]

    engine = LLM(**json.loads(options)).engine
    reset = engine.reset_prefix_cache if hasattr(engine, "reset_prefix_cache") else engine.forget  # type: ignore[attr-defined]
    # As in the process of the bench (scenario.py).
    gc.collect()
    gc.freeze()
    print("[]", file=answers, flush=True)
    for line in sys.stdin:
        prompts, tokens = json.loads(line)
        reset()
        ttft = decode(engine, SamplingParams, prompts, 0)["ttft"]
        decoded = decode(engine, SamplingParams, prompts, tokens)
        print(json.dumps({**decoded, "ttft": ttft, "ttft_cached": decoded["ttft"]}), file=answers, flush=True)


if __name__ == "__main__":
    main()
