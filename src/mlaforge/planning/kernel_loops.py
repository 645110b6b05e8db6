"""Inner loops of this package's compiled Triton kernels, for kernel_time.py: kernel_loops.json, a line per launch.

`python -m mlaforge.gpu_verification.static` writes the file next to its table of binaries, from which `derive` makes
it; `--derive` only derives.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
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


def derive(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Lines of the file from the rows of benchmarks/gpu_static.json. dtype: of cached rows or factors."""
    lines = []
    for row in rows:
        constants, inner = row["constants"], row["loop"]
        dtype = re.search(r"fp8|fp16|fp32|int8|coded", row["name"])
        loop = Loop(
            inner["all"], inner["exponential"], row["instructions"]["all"] - inner["all"],
            constants.get("num_warps", DEFAULT_WARPS), row["registers"], row["shared"],
        )  # fmt: skip
        lines.append({
            "name": row["name"], "kernel": row["kernel"], "capability": row["capability"],
            "dtype": dtype[0] if dtype else "bf16",
            "tile": {name: constants[name] for name in TILE if name in constants}, **asdict(loop),
        })  # fmt: skip
    return lines


@functools.cache
def lines() -> tuple[dict[str, Any], ...]:
    """Lines of the packaged file."""
    return tuple(json.loads(FILE.read_text(encoding="utf-8"))["rows"])


def find(kernel: str, capability: int, constants: Mapping[str, Any] | None, dtype: str = "bf16") -> Loop | None:
    """Loop of a launch with these constants and options (None: with any), compiled for the closest capability that is
    not newer; None if no such launch has been compiled."""
    known = {line["capability"] for line in lines() if line["capability"] <= capability}
    for line in lines():
        same = line["kernel"] == kernel and line["dtype"] == dtype and line["capability"] == max(known, default=None)
        if same and (constants is None or all(constants.get(name) == value for name, value in line["tile"].items())):
            return Loop(**{name: line[name] for name in Loop.__dataclass_fields__})
    return None
