"""Paged attention in Triton: flash decoding over the block table, split along the cache, merged by lse.

A program computes one tile of query rows (tokens x heads of one KV head, at most BLOCK_M), for one KV head and one
split of the positions that the tile sees, so a cached row is read once per tile; a loaded MLA latent serves as key and
as value. Steps of few tokens take their splits from a list that divides all sequences' rows evenly (ops/work_list.py);
prefill is the same kernel with more tiles per sequence, each divided alike. Launch geometry depends only on host values
(tensor shapes and the view's bounds), and lengths are read on the device, so launches can be captured in a graph.

Widths that are not powers of two are cut into pieces (576 = 512 + 64), of which the last is masked. Rows in another
dtype than the queries (fp8) are cast per tile. Written after Flash-Decoding (Dao et al. 2023) and FlashAttention-2
(arXiv:2307.08691). Not measured on a GPU yet.
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

from mlaforge.ops import tuned
from mlaforge.ops.attention_program_triton import (
    columns,
    distances,
    finite,
    program,
    put_values,
    sink_divisor,
    slots_of,
    softmax_end,
    softmax_step,
    span,
    visible,
)
from mlaforge.ops.attention_tiles import choose_splits, cut, tile_sizes
from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.gpu_properties import KIB, GpuProperties, gpu_properties
from mlaforge.ops.paged_rows import PagedRows
from mlaforge.ops.row_formats.int8 import Int8
from mlaforge.ops.work_list import MOST_PIECES, UNIT, work_list

# Sequences per step of the search for a tile's sequence. Passed to launches, because compiled kernels read no globals.
SEARCHED = 256
MOST_SPLITS = MOST_PIECES
# Query tokens of a sequence up to which a step's rows are divided by a list: decoding, and verification of 8 drafts.
LISTED_QUERIES = 9


# What a launch's lengths change is not specialized: each variant takes seconds to compile.
@triton.jit(
    do_not_specialize=["table_row", "num_sequences", "tiles", "nodes"],
    do_not_specialize_on_alignment=["table", "seq_lens", "firsts", "query_start"],
)
def attend_kernel(
    q, k, v, out, lse, parts, part_lse, sinks, table, seq_lens, firsts, query_start, work, tree, scale_log2,
    q_row, q_head, k_slot, k_head, v_slot, v_head, table_row, num_sequences, tiles, nodes, scales, scales_row,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, UNIT: tl.constexpr, BLOCK_SIZE: tl.constexpr, V_IN_K: tl.constexpr,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, V: tl.constexpr, V0: tl.constexpr,
    V1: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SEARCHED: tl.constexpr, PRECISION: tl.constexpr,
    SINKS: tl.constexpr, LISTED: tl.constexpr, NODES: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, KV heads, splits), or, if LISTED, (entries of the list `work`, KV heads, tiles of a sequence, whose
    tokens are `tiles` at most). Contiguous outputs: out [N, H, V], with the SINKS [H] applied, and lse [N, H]; of
    several splits fp32 parts [N, H, splits, V] and part_lse, without sinks. Listed parts are [partial result, `tiles`
    tokens, H]. Strides count UNIT elements. 0: no WINDOW or piece. V_IN_K: D0 and D1 are V's too. NODES > 0: the
    last `nodes` rows are a tree, `tree` [T, nodes] as in CacheView. INT8: `scales` of a slot
    are of the keys of all heads, then of the values."""
    g = tl.program_id(1).to(tl.int64)
    heads = tl.num_programs(1) * GROUP
    s, tile, final = program(work, tiles, query_start, num_sequences, GROUP, BLOCK_M, SEARCHED, LISTED)
    if s < 0:
        return
    begin = tl.load(query_start + s)
    T = tl.load(query_start + s + 1) - begin
    if tile * BLOCK_M >= T * GROUP:
        return
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    real, token, h = m < T * GROUP, m // GROUP, g * GROUP + m % GROUP
    n_row = (begin + token).to(tl.int64)
    length, first = tl.load(seq_lens + s), tl.load(firsts + s)
    position, before = length - T + token, length - nodes
    lowest = length - T + tile * BLOCK_M // GROUP
    highest = length - T + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, T - 1)
    if NODES > 0:
        # Rows are in the order of the table, and nodes at the same depth have the same position.
        node = tl.arange(0, NODES)
        position = before + tl.max(distances(tree, token, real, node, node < nodes, nodes), 1)
        lowest, highest = before, length - 1
    start, end, at = span(work, tiles, lowest, highest, first, n_row, token, heads, h, WINDOW, BLOCK_N, LISTED)
    if (start >= end) & (not final):  # the merge does not read the values of an empty split
        tl.store(part_lse + at, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=real)
        return
    q_rows = q + n_row * (q_row * UNIT) + h * (q_head * UNIT)
    q0 = columns(q_rows, real, 0, D0, D)
    if D1 > 0:
        q1 = columns(q_rows, real, D0, D1, V if V_IN_K else D)
    if D2 > 0:
        q2 = columns(q_rows, real, V, D2, D)
    peak, total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    acc0 = tl.zeros([BLOCK_M, V0], tl.float32)
    acc1 = tl.zeros([BLOCK_M, V1 if V1 > 0 else 16], tl.float32)
    blocks = table + s.to(tl.int64) * table_row
    for n in range(start, end, BLOCK_N):
        p = n + tl.arange(0, BLOCK_N)
        live = p < end
        slot = slots_of(blocks, p - first, live, BLOCK_SIZE)
        k_rows = k + slot * (k_slot * UNIT) + g * (k_head * UNIT)
        k0 = columns(k_rows, live, 0, D0, V if V_IN_K else D).to(q.dtype.element_ty)
        scores = tl.dot(q0, tl.trans(k0), input_precision=PRECISION)
        if D1 > 0:
            k1 = columns(k_rows, live, D0, D1, V if V_IN_K else D).to(q.dtype.element_ty)
            scores = tl.dot(q1, tl.trans(k1), scores, input_precision=PRECISION)
        if D2 > 0:
            k2 = columns(k_rows, live, V, D2, D).to(q.dtype.element_ty)
            scores = tl.dot(q2, tl.trans(k2), scores, input_precision=PRECISION)
        seen = visible(p, live, position, tree, token, real, before, nodes, WINDOW, NODES)
        if INT8:
            scale = scales + slot * scales_row + g
            scores *= tl.load(scale, mask=live, other=0.0).to(tl.float32)[None, :]
        scores = tl.where(seen, scores * scale_log2, float("-inf"))
        weights, fade, peak, total = softmax_step(scores, peak, total)
        if INT8:
            weights *= tl.load(scale + tl.num_programs(1), mask=live, other=0.0).to(tl.float32)[None, :]
        weights = weights.to(q.dtype.element_ty)
        if V_IN_K:
            v0 = k0
        else:
            v_rows = v + slot * (v_slot * UNIT) + g * (v_head * UNIT)
            v0 = columns(v_rows, live, 0, V0, V).to(q.dtype.element_ty)
        acc0 = tl.dot(weights, v0, acc0 * fade[:, None], input_precision=PRECISION)
        if V1 > 0:
            if V_IN_K:
                v1 = k1
            else:
                v1 = columns(v_rows, live, V0, V1, V).to(q.dtype.element_ty)
            acc1 = tl.dot(weights, v1, acc1 * fade[:, None], input_precision=PRECISION)
    row_lse, divisor = softmax_end(peak, total, sinks, h, real, final, SINKS)
    if final:
        at = n_row * heads + h
        tl.store(lse + at, row_lse, mask=real)
        put_values(out, at, real, acc0, acc1, divisor, V, V0, V1)
    else:
        tl.store(part_lse + at, row_lse, mask=real)
        put_values(parts, at, real, acc0, acc1, divisor, V, V0, V1)


@triton.jit(do_not_specialize=["splits", "queries"], do_not_specialize_on_alignment=["query_start", "by_sequence"])
def merge_kernel(
    parts, part_lse, out, lse, sinks, query_start, by_sequence, splits, queries, H: tl.constexpr, V: tl.constexpr,
    BLOCK_V: tl.constexpr, MOST: tl.constexpr, BLOCK_S: tl.constexpr, SINKS: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Grid (N * H, pieces of BLOCK_V values): merge parts [N * H, splits, V] and part_lse [N * H, splits], at most MOST
    splits, into out [N * H, V] and lse [N * H], which does not count the SINKS [H]. LISTED: grid (S * queries * H,
    pieces), and a sequence's partial results [queries, H, V] are numbers `by_sequence` [S, 2]: first and count; those
    with one are final. Loads of values wait for no other values: BLOCK_S splits are in flight at a time."""
    row, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    first, step = row * splits, 1
    if LISTED:
        s, token = row // (queries * H), row // H % queries
        begin = tl.load(query_start + s)
        splits = tl.load(by_sequence + 2 * s + 1)
        if (token >= tl.load(query_start + s + 1) - begin) | (splits < 2):
            return
        step = queries * H
        first = tl.load(by_sequence + 2 * s) * step + token * H + row % H
        row = (begin + token) * H + row % H
    i = tl.arange(0, MOST)
    every_lse = tl.load(part_lse + first + i * step, mask=i < splits, other=float("-inf"))
    peak = tl.max(every_lse, 0)
    total = tl.sum(tl.exp(every_lse - finite(peak)), 0)
    acc = tl.zeros([BLOCK_V], tl.float32)
    for start in range(0, splits, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)
        at = first + split * step
        one_lse = tl.load(part_lse + at, mask=split < splits, other=float("-inf"))
        # The values of an empty split are uninitialised.
        live = (one_lse > float("-inf"))[:, None] & (d < V)[None, :]
        part = tl.load(parts + at[:, None] * V + d[None, :], mask=live, other=0.0)
        acc += tl.sum(part * tl.exp(one_lse - finite(peak))[:, None], 0)
    total = tl.where(total > 0, total, 1.0)
    row_lse = peak + tl.log(total)
    if tl.program_id(1) == 0:
        tl.store(lse + row, row_lse)
    if SINKS:
        total *= sink_divisor(row_lse, tl.load(sinks + row % H))
    tl.store(out + row * V + d, (acc / total).to(out.dtype.element_ty), mask=d < V)


INTERPRETED = not isinstance(attend_kernel, triton.JITFunction)


def supports(q_NHD: Tensor, k_LGD: Tensor, v_LGV: Tensor) -> Literal[True] | str:
    """Return True, or the reason why the kernel cannot run on these."""
    if q_NHD.device.type != "cuda" and not INTERPRETED:
        return f"it needs CUDA tensors, the inputs are on {q_NHD.device.type}"
    if k_LGD.dtype != v_LGV.dtype or k_LGD.dtype not in (q_NHD.dtype, torch.bfloat16, torch.float8_e4m3fn):
        return f"queries {q_NHD.dtype}, keys {k_LGD.dtype} and values {v_LGV.dtype} differ in dtype"
    if q_NHD.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"it does not support {q_NHD.dtype}"
    if INTERPRETED and q_NHD.dtype == torch.bfloat16:
        return "Triton's interpreter computes wrong bfloat16 products"
    gpu = gpu_properties(q_NHD.device)
    if k_LGD.dtype == torch.float8_e4m3fn and (reason := gpu.why_no_fp8()):
        return reason
    if any(x.stride(-1) != 1 for x in (q_NHD, k_LGD, v_LGV)):
        return "rows must be contiguous"
    if q_NHD.shape[1] % k_LGD.shape[1]:
        return f"{q_NHD.shape[1]} query heads are not a multiple of {k_LGD.shape[1]} KV heads"
    D, V, v_in_k = k_LGD.shape[2], v_LGV.shape[2], is_prefix(v_LGV, k_LGD)
    K_pieces, V_pieces = cut(D, V, v_in_k)
    if sum(V_pieces) > 512:
        return f"values of {V} elements do not fit into registers; at most 512 do"
    if not tile_sizes(512, sum(K_pieces), sum(V_pieces), v_in_k, q_NHD.element_size(), gpu):
        return f"rows of {D} and {V} elements do not fit into {gpu.shared_memory // KIB} KiB of shared memory"
    return True


def is_prefix(v_LGV: Tensor, k_LGD: Tensor) -> bool:
    """Whether the values are the first columns of the keys."""
    return (
        v_LGV.data_ptr() == k_LGD.data_ptr() and v_LGV.stride() == k_LGD.stride() and v_LGV.shape[2] <= k_LGD.shape[2]
    )


@dataclasses.dataclass(frozen=True)
class Launch:
    """A launch of the attention kernel: grid, arguments by name, compiler options, the most splits of a sequence."""

    grid: tuple[int, int, int]
    arguments: dict[str, Any]
    options: dict[str, int]
    most_splits: int

    @property
    def pieces(self) -> list[int]:
        """Rows of every piece of the list, if there is one. Reads it from the device."""
        if not self.arguments["LISTED"]:
            return []
        entries = self.arguments["work"][: 4 * self.grid[0]].view(-1, 4).tolist()
        return [end - begin for sequence, begin, end, _ in entries if sequence >= 0]


def make_launch(
    q_NHD: Tensor, k_LGD: Tensor, v_LGV: Tensor, view: CacheView, scale: float, splits: int | None = None,
    gpu: GpuProperties | None = None, sinks_H: Tensor | None = None, scales_LX: Tensor | None = None,
) -> Launch:  # fmt: skip
    """Prepare a launch from shapes, strides and the view's host values. Allocates `out` [N, H, V], `lse` [N, H] and, if
    there may be several splits, their results. splits: of every tile, instead of a list. scales_LX [L, 2 G]: of int8
    keys and values.

    `gpu` is the GPU to compile for, if not the tensors' device.
    """
    here, gpu = gpu is None, gpu or gpu_properties(q_NHD.device)
    (N, H, D), (_, G, V) = q_NHD.shape, v_LGV.shape
    group, S = H // G, len(view.seq_lens_S)
    v_in_k = is_prefix(v_LGV, k_LGD)
    (D0, D1, D2), (V0, V1) = cut(D, V, v_in_k)
    sizes = tile_sizes(view.max_query * group, D0 + D1 + D2, V0 + V1, v_in_k, q_NHD.element_size(), gpu)
    assert sizes, "supports() was not asked"
    step_rows = view.step_rows(view.max_query)
    span = view.max_seq_len if view.window is None else min(view.max_seq_len, view.window + step_rows)
    configuration: tuned.Configuration = {}
    if here:
        # Another GPU's launches are not this machine's to tune.
        format = "int8" if scales_LX is not None else str(k_LGD.dtype).removeprefix("torch.")
        key = tuned.attention_key(
            "mla" if v_in_k else "gqa", D, V, H, G, format, view.max_query, S, span, view.block_size == 1
        )
        configuration = tuned.config("attention", key) or {}
    BLOCK_M, BLOCK_N, num_warps, num_stages = sizes
    BLOCK_N = configuration.get("BLOCK_N", BLOCK_N)
    num_warps, num_stages = configuration.get("num_warps", num_warps), configuration.get("num_stages", num_stages)
    tiles = triton.cdiv(view.max_query * group, BLOCK_M)
    room = gpu.multiprocessors * configuration.get("waves", 2 if BLOCK_M < 64 else 1)
    listed = None
    # Windows make lengths alike.
    tree_Tn = view.tree_Tn
    if splits is None and view.max_query <= LISTED_QUERIES and view.window is None and tree_Tn is None:
        listed = work_list(view, max(1, room // (G * tiles)))
    if listed is not None:
        assert UNIT % BLOCK_N == 0, BLOCK_N
        grid = (listed.entries, G, tiles)
        tiles, most, partials = view.max_query, MOST_SPLITS, (listed.entries, view.max_query, H)
    else:
        # A search per tile costs less than many empty programs in steps that mix prefill and decode.
        rectangular = S * tiles <= 2 * (N * group // BLOCK_M + S)
        grid_x = S * tiles if rectangular else N * group // BLOCK_M + S
        if splits is None:
            splits = choose_splits(grid_x * G, triton.cdiv(span, 2 * BLOCK_N), room)
        grid, tiles, most = (grid_x, G, splits), tiles if rectangular else 0, splits
        partials = (N, H, splits if splits > 1 else 0)
    out = torch.empty(N, H, V, dtype=q_NHD.dtype, device=q_NHD.device)
    lse = torch.empty(N, H, dtype=torch.float32, device=q_NHD.device)
    parts = torch.empty(*partials, V, dtype=torch.float32, device=q_NHD.device)
    part_lse = torch.empty(partials, dtype=torch.float32, device=q_NHD.device)
    strides = {
        "q_row": q_NHD.stride(0), "q_head": q_NHD.stride(1), "k_slot": k_LGD.stride(0), "k_head": k_LGD.stride(1),
        "v_slot": v_LGV.stride(0), "v_head": v_LGV.stride(1),
    }  # fmt: skip
    # Triton looks for strides that are multiples of 16. Those of ranks that are multiples of 8 allow loads of 16 bytes
    # too.
    unit = math.gcd(16, *strides.values())
    arguments = {
        "q": q_NHD, "k": k_LGD, "v": v_LGV, "out": out, "lse": lse, "parts": parts, "part_lse": part_lse,
        "sinks": lse if sinks_H is None else sinks_H, "table": view.block_table_SB, "seq_lens": view.seq_lens_S,
        "firsts": view.first_S, "query_start": view.query_start_S1,
        "work": view.seq_lens_S if listed is None else listed.numbers,
        "tree": view.seq_lens_S if tree_Tn is None else tree_Tn, "nodes": 0 if tree_Tn is None else tree_Tn.shape[1],
        "scale_log2": scale * math.log2(math.e),
        **{name: stride // unit for name, stride in strides.items()}, "UNIT": unit,
        "table_row": view.block_table_SB.stride(0), "num_sequences": S, "tiles": tiles,
        "GROUP": group, "WINDOW": view.window or 0, "BLOCK_SIZE": view.block_size, "V_IN_K": v_in_k, "D": D, "D0": D0,
        "D1": D1, "D2": D2, "V": V, "V0": V0, "V1": V1, "BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "SEARCHED": SEARCHED,
        "PRECISION": "ieee" if q_NHD.dtype == torch.float32 else "tf32", "SINKS": sinks_H is not None,
        "LISTED": listed is not None, "INT8": scales_LX is not None,
        "scales": lse if scales_LX is None else scales_LX,
        "scales_row": 0 if scales_LX is None else scales_LX.stride(0),
        "NODES": 0 if tree_Tn is None else max(64, triton.next_power_of_2(tree_Tn.shape[1])),
    }  # fmt: skip
    return Launch(grid, arguments, {"num_warps": num_warps, "num_stages": num_stages}, most)


def attend(
    q_NHD: Tensor, k_LGD: Tensor, v_LGV: Tensor, view: CacheView, scale: float, sinks_H: Tensor | None = None,
    splits: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """ops.paged_attention; `splits` overrides the number of parts into which each tile's positions are cut."""
    return run(make_launch(q_NHD, k_LGD, v_LGV, view, scale, splits, sinks_H=sinks_H))


def attend_int8(
    q_NHD: Tensor, rows: PagedRows, view: CacheView, scale: float, sinks_H: Tensor | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """ops.packed_attention of int8 rows: codes are products' factors, scales those of logits and weights."""
    return run(int8_launch(q_NHD, rows, view, scale, sinks_H))


def int8_launch(
    q_NHD: Tensor, rows: PagedRows, view: CacheView, scale: float, sinks_H: Tensor | None = None,
    gpu: GpuProperties | None = None,
) -> Launch:  # fmt: skip
    """Prepare a launch over int8 rows, as make_launch."""
    codes, scales = rows.format.parts
    k_LGD, v_LGD = rows.packed[:, codes.range].view(torch.int8).unflatten(1, (2, -1, q_NHD.shape[2])).unbind(1)
    scales_LX = rows.packed.view(torch.bfloat16)[:, scales.offset // 2 :][:, : 2 * k_LGD.shape[1]]
    return make_launch(q_NHD, k_LGD, v_LGD, view, scale, gpu=gpu, sinks_H=sinks_H, scales_LX=scales_LX)


def int8_supports(q_NHD: Tensor, rows: PagedRows, view: CacheView, *others: Any) -> Literal[True] | str:
    """Return True, or the reason why the kernel cannot run on these."""
    D = q_NHD.shape[2]
    if not isinstance(rows.format, Int8) or {*rows.format.group_sizes} != {D} or D % 2:
        return f"it reads int8 rows of one scale per head, not {rows.format.name}"
    if INTERPRETED and q_NHD.dtype == torch.bfloat16:
        return "Triton's interpreter computes wrong bfloat16 products"
    if view.tree_Tn is not None and not view.tree_Tn.is_contiguous():
        return "the tree must be contiguous"
    return True if q_NHD.stride(2) == 1 else "rows must be contiguous"


def run(launch: Launch) -> tuple[Tensor, Tensor]:
    """Run the kernel and merge its splits: out [N, H, V] and lse [N, H]."""
    out, lse = launch.arguments["out"], launch.arguments["lse"]
    if not len(out):
        return out, lse
    with torch.cuda.device_of(out):
        attend_kernel[launch.grid](**launch.arguments, **launch.options)
        if launch.most_splits > 1:
            grid, arguments = merge_launch(launch)
            merge_kernel[grid](**arguments, num_warps=4)
    return out, lse


def merge_launch(launch: Launch) -> tuple[tuple[int, int], dict[str, Any]]:
    """Return the grid and the arguments of the merge of a launch's splits."""
    of = launch.arguments
    N, H, V = of["out"].shape
    S, listed, block = of["num_sequences"], of["LISTED"], min(128, triton.next_power_of_2(V))
    # A list ends with the numbers by sequence.
    by_sequence = of["work"][len(of["work"]) - 2 * S :] if listed else of["work"]
    arguments = {
        **{name: of[name] for name in ("parts", "part_lse", "out", "lse", "sinks", "query_start", "SINKS", "LISTED")},
        "by_sequence": by_sequence, "splits": launch.most_splits, "queries": of["tiles"] if listed else 1, "H": H,
        "V": V, "BLOCK_V": block, "MOST": MOST_SPLITS, "BLOCK_S": 16,
    }  # fmt: skip
    return ((S * of["tiles"] if listed else N) * H, triton.cdiv(V, block)), arguments
