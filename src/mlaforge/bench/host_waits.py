"""Counter of host waits for a GPU by source line, from PyTorch's warnings about synchronizing operations.

PyTorch reports .item(), .tolist() and other reads of values, operations whose output shape depends on values, and
blocking copies between host and device. It does not report torch.cuda.synchronize, copies from pageable memory with
non_blocking=True, or waits inside libraries.
"""

from __future__ import annotations

import contextlib
import dataclasses
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

MESSAGE = "called a synchronizing CUDA operation"
PACKAGE = Path(__file__).parents[1]


@dataclasses.dataclass
class HostWaits:
    """Recorded waits. `lines` has one entry per wait: the innermost line of mlaforge on the stack as path:number, else
    the line that PyTorch reported."""

    lines: list[str] = dataclasses.field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.lines)


@contextlib.contextmanager
def count_host_waits(device: torch.device) -> Iterator[HostWaits]:
    """Count the host's waits for a CUDA device inside the context. Not thread-safe: PyTorch's sync debug mode and
    Python's warning filters are global to the process."""
    assert device.type == "cuda", f"the host does not wait for a {device.type}"
    waits = HostWaits()
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=MESSAGE)
        show = warnings.showwarning

        def record(
            message: Warning | str, category: type[Warning], filename: str, lineno: int, *args: Any, **kwargs: Any
        ) -> None:  # fmt: skip
            if MESSAGE in str(message):
                waits.lines.append(_innermost_line() or f"{Path(filename).name}:{lineno}")
            else:
                show(message, category, filename, lineno, *args, **kwargs)

        warnings.showwarning = record
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode(mode)


def _innermost_line() -> str | None:
    """Innermost line of mlaforge on the stack, as path:number."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path != Path(__file__) and path.is_relative_to(PACKAGE):
            return f"{path.relative_to(PACKAGE)}:{frame.lineno}"
    return None
