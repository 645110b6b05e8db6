"""Latent attention, layout `latent`, in Triton: logits over decompressed keys, then the sum over latents, and W_uv.

The first kernel is a matrix product whose tiles are rows of the cache by the keys of a few KV heads; its epilogue norms
and rotates the keys and multiplies them by the queries, so keys are never stored. A tile serves all query tokens of a
sequence. The second kernel's tiles are query rows (tokens and all heads, which share latents) by columns of latents:
they are read once. One kernel of both would need the accumulators of all heads and columns, more than registers hold;
logits are a few bytes per head instead. Coded rows are decoded to bytes once per layer and step, and their product with
W_uk is one of bytes (integer_rows.py). Sequences are computed in groups whose temporary results fit into a workspace.
Launch geometry depends only on host values. Not measured on a GPU yet.

Legend: S sequences, N query tokens, T of one sequence, H query heads, G KV heads, D key and V value dimensions, L most
rows that a sequence reads, K columns of the rows that are multiplied.
"""

# Triton reads annotations of kernels: only constexpr is allowed.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlaforge.modeling.coded_layout_mla import round_up
from mlaforge.ops.absorbed_latents_triton import up_project_kernel, up_project_launch
from mlaforge.ops.attention_program_triton import as_numbers, distances, finite, put, slots_of
from mlaforge.ops.attention_tiles import OVERHEAD, choose_splits
from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.gpu_properties import GpuProperties, gpu_properties
from mlaforge.ops.integer_rows import STEP
from mlaforge.ops.integer_rows_triton import integers_kernel
from mlaforge.ops.integer_rows_triton import make_launch as integers_launch
from mlaforge.ops.latent_weights_gpu import GpuLatentWeights
from mlaforge.ops.paged_attention_triton import MOST_SPLITS, merge_kernel
from mlaforge.ops.paged_rows import PagedRows
from mlaforge.ops.row_formats.coded import Coded
from mlaforge.ops.row_formats.plain import Plain

# Bytes of the temporary results of a group of sequences, unless those of one are more.
WORKSPACE = 512 << 20
# Rows of a tile of logits, and of a step of the sum; most rows of a piece of the sum.
MOST_ROWS, BLOCK_N, PIECE = 128, 64, 4096


@triton.jit
def _range(seq_lens, firsts, query_start, s, before, nodes, WINDOW: tl.constexpr, NODES: tl.constexpr):
    """Return a sequence's first query token in its group, their number, its first row that any of them sees, and its
    rows."""
    begin = tl.load(query_start + s)
    T = tl.load(query_start + s + 1) - begin
    begin -= before
    count = tl.load(seq_lens + s) - tl.load(firsts + s)
    low = 0
    if WINDOW > 0:
        own = T
        if NODES > 0:
            own = nodes
        low = tl.maximum(0, count - own + 1 - WINDOW)
    return begin, T, low, count


@triton.jit
def _product(
    lower, upper, row, live, weight, inside, w_row, half, begin, end, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the products of columns [begin, end) to the keys' lower and upper halves [rows, pairs]."""
    for start in range(begin, end, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        row_mask, w_mask = live[:, None], inside[:, None]
        if WIDTH % BLOCK_K:
            row_mask, w_mask = row_mask & (k < WIDTH)[None, :], w_mask & (k < WIDTH)[None, :]
        x = tl.load(row[:, None] + k[None, :], mask=row_mask, other=0.0).to(weight.dtype.element_ty)
        w = weight[:, None] + k[None, :]
        low, high = tl.load(w, mask=w_mask, other=0.0), tl.load(w + half * w_row, mask=w_mask, other=0.0)
        lower = tl.dot(x, tl.trans(low), lower, input_precision=PRECISION, out_dtype=lower.dtype)
        upper = tl.dot(x, tl.trans(high), upper, input_precision=PRECISION, out_dtype=upper.dtype)
    return lower, upper


@triton.jit
def _rotated(a, b, cos, sin, at, mask):
    """Rotate pairs by the tables at some places."""
    c, s = (
        tl.load(cos + at, mask=mask, other=0.0).to(tl.float32),
        tl.load(sin + at, mask=mask, other=0.0).to(tl.float32),
    )
    return a * c - b * s, b * c + a * s


@triton.jit(
    do_not_specialize=["most", "table_row", "nodes", "tokens_before"],
    do_not_specialize_on_alignment=["table", "seq_lens", "firsts", "query_start"],
)
def logits_kernel(
    q, rows, w_uk, scales, bias, q_norm, k_norm, cos, sin, weights, peaks, totals, table, seq_lens, firsts,
    query_start, positions, tree, scale_log2, eps, q_row, row_stride, weights_row, w_head, w_row, table_row, most,
    nodes, tokens_before,
    G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, WIDTH: tl.constexpr,
    INTEGERS: tl.constexpr, NORMS: tl.constexpr, SELECTED: tl.constexpr, WINDOW: tl.constexpr, NODES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HEADS: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_J: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (groups of HEADS KV heads, tiles of BLOCK_N rows, S): the softmax of each tile: to weights [N, H, .] 2 to
    the power of logits less the tile's peak, to peaks and totals [N, H, tiles] this peak and the sum. INTEGERS: row i
    of sequence s is rows[s * most + i], otherwise at its slot. SELECTED: positions [S, most] of the rows. cos and sin
    [positions, D / 2]."""
    s, g0 = tl.program_id(2), tl.program_id(0) * HEADS
    begin, T, low, count = _range(seq_lens, firsts, query_start, s, tokens_before, nodes, WINDOW, NODES)
    first = low + tl.program_id(1) * BLOCK_N
    if (first >= count) | (T == 0):
        return
    i = first + tl.arange(0, BLOCK_N)
    live = i < count
    if INTEGERS:
        slot = s.to(tl.int64) * most + i
    else:
        slot = slots_of(table + s.to(tl.int64) * table_row, i, live, BLOCK_SIZE)
    o = tl.arange(0, HEADS * BLOCK_P)
    g, pair = g0 + o // BLOCK_P, o % BLOCK_P
    inside = (g < G) & (pair < D // 2)
    kind: tl.constexpr = tl.int32 if INTEGERS else tl.float32
    lower, upper = tl.zeros([BLOCK_N, HEADS * BLOCK_P], kind), tl.zeros([BLOCK_N, HEADS * BLOCK_P], kind)
    row, weight = rows + slot * row_stride, w_uk + g * w_head + pair * w_row
    if WIDE > 0:
        lower, upper = _product(
            lower, upper, row, live, weight, inside, w_row, D // 2, 0, WIDE, WIDTH, BLOCK_K, PRECISION
        )
        lower, upper = lower * 256, upper * 256
    lower, upper = _product(
        lower, upper, row, live, weight, inside, w_row, D // 2, WIDE, w_row, WIDTH, BLOCK_K, PRECISION
    )
    a, b, output = lower.to(tl.float32), upper.to(tl.float32), g * D + pair
    if INTEGERS:
        a *= tl.load(scales + output, mask=inside, other=0.0)[None, :]
        b *= tl.load(scales + output + D // 2, mask=inside, other=0.0)[None, :]
    a += tl.load(bias + output, mask=inside, other=0.0)[None, :]
    b += tl.load(bias + output + D // 2, mask=inside, other=0.0)[None, :]
    if NORMS:
        square = tl.sum(tl.reshape(a * a + b * b, [BLOCK_N, HEADS, BLOCK_P]), 2)
        factor = tl.rsqrt(square / D + eps)[:, :, None] + tl.zeros([BLOCK_N, HEADS, BLOCK_P], tl.float32)
        factor = tl.reshape(factor, [BLOCK_N, HEADS * BLOCK_P])
        a *= factor * tl.load(k_norm + pair, mask=inside, other=0.0).to(tl.float32)[None, :]
        b *= factor * tl.load(k_norm + pair + D // 2, mask=inside, other=0.0).to(tl.float32)[None, :]
    before, text = count - nodes, tl.load(firsts + s)
    if SELECTED:
        at = tl.load(positions + s.to(tl.int64) * most + i, mask=live, other=0)
    else:
        at = text + i
    if NODES > 0:
        node = tl.arange(0, NODES)
        depth = tl.max(distances(tree, i - before, live & (i >= before), node, node < nodes, nodes), 1)
        at = tl.where(i >= before, text + before + depth, at)
    # All heads are rotated alike.
    p = tl.arange(0, BLOCK_P)
    place, mask = at[:, None] * (D // 2) + p[None, :], live[:, None] & (p < D // 2)[None, :]
    c = tl.load(cos + place, mask=mask, other=0.0).to(tl.float32)[:, None, :]
    d = tl.load(sin + place, mask=mask, other=0.0).to(tl.float32)[:, None, :]
    a, b = tl.reshape(a, [BLOCK_N, HEADS, BLOCK_P]), tl.reshape(b, [BLOCK_N, HEADS, BLOCK_P])
    x, y = (a * c - b * d).to(q.dtype.element_ty), (b * c + a * d).to(q.dtype.element_ty)
    a, b = tl.reshape(x, [BLOCK_N, HEADS * BLOCK_P]), tl.reshape(y, [BLOCK_N, HEADS * BLOCK_P])

    j = tl.arange(0, HEADS * BLOCK_J)
    head = g0 + j // BLOCK_J
    h, real = head * GROUP + j % BLOCK_J, (j % BLOCK_J < GROUP) & (head < G)
    # Columns of other heads are 0.
    same = (g[:, None] == head[None, :]) & inside[:, None] & real[None, :]
    for t in range(T):
        n = (begin + t).to(tl.int64)
        query = q + n * q_row + h[None, :] * D + pair[:, None]
        u = tl.load(query, mask=same, other=0.0).to(tl.float32)
        v = tl.load(query + D // 2, mask=same, other=0.0).to(tl.float32)
        if NORMS:
            norm = tl.rsqrt(tl.sum(u * u + v * v, 0) / D + eps)[None, :]
            u *= norm * tl.load(q_norm + pair, mask=inside, other=0.0).to(tl.float32)[:, None]
            v *= norm * tl.load(q_norm + pair + D // 2, mask=inside, other=0.0).to(tl.float32)[:, None]
        last = count - T + t
        if SELECTED:
            own = tl.load(positions + s.to(tl.int64) * most + tl.maximum(last, 0))
        else:
            own = text + tl.maximum(last, 0)  # padding of a captured step is before the first row, and sees none
        seen = i <= last
        if NODES > 0:
            distance = tl.load(tree + t * nodes + node, mask=node < nodes, other=-1)
            last = before + tl.max(distance, 0)
            own = text + last
            path = tl.load(tree + t * nodes + i - before, mask=live & (i >= before), other=-1)
            seen = tl.where(i >= before, path >= 0, True)
        if WINDOW > 0:
            near = i > last - WINDOW
            if NODES > 0:
                near = tl.where(i >= before, path < WINDOW, near)
            seen = seen & near
        u, v = _rotated(u, v, cos, sin, own * (D // 2) + pair[:, None] + 0 * h[None, :], same)
        logits = tl.dot(a, u.to(a.dtype), input_precision=PRECISION)
        logits = tl.dot(b, v.to(a.dtype), logits, input_precision=PRECISION)
        logits = tl.where((seen & live)[:, None], logits * scale_log2, float("-inf"))
        peak = tl.max(logits, 0)
        share = tl.exp2(logits - finite(peak)[None, :])
        line = n * (G * GROUP) + h
        to = line * tl.num_programs(1) + tl.program_id(1)
        tl.store(peaks + to, peak, mask=real)
        tl.store(totals + to, tl.sum(share, 0), mask=real)
        to_weights = weights + line[None, :] * weights_row + i[:, None]
        # Zeros to the end of the tile, so that whole steps of the sum are loaded.
        tl.store(to_weights, share.to(weights.dtype.element_ty), mask=real[None, :])


@triton.jit(
    do_not_specialize=["most", "table_row", "nodes", "piece", "splits", "tokens_before", "tiles"],
    do_not_specialize_on_alignment=["table", "seq_lens", "firsts", "query_start"],
)
def latent_sum_kernel(
    weights, peaks, totals, rows, out, lse, parts, part_lse, table, seq_lens, firsts, query_start, row_stride,
    weights_row, table_row, most, nodes, piece, splits, tokens_before, tiles,
    H: tl.constexpr, WIDTH: tl.constexpr, INTEGERS: tl.constexpr, WINDOW: tl.constexpr, NODES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, TILE: tl.constexpr,
    CONVERT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of BLOCK_C columns, tiles of query rows times splits, S): the softmax, whose parts are weights
    [N, H, most], peaks and totals [N, H, tiles] of TILE rows, times rows, to out [N, H, WIDTH] and lse [N, H]; of
    several splits, each of `piece` rows, to fp32 parts [N, H, splits, WIDTH] and part_lse."""
    s, split, group = tl.program_id(2), tl.program_id(1) % splits, tl.program_id(1) // splits
    begin, T, low, count = _range(seq_lens, firsts, query_start, s, tokens_before, nodes, WINDOW, NODES)
    if group * BLOCK_M >= T * H:
        return
    m = group * BLOCK_M + tl.arange(0, BLOCK_M)
    real = m < T * H
    row = (begin * H + m).to(tl.int64)
    start = low + split * piece
    end = tl.minimum(start + piece, count)
    if (start >= end) & (splits > 1):  # the merge does not read the values of an empty split
        tl.store(part_lse + row * splits + split, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=real)
        return
    peak, total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    last_tile = tl.cdiv(tl.maximum(end - low, 0), TILE)
    for first in range(split * piece // TILE, last_tile, 16):
        t = first + tl.arange(0, 16)
        mask = real[:, None] & (t < last_tile)[None, :]
        several = tl.load(peaks + row[:, None] * tiles + t[None, :], mask=mask, other=float("-inf"))
        sums = tl.load(totals + row[:, None] * tiles + t[None, :], mask=mask, other=0.0)
        higher = tl.maximum(peak, tl.max(several, 1))
        total *= tl.exp2(peak - finite(higher))
        total += tl.sum(sums * tl.exp2(several - finite(higher)[:, None]), 1)
        peak = higher
    total = tl.where(total > 0, total, 1.0)  # rows that see nothing: peak is -inf, their sum 0
    column = tl.program_id(0) * BLOCK_C
    c = column + tl.arange(0, BLOCK_C)
    acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    for n in range(start, end, BLOCK_N):
        i = n + tl.arange(0, BLOCK_N)
        if WINDOW == 0:
            i = tl.multiple_of(i, 16)  # for wide loads of weights
        live = i < end
        if INTEGERS:
            slot = s.to(tl.int64) * most + i
        else:
            slot = slots_of(table + s.to(tl.int64) * table_row, i, live, BLOCK_SIZE)
        share_row = weights + row[:, None] * weights_row
        share = tl.load(share_row + i[None, :], mask=real[:, None], other=0.0)
        height = tl.load(peaks + row * tiles + (n - low) // TILE, mask=real, other=float("-inf"))
        share = share.to(tl.float32) * tl.exp2(height - finite(peak))[:, None]
        mask = live[:, None]
        if WIDTH % BLOCK_C:
            mask = mask & (c < WIDTH)[None, :]
        x = tl.load((rows + slot * row_stride)[:, None] + c[None, :], mask=mask, other=0.0)
        x = as_numbers(x, out.dtype.element_ty, CONVERT)
        acc = tl.dot(share.to(x.dtype), x, acc, input_precision=PRECISION)
    acc = acc / total[:, None]
    row_lse = (peak + tl.log2(total)) * 0.6931471805599453
    if splits == 1:
        if column == 0:
            tl.store(lse + row, row_lse, mask=real)
        put(out + row * WIDTH, real, acc, column, BLOCK_C, WIDTH)
    else:
        at = row * splits + split
        if column == 0:
            tl.store(part_lse + at, row_lse, mask=real)
        put(parts + at * WIDTH, real, acc, column, BLOCK_C, WIDTH)


INTERPRETED = not isinstance(logits_kernel, triton.JITFunction)


def supports(
    q_kv_NX: Tensor, cos_LP: Tensor, sin_LP: Tensor, weights: Any, rows: PagedRows, view: CacheView, *others: Any
) -> Literal[True] | str:
    """Return True, or the reason why the kernels cannot run on these."""
    if not isinstance(weights, GpuLatentWeights):
        return "weights are packed for a CPU"
    if not isinstance(rows.format, Plain | Coded):
        return f"it does not read rows in {rows.format.name}"
    if INTERPRETED and q_kv_NX.dtype == torch.bfloat16:
        return "Triton's interpreter computes wrong bfloat16 products"
    if q_kv_NX.stride(1) != 1 or not (cos_LP.is_contiguous() and sin_LP.is_contiguous()):
        return "inputs must be contiguous"
    if view.tree_Tn is not None and (view.positions_SK is not None or view.tree_Tn.shape[0] != view.tree_Tn.shape[1]):
        return "it supports whole trees over all rows only"
    gpu = gpu_properties(q_kv_NX.device)
    if rows.packed.dtype == torch.float8_e4m3fn and (reason := gpu.why_no_fp8()):
        return reason
    return True


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Of the logits: rows, KV heads and columns of a step; warps; stages."""

    rows: int
    heads: int
    step: int
    warps: int
    stages: int


def logit_tiles(rows: int, G: int, pairs: int, itemsize: int, gpu: GpuProperties) -> Tiles:
    """Choose tiles for so many rows of all sequences and padded rotary pairs.

    Large tiles read W_uk and rows less often; small ones are for rows that would leave half of the multiprocessors
    without a tile.
    """
    if itemsize == 4:
        # For parity only: exact products have no tensor core.
        return Tiles(16, 1, 16, 4, 2)
    block, heads = MOST_ROWS, max(1, min(triton.next_power_of_2(G), MOST_ROWS // pairs))
    if 2 * triton.cdiv(rows, block) * triton.cdiv(G, heads) < gpu.multiprocessors:
        block, heads = 64, 1
    warps = 8 if block * heads * pairs >= 64 * 128 else 4
    step = STEP
    for stages in (4, 3, 2):
        if stages * step * (block + 2 * heads * pairs) * itemsize <= gpu.shared_memory - OVERHEAD:
            return Tiles(block, heads, step, warps, stages)
    return Tiles(block, heads, 32, warps, 2)


@dataclasses.dataclass(frozen=True)
class Launches:
    """Grids and arguments of the kernels for a group of sequences; `integers` and `merge` are None where not needed."""

    integers: tuple[tuple[int, ...], dict[str, Any]] | None
    logits: tuple[tuple[int, ...], dict[str, Any], dict[str, int]]
    sum: tuple[tuple[int, ...], dict[str, Any], dict[str, int]]
    merge: tuple[tuple[int, ...], dict[str, Any]] | None


def most_rows(view: CacheView) -> int:
    """Return the most rows of a sequence of a view, a host value."""
    if view.positions_SK is not None:
        return view.positions_SK.shape[1]
    if view.window is None:
        return view.max_seq_len
    return min(view.max_seq_len, view.block_table_SB.shape[1] * view.block_size)


def make_launches(
    q_kv_NX: Tensor, tables: tuple[Tensor, Tensor], weights: GpuLatentWeights, rows: PagedRows, view: CacheView,
    group: slice, results: tuple[Tensor, Tensor], scale: float, gpu: GpuProperties | None = None,
) -> Launches:  # fmt: skip
    """Prepare the launches of a group of sequences, which write to its tokens of `results`, out [N, H, K] and lse
    [N, H]. tables: cos and sin. Allocates what is temporary."""
    gpu = gpu or gpu_properties(q_kv_NX.device)
    before = sum(view.queries[: group.start])
    tokens = slice(before, before + sum(view.queries[group]))
    q_kv_NX, out, lse = (x[tokens] for x in (q_kv_NX, *results))
    (G, D, K), (N, H, _), device = weights.w_uk.shape, out.shape, q_kv_NX.device
    S, most, T = group.stop - group.start, most_rows(view), view.max_query
    integers = weights.columns is not None
    tree_Tn, selected = view.tree_Tn, view.positions_SK
    nodes = 0 if tree_Tn is None else tree_Tn.shape[1]
    of_group = dataclasses.replace(
        view, block_table_SB=view.block_table_SB[group], seq_lens_S=view.seq_lens_S[group],
        first_S=view.first_S[group], query_start_S1=view.query_start_S1[group.start : group.stop + 1],
    )  # fmt: skip
    data, decoding = rows.packed, None
    if integers:
        data = torch.empty(S * most, K, dtype=torch.int8, device=device)
        assert isinstance(rows.format, Coded)
        decoding = integers_launch(rows.packed, rows.format, of_group, most, data)
    pairs, item = max(16, triton.next_power_of_2(D // 2)), weights.w_uk.element_size()
    tiles = logit_tiles(S * most, G, pairs, item if integers else q_kv_NX.element_size(), gpu)
    precision = "ieee" if q_kv_NX.dtype == torch.float32 else "tf32"
    # Weights are at most 1, and fp16 has more of their digits than bf16.
    exact = q_kv_NX.dtype == torch.float32
    # Tiles begin with the window.
    weights_row = round_up(most, tiles.rows) + (tiles.rows if view.window else 0)
    shares = torch.empty(
        N, H, weights_row, dtype=torch.float32 if exact and not integers else torch.float16, device=device
    )
    row_tiles = triton.cdiv(most, tiles.rows)
    peaks, totals = torch.empty(2, N, H, row_tiles, dtype=torch.float32, device=device)
    shared = {
        "table": of_group.block_table_SB, "seq_lens": of_group.seq_lens_S, "firsts": of_group.first_S,
        "query_start": of_group.query_start_S1, "row_stride": data.stride(0), "weights_row": weights_row,
        "table_row": view.block_table_SB.stride(0), "most": most, "nodes": nodes, "tokens_before": before,
        "INTEGERS": integers, "WIDTH": K, "WINDOW": view.window or 0,
        "NODES": 0 if tree_Tn is None else max(16, triton.next_power_of_2(nodes)), "BLOCK_SIZE": view.block_size,
        "PRECISION": precision, "rows": data,
    }  # fmt: skip
    q_norm, k_norm = (weights.b_k if norm is None else norm for norm in (weights.q_norm, weights.k_norm))
    arguments = shared | {
        "q": q_kv_NX, "w_uk": weights.w_uk, "scales": lse if weights.scales is None else weights.scales,
        "bias": weights.key_bias, "q_norm": q_norm, "k_norm": k_norm, "cos": tables[0], "sin": tables[1],
        "weights": shares, "peaks": peaks, "totals": totals,
        "positions": view.seq_lens_S if selected is None else selected[group],
        "tree": view.seq_lens_S if tree_Tn is None else tree_Tn, "scale_log2": scale * math.log2(math.e),
        "eps": weights.eps, "q_row": q_kv_NX.stride(0), "w_head": weights.w_uk.stride(0), "w_row": K, "G": G,
        "GROUP": H // G, "D": D, "WIDE": weights.columns.wide if weights.columns is not None else 0,
        "NORMS": weights.q_norm is not None, "SELECTED": selected is not None, "BLOCK_N": tiles.rows,
        "BLOCK_K": tiles.step, "HEADS": tiles.heads, "BLOCK_P": pairs,
        "BLOCK_J": max(triton.next_power_of_2(H // G), 16 // tiles.heads),
    }  # fmt: skip
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    grid = (triton.cdiv(G, tiles.heads), row_tiles, S)

    BLOCK_M = 16 if T * H <= 16 or exact else 64
    BLOCK_C = 64 if exact else min(256, max(16, triton.next_power_of_2(K))) if BLOCK_M == 64 else 128
    columns, m_tiles = triton.cdiv(K, BLOCK_C), triton.cdiv(T * H, BLOCK_M)
    splits = choose_splits(columns * m_tiles * S, triton.cdiv(most, 2 * BLOCK_N), gpu.multiprocessors)
    splits = min(max(splits, triton.cdiv(most, PIECE)), MOST_SPLITS)
    unit = max(BLOCK_N, tiles.rows)
    piece = triton.cdiv(triton.cdiv(most, splits), unit) * unit
    splits = triton.cdiv(most, piece)
    kept = splits if splits > 1 else 0
    parts = torch.empty(N, H, kept, K, dtype=torch.float32, device=device)
    part_lse = torch.empty(N, H, kept, dtype=torch.float32, device=device)
    sum_arguments = shared | {
        "weights": shares, "peaks": peaks, "totals": totals, "tiles": row_tiles, "TILE": tiles.rows,
        "CONVERT": integers and not INTERPRETED, "out": out, "lse": lse, "parts": parts,
        "part_lse": part_lse, "piece": piece,
        "splits": splits, "H": H, "BLOCK_M": BLOCK_M, "BLOCK_N": min(tiles.rows, BLOCK_N), "BLOCK_C": BLOCK_C,
    }  # fmt: skip
    merge = None
    if splits > 1:
        merge_arguments = {
            "parts": parts, "part_lse": part_lse, "out": out, "lse": lse, "sinks": lse, "SINKS": False, "LISTED": False,
            "query_start": view.query_start_S1, "by_sequence": view.query_start_S1, "splits": splits, "queries": 1,
            "H": H, "V": K, "BLOCK_V": min(128, triton.next_power_of_2(K)), "MOST": MOST_SPLITS, "BLOCK_S": 16,
        }  # fmt: skip
        merge = (N * H, triton.cdiv(K, merge_arguments["BLOCK_V"])), merge_arguments
    return Launches(
        decoding, (grid, arguments, options),
        ((columns, m_tiles * splits, S), sum_arguments, {"num_warps": 8 if BLOCK_C == 256 else 4, "num_stages": 3}),
        merge,
    )  # fmt: skip


def groups(view: CacheView, heads: int, K: int) -> list[slice]:
    """Divide a view's sequences into groups whose decoded rows, of K bytes, and logits fit into the workspace."""
    S, bytes_of_row = len(view.seq_lens_S), K + 2 * heads * view.max_query
    size = max(1, WORKSPACE // (most_rows(view) * bytes_of_row))
    return [slice(first, min(S, first + size)) for first in range(0, S, size)]


def attend(
    q_kv_NX: Tensor, cos_LP: Tensor, sin_LP: Tensor, weights: GpuLatentWeights, rows: PagedRows, view: CacheView,
    scale: float,
) -> Tensor:  # fmt: skip
    """ops/latent_attention.py's `latent`."""
    (_, D, K), R, N = weights.w_uk.shape, rows.format.width, len(q_kv_NX)
    H = (q_kv_NX.shape[1] - R) // D
    rows.write(view.slots_N, q_kv_NX[:, -R:])
    # Sums over integers of up to 127 need fp16's precision.
    dtype = torch.float16 if weights.columns is not None else q_kv_NX.dtype
    results = (
        torch.empty(N, H, K, dtype=dtype, device=q_kv_NX.device),
        torch.empty(N, H, dtype=torch.float32, device=q_kv_NX.device),
    )
    with torch.cuda.device_of(q_kv_NX):
        for group in groups(view, H, K if weights.columns is not None else 0):
            launches = make_launches(q_kv_NX, (cos_LP, sin_LP), weights, rows, view, group, results, scale)
            if launches.integers is not None:
                integers_kernel[launches.integers[0]](**launches.integers[1], num_warps=4)
            grid, arguments, options = launches.logits
            logits_kernel[grid](**arguments, **options)
            grid, arguments, options = launches.sum
            latent_sum_kernel[grid](**arguments, **options)
            if launches.merge is not None:
                merge_kernel[launches.merge[0]](**launches.merge[1], num_warps=4)
        grid, arguments = up_project_launch(
            *results, None, weights.w_uv, weights.value_bias, weights.sinks, q_kv_NX.dtype
        )
        up_project_kernel[grid](**arguments, num_warps=4)
    out: Tensor = arguments["out"]
    return out
