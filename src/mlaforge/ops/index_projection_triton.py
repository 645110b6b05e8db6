"""Index keys and index queries of token selection in Triton: a linear map and a rotation. The maps multiply in fp32,
because a rounded key decides the selection. Not measured on a GPU yet.

Legend: S sequences, N tokens, H heads, G KV heads, I elements of an index key, F of its features, E of a query.
"""

# Triton reads annotations of kernels: only constexpr is allowed.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlaforge.ops.cache_view import CacheView

if TYPE_CHECKING:
    from mlaforge.ops.token_selection import TokenIndex

# Tokens whose keys a program computes, and features per step.
KEYS, FEATURES = 16, 32


@triton.jit
def _angle(rotation, at, frequency, pair, live):
    """Return cos and sin [rows, pairs] of index pairs; pairs without a frequency are not rotated."""
    number = tl.load(frequency + pair, mask=live, other=-1)
    angle = rotation + 2 * (at[:, None] + tl.maximum(number, 0)[None, :])
    rotated = (number >= 0) & live
    cos = tl.load(angle, mask=rotated[None, :] & (at >= 0)[:, None], other=1.0)
    return cos, tl.load(angle + 1, mask=rotated[None, :] & (at >= 0)[:, None], other=0.0)


@triton.jit
def _rounded(x):
    """Round to the nearest integer, ties to even, as torch.round does up to 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit(do_not_specialize=["tokens"])
def write_kernel(
    features, key, bias, halves, rotation, frequency, slots, keys, tokens, features_row, pairs, key_tile, key_number,
    key_token, F: tl.constexpr, CODED: tl.constexpr, PAIRS: tl.constexpr, BLOCK_P: tl.constexpr, ROTATED: tl.constexpr,
    KEYS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of tokens,): the index keys of features [N, F] to keys [slots / 16, I, 16]. The first CODED features
    are rounded to whole numbers from -halves to halves - 1. rotation [N, pairs, 2]; ROTATED: features are already."""
    n, p = tl.program_id(0) * KEYS + tl.arange(0, KEYS), tl.arange(0, BLOCK_P)
    real, live = n < tokens, p < PAIRS
    low, high = tl.zeros([KEYS, BLOCK_P], tl.float32), tl.zeros([KEYS, BLOCK_P], tl.float32)
    for start in range(0, F, FEATURES):
        f = start + tl.arange(0, FEATURES)
        x = tl.load(
            features + n[:, None].to(tl.int64) * features_row + f[None, :],
            mask=real[:, None] & (f < F)[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        if CODED > 0:
            half = tl.load(halves + f, mask=f < CODED, other=0.0)[None, :]
            whole = tl.maximum(tl.minimum(_rounded(x.to(tl.bfloat16).to(tl.float32)), half - 1.0), -half)
            x = tl.where((f < CODED)[None, :], whole, x)
        weight = key + p[None, :] * F + f[:, None]
        mask = live[None, :] & (f < F)[:, None]
        low = tl.dot(x, tl.load(weight, mask=mask, other=0.0), low, input_precision="ieee")
        high = tl.dot(x, tl.load(weight + PAIRS * F, mask=mask, other=0.0), high, input_precision="ieee")
    low += tl.load(bias + p, mask=live, other=0.0)[None, :]
    high += tl.load(bias + PAIRS + p, mask=live, other=0.0)[None, :]
    if not ROTATED:
        cos, sin = _angle(rotation, tl.where(real, n * pairs, -1), frequency, p, live)
        low, high = low * cos - high * sin, high * cos + low * sin
    slot = tl.load(slots + n, mask=real, other=0)
    at = keys + (slot // 16 * key_tile + slot % 16 * key_token)[:, None] + p[None, :] * key_number
    mask = real[:, None] & live[None, :]
    low = tl.maximum(tl.minimum(_rounded(tl.where(low == low, low, 0.0)), 127.0), -127.0)
    high = tl.maximum(tl.minimum(_rounded(tl.where(high == high, high, 0.0)), 127.0), -127.0)
    tl.store(at, low.to(tl.int8), mask=mask)
    tl.store(at + PAIRS * key_number, high.to(tl.int8), mask=mask)


@triton.jit
def query_kernel(
    q, query, rotation, frequency, query_start, out, scales, q_row, pairs,
    GROUP: tl.constexpr, E: tl.constexpr, PAIRS: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_P: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    """Grid (sequences, KV heads): the index queries of each sequence's last token, from queries q [N, H E] and weights
    query [G, I, E]: fp16 out [S, 2, H, I], whose sum over two parts times scales [S, H] they are, in units of log2."""
    s, g = tl.program_id(0), tl.program_id(1)
    n = tl.load(query_start + s + 1) - 1
    j, e, p = tl.arange(0, BLOCK_J), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_P)
    live = p < PAIRS
    h = g * GROUP + j
    x_mask = (j < GROUP)[:, None] & (e < E)[None, :]
    x = tl.load(q + n.to(tl.int64) * q_row + h[:, None] * E + e[None, :], mask=x_mask, other=0.0).to(tl.float32)
    weight = query + (g * 2 * PAIRS + p)[None, :] * E + e[:, None]
    mask = live[None, :] & (e < E)[:, None]
    low = tl.dot(x, tl.load(weight, mask=mask, other=0.0), input_precision="ieee")
    high = tl.dot(x, tl.load(weight + PAIRS * E, mask=mask, other=0.0), input_precision="ieee")
    if not ROTATED:
        cos, sin = _angle(rotation, tl.full([BLOCK_J], 0, tl.int32) + n * pairs, frequency, p, live)
        low, high = low * cos - high * sin, high * cos + low * sin
    heads = tl.num_programs(1) * GROUP
    # A power of two, so that the largest number of a head is near 2^10.
    most = tl.maximum(tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 1), 1e-30)
    exponent = ((most.to(tl.int32, bitcast=True) >> 23) - 127) - 10
    factor = ((127 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    scale = ((127 + exponent) << 23).to(tl.float32, bitcast=True) * 1.4426950408889634
    tl.store(scales + s * heads + h, scale, mask=j < GROUP)
    to = out + (s * 2 * heads + h)[:, None] * (2 * PAIRS) + p[None, :]
    mask = (j < GROUP)[:, None] & live[None, :]
    rest = heads * 2 * PAIRS
    first = (low * factor).to(tl.float16)
    tl.store(to, first, mask=mask)
    tl.store(to + rest, (low * factor - first.to(tl.float32)).to(tl.float16), mask=mask)
    first = (high * factor).to(tl.float16)
    tl.store(to + PAIRS, first, mask=mask)
    tl.store(to + rest + PAIRS, (high * factor - first.to(tl.float32)).to(tl.float16), mask=mask)


def _pairs_of(index: TokenIndex, rotation_N1P: Tensor) -> dict[str, Any]:
    """Arguments of the rotation of index keys or queries."""
    PAIRS = len(index.frequency)
    return {
        "rotation": torch.view_as_real(rotation_N1P), "frequency": index.frequency, "pairs": rotation_N1P.shape[-1],
        "PAIRS": PAIRS, "BLOCK_P": max(16, triton.next_power_of_2(PAIRS)), "ROTATED": index.pre_rotated,
    }  # fmt: skip


def write_launch(
    features_NF: Tensor, index: TokenIndex, rotation_N1P: Tensor, keys: Tensor, slots_N: Tensor
) -> tuple[tuple[int], dict[str, Any]]:
    """Return the grid and the arguments of a write."""
    coded = 0 if index.halves is None else len(index.halves)
    arguments = {
        "features": features_NF, "key": index.key, "bias": index.bias,
        "halves": index.bias if index.halves is None else index.halves, "slots": slots_N, "keys": keys,
        "tokens": len(features_NF), "features_row": features_NF.stride(0), "key_tile": keys.stride(0),
        "key_number": keys.stride(1), "key_token": keys.stride(2), "F": index.key.shape[1], "CODED": coded,
        "KEYS": KEYS, "FEATURES": FEATURES, **_pairs_of(index, rotation_N1P),
    }  # fmt: skip
    return (triton.cdiv(len(features_NF), KEYS),), arguments


def write(features_NF: Tensor, index: TokenIndex, rotation_N1P: Tensor, keys: Tensor, slots_N: Tensor) -> None:
    """ops/token_selection.py's `write_index`."""
    grid, arguments = write_launch(features_NF, index, rotation_N1P, keys, slots_N)
    if grid[0]:
        with torch.cuda.device_of(keys):
            write_kernel[grid](**arguments, num_warps=4)


def write_supports(features_NF: Tensor, *others: Any) -> Literal[True] | str:
    """Return True, or the reason why the kernel cannot run on these."""
    return True if features_NF.stride(1) == 1 else "features must be contiguous"


def query_launch(
    q_NX: Tensor, index: TokenIndex, rotation_N1P: Tensor, view: CacheView
) -> tuple[tuple[int, int], dict[str, Any]]:
    """Return the grid and the arguments of the index queries. Allocates `out` and `scales`."""
    (G, I, E), S = index.query.shape, len(view.seq_lens_S)  # noqa: E741
    group = index.heads // G
    arguments = {
        "q": q_NX, "query": index.query, "query_start": view.query_start_S1,
        "out": torch.empty(S, 2, index.heads, I, dtype=torch.float16, device=q_NX.device),
        "scales": torch.empty(S, index.heads, device=q_NX.device), "q_row": q_NX.stride(0), "GROUP": group, "E": E,
        "BLOCK_J": max(16, triton.next_power_of_2(group)), "BLOCK_E": max(16, triton.next_power_of_2(E)),
        **_pairs_of(index, rotation_N1P),
    }  # fmt: skip
    return (S, G), arguments
