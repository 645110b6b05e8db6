"""Norms and gates between the products of a layer, in Triton: one launch instead of two to eight. A program computes a
row; memory limits all of them. Not measured on a GPU yet.

Legend: N tokens, C hidden size, I intermediate size.
"""

# Triton reads annotations of kernels: only constexpr is allowed.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

# Columns per program of the gate.
GATE_BLOCK = 1024


@triton.jit
def add_rms_norm_kernel(
    x, residual, weight, total, out, eps, x_row, C: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr
):  # fmt: skip
    """Grid (N,): out [N, C] is the RMS norm of x. ADD: of x + residual, rounded and stored to `total`."""
    n, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    row, mask = n * C, c < C
    value = tl.load(x + n * x_row + c, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row + c, mask=mask, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row + c, rounded, mask=mask)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / C + eps)
    normed = value * scale * tl.load(weight + c, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row + c, normed.to(out.dtype.element_ty), mask=mask)


@triton.jit
def silu_mul_kernel(gate_up, out, WIDTH: tl.constexpr, GATE_BLOCK: tl.constexpr):
    """Grid (N, pieces): out [N, WIDTH] = silu(gate) * up for rows [gate, up]."""
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * GATE_BLOCK + tl.arange(0, GATE_BLOCK)
    mask = i < WIDTH
    gate = tl.load(gate_up + row * (2 * WIDTH) + i, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * WIDTH) + WIDTH + i, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + i, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=mask)


def supports(gate_up: Tensor) -> Literal[True] | str:
    """Return True, or the reason why the gate cannot run on these."""
    return True if gate_up.is_contiguous() else "rows must be contiguous"


def norm_supports(x_NC: Tensor, residual_NC: Tensor | None, *others: Any) -> Literal[True] | str:
    """Return True, or the reason why the norm cannot run on these."""
    contiguous = x_NC.stride(1) == 1 and (residual_NC is None or residual_NC.is_contiguous())
    return True if contiguous else "rows must be contiguous"


def norm_launch(
    x_NC: Tensor, residual_NC: Tensor | None, weight_C: Tensor, eps: float
) -> tuple[tuple[int], dict[str, Any], dict[str, int]]:  # fmt: skip
    """Return the grid, the arguments and the options of a norm. Allocates `out` and, for a residual, `total`."""
    N, C = x_NC.shape
    add = residual_NC is not None
    arguments = {
        "x": x_NC, "residual": residual_NC if add else x_NC, "weight": weight_C,
        "total": x_NC.new_empty(N, C) if add else x_NC, "out": x_NC.new_empty(N, C), "eps": eps,
        "x_row": x_NC.stride(0), "C": C, "BLOCK": triton.next_power_of_2(C), "ADD": add,
    }  # fmt: skip
    return (N,), arguments, {"num_warps": 4 if C <= 1024 else 8}


def add_rms_norm(
    x_NC: Tensor, residual_NC: Tensor | None, weight_C: Tensor, eps: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """ops/elementwise.py's function."""
    grid, arguments, options = norm_launch(x_NC, residual_NC, weight_C, eps)
    if len(x_NC):
        with torch.cuda.device_of(x_NC):
            add_rms_norm_kernel[grid](**arguments, **options)
    return arguments["out"], arguments["total"]


def silu_mul(gate_up: Tensor) -> Tensor:
    """ops/elementwise.py's function."""
    N, I = len(gate_up), gate_up.shape[1] // 2  # noqa: E741
    out = gate_up.new_empty(N, I)
    if N:
        with torch.cuda.device_of(out):
            grid = (N, triton.cdiv(I, GATE_BLOCK))
            silu_mul_kernel[grid](gate_up, out, WIDTH=I, GATE_BLOCK=GATE_BLOCK, num_warps=4)
    return out
