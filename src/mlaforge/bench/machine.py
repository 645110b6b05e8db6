"""Which machine and which code measured: commit, device, memory, and how results are written."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch

from mlaforge.artifact import record_text
from mlaforge.runtime import environment, version

SCHEMA = 1


def commit() -> tuple[str, bool]:
    """The commit of the checkout that this package runs from, and whether the package differs from it; mlaforge's
    version where it runs from none."""
    here = Path(__file__).parents[1]

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return None
        return None if done.returncode else done.stdout.strip()

    # An installed package may lie inside a repository that it is no part of.
    if git("ls-files", "--error-unmatch", "__init__.py") is None or (head := git("rev-parse", "HEAD")) is None:
        return f"mlaforge {version()}", False
    return head, bool(git("status", "--porcelain", "--", "."))


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's and the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{environment_processor()}, {torch.get_num_threads()} threads"


def environment_processor() -> str:
    """The processor as the system names it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "cpu")


def command(*program: str) -> str:
    """The command that runs, as results record it: without the folders of this machine."""
    return shlex.join([*program, *map(record_text, sys.argv[1:])])


def header(kind: str, device: torch.device) -> dict[str, Any]:
    """What every file of results begins with."""
    code, dirty = commit()
    return {
        "kind": kind, "schema": SCHEMA, "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command(Path(sys.argv[0]).name), "commit": code, "dirty": dirty,
        "device": device_name(device), "environment": environment(),
    }  # fmt: skip


def write(path: Path, body: dict[str, Any]) -> None:
    """All of it or nothing: a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


class Memory:
    """Bytes that this process holds on a device, and the most it held since `reset`.

    On CUDA torch's allocator counts. On a CPU it is the resident set, files that are mapped included; where the
    system does not let the peak be reset, `peak` is that of the process's whole life.
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
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else _most_resident()


def _resident() -> int:
    return int(psutil.Process().memory_info().rss)


def _most_resident() -> int:
    """The peak, which psutil does not know on Linux; where the system does not tell it, what is resident now."""
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="utf-8").splitlines() if status.is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), _resident())
