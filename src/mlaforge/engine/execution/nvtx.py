"""NVTX ranges: fixed names in GPU profiles."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def span(name: str, device: torch.device) -> AbstractContextManager[None]:
    """Return a context manager: an NVTX range on CUDA, nothing elsewhere."""
    return torch.cuda.nvtx.range(name) if device.type == "cuda" else nullcontext()
