"""Token selection in Triton: index queries and keys, index logits, each head's softmax over its sequence, the mean over
heads, and the tokens with the best scores.

Logits are computed twice, for the softmax's sums and for the scores: index keys are few bytes, and logits of all heads
would be many. Close scores decide the selection, so queries have two parts in fp16, 22 bits, and keys are exact. The
best scores are found digit by digit (radix selection), as in torch.topk, and their tokens written in order. Launch
geometry depends only on host values. Not measured on a GPU yet.

Legend: S sequences, N tokens, H heads, G KV heads, J = H / G, I elements of an index key, F of its features, E of a
query, K selected tokens.
"""

# Triton reads annotations of kernels: only constexpr is allowed.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlaforge.ops import tuned
from mlaforge.ops.attention_program_triton import as_numbers, slots_of
from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.gpu_properties import GpuProperties, gpu_properties
from mlaforge.ops.index_projection_triton import query_kernel, query_launch
from mlaforge.runtime import on_device

if TYPE_CHECKING:
    from mlaforge.ops.token_selection import TokenIndex

# Tokens per program, if all multiprocessors then have one, and per tile of logits; scores per step of the selection.
STRETCHES, BLOCK_N, BLOCK_L = (2048, 1024, 512, 256), 128, 4096
# Products of a logit: of the two parts of a query.
PRODUCTS = 2


@triton.jit
def _logits(
    first, second, keys, blocks, start, length, key_tile, key_number, key_token,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_I: tl.constexpr,
    BLOCK_N: tl.constexpr, BY_TOKEN: tl.constexpr, CONVERT: tl.constexpr,
):  # fmt: skip
    """Return unscaled logits of the tokens from `start` on, for queries of two parts [BLOCK_H, BLOCK_I], -inf for
    masked heads and tokens: [BLOCK_H, BLOCK_N], or BY_TOKEN [BLOCK_N, BLOCK_H], so that a sum's terms are in few
    threads. Index keys are tiles of 16 tokens with any strides: side by side are a token's numbers on GPUs."""
    h, i, t = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_I), start + tl.arange(0, BLOCK_N)
    live = t < length
    slot = slots_of(blocks, t, live, BLOCK_SIZE)
    at = keys + slot // 16 * key_tile + slot % 16 * key_token
    key = tl.load(at[:, None] + i[None, :] * key_number, mask=live[:, None] & (i < WIDTH)[None, :], other=0)
    key = as_numbers(key, tl.float16, CONVERT)
    if BY_TOKEN:
        logits, seen, head = tl.dot(key, tl.trans(second), tl.dot(key, tl.trans(first))), live[:, None], h[None, :]
    else:
        logits, seen, head = tl.dot(second, tl.trans(key), tl.dot(first, tl.trans(key))), live[None, :], h[:, None]
    if HEADS < BLOCK_H:
        logits = tl.where(seen & (head < HEADS), logits, float("-inf"))
    elif start + BLOCK_N > length:
        logits = tl.where(seen, logits, float("-inf"))
    return logits


@triton.jit
def _parts(queries, HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_I: tl.constexpr):
    """Load both parts of a sequence's index queries."""
    h, i = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_I)
    mask = (h < HEADS)[:, None] & (i < WIDTH)[None, :]
    query = queries + h[:, None] * WIDTH + i[None, :]
    return tl.load(query, mask=mask, other=0.0), tl.load(query + HEADS * WIDTH, mask=mask, other=0.0)


@triton.jit
def _scales(scales, HEADS: tl.constexpr, BLOCK_H: tl.constexpr):
    """Load the scales of logits: base-2 ones are products times them. They are positive, 1 for padding heads."""
    h = tl.arange(0, BLOCK_H)
    return tl.load(scales + h, mask=h < HEADS, other=1.0)


@triton.jit(do_not_specialize=["table_row"], do_not_specialize_on_alignment=["table", "seq_lens"])
def lse_kernel(
    queries, scales, keys, table, seq_lens, out, table_row, key_tile, key_number, key_token,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_I: tl.constexpr,
    BLOCK_N: tl.constexpr, STRETCH: tl.constexpr, CONVERT: tl.constexpr,
):  # fmt: skip
    """Grid (sequences, stretches): out [S, stretches, HEADS], each head's logarithm of the sum of exponentials over a
    stretch, in base 2."""
    s, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(seq_lens + s)
    scale = _scales(scales + s * HEADS, HEADS, BLOCK_H)
    queries_1, queries_2 = _parts(queries + s * 2 * HEADS * WIDTH, HEADS, WIDTH, BLOCK_H, BLOCK_I)
    peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    for start in range(part * STRETCH, tl.minimum(part * STRETCH + STRETCH, length), BLOCK_N):
        logits = _logits(
            queries_1, queries_2, keys, table + s * table_row, start, length, key_tile, key_number,
            key_token, HEADS, WIDTH, BLOCK_SIZE, BLOCK_H, BLOCK_I, BLOCK_N, False, CONVERT,
        )  # fmt: skip
        higher = tl.maximum(peak, tl.max(logits, 1) * scale)
        level = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp2(peak - level) + tl.sum(tl.exp2(logits * scale[:, None] - level[:, None]), 1)
        peak = higher
    h = tl.arange(0, BLOCK_H)
    lse = tl.where(total > 0, peak + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
    tl.store(out + (s * tl.num_programs(1) + part) * HEADS + h, lse, mask=h < HEADS)


@triton.jit(
    do_not_specialize=["table_row", "width", "sink", "window", "stride"],
    do_not_specialize_on_alignment=["table", "seq_lens"],
)
def score_kernel(
    queries, scales, keys, table, seq_lens, lse, sinks, out, table_row, key_tile, key_number, key_token,
    width, sink, window, stride,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_I: tl.constexpr,
    BLOCK_N: tl.constexpr, STRETCH: tl.constexpr, SINKS: tl.constexpr, CONVERT: tl.constexpr,
):  # fmt: skip
    """Grid (sequences, stretches): out [S, width], the mean over heads of exp(logit - lse); inf for tokens that are
    always read, -1 behind the last token, to the end of its stretch. lse [S, stretches, HEADS]: of each stretch; SINKS
    [HEADS] take their share."""
    s, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(seq_lens + s)
    if part * STRETCH >= length:
        return
    h, scale = tl.arange(0, BLOCK_H), _scales(scales + s * HEADS, HEADS, BLOCK_H)
    queries_1, queries_2 = _parts(queries + s * 2 * HEADS * WIDTH, HEADS, WIDTH, BLOCK_H, BLOCK_I)
    peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
    if SINKS:
        peak = tl.load(sinks + h, mask=h < HEADS, other=float("-inf")) * 1.4426950408889634
    total = tl.where(peak > float("-inf"), 1.0, 0.0)
    stretches = tl.num_programs(1)
    for first in range(0, tl.cdiv(length, STRETCH), 16):
        i = first + tl.arange(0, 16)
        parts = tl.load(
            lse + (s * stretches + i)[:, None] * HEADS + h[None, :],
            mask=(i < stretches)[:, None] & (h < HEADS)[None, :], other=float("-inf"),
        )  # fmt: skip
        higher = tl.maximum(peak, tl.max(parts, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp2(peak - base) + tl.sum(tl.exp2(parts - base[None, :]), 0)
        peak = higher
    # 0 for padding heads, whose logits are -inf.
    level = tl.where(total > 0, peak + tl.log2(tl.where(total > 0, total, 1.0)), 0.0)
    for start in range(part * STRETCH, part * STRETCH + STRETCH, BLOCK_N):
        logits = _logits(
            queries_1, queries_2, keys, table + s * table_row, start, length, key_tile, key_number,
            key_token, HEADS, WIDTH, BLOCK_SIZE, BLOCK_H, BLOCK_I, BLOCK_N, True, CONVERT,
        )  # fmt: skip
        score = tl.sum(tl.exp2(logits * scale[None, :] - level[None, :]), 1) / HEADS
        t = start + tl.arange(0, BLOCK_N)
        forced = (t < sink) | (t >= length - window)
        if stride > 0:
            forced = forced | (t % stride == 0)
        score = tl.where(forced, float("inf"), score)
        tl.store(out + s * width + t, tl.where(t < length, score, -1.0))


@triton.jit
def _digit(
    values, scored, prefix, missing, ABOVE: tl.constexpr, SHIFT: tl.constexpr, BINS: tl.constexpr, BLOCK_L: tl.constexpr
):  # fmt: skip
    """Extend `prefix`, the bits from ABOVE on of the score at rank `missing`, by those from SHIFT on. Return it, the
    rank among scores with the same bits, and how many they are."""
    histogram = tl.zeros([BINS], tl.int32)
    for start in range(0, scored, BLOCK_L):
        t = start + tl.arange(0, BLOCK_L)
        bits = tl.load(values + t, mask=t < scored, other=-1.0).to(tl.int32, bitcast=True)
        same = (bits >> ABOVE) == prefix
        histogram += tl.histogram((bits >> SHIFT) & (BINS - 1), BINS, mask=same)
    # Scores with this digit or a higher one.
    upward = tl.sum(histogram, 0) - tl.cumsum(histogram, 0) + histogram
    digit = tl.maximum(tl.sum((upward >= missing).to(tl.int32), 0) - 1, 0)
    number = tl.arange(0, BINS)
    equal = tl.sum(tl.where(number == digit, histogram, 0), 0)
    missing -= tl.sum(tl.where(number > digit, histogram, 0), 0)
    return (prefix << (ABOVE - SHIFT)) | digit, missing, equal


@triton.jit(do_not_specialize=["table_row", "most", "limit"], do_not_specialize_on_alignment=["table", "seq_lens"])
def select_kernel(
    scores, counts, table, seq_lens, slots, positions, table_row, width, most, limit,
    COUNTS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_L: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Grid (sequences,): the tokens of a sequence with the best scores [S, width], the last ones of equals: slots and
    positions [S, most], ascending, then 0. Their number is counts[s] if COUNTS, otherwise at most `limit`. Scores are
    not negative, so they are ordered as their bits, of which 11, 11 and 9 are found at a time; -1 follows them, to a
    multiple of UNIT."""
    s = tl.program_id(0).to(tl.int64)
    length = tl.load(seq_lens + s)
    count = tl.minimum(limit, length)
    if COUNTS:
        count = tl.minimum(tl.load(counts + s), length)
    # Whole units, for wide loads.
    values, scored = scores + s * width, tl.cdiv(length, UNIT) * UNIT
    prefix, missing, equal = _digit(values, scored, 0, count, 31, 20, 2048, BLOCK_L)
    prefix, missing, equal = _digit(values, scored, prefix, missing, 20, 9, 2048, BLOCK_L)
    prefix, missing, equal = _digit(values, scored, prefix, missing, 9, 0, 512, BLOCK_L)
    skipped, taken = equal - missing, 0
    for start in range(0, scored, BLOCK_L):
        t = start + tl.arange(0, BLOCK_L)
        bits = tl.load(values + t, mask=t < scored, other=-1.0).to(tl.int32, bitcast=True)
        tied, higher = bits == prefix, bits > prefix
        # Both counts in one scan: a step has fewer than 2^16 tokens.
        counts_of_step = (tied.to(tl.int32) << 16) + higher.to(tl.int32)
        counted = tl.cumsum(counts_of_step, 0)
        among = (counted >> 16) - skipped
        best = higher | (tied & (among > 0))
        at = s * most + taken + (counted & 0xFFFF) + tl.maximum(among, 0) - 1
        tl.store(positions + at, t, mask=best)
        block = tl.load(table + s * table_row + t // BLOCK_SIZE, mask=best, other=0)
        tl.store(slots + at, block * BLOCK_SIZE + t % BLOCK_SIZE, mask=best)
        total = tl.sum(counts_of_step, 0)
        taken += (total & 0xFFFF) + tl.maximum((total >> 16) - skipped, 0)
        skipped = tl.maximum(skipped - (total >> 16), 0)
    for start in range(count, most, BLOCK_L):
        k = start + tl.arange(0, BLOCK_L)
        nothing = tl.zeros([BLOCK_L], tl.int32)
        tl.store(positions + s * most + k, nothing, mask=k < most)
        tl.store(slots + s * most + k, nothing, mask=k < most)


INTERPRETED = not isinstance(score_kernel, triton.JITFunction)


def supports(
    queries: Tensor, index: TokenIndex, rotation_N1P: Any, keys: Tensor, view: CacheView, *others: Any
) -> Literal[True] | str:
    """Return True, or the reason why the selection cannot run on index keys, queries and a view."""
    if view.tree_Tn is not None:
        return "it does not support trees"
    if queries.stride(1) != 1:
        return "queries must be contiguous"
    for name, tensor in (("index keys", keys), ("queries", queries), ("the block table", view.block_table_SB)):
        if tensor.device.type != "cuda" and not INTERPRETED:
            return f"it needs CUDA tensors, {name} are on {tensor.device.type}"
    if keys.dtype != torch.int8:
        return f"index keys are {keys.dtype}, not int8"
    return True


def stretch_of(S: int, length: int, gpu: GpuProperties) -> int:
    """Return the tokens of a program: a program reads what all programs of its sequence found."""
    enough = [stretch for stretch in STRETCHES if S * triton.cdiv(length, stretch) >= gpu.multiprocessors]
    return enough[0] if enough else STRETCHES[-1]


def launches(
    keys: Tensor, queries_S2HI: Tensor, scales_SH: Tensor, view: CacheView, gpu: GpuProperties | None = None
) -> tuple[tuple[int, int], dict[str, Any]]:
    """Return the grid of both kernels, and their common arguments by name."""
    S, _, H, I = queries_S2HI.shape  # noqa: E741
    stretch = stretch_of(S, view.max_seq_len, gpu or gpu_properties(keys.device))
    if gpu is None:
        configuration = tuned.config("selection", tuned.selection_key(H, I, S, view.max_seq_len)) or {}
        stretch = configuration.get("stretch", stretch)
    sizes = {
        "HEADS": H, "WIDTH": I, "BLOCK_SIZE": view.block_size, "BLOCK_H": max(16, triton.next_power_of_2(H)),
        "BLOCK_I": max(16, triton.next_power_of_2(I)), "BLOCK_N": BLOCK_N, "STRETCH": stretch,
        "CONVERT": not INTERPRETED,
    }  # fmt: skip
    arguments = {
        "queries": queries_S2HI, "scales": scales_SH, "keys": keys, "table": view.block_table_SB,
        "seq_lens": view.seq_lens_S, "table_row": view.block_table_SB.stride(0), "key_tile": keys.stride(0),
        "key_number": keys.stride(1), "key_token": keys.stride(2), **sizes,
    }  # fmt: skip
    return (S, triton.cdiv(view.max_seq_len, stretch)), arguments


def select_launch(scores_SL: Tensor, counts: Sequence[int], view: CacheView, most: int) -> dict[str, Any]:
    """Return the arguments of a selection. Allocates `slots` and `positions`, int32 [S, most]."""
    limit = max(counts)
    # Of a captured step the host knows bounds only, which are equal.
    equal = not view.lengths or all(count == min(limit, n) for count, n in zip(counts, view.lengths, strict=True))
    assert view.lengths or len(set(counts)) == 1
    counts_S = view.seq_lens_S if equal else uploaded_counts(tuple(counts), scores_SL.device)
    slots, positions = torch.empty(2, len(scores_SL), most, dtype=torch.int32, device=scores_SL.device)
    return {
        "scores": scores_SL, "counts": counts_S, "table": view.block_table_SB, "seq_lens": view.seq_lens_S,
        "slots": slots, "positions": positions, "table_row": view.block_table_SB.stride(0),
        "width": scores_SL.shape[1], "most": most, "limit": limit, "COUNTS": not equal,
        "UNIT": STRETCHES[-1],
        "BLOCK_SIZE": view.block_size, "BLOCK_L": BLOCK_L,
    }  # fmt: skip


def choose(
    q_NX: Tensor, index: TokenIndex, rotation_N1P: Tensor, keys: Tensor, view: CacheView, counts: Sequence[int],
    multiple: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """ops/token_selection.py's `select_tokens`."""
    S, device = len(counts), q_NX.device
    most = triton.cdiv(max(counts), multiple) * multiple
    with torch.cuda.device_of(q_NX):
        query_grid, query_arguments = query_launch(q_NX, index, rotation_N1P, view)
        query_kernel[query_grid](**query_arguments, num_warps=4)
        grid, arguments = launches(keys, query_arguments["out"], query_arguments["scales"], view)
        lse = torch.empty(*grid, index.heads, device=device)
        lse_kernel[grid](**arguments, out=lse)
        scores_SL = torch.empty(S, grid[1] * arguments["STRETCH"], device=device)
        score_kernel[grid](
            **arguments, lse=lse, sinks=lse if index.sinks is None else index.sinks, out=scores_SL,
            width=scores_SL.shape[1],
            sink=index.sink, window=index.window, stride=index.stride, SINKS=index.sinks is not None,
        )  # fmt: skip
        selection = select_launch(scores_SL, counts, view, most)
        select_kernel[(S,)](**selection, num_warps=16)
    return selection["slots"], selection["positions"]


@functools.lru_cache(maxsize=64)
def uploaded_counts(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """The counts on a device, int32 [S]: they repeat from layer to layer and step to step."""
    return on_device(counts, torch.int32, device)
