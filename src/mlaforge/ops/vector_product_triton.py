"""Products of a few rows in Triton (ops/vector_product.py): a program multiplies a tile of weights by all rows. Of
several splits of the inputs, a second kernel adds the results in order, so that a row's result depends neither on the
rows beside it nor on the order in which programs end. Weights are the left factor: rows are padded to the 16 columns of
a tensor core. Not measured on a GPU yet.

Legend: N rows (tokens), K inputs, M outputs.
"""

# Triton reads annotations of kernels: only constexpr is allowed.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlaforge.ops import tuned
from mlaforge.ops.vector_product import MOST_ROWS

# Inputs of a step, and outputs of a program of the sum.
BLOCK_K, SUM_BLOCK = 128, 256
# Configurations to measure: splits of the inputs, and outputs of a tile.
SPLITS, OUTPUTS = (1, 2, 4, 8), (16, 32, 64)


@triton.jit
def _store(out, bias, value, at, o, mask, BIAS: tl.constexpr):
    """Store sums plus the bias of the outputs o to the places `at`."""
    if BIAS:
        value += tl.load(bias + o, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def vector_product_kernel(
    x, weight, bias, out, parts, x_row, rows, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, BIAS: tl.constexpr,
    SPLITS: tl.constexpr, SHARE: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of BLOCK_O outputs, SPLITS): x [rows, INPUTS] times weight [OUTPUTS, INPUTS], to out [rows, OUTPUTS]
    or, of several splits of SHARE inputs, to fp32 parts [SPLITS, rows, OUTPUTS] without the bias."""
    o, n = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O), tl.arange(0, 16)
    live, real = o < OUTPUTS, n < rows
    acc = tl.zeros([BLOCK_O, 16], tl.float32)
    for step in range(0, SHARE, BLOCK_K):
        k = tl.program_id(1) * SHARE + step + tl.arange(0, BLOCK_K)
        mask, row_mask = live[:, None], real[:, None]
        if INPUTS % BLOCK_K or INPUTS != SPLITS * SHARE:
            mask, row_mask = mask & (k < INPUTS)[None, :], row_mask & (k < INPUTS)[None, :]
        w = tl.load(weight + o.to(tl.int64)[:, None] * INPUTS + k[None, :], mask=mask, other=0.0)
        row = tl.load(x + n[:, None] * x_row + k[None, :], mask=row_mask, other=0.0)
        acc = tl.dot(w, tl.trans(row), acc)
    at, mask = n[None, :] * OUTPUTS + o[:, None], live[:, None] & real[None, :]
    if SPLITS > 1:
        tl.store(parts + tl.program_id(1) * rows * OUTPUTS + at, acc, mask=mask)
    else:
        _store(out, bias, acc, at, o[:, None] + 0 * n[None, :], mask, BIAS)


@triton.jit
def split_sum_kernel(
    parts, bias, out, OUTPUTS: tl.constexpr, BIAS: tl.constexpr, SPLITS: tl.constexpr, SUM_BLOCK: tl.constexpr
):  # fmt: skip
    """Grid (tiles of SUM_BLOCK outputs, rows): the sum of parts [SPLITS, rows, OUTPUTS], to out [rows, OUTPUTS]."""
    o = tl.program_id(0) * SUM_BLOCK + tl.arange(0, SUM_BLOCK)
    at, mask = tl.program_id(1) * OUTPUTS + o, o < OUTPUTS
    acc = tl.zeros([SUM_BLOCK], tl.float32)
    for split in range(SPLITS):
        acc += tl.load(parts + split * tl.num_programs(1) * OUTPUTS + at, mask=mask, other=0.0)
    _store(out, bias, acc, at, o, mask, BIAS)


INTERPRETED = not isinstance(vector_product_kernel, triton.JITFunction)


def supports(x_NK: Tensor, weight_MK: Tensor, *others: Any) -> Literal[True] | str:
    """Return True, or the reason why the kernel cannot run on these."""
    if len(x_NK) > MOST_ROWS:
        return f"it multiplies at most {MOST_ROWS} rows"
    if x_NK.dtype not in (torch.bfloat16, torch.float16) or weight_MK.dtype != x_NK.dtype:
        return f"it multiplies bfloat16 or float16, not {x_NK.dtype} by {weight_MK.dtype}"
    if INTERPRETED and x_NK.dtype == torch.bfloat16:
        return "Triton's interpreter computes wrong bfloat16 products"
    return True if weight_MK.is_contiguous() and x_NK.stride(1) == 1 else "rows must be contiguous"


def candidates(inputs: int) -> list[tuned.Configuration]:
    """Return configurations to measure for weights of so many inputs. One serves all numbers of rows, because the
    number of splits changes the order of a sum."""
    steps = triton.cdiv(inputs, BLOCK_K)
    return [{"splits": splits, "BLOCK_O": size} for splits in SPLITS if splits <= steps for size in OUTPUTS]


@dataclasses.dataclass(frozen=True)
class Launch:
    """Grids, arguments by name and options of the product and of the sum of its splits (None: there is one split)."""

    grid: tuple[int, int]
    arguments: dict[str, Any]
    options: dict[str, int]
    sum: tuple[tuple[int, int], dict[str, Any]] | None


def make_launch(
    x_NK: Tensor, weight_MK: Tensor, bias_M: Tensor | None, out_fp32: bool, configuration: tuned.Configuration
) -> Launch:  # fmt: skip
    """Prepare a launch from shapes alone. Allocates `out` and, for several splits, their results."""
    (N, K), M = x_NK.shape, len(weight_MK)
    share = triton.cdiv(triton.cdiv(K, BLOCK_K), configuration.get("splits", 1)) * BLOCK_K
    splits, BLOCK_O = triton.cdiv(K, share), configuration.get("BLOCK_O", OUTPUTS[1])
    out = torch.empty(N, M, dtype=torch.float32 if out_fp32 else x_NK.dtype, device=x_NK.device)
    parts = torch.empty(splits if splits > 1 else 0, N, M, dtype=torch.float32, device=x_NK.device)
    terms = {
        "bias": out if bias_M is None else bias_M, "out": out, "parts": parts, "OUTPUTS": M,
        "BIAS": bias_M is not None, "SPLITS": splits,
    }  # fmt: skip
    arguments = terms | {
        "x": x_NK, "weight": weight_MK, "x_row": x_NK.stride(0), "rows": N, "INPUTS": K, "SHARE": share,
        "BLOCK_O": BLOCK_O, "BLOCK_K": BLOCK_K,
    }  # fmt: skip
    added = ((triton.cdiv(M, SUM_BLOCK), N), terms | {"SUM_BLOCK": SUM_BLOCK}) if splits > 1 else None
    # A warp per 16 outputs, as many as a tensor core's tile has rows.
    options = {"num_warps": BLOCK_O // 16, "num_stages": 4}
    return Launch((triton.cdiv(M, BLOCK_O), splits), arguments, options, added)


def product(x_NK: Tensor, weight_MK: Tensor, bias_M: Tensor | None, out_fp32: bool = False) -> Tensor:
    """ops/vector_product.py's op, with the tuned configuration of the weights' shape."""
    entry = tuned.entry("vector_product", tuned.vector_product_key(weight_MK)) or {}
    launch = make_launch(x_NK, weight_MK, bias_M, out_fp32, entry.get("configuration") or {})
    out: Tensor = launch.arguments["out"]
    if len(x_NK):
        with torch.cuda.device_of(x_NK):
            vector_product_kernel[launch.grid](**launch.arguments, **launch.options)
            if launch.sum is not None:
                split_sum_kernel[launch.sum[0]](**launch.sum[1], num_warps=4)
    return out
