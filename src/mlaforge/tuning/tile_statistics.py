"""Tiles of an attention launch: how many a step's rows and queries have, and how many of them the kernel computes.

A pure function of host numbers: lengths and query tokens of the sequences, and the launch. Rows are counted from the
first of a sequence's table. A tile is a tile of query rows (tokens x heads of a KV head) by consecutive rows of the
table.

Legend: S sequences, T query tokens of one, L rows of its table, n nodes of a tree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.work_list import pieces

# Distances of each query token from each node of a tree of the last rows, -1 if it does not see it.
Tree = Sequence[Sequence[int]]


@dataclasses.dataclass(frozen=True)
class TileStatistics:
    """total: tiles of all query rows by all rows. empty_by_span: not computed, because they lie before the window or
    after the last query. executed: computed. empty_by_mask: of these, without any visible pair of a query and a row."""

    total: int = 0
    empty_by_span: int = 0
    executed: int = 0
    empty_by_mask: int = 0

    def __add__(self, other: TileStatistics) -> TileStatistics:
        ours, theirs = dataclasses.astuple(self), dataclasses.astuple(other)
        return TileStatistics(*(a + b for a, b in zip(ours, theirs, strict=True)))

    def times(self, count: int) -> TileStatistics:
        """Return the statistics of so many equal launches."""
        return TileStatistics(*(count * number for number in dataclasses.astuple(self)))


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Of a launch: query rows and rows of a tile, query heads per KV head, KV heads. splits: of a query tile's span, or
    `programs` among which a list divides all rows (ops/work_list.py). aligned: tiles begin at multiples of `positions`,
    as the compiled CPU kernels' chunks do."""

    rows: int
    positions: int
    group: int
    kv_heads: int
    splits: int = 1
    programs: int | None = None
    aligned: bool = False


# Cached tokens of a chunk and most query rows of a task of the compiled CPU kernels (cpu/attention/).
CPU_CHUNK, CPU_COLUMNS = 256, 64


def cpu_tiling(heads: int, kv_heads: int) -> Tiling:
    """Return the tiling of the compiled CPU kernels."""
    return Tiling(CPU_COLUMNS, CPU_CHUNK, heads // kv_heads, kv_heads, aligned=True)


def of_launch(launch: Any, view: CacheView) -> Tiling:
    """Return the tiling of a launch of ops/paged_attention_triton.py."""
    arguments, sequences = launch.arguments, len(view.lengths)
    listed = arguments["LISTED"]
    return Tiling(
        arguments["BLOCK_M"], arguments["BLOCK_N"], arguments["GROUP"], launch.grid[1],
        1 if listed else launch.grid[2], launch.grid[0] - sequences if listed else None,
    )  # fmt: skip


def tile_statistics(
    lengths: Sequence[int], queries: Sequence[int], tiling: Tiling, window: int | None = None, tree: Tree | None = None
) -> TileStatistics:
    """Return the tiles of a step. lengths, queries: L and T of each sequence. tree: of a single sequence."""
    parts = _listed(lengths, tiling) if tiling.programs is not None else None
    total = TileStatistics()
    for s, (L, T) in enumerate(zip(lengths, queries, strict=True)):
        for first in range(0, T * tiling.group, tiling.rows):
            last = min(first + tiling.rows, T * tiling.group) - 1
            tokens = range(first // tiling.group, last // tiling.group + 1)
            lowest, highest = L - T + tokens[0], L - T + tokens[-1]
            if tree is not None:
                lowest, highest = L - len(tree[0]), L - 1
            spans = _split(lowest, highest, L, tiling, window) if parts is None else _clipped(parts[s], highest)
            for begin, end, limit in spans:
                total += _tiles(begin, end, limit, L, T, tokens, tiling, window, tree)
    return total.times(tiling.kv_heads)


def _listed(lengths: Sequence[int], tiling: Tiling) -> list[list[tuple[int, int]]]:
    """Rows [begin, end) of every piece of each sequence."""
    assert tiling.programs is not None
    parts: list[list[tuple[int, int]]] = [[] for _ in lengths]
    numbers = pieces(lengths, tiling.programs)[: -2 * len(lengths)]
    for s, begin, end in zip(numbers[::4], numbers[1::4], numbers[2::4], strict=True):
        if s >= 0:
            parts[s].append((begin, end))
    return parts


def _parts(count: int, size: int) -> int:
    """Parts of so many rows, of which the last may be smaller."""
    return -(-count // size)


# Rows [begin, end) that a program computes, and the end of those that are its part of the table.
Span = tuple[int, int, int]


def _clipped(parts: Sequence[tuple[int, int]], highest: int) -> Iterator[Span]:
    return ((begin, max(begin, min(end, highest + 1)), end) for begin, end in parts)


def _split(lowest: int, highest: int, L: int, tiling: Tiling, window: int | None) -> Iterator[Span]:
    """Spans of a query tile's splits, as in `share` (ops/attention_program_triton.py), after those that none reads."""
    N = tiling.positions
    low = max(0, lowest - window + 1) if window else 0
    if tiling.aligned:
        low = low // N * N
    share = _parts(_parts(highest + 1 - low, tiling.splits), N) * N
    yield 0, 0, low
    for split in range(tiling.splits):
        begin = min(low + split * share, highest + 1)
        end = min(begin + share, highest + 1)
        yield begin, end, L if begin < end == highest + 1 else end


def _tiles(
    begin: int, end: int, limit: int, L: int, T: int, tokens: range, tiling: Tiling, window: int | None,
    tree: Tree | None,
) -> TileStatistics:  # fmt: skip
    """Tiles of a span, in which queries see rows of the window and, in a tree, their ancestors."""
    N = tiling.positions
    executed = _parts(end - begin, N)
    skipped = _parts(limit - begin, N) - executed
    # Windows of consecutive tokens overlap, so without a tree every row of a span is visible to one of them.
    empty = 0
    for at in range(begin, end, N) if tree is not None else ():
        rows = range(at, min(at + N, end))
        empty += not any(sees(token, row, L, T, window, tree) for token in tokens for row in rows)
    return TileStatistics(executed + skipped, skipped, executed, empty)


def sees(token: int, row: int, L: int, T: int, window: int | None, tree: Tree | None = None) -> bool:
    """Return whether a query token sees a row (CacheView.visible)."""
    if tree is None:
        distance = L - T + token - row
    else:
        before = L - len(tree[0])
        distance = tree[token][row - before] if row >= before else before + max(tree[token]) - row
    return 0 <= distance < (window or L + 1)
