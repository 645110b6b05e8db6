"""Norm of queries and keys, rotation, and the write to the cache, in one Triton kernel. Memory limits it. Not measured
on a GPU yet.

Legend: N tokens, W elements of a fused projection [q, k, v], H query heads, G KV heads, D head_dim.
"""

# Triton reads annotations of kernels: only constexpr is allowed.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlaforge.ops.paged_rows import PagedRows
from mlaforge.ops.row_formats.int8 import Int8
from mlaforge.ops.row_formats.plain import Plain

# Heads per program.
BLOCK_H = 8


@triton.jit
def cached(x, rows, FP8: tl.constexpr):
    """Round x to the dtype of the cached rows. fp8 saturates at 448; infinity becomes NaN, as in Plain.write."""
    if FP8:
        saturated = tl.where(tl.abs(x) > 448.0, tl.where(x > 0, 448.0, -448.0), x)
        x = tl.where(tl.abs(x) == float("inf"), float("nan"), saturated)
    return x.to(rows.dtype.element_ty)


@triton.jit
def _bf16(x):
    """Round finite numbers to bf16 by their bits, because the interpreter's conversion truncates."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 32767 + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _code(x, scale):
    """Return x / scale as an int8 code; 0 where the scale is 0, infinite or NaN."""
    good = (scale > 0.0) & (scale < float("inf"))
    whole = (tl.div_rn(tl.where(good, x, 0.0), tl.where(good, scale, 1.0)) + 12582912.0) - 12582912.0
    return tl.maximum(tl.minimum(whole, 127.0), -127.0).to(tl.int8)


@triton.jit
def rope_and_store_kernel(
    qkv, rotation, slots, rows, scales, q_weight, k_weight, eps, qkv_row, rows_row, scales_row,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, NORM: tl.constexpr, FP8: tl.constexpr,
    INT8: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Grid (N, blocks of heads): norm and rotate queries and keys of qkv [N, (H + 2 G) D] in place, write keys and
    values to rows[slots]. rotation [N, D / 2, 2]: cos and sin of each pair of neighbours. INT8: one of the bf16
    scales[slots] per head."""
    n, h = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    p = tl.arange(0, PAIRS)
    live = (h < H + 2 * G)[:, None] & (p < D // 2)[None, :]
    rotated = live & (h < H + G)[:, None]
    at = qkv + n * qkv_row + h[:, None] * D + 2 * p[None, :]
    a = tl.load(at, mask=live, other=0.0).to(tl.float32)
    b = tl.load(at + 1, mask=live, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]
        pair = (p < D // 2)[None, :]
        even, odd = 2 * p[None, :], 2 * p[None, :] + 1
        queries = (h < H)[:, None]
        even_weight = tl.where(queries, tl.load(q_weight + even, mask=pair), tl.load(k_weight + even, mask=pair))
        odd_weight = tl.where(queries, tl.load(q_weight + odd, mask=pair), tl.load(k_weight + odd, mask=pair))
        dtype: tl.constexpr = qkv.dtype.element_ty
        a = tl.where(rotated, (a * scale * even_weight.to(tl.float32)).to(dtype).to(tl.float32), a)
        b = tl.where(rotated, (b * scale * odd_weight.to(tl.float32)).to(dtype).to(tl.float32), b)
    cos = tl.load(rotation + n * D + 2 * p, mask=p < D // 2, other=0.0)[None, :]
    sin = tl.load(rotation + n * D + 2 * p + 1, mask=p < D // 2, other=0.0)[None, :]
    first = tl.where(rotated, a * cos - b * sin, a).to(qkv.dtype.element_ty)
    second = tl.where(rotated, a * sin + b * cos, b).to(qkv.dtype.element_ty)
    tl.store(at, first, mask=rotated)
    tl.store(at + 1, second, mask=rotated)
    row = rows + tl.load(slots + n) * rows_row + (h - H)[:, None] * D + 2 * p[None, :]
    stored = live & (h >= H)[:, None]
    if INT8:
        first, second = _bf16(first.to(tl.float32)), _bf16(second.to(tl.float32))
        most = tl.max(tl.maximum(tl.abs(first), tl.abs(second)), 1)
        # Rounded up to bf16, so that no code is clipped.
        bits = tl.div_rn(most, tl.full([BLOCK_H], 127.0, tl.float32)).to(tl.int32, bitcast=True)
        scale = ((bits + 65535) & -65536).to(tl.float32, bitcast=True)
        tl.store(row, _code(first, scale[:, None]), mask=stored)
        tl.store(row + 1, _code(second, scale[:, None]), mask=stored)
        at = scales + tl.load(slots + n) * scales_row + h - H
        tl.store(at, scale.to(tl.bfloat16), mask=(h >= H) & (h < H + 2 * G))
        return
    tl.store(row, cached(first.to(tl.float32), rows, FP8), mask=stored)
    tl.store(row + 1, cached(second.to(tl.float32), rows, FP8), mask=stored)


def supports(
    qkv_NW: Tensor, rotation_N1P: Tensor | None, rows: PagedRows, *others: Any
) -> Literal[True] | str:  # fmt: skip
    """Return True, or the reason why the kernel cannot run on these."""
    if not isinstance(rows.format, Plain | Int8):
        return f"it does not write rows in {rows.format.name}"
    return True if qkv_NW.stride(1) == 1 else "rows must be contiguous"


def make_launch(
    qkv_NW: Tensor, rotation_N1P: Tensor, rows: PagedRows, slots_N: Tensor, heads: int, head_dim: int,
    norms: tuple[Tensor, Tensor, float] | None = None,
) -> tuple[tuple[int, int], dict[str, Any]]:  # fmt: skip
    """Return the grid and the arguments."""
    G = rows.format.width // (2 * head_dim)
    q_weight, k_weight, eps = norms or (qkv_NW, qkv_NW, 0.0)
    int8, packed, scales = isinstance(rows.format, Int8), rows.packed, rows.packed
    if int8:
        packed, scales = packed.view(torch.int8), packed.view(torch.bfloat16)[:, rows.format.parts[1].offset // 2 :]
    arguments = {
        "qkv": qkv_NW, "rotation": torch.view_as_real(rotation_N1P), "slots": slots_N, "rows": packed,
        "scales": scales, "q_weight": q_weight, "k_weight": k_weight, "eps": eps, "qkv_row": qkv_NW.stride(0),
        "rows_row": packed.stride(0), "scales_row": scales.stride(0), "INT8": int8, "H": heads - G, "G": G,
        "D": head_dim, "PAIRS": triton.next_power_of_2(head_dim // 2), "NORM": norms is not None,
        "FP8": rows.packed.dtype == torch.float8_e4m3fn, "BLOCK_H": BLOCK_H,
    }  # fmt: skip
    return (len(qkv_NW), triton.cdiv(heads + G, BLOCK_H)), arguments


def rope_and_store(*inputs: Any) -> None:
    """ops/rope_and_store.py's function."""
    qkv_NW = inputs[0]
    if len(qkv_NW):
        grid, arguments = make_launch(*inputs)
        with torch.cuda.device_of(qkv_NW):
            rope_and_store_kernel[grid](**arguments, num_warps=4)
