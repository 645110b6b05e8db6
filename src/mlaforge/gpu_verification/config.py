"""Options of `verify-gpu`."""

from __future__ import annotations

import dataclasses

from mlaforge.config import Options, option
from mlaforge.gpu_verification.stage import NAMES


@dataclasses.dataclass(frozen=True)
class VerifyGpuConfig(Options):
    """Options of `verify-gpu`."""

    seconds: int = option(480, "time limit; cases beyond it are reported as skipped", "seconds", least=10)
    only: tuple[str, ...] | None = option(None, "stages to run", choices=NAMES)
    twin: str | None = option(
        None, "run every stage at tiny sizes without a GPU, in Triton's interpreter; times are not judged",
        choices=("cpu",),
    )  # fmt: skip
