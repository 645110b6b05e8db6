"""NVTX ranges: fixed names in a profile of the GPU."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def span(name: str, device: torch.device) -> AbstractContextManager[None]:
    """A context manager: an NVTX range on CUDA, nothing elsewhere."""
    return torch.cuda.nvtx.range(name) if device.type == "cuda" else nullcontext()
