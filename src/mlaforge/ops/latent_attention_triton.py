"""Triton kernels of latent attention, layout `latent` (latent_attention_gpu.py launches them).

Legend: S sequences, N query tokens, T of one sequence, H query heads, G KV heads, D key and value dimensions, K columns
of the rows that are multiplied.
"""

# Triton reads annotations of kernels: only constexpr is allowed.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from mlaforge.ops.attention_program_triton import as_numbers, distances, finite, put, slots_of


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
        added = T
        if NODES > 0:
            added = nodes
        low = tl.maximum(0, count - added + 1 - WINDOW)
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


@triton.jit
def _scaled(sums, scales, bias, inside, INTEGERS: tl.constexpr):
    """Return half of the keys in fp32, from sums [rows, pairs]: times scales, if INTEGERS, plus a bias."""
    x = sums.to(tl.float32)
    if INTEGERS:
        x *= tl.load(scales, mask=inside, other=0.0)[None, :]
    return x + tl.load(bias, mask=inside, other=0.0)[None, :]


@triton.jit
def _normed_keys(
    a, b, k_norm, inside, eps, D: tl.constexpr, BLOCK_N: tl.constexpr, HEADS: tl.constexpr, BLOCK_P: tl.constexpr
):  # fmt: skip
    """Apply the RMS norm of each head to the halves of its keys."""
    square = tl.sum(tl.reshape(a * a + b * b, [BLOCK_N, HEADS, BLOCK_P]), 2)
    factor = tl.rsqrt(square / D + eps)[:, :, None] + tl.zeros([BLOCK_N, HEADS, BLOCK_P], tl.float32)
    factor = tl.reshape(factor, [BLOCK_N, HEADS * BLOCK_P])
    a *= factor * tl.load(k_norm, mask=inside, other=0.0).to(tl.float32)[None, :]
    return a, b * factor * tl.load(k_norm + D // 2, mask=inside, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _rotated_keys(
    a, b, cos, sin, at, live, dtype: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Rotate keys by their positions, all heads alike, and round them."""
    p = tl.arange(0, BLOCK_P)
    place, mask = at[:, None] * (D // 2) + p[None, :], live[:, None] & (p < D // 2)[None, :]
    c = tl.load(cos + place, mask=mask, other=0.0).to(tl.float32)[:, None, :]
    d = tl.load(sin + place, mask=mask, other=0.0).to(tl.float32)[:, None, :]
    a, b = tl.reshape(a, [BLOCK_N, HEADS, BLOCK_P]), tl.reshape(b, [BLOCK_N, HEADS, BLOCK_P])
    x, y = (a * c - b * d).to(dtype), (b * c + a * d).to(dtype)
    return tl.reshape(x, [BLOCK_N, HEADS * BLOCK_P]), tl.reshape(y, [BLOCK_N, HEADS * BLOCK_P])


@triton.jit
def _query(query, q_norm, same, inside, eps, D: tl.constexpr, NORMS: tl.constexpr):
    """Load the halves of a token's queries [pairs, heads], 0 in the rows of other KV heads, and norm them."""
    u = tl.load(query, mask=same, other=0.0).to(tl.float32)
    v = tl.load(query + D // 2, mask=same, other=0.0).to(tl.float32)
    if NORMS:
        norm = tl.rsqrt(tl.sum(u * u + v * v, 0) / D + eps)[None, :]
        u *= norm * tl.load(q_norm, mask=inside, other=0.0).to(tl.float32)[:, None]
        v *= norm * tl.load(q_norm + D // 2, mask=inside, other=0.0).to(tl.float32)[:, None]
    return u, v


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
    of a sequence is rows[s * most + i], otherwise at its slot. SELECTED: positions [S, most] of rows."""
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
    output = g * D + pair
    a = _scaled(lower, scales + output, bias + output, inside, INTEGERS)
    b = _scaled(upper, scales + output + D // 2, bias + output + D // 2, inside, INTEGERS)
    if NORMS:
        a, b = _normed_keys(a, b, k_norm + pair, inside, eps, D, BLOCK_N, HEADS, BLOCK_P)
    before, text = count - nodes, tl.load(firsts + s)
    if SELECTED:
        at = tl.load(positions + s.to(tl.int64) * most + i, mask=live, other=0)
    else:
        at = text + i
    if NODES > 0:
        node = tl.arange(0, NODES)
        depth = tl.max(distances(tree, i - before, live & (i >= before), node, node < nodes, nodes), 1)
        at = tl.where(i >= before, text + before + depth, at)
    a, b = _rotated_keys(a, b, cos, sin, at, live, q.dtype.element_ty, D, BLOCK_N, HEADS, BLOCK_P)
    j = tl.arange(0, HEADS * BLOCK_J)
    head = g0 + j // BLOCK_J
    h, real = head * GROUP + j % BLOCK_J, (j % BLOCK_J < GROUP) & (head < G)
    # Columns of other heads are 0.
    same = (g[:, None] == head[None, :]) & inside[:, None] & real[None, :]
    for t in tl.range(0, T, num_stages=1):  # not pipelined: shared memory is for the product
        n = (begin + t).to(tl.int64)
        query = q + n * q_row + h[None, :] * D + pair[:, None]
        u, v = _query(query, q_norm + pair, same, inside, eps, D, NORMS)
        last = count - T + t
        if SELECTED:
            position = tl.load(positions + s.to(tl.int64) * most + tl.maximum(last, 0))
        else:
            position = text + tl.maximum(last, 0)  # padding is before the first row, and sees none
        seen = i <= last
        if NODES > 0:
            distance = tl.load(tree + t * nodes + node, mask=node < nodes, other=-1)
            last = before + tl.max(distance, 0)
            position = text + last
            path = tl.load(tree + t * nodes + i - before, mask=live & (i >= before), other=-1)
            seen = tl.where(i >= before, path >= 0, True)
        if WINDOW > 0:
            near = i > last - WINDOW
            if NODES > 0:
                near = tl.where(i >= before, path < WINDOW, near)
            seen = seen & near
        u, v = _rotated(u, v, cos, sin, position * (D // 2) + pair[:, None] + 0 * h[None, :], same)
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
