"""What a user may set of `verify-gpu`."""

from __future__ import annotations

import dataclasses

from mlaforge.config import Options, option
from mlaforge.gpu_verification.stage import NAMES


@dataclasses.dataclass(frozen=True)
class VerifyGpuConfig(Options):
    """Options of `verify-gpu`."""

    seconds: int = option(480, "time limit; cases that are not reached are reported as skipped", "seconds", least=10)
    only: tuple[str, ...] | None = option(None, "stages to run, with commas between them", choices=NAMES)
    twin: str | None = option(
        None, "run every stage on tiny sizes without a GPU: kernels in Triton's interpreter, times not judged",
        choices=("cpu",),
    )  # fmt: skip
