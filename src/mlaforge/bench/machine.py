"""Provenance of results (commit, device, environment), process memory, and atomic writing of results."""

from __future__ import annotations

import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch

from mlaforge.artifact import record_text
from mlaforge.ops import native, tuned
from mlaforge.runtime import compact_json, environment, processor_name, replace_file, version

SCHEMA = 1
# Longest line of a row.
ROW_WIDTH = 800


def commit() -> tuple[str, bool]:
    """Commit of the checkout that contains this package, and whether the package has uncommitted changes; mlaforge's
    version and False outside a checkout."""
    here = Path(__file__).parents[1]

    def git(*words: str) -> str | None:
        try:
            result = subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return None
        return None if result.returncode else result.stdout.strip()

    # An installed package may be inside an unrelated repository.
    if git("ls-files", "--error-unmatch", "__init__.py") is None or (head := git("rev-parse", "HEAD")) is None:
        return f"mlaforge {version()}", False
    return head, bool(git("status", "--porcelain", "--", "."))


def device_name(device: torch.device) -> str:
    """Name of the GPU, or of the processor with the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{processor_name()}, {torch.get_num_threads()} threads"


def command(*program: str) -> str:
    """Command line of this process as results record it, without this machine's folders."""
    return shlex.join([*program, *map(record_text, sys.argv[1:])])


def header(kind: str, device: torch.device, tuned_file: str | None = None) -> dict[str, Any]:
    """Common first keys of every results file. tuned_file: option `tuned`, as for the engine."""
    tuned.load(device, tuned_file)
    code, dirty = commit()
    return {
        "kind": kind, "schema": SCHEMA, "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command(Path(sys.argv[0]).name), "commit": code, "dirty": dirty,
        "device": device_name(device), "kernels": native.form() if device.type == "cpu" else None,
        "tuned": tuned.identity(), "environment": environment(),
    }  # fmt: skip


def write(path: Path, body: dict[str, Any]) -> None:
    """Write `body` as JSON with a line per row, atomically: readers never see a partial file."""
    replace_file(path, compact_json(body, ROW_WIDTH) + "\n")


class Memory:
    """Bytes that this process has allocated on a device: current, and peak since `reset`.

    CUDA: torch's caching allocator. CPU: the resident set including mapped files; if the system cannot reset the peak,
    `peak` covers the process's whole lifetime.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.how = "torch's allocator" if device.type == "cuda" else "resident set of the process"

    def reset(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            self.how = "resident set of the process; peak since its start"

    def now(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else _resident()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else _peak_resident()


def _resident() -> int:
    return int(psutil.Process().memory_info().rss)


def _peak_resident() -> int:
    """Peak resident set from VmHWM, which psutil does not report on Linux; the current one where VmHWM is missing."""
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="utf-8").splitlines() if status.is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), _resident())
