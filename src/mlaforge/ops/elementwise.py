"""Norms and gates between the products of a layer (ops/cpu/linear/elementwise.h, ops/elementwise_triton.py).

Legend: N tokens, C hidden size, I intermediate size.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from mlaforge.ops.dispatch import Op
from mlaforge.ops.native import supports_bfloat16


def rms_norm_reference(x_NC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x²) + eps) * weight, in the dtype of x, computed in fp32."""
    return F.rms_norm(x_NC.float(), (x_NC.shape[-1],), weight_C.float(), eps).to(x_NC.dtype)


def add_rms_norm_reference(
    x_NC: Tensor, residual_NC: Tensor | None, weight_C: Tensor, eps: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the RMS norm of x + residual, and this sum, which is rounded before the norm, both in the dtype of x.
    residual_NC: None for x alone."""
    total = x_NC if residual_NC is None else x_NC + residual_NC
    return rms_norm_reference(total, weight_C, eps), total


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, [N, I], for rows [gate, up], computed in fp32."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


RMS_NORM = Op("rms_norm", rms_norm_reference)
RMS_NORM.register_native(supports_bfloat16)
SILU_MUL = Op("silu_mul", silu_mul_reference)
SILU_MUL.register_native(supports_bfloat16)
SILU_MUL.register_triton("elementwise_triton", "silu_mul")
ADD_RMS_NORM = Op("add_rms_norm", add_rms_norm_reference)
ADD_RMS_NORM.register_triton("elementwise_triton", "add_rms_norm", "norm_supports")
