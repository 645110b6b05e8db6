"""What weights will take as the engine holds them, by their shapes alone."""

from __future__ import annotations

import torch
from torch import nn

from mlaforge.engine.execution.linear import QUANTIZED


def held_bytes(module: nn.Module, format: str, device: torch.device) -> int:
    """Bytes of a module's weights, which may be on the meta device, once it is loaded in `format` (engine/config.py).

    Experts in MXFP4 count as they are stored. A GPU has a copy of them; on a CPU they are mapped from the checkpoint's
    files, and a step that finds their pages gone waits for the disk: so they need the same memory. A tied vocabulary
    head counts beside the embedding, since it is laid out anew.
    """
    dtype = QUANTIZED.get(format) or getattr(torch, format)
    on_cpu = device.type == "cpu"
    total = 0
    for name, tensor in module.state_dict().items():
        shape, plain = tensor.shape, tensor.numel() * dtype.itemsize
        if not tensor.is_floating_point():
            total += tensor.numel() * tensor.element_size()
        elif tensor.ndim < 2 or name.endswith(("embed_tokens.weight", "router.weight")) or not on_cpu:
            total += plain
        elif name.endswith("kv_b_proj.weight"):
            # As it is in fp32, for what has no kernel, and laid out in bf16 for what has.
            total += tensor.numel() * (4 + 2 * (dtype == torch.bfloat16))
        elif name.endswith("lm_head.weight"):
            total += _linear_bytes(shape[0], shape[1], "int8" if format == "int4" else format)
        elif tensor.ndim == 3:
            # Fused experts are [E, inputs, outputs].
            total += shape[0] * _linear_bytes(shape[2], shape[1], format)
        else:
            total += _linear_bytes(shape[0], shape[1], format)
    return total


def _linear_bytes(M: int, K: int, format: str) -> int:
    """Of M outputs and K inputs, as kernels read them (ops/rounded_weights.py). int4 counts as in torch's
    own layout, which is read where ours is not compiled: half a bit more."""
    rows, columns = -(-M // 16) * 16, -(-K // 64) * 64
    if format == "int8":
        return rows * (columns + 4)
    if format == "int4":
        return rows * (columns * 5 // 8 + 4)
    return rows * K * 2 if format == "bfloat16" else M * K * getattr(torch, format).itemsize
