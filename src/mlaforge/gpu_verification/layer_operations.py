"""Stage operations: times of a layer's small operations (bench/layer_operations.py) and of a draft head's products."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from mlaforge.bench.draft_products import products
from mlaforge.bench.layer_operations import Run, operations
from mlaforge.gpu_verification.case import Case, Outcome, Prediction
from mlaforge.gpu_verification.context import Context
from mlaforge.planning.kernel_time import LAUNCH, MEMORY_LATENCY

TOKENS, TWIN_TOKENS = (1, 64, 2048), (3,)
# Share of the bandwidth at which cuBLAS is expected to read the weights of a few rows.
READ_SHARE = 0.8
# Loads that depend on each other: a slot or the first half of a row, then a row.
LATENCY = LAUNCH + 2 * MEMORY_LATENCY


def cases(context: Context) -> Iterator[Case]:
    """The stage's cases."""
    for N in TWIN_TOKENS if context.twin else TOKENS:
        for name, (minimum, run) in operations(N, context.dtype, context.device, context.twin).items():
            # Cloning and clearing of what is written over count too: at most twice the bytes, and a launch each.
            predicted = 2 * minimum / context.roof.bandwidth + 2 * LATENCY
            bound = Prediction(predicted * 1e6, "us")
            yield Case(f"{name}, {N} tokens", bound, functools.partial(measure, context, run))
    for name, (_, minimum, run) in products(context.dtype, context.device, context.twin).items():
        predicted = minimum / (READ_SHARE * context.roof.bandwidth) + LATENCY
        bound = Prediction(predicted * 1e6, "us", share=READ_SHARE)
        yield Case(name, bound, functools.partial(measure, context, run, "linear"))


def measure(context: Context, run: Run, implementation: str = "triton") -> Outcome:
    """Time of an operation."""
    return Outcome(context.seconds(functools.partial(run, implementation)) * 1e6)
