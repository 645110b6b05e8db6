"""A stage of `verify-gpu` with injected faults: a wrong merge, a crash, a hang, a broken context."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

from mlaforge.gpu_verification.case import AT_MOST, Case, Outcome, Prediction, Unsupported
from mlaforge.gpu_verification.context import Context


def cases(context: Context) -> Iterator[Case]:
    error = Prediction(1e-5, "relative error", AT_MOST)
    yield Case("right merge", error, lambda: merge(context))
    yield Case("wrong merge", error, lambda: wrong_merge(context))
    yield Case("crash", error, lambda: os.kill(os.getpid(), signal.SIGSEGV))
    yield Case("after the crash", error, lambda: Outcome(0.0))
    yield Case("broken context", error, lambda: broken_context(context))
    yield Case("exception", error, lambda: [][1])
    yield Case("hang", error, lambda: time.sleep(1000), limit=1.0)
    yield Case("too large", error, lambda: too_large())
    yield Case("last", error, lambda: Outcome(0.0))


def merge(context: Context) -> Outcome:
    # Imported here: every crash takes another process, which does not need the kernels.
    from mlaforge.gpu_verification import correctness

    return correctness.merge(context, correctness.SMALL["gqa-64"], 3)


def wrong_merge(context: Context) -> Outcome:
    """As `merge`, with a kernel whose outputs are 1 % too large."""
    from mlaforge.ops import paged_attention_triton as attention

    class Wrong:
        kernel = attention.merge_kernel

        def __getitem__(self, grid: Any) -> Any:
            def launch(**arguments: Any) -> None:
                self.kernel[grid](**arguments)
                arguments["out"].mul_(1.01)

            return launch

    attention.merge_kernel = Wrong()
    try:
        return merge(context)
    finally:
        attention.merge_kernel = Wrong.kernel


def broken_context(context: Context) -> Outcome:
    """Like an illegal memory access: every later CUDA call fails."""

    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    context.synchronize = fail
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def too_large() -> Outcome:
    raise Unsupported("99 GiB are needed")
