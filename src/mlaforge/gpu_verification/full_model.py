"""Stage model: tokens per second of all 24 layers of 20B's sizes, including engine and host."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator

from mlaforge.engine.engine import Engine
from mlaforge.gpu_verification import drawn_engine
from mlaforge.gpu_verification.case import Case, Outcome, Prediction
from mlaforge.gpu_verification.context import Context

LAYERS = 24
BATCHES, CONTEXTS = (1, 8, 64), (2048, 32768)
TWIN_BATCHES, TWIN_CONTEXTS = (2,), (96,)
# Timed steps, after the warm-up steps that compile and capture.
TIMED, WARM_UP = 32, 4
# Microseconds of the host between two steps: scheduling, sampling, reading the tokens.
HOST_US = 500.0


def cases(context: Context) -> Iterator[Case]:
    """The stage's cases."""
    config = drawn_engine.config_of(context, LAYERS)
    for length in TWIN_CONTEXTS if context.twin else CONTEXTS:
        for batch in TWIN_BATCHES if context.twin else BATCHES:
            roof, predicted = drawn_engine.predicted_seconds(context, config, length, batch, head=True)
            predicted += HOST_US * 1e-6
            yield Case(
                f"decode, {batch} x {length}", Prediction(batch / predicted, "tokens/s", share=roof / predicted),
                functools.partial(measure, context, batch, length, roof),
            )  # fmt: skip


def stage_engine(context: Context) -> Engine:
    """The stage's engine."""
    config = drawn_engine.config_of(context, LAYERS)
    return context.shared("engine", lambda: drawn_engine.with_graphs(drawn_engine.build(context, config)))


def measure(context: Context, batch: int, length: int, roof: float) -> Outcome:
    """Tokens per second of `batch` requests that decode together."""
    engine, steps = stage_engine(context), 3 if context.twin else TIMED
    drawn_engine.stop(engine)
    try:
        drawn_engine.decode(engine, [length] * batch, steps + WARM_UP + 8)
        for _ in range(WARM_UP):
            drawn_engine.step(engine)
        context.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            drawn_engine.step(engine)
        context.synchronize()
        seconds = (time.perf_counter() - start) / steps
    finally:
        drawn_engine.stop(engine)
    return Outcome(batch / seconds, roof / seconds, f"{seconds * 1e3:.2f} ms a step")
