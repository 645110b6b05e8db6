"""Stage compile: compilation of every Triton kernel, one process per core: registers, spills, seconds.

A kernel is compiled by the code that launches it, under a driver with a target and no device: the cache entry is then
the one that a launch looks up, and no GPU is needed. `python -m mlaforge.gpu_verification.compilation NAME ...
CAPABILITY` compiles kernels and prints a JSON line for each.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from mlaforge.gpu_verification.case import AT_MOST, Case, Outcome, Prediction, WrongResult
from mlaforge.gpu_verification.context import Context
from mlaforge.ops.gpu_properties import GpuProperties

# Compute capability assumed without a GPU.
HOPPER = 90
TWIN = ("gqa-64", "merge gqa-64")
LIMIT = 100.0


def cases(context: Context) -> Iterator[Case]:
    """One case per kernel. The first one that runs starts the compilation of all."""
    from mlaforge.gpu_verification.kernel_launches import LAUNCHES

    names = list(TWIN if context.twin else LAUNCHES)
    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    major, minor = context.facts.get("capability") or divmod(HOPPER, 10)
    gpu = gpu_of(10 * major + minor)
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


# Multiprocessors of an A100, an L40S, an H100, a B200 and an RTX PRO 6000, by compute capability.
MULTIPROCESSORS = {80: 108, 89: 142, 90: 132, 100: 148, 120: 188}


def gpu_of(capability: int) -> GpuProperties:
    """Return the properties of a GPU to compile for, by compute capability such as 90."""
    return GpuProperties.of_capability(*divmod(capability, 10), MULTIPROCESSORS.get(capability, 4))


def compile_one(name: str, capability: int) -> dict[str, Any]:
    """Compile one of LAUNCHES for a compute capability such as 90. Triton must not be in interpreter mode."""
    from triton.runtime import driver

    from mlaforge.gpu_verification.kernel_launches import LAUNCHES

    driver.set_active(TargetDriver(capability))
    launch = LAUNCHES[name](gpu_of(capability))
    start = time.perf_counter()
    binary = launch.kernel.run(**launch.arguments, **launch.options, grid=(1, 1, 1), warmup=True)
    seconds = round(time.perf_counter() - start, 1)
    ptx = binary.asm["ptx"]
    return {
        "name": name, "kernel": binary.metadata.name, "capability": capability, "tile": launch.tile,
        "shared": binary.metadata.shared, "wgmma": ptx.count("wgmma.mma_async"), "mma": ptx.count("mma.sync"),
        **binary_report(binary.asm["cubin"]), "seconds": seconds,
    }  # fmt: skip


# Classes of machine instructions, by their first letters; loads of 16 bytes or in bulk have a second pattern.
CLASSES = {
    "tensor": r"[A-Z]*MMA", "exponential": r"MUFU\.EX2", "spill": r"LDL|STL", "load": r"LDG(?!DEPBAR)|UTMALDG|UBLKCP",
}  # fmt: skip
WIDE = r"\.128|\.256|^U"


def binary_report(cubin: bytes) -> dict[str, Any]:
    """Return registers and spilled bytes per thread of a binary, and counts of the machine instructions of the whole
    kernel and of its main loop: all, by CLASSES, and loads from global memory of 16 bytes or more."""
    from triton import knobs

    def output(*command: str) -> str:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = output(knobs.nvidia.nvdisasm.path, "-c", file.name)
        usage = output(knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name)
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", usage)[-1]
    whole, loop = disassembled(text)
    counts = {"instructions": count(whole), "loop": count(loop)}
    return {"registers": int(registers), "spilled": int(stack), **counts}


def disassembled(text: str) -> tuple[list[str], list[str]]:
    """Return nvdisasm's instructions of a kernel, without predicates, and those of the innermost loop with the most
    products, the largest one of equals."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    loops: list[tuple[int, int]] = []
    for line in text.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif instruction := re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z].*?) ;", line):
            target = re.match(r"BRA.*`\((\.L_x_\d+)\)", instruction[1])
            if target and target[1] in labels:
                loops.append((labels[target[1]], len(instructions) + 1))
            instructions.append(instruction[1])
    innermost = [
        (a, b) for a, b in loops if not any((c, d) != (a, b) and a <= c and d <= b for c, d in loops)
    ]  # fmt: skip
    begin, end = max(
        innermost, key=lambda loop: (products(instructions[slice(*loop)]), loop[1] - loop[0]), default=(0, 0)
    )
    return instructions, instructions[begin:end]


def products(instructions: list[str]) -> int:
    """Return the multiplications of instructions for tensor cores whose names have shapes: 64x128x16, or 16816."""
    total = 0
    for text in instructions:
        for pattern in (r"[A-Z]GMMA\S*?\.(\d+)x(\d+)x(\d+)", r"[A-Z]MMA\S*?\.(16)(8)(\d+)"):
            if shape := re.match(pattern, text):
                total += math.prod(map(int, shape.groups()))
    return total


def count(instructions: list[str]) -> dict[str, int]:
    """Count all instructions, those of CLASSES, and wide loads."""
    counts = {kind: sum(bool(re.match(pattern, text)) for text in instructions) for kind, pattern in CLASSES.items()}
    loads = [text.split()[0] for text in instructions if re.match(CLASSES["load"], text)]
    return {"all": len(instructions), **counts, "wide load": sum(bool(re.search(WIDE, name)) for name in loads)}


if __name__ == "__main__":
    for name in sys.argv[1:-1]:
        print(json.dumps(compile_one(name, int(sys.argv[-1]))), flush=True)
