"""Memory that an engine's weights will take, computed from their shapes."""

from __future__ import annotations

import torch
from torch import nn

from mlaforge.engine.execution.linear import QUANTIZED
from mlaforge.ops.native import form


def weight_bytes(module: nn.Module, format: str, device: torch.device) -> int:
    """Return the bytes of a module's weights once they are loaded in `format` (engine/config.py). The module may be on
    the meta device.

    MXFP4 experts count as they are stored. A GPU has a copy of them; on a CPU they are mapped from the checkpoint's
    files, and a step that misses their pages waits for the disk, so they need the same memory. A tied vocabulary head
    counts in addition to the embedding, because it is packed anew.
    """
    dtype = QUANTIZED.get(format) or getattr(torch, format)
    on_cpu = device.type == "cpu"
    state, total = module.state_dict(), 0
    coded = bool(getattr(getattr(module, "config", None), "mla_code_counts", None))
    for name, tensor in state.items():
        shape, plain = tensor.shape, tensor.numel() * dtype.itemsize
        if not tensor.is_floating_point():
            total += tensor.numel() * tensor.element_size()
        elif tensor.ndim < 2 or name.endswith(("embed_tokens.weight", "router.weight")) or not on_cpu:
            total += plain
        elif name.endswith("kv_b_proj.weight"):
            # In fp32 for the operations without a kernel, and packed in bf16 for those with one, if rows are coded also
            # as integers. latent_rope multiplies queries by W_uk, and the cached rows of prompts.
            total += 4 * tensor.numel()
            if dtype == torch.bfloat16:
                rotary = name.removesuffix("kv_b_proj.weight") + "rope_index" in state
                copies = 2 if coded and form() != "amx" else 1
                total += copies * 2 * shape[0] * -(-shape[1] // 32) * 32 + rotary * tensor.numel()
        elif name.endswith("lm_head.weight"):
            total += _linear_bytes(shape[0], shape[1], "int8" if format == "int4" else format)
        elif tensor.ndim == 3:
            # Fused experts are [E, inputs, outputs].
            total += shape[0] * _linear_bytes(shape[2], shape[1], format)
        else:
            total += _linear_bytes(shape[0], shape[1], format)
    return total


def _linear_bytes(M: int, K: int, format: str) -> int:
    """Bytes of a linear layer with M outputs and K inputs, as kernels read it (ops/rounded_weights.py). int4 counts as
    in torch's layout, which is used where our kernels are not compiled: half a bit more per weight."""
    rows, columns = -(-M // 16) * 16, -(-K // 64) * 64
    if format == "int8":
        return rows * (columns + 4)
    if format == "int4":
        return rows * (columns * 5 // 8 + 4)
    return rows * K * 2 if format == "bfloat16" else M * K * getattr(torch, format).itemsize
