"""Stage compile: compilation of every Triton kernel, one process per core: registers, spills, seconds.

A kernel is compiled by the code that launches it, under a driver with a target and no device: the cache entry is then
the one that a launch looks up, and no GPU is needed. `python -m mlaforge.gpu_verification.compilation NAME CAPABILITY`
compiles one kernel and prints a JSON line.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mlaforge.gpu_verification.case import AT_MOST, Case, Outcome, Prediction, WrongResult
from mlaforge.gpu_verification.context import Context
from mlaforge.ops.gpu_properties import GpuProperties

# Compute capability assumed without a GPU.
HOPPER = 90
TWIN = ("gqa-64", "merge")
LIMIT = 100.0


def cases(context: Context) -> Iterator[Case]:
    """One case per kernel. The first one that runs starts the compilation of all."""
    from mlaforge.gpu_verification.kernel_launches import LAUNCHES

    names = list(TWIN if context.twin else LAUNCHES)
    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    major, minor = context.facts.get("capability") or divmod(HOPPER, 10)
    gpu = GpuProperties.of_capability(major, minor)
    jobs: dict[str, Future[dict[str, Any]]] = {}

    def result(name: str) -> Outcome:
        # Earlier cases have run, in this process or in one that crashed.
        for other in names[names.index(name) :] if not jobs else ():
            jobs[other] = pool.submit(compile_in_subprocess, other, 10 * major + minor)
        record = jobs[name].result()
        with (context.folder / "compile.jsonl").open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(record) + "\n")
        if "error" in record:
            raise WrongResult(record["error"])
        keys = ("registers", "shared", "wgmma", "seconds")
        return Outcome(record["spilled"], detail=", ".join(f"{key} {record[key]}" for key in keys), more=record)

    for name in names:
        bound = Prediction(LAUNCHES[name](gpu).spilled, "bytes spilled", AT_MOST)
        yield Case(name, bound, functools.partial(result, name), LIMIT)


def compile_in_subprocess(name: str, capability: int) -> dict[str, Any]:
    """compile_one in a separate process. If it fails, return the name and its last error line."""
    command = [sys.executable, "-m", __name__, name, str(capability)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        return {"name": name, "error": lines[-1][:300] if lines else f"exit code {result.returncode}"}
    record: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return record


class TargetDriver:
    """The part of Triton's driver interface that compilation uses: a target without a device."""

    def __init__(self, capability: int):
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_one(name: str, capability: int) -> dict[str, Any]:
    """Compile one of LAUNCHES for a compute capability such as 90. Triton must not be in interpreter mode."""
    from triton.runtime import driver

    from mlaforge.gpu_verification.kernel_launches import LAUNCHES

    driver.set_active(TargetDriver(capability))
    launch = LAUNCHES[name](GpuProperties.of_capability(*divmod(capability, 10)))
    start = time.perf_counter()
    binary = launch.kernel.run(**launch.arguments, **launch.options, grid=(1, 1, 1), warmup=True)
    seconds = round(time.perf_counter() - start, 1)
    ptx = binary.asm["ptx"]
    return {
        "name": name, "kernel": binary.metadata.name, "capability": capability, "tile": launch.tile,
        "shared": binary.metadata.shared, **registers(ptx, capability), "wgmma": ptx.count("wgmma.mma_async"),
        "mma": ptx.count("mma.sync"), "seconds": seconds,
    }  # fmt: skip


def registers(ptx: str, capability: int) -> dict[str, int]:
    """Registers and spilled bytes per thread, from ptxas. Raise RuntimeError with its output if it fails."""
    from triton.backends.nvidia.compiler import get_ptxas

    # The architecture-specific variant (sm_90a), as Triton uses.
    architecture = f"sm_{capability}a" if capability >= HOPPER else f"sm_{capability}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        binary = path.with_suffix(".cubin")
        command = [get_ptxas(capability).path, "-v", f"--gpu-name={architecture}", path, "-o", binary]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    output = result.stdout + result.stderr
    used, spilled = re.search(r"Used (\d+) registers", output), re.search(r"(\d+) bytes spill stores", output)
    if not (used and spilled):
        raise RuntimeError(f"ptxas: {output[:300]}")
    return {"registers": int(used[1]), "spilled": int(spilled[1])}


if __name__ == "__main__":
    print(json.dumps(compile_one(sys.argv[1], int(sys.argv[2]))))
