"""Products of the absorbed form in Triton: queries by W_uk, with the rotation and the write to the cache, and attended
latents by W_uv, with the sinks. A program computes a tile of tokens and heads that share a KV head, and a piece of the
outputs, so W is read once per tile of rows. Few tokens are limited by reading W. Not measured on a GPU yet.

Legend: N tokens, H query heads, G KV heads, D key and V value dimensions, R latent rank, E rotary dimensions.
"""

# Triton reads annotations of kernels: only constexpr is allowed.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlaforge.ops.absorbed_latents import AbsorbedWeights
from mlaforge.ops.paged_rows import PagedRows
from mlaforge.ops.rope_and_store_triton import cached
from mlaforge.ops.row_formats.plain import Plain

# Rows of a tile for few and for many tokens; outputs per program; latent elements per step of the second product.
FEW, MANY, OUTPUTS, INPUTS = 16, 64, 128, 64


@triton.jit(do_not_specialize=["tokens"])
def absorb_kernel(
    x, w_uk, b_k, rotation, rope_index, slots, rows, out, shift, scale, tokens, x_row, w_head, rows_row, pairs,
    GROUP: tl.constexpr, D: tl.constexpr, R: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, OUTPUTS: tl.constexpr, SHIFT: tl.constexpr, FP8: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, G, pieces of R): out [N, H, R + E] from x [N, H (D + E) + R + E]. The first piece also rotates, and
    the first KV head's programs write [c, rotary key] to rows[slots]. rotation [N, pairs, 2]."""
    g, piece = tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1) * GROUP
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = m < tokens * GROUP
    n, h = (m // GROUP).to(tl.int64), g * GROUP + m % GROUP
    d, r = tl.arange(0, BLOCK_D), piece * OUTPUTS + tl.arange(0, OUTPUTS)
    q_rows = x + n * x_row + h * (D + E)
    q = tl.load(q_rows[:, None] + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0.0)
    w_mask = (d < D)[:, None] & (r < R)[None, :]
    w = tl.load(w_uk + g.to(tl.int64) * w_head + d[:, None] * R + r[None, :], mask=w_mask, other=0.0)
    y = tl.dot(q, w, input_precision=PRECISION)
    out_rows = out + (n * heads + h) * (R + E)
    tl.store(out_rows[:, None] + r[None, :], y.to(out.dtype.element_ty), mask=real[:, None] & (r < R)[None, :])
    stored = real & (m % GROUP == 0)
    c_rows = x + n * x_row + heads * (D + E)
    row = rows + tl.load(slots + n, mask=real, other=0) * rows_row
    if g == 0:
        mask = stored[:, None] & (r < R)[None, :]
        c = tl.load(c_rows[:, None] + r[None, :], mask=mask, other=0.0)
        tl.store(row[:, None] + r[None, :], cached(c.to(tl.float32), rows, FP8), mask=mask)
    if piece == 0:
        if SHIFT:
            bias = tl.load(b_k + g.to(tl.int64) * D + d, mask=d < D, other=0.0).to(tl.float32)
            tl.store(shift + n * heads + h, tl.sum(q.to(tl.float32) * bias[None, :], 1) * scale, mask=real)
        p = tl.arange(0, BLOCK_E)
        i = tl.load(rope_index + p, mask=p < E // 2, other=0)
        mask = real[:, None] & (p < E // 2)[None, :]
        angle = rotation + (n[:, None] * pairs + i[None, :]) * 2
        cos, sin = tl.load(angle, mask=mask, other=0.0), tl.load(angle + 1, mask=mask, other=0.0)
        rotary = q_rows[:, None] + D + p[None, :]
        a = tl.load(rotary, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(rotary + E // 2, mask=mask, other=0.0).to(tl.float32)
        to = out_rows[:, None] + R + p[None, :]
        tl.store(to, (a * cos - b * sin).to(out.dtype.element_ty), mask=mask)
        tl.store(to + E // 2, (b * cos + a * sin).to(out.dtype.element_ty), mask=mask)
        if g == 0:
            mask = mask & stored[:, None]
            rotary = c_rows[:, None] + R + p[None, :]
            a = tl.load(rotary, mask=mask, other=0.0).to(tl.float32)
            b = tl.load(rotary + E // 2, mask=mask, other=0.0).to(tl.float32)
            to_row = row[:, None] + R + p[None, :]
            first = (a * cos - b * sin).to(x.dtype.element_ty).to(tl.float32)
            second = (b * cos + a * sin).to(x.dtype.element_ty).to(tl.float32)
            tl.store(to_row, cached(first, rows, FP8), mask=mask)
            tl.store(to_row + E // 2, cached(second, rows, FP8), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def up_project_kernel(
    x, w_uv, b_v, lse, shift, sinks, out, tokens, w_head,
    GROUP: tl.constexpr, V: tl.constexpr, R: tl.constexpr, BLOCK_M: tl.constexpr, OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr, SINKS: tl.constexpr, SHIFT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, G, pieces of V): out [N, H, V] = x [N, H, R] W_uv + b_v, times the share that the sinks leave."""
    g = tl.program_id(1)
    heads = tl.num_programs(1) * GROUP
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = m < tokens * GROUP
    n, h = (m // GROUP).to(tl.int64), g * GROUP + m % GROUP
    v = tl.program_id(2) * OUTPUTS + tl.arange(0, OUTPUTS)
    x_rows, w_rows = x + (n * heads + h) * R, w_uv + g.to(tl.int64) * w_head + v * R
    acc = tl.zeros([BLOCK_M, OUTPUTS], tl.float32)
    for start in range(0, R, INPUTS):
        r = start + tl.arange(0, INPUTS)
        x_mask, w_mask = real[:, None], (v < V)[:, None]
        if R % INPUTS:
            x_mask, w_mask = x_mask & (r < R)[None, :], w_mask & (r < R)[None, :]
        tile = tl.load(x_rows[:, None] + r[None, :], mask=x_mask, other=0.0)
        w = tl.load(w_rows[:, None] + r[None, :], mask=w_mask, other=0.0)
        acc = tl.dot(tile, tl.trans(w), acc, input_precision=PRECISION)
    acc += tl.load(b_v + g.to(tl.int64) * V + v, mask=v < V, other=0.0).to(tl.float32)[None, :]
    if SINKS:
        at = n * heads + h
        seen = tl.load(lse + at, mask=real, other=0.0)
        if SHIFT:
            seen += tl.load(shift + at, mask=real, other=0.0)
        acc *= tl.sigmoid(seen - tl.load(sinks + h, mask=real, other=0.0).to(tl.float32))[:, None]
    to = out + ((n * heads + h) * V)[:, None] + v[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=real[:, None] & (v < V)[None, :])


def _piece(width: int) -> int:
    """Return outputs per program: a power of two."""
    return min(OUTPUTS, max(16, triton.next_power_of_2(width)))


def absorb_supports(
    q_kv_NX: Tensor, rotation_N1P: Tensor, weights: AbsorbedWeights, rows: PagedRows, *others: Any
) -> Literal[True] | str:
    """Return True, or the reason why the kernel cannot run on these."""
    if not isinstance(rows.format, Plain):
        return f"it does not write rows in {rows.format.name}"
    if weights.w_uk.stride()[1:] != (weights.w_uk.shape[2], 1):
        return "weights must be contiguous"
    return _dtype_supports(q_kv_NX)


def up_project_supports(out_NHR: Tensor, *others: Any) -> Literal[True] | str:
    """Return True, or the reason why the kernel cannot run on these."""
    return _dtype_supports(out_NHR) if out_NHR.is_contiguous() else "rows must be contiguous"


def _dtype_supports(x: Tensor) -> Literal[True] | str:
    if x.device.type != "cuda" and x.dtype == torch.bfloat16:
        return "Triton's interpreter computes wrong bfloat16 products"
    return True if x.stride(-1) == 1 else "rows must be contiguous"


def _tile(rows: int) -> int:
    return FEW if rows <= FEW else MANY


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


def absorb_launch(
    q_kv_NX: Tensor, rotation_N1P: Tensor, weights: AbsorbedWeights, rows: PagedRows, slots_N: Tensor, scale: float
) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """Return the grid and the arguments. Allocates `out` and, with sinks, `shift`."""
    (G, D, R), E, N = weights.w_uk.shape, 2 * len(weights.rope_index), len(q_kv_NX)
    H = (q_kv_NX.shape[1] - R - E) // (D + E)
    BLOCK_M, piece = _tile(N * H // G), _piece(R)
    sinks = weights.sinks is not None
    arguments = {
        "x": q_kv_NX, "w_uk": weights.w_uk, "b_k": weights.b_k,
        "rotation": torch.view_as_real(rotation_N1P), "rope_index": weights.rope_index, "slots": slots_N,
        "rows": rows.packed, "out": q_kv_NX.new_empty(N, H, R + E),
        "shift": torch.empty(N if sinks else 0, H, dtype=torch.float32, device=q_kv_NX.device), "scale": scale,
        "tokens": N, "x_row": q_kv_NX.stride(0), "w_head": weights.w_uk.stride(0), "rows_row": rows.packed.stride(0),
        "pairs": rotation_N1P.shape[-1], "GROUP": H // G, "D": D, "R": R, "E": E,
        "BLOCK_D": max(16, triton.next_power_of_2(D)), "BLOCK_E": triton.next_power_of_2(E // 2), "BLOCK_M": BLOCK_M,
        "OUTPUTS": piece, "SHIFT": sinks, "FP8": rows.packed.dtype == torch.float8_e4m3fn,
        "PRECISION": _precision(q_kv_NX),
    }  # fmt: skip
    return (triton.cdiv(N * (H // G), BLOCK_M), G, triton.cdiv(R, piece)), arguments


def absorb_and_store(*inputs: Any) -> tuple[Tensor, Tensor | None]:
    """ops/absorbed_latents.py's function."""
    grid, arguments = absorb_launch(*inputs)
    if grid[0]:
        with torch.cuda.device_of(arguments["out"]):
            absorb_kernel[grid](**arguments, num_warps=4)
    return arguments["out"], arguments["shift"] if arguments["SHIFT"] else None


def up_project_launch(
    out_NHR: Tensor, lse_NH: Tensor, shift_NH: Tensor | None, w_uv: Tensor, b_v: Tensor, sinks_H: Tensor | None,
    dtype: torch.dtype,
) -> tuple[tuple[int, int, int], dict[str, Any]]:  # fmt: skip
    """Return the grid and the arguments of the product with w_uv [G, V, R]. Allocates `out`, in `dtype`."""
    (N, H, R), (G, V) = out_NHR.shape, b_v.shape
    BLOCK_M, piece = _tile(N * H // G), _piece(V)
    arguments = {
        "x": out_NHR, "w_uv": w_uv, "b_v": b_v, "lse": lse_NH,
        "shift": lse_NH if shift_NH is None else shift_NH, "sinks": lse_NH if sinks_H is None else sinks_H,
        "out": out_NHR.new_empty(N, H * V, dtype=dtype), "tokens": N, "w_head": w_uv.stride(0), "GROUP": H // G, "V": V,
        "R": R, "BLOCK_M": BLOCK_M, "OUTPUTS": piece, "INPUTS": INPUTS, "SINKS": sinks_H is not None,
        "SHIFT": shift_NH is not None,
        "PRECISION": _precision(out_NHR),
    }  # fmt: skip
    return (triton.cdiv(N * (H // G), BLOCK_M), G, triton.cdiv(V, piece)), arguments


def up_project_values(out_NHR: Tensor, lse_NH: Tensor, shift_NH: Tensor | None, weights: AbsorbedWeights) -> Tensor:
    """ops/absorbed_latents.py's function."""
    sinks = weights.sinks if shift_NH is not None else None
    grid, arguments = up_project_launch(out_NHR, lse_NH, shift_NH, weights.w_uv, weights.b_v, sinks, out_NHR.dtype)
    out: Tensor = arguments["out"]
    if grid[0]:
        with torch.cuda.device_of(out):
            up_project_kernel[grid](**arguments, num_warps=4)
    return out
