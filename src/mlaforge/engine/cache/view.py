"""Views: what the queries of a step may read of the cache. The only module that builds them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from mlaforge.engine.cache.block_tables import CacheGroup
from mlaforge.engine.cache.device_tables import DeviceTables
from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.dispatch import prefers_triton
from mlaforge.ops.host_view import Runs, host_view
from mlaforge.runtime import on_device, uploaded


class Tables(Protocol):
    """Which blocks hold which positions of which sequence; the engine's tables are BlockTables."""

    @property
    def block_size(self) -> int: ...

    @property
    def groups(self) -> Sequence[CacheGroup]: ...

    def table(self, seq: int, group: int) -> tuple[int, Sequence[int]]:
        """Return the first cached position of a sequence and its blocks from there on."""

    def written(self, seq: int, group: int) -> Mapping[int, int]:
        """Return the blocks that the step writes to, by block number; for groups whose newest blocks are
        unquantized."""


# A sequence's number in the tables, and the positions [start, stop) that a step computes of it.
Span = tuple[int, int, int]


def make_views(
    spans: Sequence[Span], tables: Tables, device: torch.device, groups: Sequence[int] | None = None,
    tree: list[list[int]] | None = None, generating: Sequence[bool] = (), selecting: Sequence[bool] = (),
) -> tuple[CacheView, ...]:  # fmt: skip
    """Return the view of every cache group, or of those in `groups`. `tree` is CacheView.tree_Tn, for a single span;
    `generating` and `selecting` are CacheView's."""
    assert tree is None or len(spans) == 1
    tree_Tn = None if tree is None else on_device(tree, torch.int32, device)
    flags = {"generating": tuple(generating), "selecting": tuple(selecting)}
    shared = _shared(spans, tables, device)
    views = []
    for group in groups or range(len(tables.groups)):
        if tables.groups[group].newest_unquantized:
            assert tree is None, "queries of one block see different blocks before it"
            # Grouped-query layers without an index, which compute all tokens in one form.
            by_block = _split_by_block(spans, tables.block_size)
            packs = _packs(spans, tables, group)
            packs_2K = on_device(packs, torch.int64, device).T.contiguous() if packs else None
            views.append(_view(group, by_block, tables, device, packs_2K=packs_2K, **_shared(by_block, tables, device)))
        else:
            views.append(_view(group, spans, tables, device, tree_Tn=tree_Tn, **flags, **shared))
    return tuple(views)


def _split_by_block(spans: Sequence[Span], size: int) -> list[Span]:
    """Split every span at block boundaries: queries of one block read that block and all before it as the same
    kinds."""
    return [
        (seq, max(start, begin), min(stop, begin + size))
        for seq, start, stop in spans
        for begin in range(start // size * size, stop, size)
    ]


def _packs(spans: Sequence[Span], tables: Tables, group: int) -> list[list[int]]:
    """Return [unquantized block, quantized block] for each block that the step fills."""
    packs = []
    for seq, _, stop in spans:
        first, blocks = tables.table(seq, group)
        for number, block in tables.written(seq, group).items():
            if (number + 1) * tables.block_size <= stop:
                packs.append([block, blocks[number - first // tables.block_size]])
    return packs


def _shared(spans: Sequence[Span], tables: Tables, device: torch.device) -> dict[str, Any]:
    """The fields that all views of these spans have in common."""
    queries = [stop - start for _, start, stop in spans]
    lengths = [stop for _, _, stop in spans]
    return {
        "seq_lens_S": on_device(lengths, torch.int32, device),
        "query_start_S1": on_device([0, *itertools.accumulate(queries)], torch.int32, device),
        "block_size": tables.block_size,
        "max_query": max(queries),
        "max_seq_len": max(lengths),
        "queries": tuple(queries),
    }


def _visible_blocks(group: int, span: Span, tables: Tables) -> tuple[int, Sequence[int]]:
    """As Tables.table, for the queries of this span."""
    seq, _, stop = span
    first, blocks = tables.table(seq, group)
    if not tables.groups[group].newest_unquantized:
        return first, blocks
    newest = (stop - 1) // tables.block_size
    index = newest - first // tables.block_size
    return first, [*blocks[:index], tables.written(seq, group).get(newest, blocks[index])]


def _view(
    group: int, spans: Sequence[Span], tables: Tables, device: torch.device, **shared: Any
) -> CacheView:  # fmt: skip
    size = tables.block_size
    visible = [_visible_blocks(group, span, tables) for span in spans]
    if isinstance(tables, DeviceTables) and not tables.groups[group].newest_unquantized:
        table_SB = tables.table_SB([seq for seq, _, _ in spans], group)
    else:
        table_SB = _host_table([blocks for _, blocks in visible], device)
    slots: list[int] = []
    for (_, start, stop), (first, blocks) in zip(spans, visible, strict=True):
        for position in range(start - first, stop - first):
            block, offset = divmod(position, size)
            slots.append(blocks[block] * size + offset)
    lengths = tuple(stop - first for (_, _, stop), (first, _) in zip(spans, visible, strict=True))
    return CacheView(
        block_table_SB=table_SB,
        first_S=on_device([first for first, _ in visible], torch.int32, device),
        slots_N=on_device(slots, torch.int64, device),
        window=tables.groups[group].window,
        runs=Runs([blocks for _, blocks in visible], lengths, size),
        lengths=lengths,
        **shared,
    )


def _host_table(tables: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """Build an int32 [S, B] table on the host: columns after a sequence's last block are 0."""
    table_SB = torch.zeros(len(tables), max(map(len, tables)), dtype=torch.int32)
    for row, blocks in zip(table_SB.numpy(), tables, strict=True):
        # An array takes a tenth of the time of a tensor made from lists.
        row[: len(blocks)] = array("i", blocks)
    return uploaded(table_SB, device)


def mutual_view(view: CacheView) -> CacheView:
    """Return the view in which the query tokens of a sequence see each other, later ones too: each is a sequence that
    ends with the last of them. For block heads; the view must be of the host (make_views) and without a tree."""
    assert view.tree_Tn is None and isinstance(view.runs, Runs)
    sequences, device = [s for s, T in enumerate(view.queries) for _ in range(T)], view.slots_N.device
    sequence_N = on_device(sequences, torch.int64, device)
    N = len(sequences)
    return dataclasses.replace(
        view, block_table_SB=view.block_table_SB.index_select(0, sequence_N),
        seq_lens_S=view.seq_lens_S.index_select(0, sequence_N), first_S=view.first_S.index_select(0, sequence_N),
        query_start_S1=torch.arange(N + 1, dtype=torch.int32, device=device), max_query=1, queries=(1,) * N,
        lengths=tuple(view.lengths[s] for s in sequences), runs=view.runs.take(sequences), generating=(True,) * N,
        selecting=(False,) * N,
    )  # fmt: skip


def prefix_view(view: CacheView, lengths: Sequence[Sequence[int]]) -> CacheView:
    """Return the view in which every query token is a sequence of its own, of the first rows of one of `view`.
    `lengths`: per sequence, how many rows each of its query tokens sees; 0 is none. Writes no rows."""
    sequences = [s for s, counts in enumerate(lengths) for _ in counts]
    counts = [count for counts in lengths for count in counts]
    N, device = len(counts), view.slots_N.device
    sequence_N = on_device(sequences, torch.int64, device)
    return dataclasses.replace(
        view, block_table_SB=view.block_table_SB.index_select(0, sequence_N),
        seq_lens_S=on_device(counts, torch.int32, device), first_S=view.first_S.index_select(0, sequence_N),
        query_start_S1=torch.arange(N + 1, dtype=torch.int32, device=device), slots_N=view.slots_N[:0], runs=(),
        max_query=1, max_seq_len=max(counts), queries=(1,) * N, lengths=tuple(counts), generating=(), selecting=(),
    )  # fmt: skip


def query_token_view(view: CacheView) -> CacheView:
    """Return the view in which each query token with a selection is a sequence that ends with it, as when it is decoded
    alone; `view` itself if that is the case. Other sequences stay whole. Nodes of a tree keep all of its rows, and
    `tree_Tn`.

    For token selection (execution/indexer.py). The view must be without a window.
    """
    selecting = view.selecting or (False,) * len(view.queries)
    if view.tree_Tn is not None and any(selecting) and prefers_triton(view.slots_N.device):
        return _tree_nodes(view)
    if not view.lengths:
        return _captured_query_tokens(view)
    if not any(T > 1 and flag for T, flag in zip(view.queries, selecting, strict=True)):
        return view
    sequences: list[int] = []
    queries: list[int] = []
    lengths: list[int] = []
    for s, (T, length, flag) in enumerate(zip(view.queries, view.lengths, selecting, strict=True)):
        sequences += [s] * T if flag else [s]
        queries += [1] * T if flag else [T]
        if flag and view.tree_Tn is None:
            lengths += range(length - T + 1, length + 1)
        else:
            lengths += [length] * (T if flag else 1)
    device = view.slots_N.device
    sequences_R = on_device(sequences, torch.int64, device)
    return dataclasses.replace(
        view, block_table_SB=view.block_table_SB.index_select(0, sequences_R),
        seq_lens_S=on_device(lengths, torch.int32, device), first_S=view.first_S.index_select(0, sequences_R),
        query_start_S1=on_device([0, *itertools.accumulate(queries)], torch.int32, device), runs=(),
        max_query=max(queries), queries=tuple(queries), lengths=tuple(lengths),
        generating=tuple(view.generating[s] for s in sequences), selecting=tuple(selecting[s] for s in sequences),
    )  # fmt: skip


def _captured_query_tokens(view: CacheView) -> CacheView:
    """As query_token_view, for a captured step, whose sequences have equally many query tokens and lengths that only
    the device knows."""
    S, T, device = len(view.queries), view.max_query, view.slots_N.device
    if T == 1 or not any(view.selecting):
        return view
    at_T = torch.arange(1 - T, 1, dtype=torch.int32, device=device)
    sequence_R = torch.arange(S, device=device).repeat_interleave(T, output_size=S * T)
    # Padding before a text's first token sees nothing.
    lengths_R = (view.seq_lens_S[:, None] + at_T).clamp_min(0).flatten()
    return dataclasses.replace(
        view, block_table_SB=view.block_table_SB.index_select(0, sequence_R), seq_lens_S=lengths_R,
        first_S=view.first_S.index_select(0, sequence_R), max_query=1, queries=(1,) * (S * T),
        query_start_S1=torch.arange(S * T + 1, dtype=torch.int32, device=device),
        generating=(True,) * (S * T), selecting=(True,) * (S * T),
    )  # fmt: skip


def _tree_nodes(view: CacheView) -> CacheView:
    """As query_token_view, for a tree on a GPU, with the rows that each node sees in its own table: blocks of one row,
    the node's ancestors last."""
    assert view.tree_Tn is not None
    (T, n), device, L = view.tree_Tn.shape, view.slots_N.device, view.max_seq_len
    at_L = torch.arange(L, device=device)
    before = view.seq_lens_S.long() - n
    # Distances fall from the root on; what is not an ancestor is -1.
    path_TL = view.tree_Tn.argsort(1, descending=True).gather(1, (at_L - before).clamp(0, n - 1).expand(T, L))
    row_TL = torch.where(at_L < before, at_L, before + path_TL).clamp_max(L - 1)
    blocks_L = view.block_table_SB[0]
    table_TL = blocks_L[row_TL // view.block_size] * view.block_size + (row_TL % view.block_size).int()
    return dataclasses.replace(
        view, block_table_SB=table_TL, block_size=1, first_S=view.first_S.expand(T), tree_Tn=None, runs=(),
        seq_lens_S=(before + 1 + view.tree_Tn.amax(1)).int(), max_query=1, queries=(1,) * T,
        query_start_S1=torch.arange(T + 1, dtype=torch.int32, device=device),
        lengths=host_view(view).visible_nodes if view.lengths else (), generating=(True,) * T, selecting=(True,) * T,
    )  # fmt: skip


def select_view(
    view: CacheView, slots_SK: torch.Tensor, positions_SK: torch.Tensor, counts: tuple[int, ...], by_sequence: bool,
    bounds: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> CacheView:  # fmt: skip
    """Return the view of selected tokens as if their rows were all that exists: blocks of one row.

    slots_SK and positions_SK, int32, are the selection (ops/token_selection.py), `counts` its tokens per sequence. With
    `by_sequence` the rows of sequence s count from s·K on, so that `positions_SK` is one table of positions. If every
    query token has its own selection, a tree is resolved: a node's selection is from its path. `bounds`: of
    `selected_bounds`, if they are computed already.
    """
    K = slots_SK.shape[1]
    first_S, lengths_S = bounds or selected_bounds(view, counts, K if by_sequence else 0)
    return dataclasses.replace(
        view, block_table_SB=slots_SK, first_S=first_S, seq_lens_S=lengths_S, block_size=1, runs=(),
        # Positions that are looked up need their bound.
        max_seq_len=view.max_seq_len if by_sequence else K,
        positions_SK=positions_SK, counts=counts, lengths=counts if view.lengths else (),
        tree_Tn=None if view.max_query == 1 else view.tree_Tn,
    )  # fmt: skip


def selected_bounds(view: CacheView, counts: tuple[int, ...], row_stride: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return first rows and ends of a selection, int32 [S]. In a captured step `counts` are bounds."""
    if view.lengths:
        return _bounds(counts, row_stride, view.seq_lens_S.device)
    first_S = torch.arange(len(counts), dtype=torch.int32, device=view.seq_lens_S.device) * row_stride
    return first_S, first_S + view.seq_lens_S.clamp_max(max(counts))


@functools.lru_cache(maxsize=64)
def _bounds(counts: tuple[int, ...], row_stride: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return first rows and ends, int32 [S]. Cached: they repeat from layer to layer and step to step."""
    first = [s * row_stride for s in range(len(counts))]
    last = [start + count for start, count in zip(first, counts, strict=True)]
    return on_device(first, torch.int32, device), on_device(last, torch.int32, device)
