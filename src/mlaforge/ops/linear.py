"""Products with packed weights on a CPU: y = x Wᵀ + bias + residual, in bf16, 8 or 4 bits.

The weights are packed once, for the kernels and for any number of rows (ops/cpu/linear/). Without compiled kernels the
engine uses torch's operations instead (engine/execution/linear.py).

Legend: N rows (tokens), K inputs, M outputs.
"""

from __future__ import annotations

from torch import Tensor

from mlaforge.ops.dispatch import Op
from mlaforge.ops.elementwise import rms_norm_reference, silu_mul_reference
from mlaforge.ops.native import supports_bfloat16, unpack
from mlaforge.ops.rounded_weights import unpacked4, unpacked8


def reference(
    x_NK: Tensor, packed: Tensor, M: int, bias_M: Tensor | None, residual_NM: Tensor | None, out_fp32: bool = False,
    norm_K: Tensor | None = None, eps: float = 0.0,
) -> Tensor:  # fmt: skip
    """Return y [N, M] in the dtype of x, or in fp32 with `out_fp32`. packed: bf16 weights as `pack` returns them.
    norm_K: weights of an RMS norm of x before the product, or None; `eps` is that of the norm."""
    if norm_K is not None:
        x_NK = rms_norm_reference(x_NK, norm_K, eps)
    return _product(x_NK, unpack(packed), M, bias_M, residual_NM, out_fp32)


def reference_int8(
    x_NK: Tensor, packed: Tensor, scale: Tensor, M: int, bias_M: Tensor | None, residual_NM: Tensor | None,
    out_fp32: bool = False,
) -> Tensor:  # fmt: skip
    """As `reference`; packed, scale: weights as `packed8` returns them."""
    return _product(x_NK, unpacked8(packed) * scale[:, None], M, bias_M, residual_NM, out_fp32)


def reference_int4(
    x_NK: Tensor, packed: Tensor, scale: Tensor, M: int, bias_M: Tensor | None, residual_NM: Tensor | None,
    out_fp32: bool = False,
) -> Tensor:  # fmt: skip
    """As `reference`; packed, scale: weights as `packed4` returns them."""
    return _product(x_NK, unpacked4(packed) * scale[:, None], M, bias_M, residual_NM, out_fp32)


def _product(
    x_NK: Tensor, weight: Tensor, M: int, bias_M: Tensor | None, residual_NM: Tensor | None, out_fp32: bool
) -> Tensor:
    """Multiply in fp32 by a weight that may be padded to more outputs and inputs."""
    out = x_NK.float() @ weight[:M, : x_NK.shape[1]].T
    for term in (bias_M, residual_NM):
        if term is not None:
            out = out + term
    return out if out_fp32 else out.to(x_NK.dtype)


def gated_mlp_reference(
    x_NC: Tensor, gate_up: Tensor, gate_up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None,
    residual_NC: Tensor, intermediate: int, norm_C: Tensor | None = None, eps: float = 0.0,
) -> Tensor:  # fmt: skip
    """Return residual + down(silu(gate) * up) for rows [gate, up] of gate_up(x): products and norm as in
    `reference`."""
    rows = reference(x_NC, gate_up, 2 * intermediate, gate_up_bias, None, False, norm_C, eps)
    return reference(silu_mul_reference(rows), down, residual_NC.shape[1], down_bias, residual_NC)


LINEAR = Op("linear", reference)
LINEAR_INT8 = Op("linear_int8", reference_int8)
LINEAR_INT4 = Op("linear_int4", reference_int4)
for op in (LINEAR, LINEAR_INT8, LINEAR_INT4):
    op.register_native(supports_bfloat16)
GATED_MLP = Op("gated_mlp", gated_mlp_reference)
GATED_MLP.register_native(supports_bfloat16)
