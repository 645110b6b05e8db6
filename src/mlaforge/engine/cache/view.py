"""What the queries of a step may see of the cache: the only place where views are made."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, overload

import torch

from mlaforge.engine.cache.block_tables import CacheGroup
from mlaforge.engine.cache.device_tables import DeviceTables
from mlaforge.ops.cache_view import CacheView
from mlaforge.runtime import on_device, uploaded


class Tables(Protocol):
    """Which blocks hold what of which sequence; the engine's are BlockTables."""

    @property
    def block_size(self) -> int: ...

    @property
    def groups(self) -> Sequence[CacheGroup]: ...

    def table(self, seq: int, group: int) -> tuple[int, Sequence[int]]:
        """The first cached position of a sequence and the blocks from there on."""

    def written(self, seq: int, group: int) -> Mapping[int, int]:
        """Asked of groups whose newest blocks are whole: those that the step writes to, by the block's number."""


# A sequence's number in the tables, and the positions [start, stop) of it that a step writes and asks for.
Span = tuple[int, int, int]


def make_views(
    spans: Sequence[Span], tables: Tables, device: torch.device, groups: Sequence[int] | None = None,
    tree: list[list[int]] | None = None, generating: Sequence[bool] = (),
) -> tuple[CacheView, ...]:  # fmt: skip
    """The view of every cache group, or of those named only. `tree` is CacheView.tree_Tn, of a span that is alone;
    `generating` is CacheView's."""
    assert tree is None or len(spans) == 1
    tree_Tn = None if tree is None else on_device(tree, torch.int32, device)
    shared = _shared(spans, tables, device) | {"generating": tuple(generating)}
    views = []
    for group in groups or range(len(tables.groups)):
        if "newest" in tables.groups[group].whole:
            assert tree is None, "queries of one block see different ones before it"
            cut = _cut(spans, tables.block_size)
            packs = _packs(spans, tables, group)
            packs_2K = on_device(packs, torch.int64, device).T.contiguous() if packs else None
            views.append(_view(group, cut, tables, device, packs_2K=packs_2K, **_shared(cut, tables, device)))
        else:
            views.append(_view(group, spans, tables, device, tree_Tn=tree_Tn, **shared))
    return tuple(views)


def _cut(spans: Sequence[Span], size: int) -> list[Span]:
    """Every span block by block: queries of one block see it and all before it as the same kinds of blocks."""
    return [
        (seq, max(start, begin), min(stop, begin + size))
        for seq, start, stop in spans
        for begin in range(start // size * size, stop, size)
    ]


def _packs(spans: Sequence[Span], tables: Tables, group: int) -> list[list[int]]:
    """Whole blocks that the step fills, and the packed ones that they become."""
    packs = []
    for seq, _, stop in spans:
        first, blocks = tables.table(seq, group)
        for number, block in tables.written(seq, group).items():
            if (number + 1) * tables.block_size <= stop:
                packs.append([block, blocks[number - first // tables.block_size]])
    return packs


def _shared(spans: Sequence[Span], tables: Tables, device: torch.device) -> dict[str, Any]:
    """What views of these spans have in common."""
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


def _held(group: int, span: Span, tables: Tables) -> tuple[int, Sequence[int]]:
    """As Tables.table, for the queries of this span."""
    seq, _, stop = span
    first, blocks = tables.table(seq, group)
    if "newest" not in tables.groups[group].whole:
        return first, blocks
    newest = (stop - 1) // tables.block_size
    at = newest - first // tables.block_size
    return first, [*blocks[:at], tables.written(seq, group).get(newest, blocks[at])]


def _view(
    group: int, spans: Sequence[Span], tables: Tables, device: torch.device, **shared: Any
) -> CacheView:  # fmt: skip
    size = tables.block_size
    held = [_held(group, span, tables) for span in spans]
    if isinstance(tables, DeviceTables) and "newest" not in tables.groups[group].whole:
        table_SB = tables.table_SB([seq for seq, _, _ in spans], group)
    else:
        table_SB = _host_table([blocks for _, blocks in held], device)
    slots: list[int] = []
    for (_, start, stop), (first, blocks) in zip(spans, held, strict=True):
        for position in range(start - first, stop - first):
            block, offset = divmod(position, size)
            slots.append(blocks[block] * size + offset)
    lengths = tuple(stop - first for (_, _, stop), (first, _) in zip(spans, held, strict=True))
    return CacheView(
        block_table_SB=table_SB,
        first_S=on_device([first for first, _ in held], torch.int32, device),
        slots_N=on_device(slots, torch.int64, device),
        window=tables.groups[group].window,
        runs=Runs([blocks for _, blocks in held], lengths, size),
        lengths=lengths,
        **shared,
    )


def _host_table(tables: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """int32 [S, B], built on the host: columns behind a sequence's last block are 0."""
    table_SB = torch.zeros(len(tables), max(map(len, tables)), dtype=torch.int32)
    for row, blocks in zip(table_SB.numpy(), tables, strict=True):
        # By way of an array, which takes a tenth of the time of a tensor made from lists.
        row[: len(blocks)] = array("i", blocks)
    return uploaded(table_SB, device)


Stretches = tuple[tuple[int, int], ...]


class Runs(Sequence[Stretches]):
    """CacheView.runs, computed for a sequence when it is first read: most steps never do.

    `blocks` are the block tables' lists themselves, which change when the step is committed: runs must be read before.
    """

    def __init__(self, blocks: Sequence[Sequence[int]], lengths: Sequence[int], block_size: int):
        self._blocks, self._lengths, self._block_size = blocks, lengths, block_size
        self._computed: dict[int, Stretches] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    @overload
    def __getitem__(self, index: int) -> Stretches: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Stretches, ...]: ...

    def __getitem__(self, index: int | slice) -> Stretches | tuple[Stretches, ...]:
        places = range(len(self))[index]
        if isinstance(places, range):
            return tuple(self[place] for place in places)
        if places not in self._computed:
            self._computed[places] = _runs(self._blocks[places], self._lengths[places], self._block_size)
        return self._computed[places]


def _runs(blocks: Sequence[int], rows: int, size: int) -> Stretches:
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
