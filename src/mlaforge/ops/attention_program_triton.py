"""Parts of a program of paged attention's Triton kernel (paged_attention_triton.py): which rows it reads, what its
queries see of them, and its softmax.
"""

# Triton reads annotations of kernels: only constexpr is allowed.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def columns(rows, live, BEGIN: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Load columns [BEGIN, BEGIN + SIZE) of rows given by their addresses; 0 in masked rows and from column WIDTH
    on."""
    d = BEGIN + tl.arange(0, SIZE)
    mask = live[:, None]
    if BEGIN + SIZE > WIDTH:
        mask = mask & (d < WIDTH)[None, :]
    return tl.load(rows[:, None] + d[None, :], mask=mask, other=0.0)


@triton.jit
def put(rows, live, values, BEGIN: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    d = BEGIN + tl.arange(0, SIZE)
    mask = live[:, None] & (d < WIDTH)[None, :]
    tl.store(rows[:, None] + d[None, :], values.to(rows.dtype.element_ty), mask=mask)


@triton.jit
def as_numbers(x, dtype: tl.constexpr, CONVERT: tl.constexpr):
    """Convert a tile. CONVERT: int8 to fp16 by their bits, four at a time: x + 128 is the last bits of 1024 + 128 + x.
    The interpreter has no such instructions."""
    if CONVERT:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 biased, offset;
            mov.b32 offset, 0x64806480;
            xor.b32 biased, $2, 0x80808080;
            prmt.b32 $0, biased, 0x64646464, 0x4140;
            prmt.b32 $1, biased, 0x64646464, 0x4342;
            sub.f16x2 $0, $0, offset;
            sub.f16x2 $1, $1, offset;
            }
            """,
            "=&r,=&r,r", [x], dtype=tl.float16, is_pure=True, pack=4,
        )  # fmt: skip
    return x.to(dtype)


@triton.jit
def finite(x):
    """Replace -inf by 0, so that -inf - finite(-inf) is -inf instead of NaN."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def sink_divisor(lse, sink):
    """Return what a learned sink divides the output by: the inverse of sigmoid(lse - sink)."""
    return 1.0 + tl.exp(sink.to(tl.float32) - lse)


@triton.jit
def locate(
    tile, tiles, query_start, num_sequences, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, SEARCHED: tl.constexpr
):  # fmt: skip
    """Return the sequence of a tile of the grid, and the tile's number within the sequence.

    tiles > 0: every sequence has this many tiles. tiles = 0: sequence s has as many as its rows can need, from tile
    rows_before(s) // BLOCK_M + s on.
    """
    s = tile // tl.maximum(tiles, 1)
    first = s * tiles
    if tiles == 0:
        s = tile * 0 - 1
        for base in range(0, num_sequences, SEARCHED):
            i = base + tl.arange(0, SEARCHED)
            before = tl.load(query_start + i, mask=i < num_sequences, other=0) * GROUP // BLOCK_M + i
            s += tl.sum(((before <= tile) & (i < num_sequences)).to(tl.int32))
        first = tl.load(query_start + s) * GROUP // BLOCK_M + s
    return s, tile - first


@triton.jit
def share(lowest, highest, first, split, splits, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the positions [start, end) that a split reads for tokens at positions `lowest` to `highest`."""
    lo = first
    if WINDOW > 0:
        lo = tl.maximum(first, lowest - WINDOW + 1)
    share = tl.cdiv(tl.cdiv(highest + 1 - lo, splits), BLOCK_N) * BLOCK_N
    start = lo + split * share
    return start, tl.minimum(start + share, highest + 1)


@triton.jit
def program(
    work, tiles, query_start, num_sequences, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, SEARCHED: tl.constexpr,
    LISTED: tl.constexpr,
):  # fmt: skip
    """Return a program's sequence (-1: none), its tile, and whether the sequence has no other splits."""
    if LISTED:
        entry = work + tl.program_id(0) * 4
        return tl.load(entry), tl.program_id(2), tl.load(entry + 3) < 0
    s, tile = locate(tl.program_id(0), tiles, query_start, num_sequences, GROUP, BLOCK_M, SEARCHED)
    return s, tile, tl.num_programs(2) == 1


@triton.jit
def span(
    work, tiles, lowest, highest, first, n_row, token, heads, h, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr,
    LISTED: tl.constexpr,
):  # fmt: skip
    """Return the positions [start, end) that a program reads, and where its partial results are."""
    if LISTED:
        entry = work + tl.program_id(0) * 4
        start, end = first + tl.load(entry + 1), tl.minimum(first + tl.load(entry + 2), highest + 1)
        return start, end, (tl.load(entry + 3).to(tl.int64) * tiles + token) * heads + h
    split, splits = tl.program_id(2), tl.num_programs(2)
    start, end = share(lowest, highest, first, split, splits, WINDOW, BLOCK_N)
    return start, end, (n_row * heads + h) * splits + split


@triton.jit
def distances(tree, token, real, node, live, nodes):
    """Return the distances [rows, nodes] of tree nodes from the rows' tokens, -1 if not visible."""
    return tl.load(tree + token[:, None] * nodes + node[None, :], mask=real[:, None] & live[None, :], other=-1)


@triton.jit
def visible(p, live, position, tree, token, real, before, nodes, WINDOW: tl.constexpr, NODES: tl.constexpr):
    """Return which positions p rows see. Masked positions are beyond every query's: only the last split's last tile is
    partial."""
    seen = p[None, :] <= position[:, None]
    if WINDOW > 0:
        seen = seen & (p[None, :] > position[:, None] - WINDOW)
    if NODES > 0:  # noqa: SIM102 (known when it is compiled)
        if tl.max(p, 0) >= before:
            inside = (p >= before) & live
            distance = distances(tree, token, real, p - before, inside, nodes)
            path = distance >= 0
            if WINDOW > 0:
                path = path & (distance < WINDOW)
            seen = tl.where(inside[None, :], path, seen)
    return seen


@triton.jit
def put_values(to, at, real, acc0, acc1, divisor, V: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr):
    put(to + at * V, real, acc0 / divisor[:, None], 0, V0, V)
    if V1 > 0:
        put(to + at * V, real, acc1 / divisor[:, None], V0, V1, V)


@triton.jit
def slots_of(blocks, at, live, BLOCK_SIZE: tl.constexpr):
    """Return the slots, int64, of places in a sequence's table."""
    block = tl.load(blocks + at // BLOCK_SIZE, mask=live, other=0)
    return block.to(tl.int64) * BLOCK_SIZE + at % BLOCK_SIZE


@triton.jit
def softmax_step(scores, peak, total):
    """Return the weights 2^(score - peak) of a tile, the factor of former sums, and the new peak and total."""
    higher = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - finite(higher)[:, None])
    fade = tl.exp2(peak - finite(higher))
    return weights, fade, higher, total * fade + tl.sum(weights, 1)


@triton.jit
def softmax_end(peak, total, sinks, h, real, final, SINKS: tl.constexpr):
    """Return the rows' natural lse, and the divisor of their sums, with SINKS in final results."""
    total = tl.where(total > 0, total, 1.0)  # rows that see nothing: peak is -inf, their sum 0
    lse = (peak + tl.log2(total)) * 0.6931471805599453
    if SINKS:  # noqa: SIM102 (known when it is compiled)
        if final:
            total = total * sink_divisor(lse, tl.load(sinks + h, mask=real, other=0.0))
    return lse, total
