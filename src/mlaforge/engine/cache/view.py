"""What the queries of a step may see of the cache: the only place where views are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from mlaforge.engine.cache.block_tables import CacheGroup
from mlaforge.ops.cache_view import CacheView
from mlaforge.runtime import on_device


class Tables(Protocol):
    """Which blocks hold what of which sequence; the engine's are BlockTables."""

    @property
    def block_size(self) -> int: ...

    @property
    def groups(self) -> Sequence[CacheGroup]: ...

    def table(self, seq: int, group: int) -> tuple[int, Sequence[int]]:
        """The first cached position of a sequence and the blocks from there on."""


# A sequence's number in the tables, and the positions [start, stop) of it that a step writes and asks for.
Span = tuple[int, int, int]


def make_views(
    spans: Sequence[Span], tables: Tables, device: torch.device, groups: Sequence[int] | None = None,
    tree: list[list[int]] | None = None,
) -> tuple[CacheView, ...]:  # fmt: skip
    """The view of every cache group, or of those named only. `tree` is CacheView.tree_Tn, of a span that is alone."""
    assert tree is None or len(spans) == 1
    queries = [stop - start for _, start, stop in spans]
    lengths = [stop for _, _, stop in spans]
    starts = [0]
    for count in queries:
        starts.append(starts[-1] + count)
    shared = {
        "seq_lens_S": on_device(lengths, torch.int32, device),
        "query_start_S1": on_device(starts, torch.int32, device),
        "block_size": tables.block_size,
        "max_query": max(queries),
        "max_seq_len": max(lengths),
        "queries": tuple(queries),
        "tree_Tn": None if tree is None else on_device(tree, torch.int32, device),
    }
    return tuple(_view(group, spans, tables, shared, device) for group in groups or range(len(tables.groups)))


def _view(
    group: int, spans: Sequence[Span], tables: Tables, shared: dict[str, Any], device: torch.device
) -> CacheView:  # fmt: skip
    size = tables.block_size
    held = [tables.table(seq, group) for seq, _, _ in spans]
    widest = max(len(blocks) for _, blocks in held)
    slots: list[int] = []
    for (_, start, stop), (first, blocks) in zip(spans, held, strict=True):
        for position in range(start - first, stop - first):
            block, offset = divmod(position, size)
            slots.append(blocks[block] * size + offset)
    stretches = [_runs(b, stop - first, size) for (_, _, stop), (first, b) in zip(spans, held, strict=True)]
    return CacheView(
        block_table_SB=on_device([[*b, *[0] * (widest - len(b))] for _, b in held], torch.int32, device),
        first_S=on_device([first for first, _ in held], torch.int32, device),
        slots_N=on_device(slots, torch.int64, device),
        window=tables.groups[group].window,
        runs=tuple(stretches),
        **shared,
    )


def _runs(blocks: Sequence[int], rows: int, size: int) -> tuple[tuple[int, int], ...]:
    """Stretches of consecutive slots (start, length) that hold the first `rows` rows of `blocks`."""
    runs: list[tuple[int, int]] = []
    begin, previous = blocks[0], blocks[0] - 1
    for block in blocks:
        if block != previous + 1:
            runs.append((begin * size, (previous + 1 - begin) * size))
            begin = block
        previous = block
    runs.append((begin * size, (previous + 1 - begin) * size))
    # The last blocks may be empty or partly filled.
    kept, left = [], rows
    for start, length in runs:
        if left <= 0:
            break
        kept.append((start, min(length, left)))
        left -= length
    return tuple(kept)
