"""This package's compiled Triton kernels, for kernel_time.py and tests: kernel_loops.json.

`python -m mlaforge.gpu_verification.static` compiles every launch for every kind of GPU and writes the file. A row is a
launch with its constants; under the capabilities for which it was compiled with these constants it has the numbers of
COLUMNS. `sources` identifies the code of each kernel.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".json")
# Constants of a launch that change its loop; others change addresses and bounds.
TILE = (
    "D", "V", "V_IN_K", "GATED", "BLOCK_M", "BLOCK_N", "BLOCK_O", "BLOCK_K", "BLOCK_C", "HEADS", "BLOCK_P", "num_warps"
)  # fmt: skip
# Warps of a Triton kernel that does not state them.
DEFAULT_WARPS = 4


@dataclass(frozen=True)
class Loop:
    """Inner loop of a kernel: instructions and exponentials that a warp executes per iteration, instructions outside of
    the loop, and a program's warps, registers per thread and bytes of shared memory."""

    instructions: float
    exponentials: float
    outside: int
    warps: int
    registers: int
    shared: int


@dataclass(frozen=True)
class Compiled:
    """A launch, compiled for a capability. source: hash of the kernel's code. constants: numbers and options of the
    launch. registers and spilled bytes per thread, bytes of shared memory; instructions of the whole kernel and, with
    `loop_`, of its largest innermost loop: all of them, tensor instructions, exponentials, spills, wide loads."""

    name: str
    kernel: str
    capability: int
    source: str
    constants: dict[str, Any]
    registers: int
    spilled: int
    shared: int
    instructions: int
    tensor: int
    loop_instructions: int
    loop_exponentials: int
    loop_spills: int
    loop_wide_loads: int

    @property
    def dtype(self) -> str:
        """Dtype of the cached rows or factors."""
        dtype = re.search(r"fp8|fp16|fp32|int8|coded", self.name)
        return dtype[0] if dtype else "bf16"

    @property
    def tile(self) -> dict[str, Any]:
        """Constants that change the loop."""
        return {name: self.constants[name] for name in TILE if name in self.constants}

    @property
    def loop(self) -> Loop:
        """The inner loop, as the model of time needs it."""
        return Loop(
            self.loop_instructions, self.loop_exponentials, self.instructions - self.loop_instructions,
            self.constants.get("num_warps", DEFAULT_WARPS), self.registers, self.shared,
        )  # fmt: skip


IDENTITY = ("name", "kernel", "capability", "source", "constants")
COLUMNS = tuple(field.name for field in dataclasses.fields(Compiled) if field.name not in IDENTITY)


def encode(launches: Iterable[Compiled]) -> dict[str, Any]:
    """Content of the file, without the command that wrote it."""
    sources, rows = {}, dict[str, dict[str, Any]]()
    for launch in launches:
        sources[launch.kernel] = launch.source
        fields = {"name": launch.name, "kernel": launch.kernel, "constants": launch.constants}
        row = rows.setdefault(json.dumps(fields, sort_keys=True), fields)
        row[str(launch.capability)] = [getattr(launch, column) for column in COLUMNS]
    return {"columns": COLUMNS, "sources": sources, "rows": [*rows.values()]}


@functools.cache
def compiled() -> tuple[Compiled, ...]:
    """Launches of the packaged file."""
    body = json.loads(FILE.read_text(encoding="utf-8"))
    return tuple(
        Compiled(
            row["name"], row["kernel"], int(capability), body["sources"][row["kernel"]], row["constants"],
            **dict(zip(body["columns"], numbers, strict=True)),
        )
        for row in body["rows"]
        for capability, numbers in row.items() if capability.isdigit()
    )  # fmt: skip


def find(kernel: str, capability: int, constants: Mapping[str, Any] | None, dtype: str = "bf16") -> Loop | None:
    """Loop of a launch with these constants and options (None: with any), compiled for the closest capability that is
    not newer; None if no such launch has been compiled."""
    closest = max((line.capability for line in compiled() if line.capability <= capability), default=None)
    for line in compiled():
        same = (line.kernel, line.dtype, line.capability) == (kernel, dtype, closest)
        if same and (constants is None or all(constants.get(name) == value for name, value in line.tile.items())):
            return line.loop
    return None
