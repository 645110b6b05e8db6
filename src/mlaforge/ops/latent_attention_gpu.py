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

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import torch
import triton
from torch import Tensor

from mlaforge.modeling.coded_layout_mla import round_up
from mlaforge.ops import tuned
from mlaforge.ops.absorbed_latents_triton import up_project_kernel, up_project_launch
from mlaforge.ops.attention_tiles import OVERHEAD, choose_splits
from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.gpu_properties import GpuProperties, gpu_properties
from mlaforge.ops.integer_rows import STEP
from mlaforge.ops.integer_rows_triton import integers_kernel
from mlaforge.ops.integer_rows_triton import make_launch as integers_launch
from mlaforge.ops.latent_attention_triton import latent_sum_kernel, logits_kernel
from mlaforge.ops.latent_weights_gpu import GpuLatentWeights
from mlaforge.ops.paged_attention_triton import MOST_SPLITS, merge_kernel
from mlaforge.ops.paged_rows import PagedRows
from mlaforge.ops.row_formats.coded import Coded
from mlaforge.ops.row_formats.plain import Plain

# Bytes of the temporary results of a group of sequences, unless those of one are more.
WORKSPACE = 512 << 20
# Rows of a tile of logits, and of a step of the sum; most rows of a piece of the sum.
MOST_ROWS, BLOCK_N, PIECE = 128, 64, 4096

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

    def tuned(self, configuration: tuned.Configuration) -> Tiles:
        """Return the tiles with the numbers of a tuned configuration."""
        names = {"rows": "rows", "warps": "num_warps", "stages": "num_stages"}
        return dataclasses.replace(
            self, **{field: configuration[name] for field, name in names.items() if name in configuration}
        )


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


def candidates(rows: int, G: int, D: int, K: int, itemsize: int, gpu: GpuProperties) -> list[tuned.Configuration]:
    """Return configurations to measure instead of `logit_tiles`' and of the sum's that fit into shared memory. BLOCK_C:
    columns of a tile of the sum; waves: programs per multiprocessor among which its rows are divided."""
    pairs = max(16, triton.next_power_of_2(D // 2))
    usual, width = logit_tiles(rows, G, pairs, itemsize, gpu), max(16, triton.next_power_of_2(K))
    return [
        {"rows": block, "num_warps": warps, "num_stages": stages, "BLOCK_C": columns, "waves": waves}
        for block in (64, MOST_ROWS)
        for warps in (4, 8)
        for stages in (2, 3, 4)
        if stages * usual.step * (block + 2 * usual.heads * pairs) * itemsize <= gpu.shared_memory - OVERHEAD
        for columns in sorted({min(width, 128), min(width, 256)})
        for waves in (1, 2)
    ]


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
    here, gpu = gpu is None, gpu or gpu_properties(q_kv_NX.device)
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
    key = tuned.attention_key("latent", D, K, H, G, rows.format.name, T, S, most, selected is not None)
    configuration = (tuned.config("latent", key) if here else None) or {}
    tiles = logit_tiles(S * most, G, pairs, item if integers else q_kv_NX.element_size(), gpu).tuned(configuration)
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
    BLOCK_C = configuration.get("BLOCK_C", BLOCK_C)
    columns, m_tiles = triton.cdiv(K, BLOCK_C), triton.cdiv(T * H, BLOCK_M)
    room = gpu.multiprocessors * configuration.get("waves", 1)
    splits = choose_splits(columns * m_tiles * S, triton.cdiv(most, 2 * BLOCK_N), room)
    splits = min(max(splits, triton.cdiv(most, PIECE)), MOST_SPLITS)
    unit = max(BLOCK_N, tiles.rows)
    piece = triton.cdiv(triton.cdiv(most, splits), unit) * unit
    splits = triton.cdiv(most, piece)
    stored = splits if splits > 1 else 0
    parts = torch.empty(N, H, stored, K, dtype=torch.float32, device=device)
    part_lse = torch.empty(N, H, stored, dtype=torch.float32, device=device)
    sum_arguments = shared | {
        "weights": shares, "peaks": peaks, "totals": totals, "tiles": row_tiles, "TILE": tiles.rows,
        "CONVERT": integers and not INTERPRETED, "out": out, "lse": lse, "parts": parts,
        "part_lse": part_lse, "piece": piece,
        "splits": splits, "H": H, "BLOCK_M": BLOCK_M, "BLOCK_N": min(tiles.rows, BLOCK_N), "BLOCK_C": BLOCK_C,
    }  # fmt: skip
    merge = _merge_launch(parts, part_lse, out, lse, view) if splits > 1 else None
    return Launches(
        decoding, (grid, arguments, options),
        ((columns, m_tiles * splits, S), sum_arguments, {"num_warps": 8 if BLOCK_C == 256 else 4, "num_stages": 3}),
        merge,
    )  # fmt: skip


def _merge_launch(
    parts: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor, view: CacheView
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Grid and arguments of the merge of the sum's splits [N, H, splits, K]."""
    N, H, splits, K = parts.shape
    arguments = {
        "parts": parts, "part_lse": part_lse, "out": out, "lse": lse, "sinks": lse, "SINKS": False, "LISTED": False,
        "query_start": view.query_start_S1, "by_sequence": view.query_start_S1, "splits": splits, "queries": 1, "H": H,
        "V": K, "BLOCK_V": min(128, triton.next_power_of_2(K)), "MOST": MOST_SPLITS, "BLOCK_S": 16,
    }  # fmt: skip
    return (N * H, triton.cdiv(K, arguments["BLOCK_V"])), arguments


def groups(view: CacheView, heads: int, K: int, decoded: int) -> list[slice]:
    """Divide a view's sequences into groups whose decoded rows, weights and partial sums fit into the workspace.
    decoded: bytes of a decoded row."""
    S, query_rows = len(view.seq_lens_S), heads * view.max_query
    bytes_of_row = decoded + 2 * query_rows + 4 * query_rows * K // PIECE
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
        for group in groups(view, H, K, K if weights.columns is not None else 0):
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
