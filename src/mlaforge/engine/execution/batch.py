"""One step's tokens of all its sequences, laid out for the model: the only place where views of the cache are made.

Legend: N tokens of the step one after another, S sequences.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from mlaforge.engine.cache.block_tables import CacheGroup
from mlaforge.ops.cache_view import CacheView


class Tables(Protocol):
    """Which blocks hold what of which sequence; the engine's are BlockTables."""

    @property
    def block_size(self) -> int: ...

    @property
    def groups(self) -> Sequence[CacheGroup]: ...

    def table(self, seq: int, group: int) -> tuple[int, Sequence[int]]:
        """The first cached position of a sequence and the blocks from there on."""


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Tokens [start, stop) of a sequence that this step computes; `seq` is its number in the block tables.

    `tree`: the last rows up to `stop` are a tree of drafted tokens, of which this has a row for each of the tokens, as
    CacheView.tree_Tn; then there is no other chunk.
    """

    seq: int
    token_ids: Sequence[int]
    start: int
    stop: int
    tree: list[list[int]] | None = None

    @property
    def positions(self) -> Iterable[int]:
        """Where the tokens stand, branches of a tree side by side."""
        if self.tree is None:
            return range(self.start, self.stop)
        return (self.stop - len(row) + max(row) for row in self.tree)


@dataclasses.dataclass(frozen=True)
class Batch:
    """`views` has one entry per cache group. `last_S` is each chunk's last row among the N."""

    token_ids_N: Tensor
    positions_N: Tensor
    last_S: Tensor
    views: tuple[CacheView, ...]


def make_batch(
    chunks: Sequence[Chunk], tables: Tables, device: torch.device, groups: Sequence[int] | None = None
) -> Batch:
    """The chunks' tokens, positions, and what they see of every cache group, or of those named only."""
    token_ids: list[int] = []
    positions: list[int] = []
    starts = [0]
    for chunk in chunks:
        token_ids += chunk.token_ids[chunk.start : chunk.stop]
        positions += chunk.positions
        starts.append(len(positions))
    lengths = [chunk.stop for chunk in chunks]
    tree = next((chunk.tree for chunk in chunks if chunk.tree is not None), None)
    assert tree is None or len(chunks) == 1
    shared = {
        "seq_lens_S": _tensor(lengths, torch.int32, device),
        "query_start_S1": _tensor(starts, torch.int32, device),
        "block_size": tables.block_size,
        "max_query": max(chunk.stop - chunk.start for chunk in chunks),
        "max_seq_len": max(lengths),
        "queries": tuple(chunk.stop - chunk.start for chunk in chunks),
        "tree_Tn": None if tree is None else _tensor(tree, torch.int32, device),
    }
    views = tuple(_view(group, chunks, tables, shared, device) for group in groups or range(len(tables.groups)))
    return Batch(
        _tensor(token_ids, torch.int64, device),
        _tensor(positions, torch.int64, device),
        _tensor([row - 1 for row in starts[1:]], torch.int64, device),
        views,
    )


def _tensor(numbers: Sequence[int] | Sequence[list[int]], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On its way to the device without waiting for it: the copy is made from pinned memory."""
    host = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def _view(
    group: int, chunks: Sequence[Chunk], tables: Tables, shared: dict[str, Any], device: torch.device
) -> CacheView:  # fmt: skip
    size = tables.block_size
    found = [tables.table(chunk.seq, group) for chunk in chunks]
    widest = max(len(blocks) for _, blocks in found)
    slots: list[int] = []
    for chunk, (first, blocks) in zip(chunks, found, strict=True):
        for position in range(chunk.start - first, chunk.stop - first):
            block, offset = divmod(position, size)
            slots.append(blocks[block] * size + offset)
    stretches = [_runs(b, c.stop - first, size) for c, (first, b) in zip(chunks, found, strict=True)]
    return CacheView(
        block_table_SB=_tensor([[*b, *[0] * (widest - len(b))] for _, b in found], torch.int32, device),
        first_S=_tensor([first for first, _ in found], torch.int32, device),
        slots_N=_tensor(slots, torch.int64, device),
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
