"""What the queries of a step may see of the cache: the only place where views are made."""

from __future__ import annotations

from array import array
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
    table_SB = torch.zeros(len(held), max(len(blocks) for _, blocks in held), dtype=torch.int32)
    for row, (_, blocks) in zip(table_SB.numpy(), held, strict=True):
        # By way of an array, which takes a tenth of the time of a tensor made from lists.
        row[: len(blocks)] = array("i", blocks)
    slots: list[int] = []
    for (_, start, stop), (first, blocks) in zip(spans, held, strict=True):
        for position in range(start - first, stop - first):
            block, offset = divmod(position, size)
            slots.append(blocks[block] * size + offset)
    stretches = [_runs(b, stop - first, size) for (_, _, stop), (first, b) in zip(spans, held, strict=True)]
    return CacheView(
        block_table_SB=table_SB.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table_SB,
        first_S=on_device([first for first, _ in held], torch.int32, device),
        slots_N=on_device(slots, torch.int64, device),
        window=tables.groups[group].window,
        runs=tuple(stretches),
        **shared,
    )


def _runs(blocks: Sequence[int], rows: int, size: int) -> tuple[tuple[int, int], ...]:
    """Stretches of consecutive slots (start, length) that hold the first `rows` rows of `blocks`."""
    needed = blocks[: -(-rows // size)]
    if needed == list(range(needed[0], needed[0] + len(needed))):
        # As the pool hands them out where it can, and many times faster to see than one by one.
        return ((needed[0] * size, rows),)
    runs: list[tuple[int, int]] = []
    begin = 0
    for end in range(1, len(needed) + 1):
        if end == len(needed) or needed[end] != needed[end - 1] + 1:
            # The last block may be partly filled.
            runs.append((needed[begin] * size, min(end * size, rows) - begin * size))
            begin = end
    return tuple(runs)
