"""A CacheView as the host and torch's operations on a CPU read it: runs of consecutive slots, rows side by side, and
rows sequence by sequence. Everything is computed from host values when it is first used, and then shared by the layers.

Legend: S sequences of the step, N query tokens of all of them, L rows of the cache or of a sequence, W elements of a
row; of one sequence: T query tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor

from mlaforge.ops.cache_view import CacheView
from mlaforge.runtime import on_device, uploaded

# Ranges of consecutive slots: (start, length) of each.
SlotRuns = tuple[tuple[int, int], ...]


def host_view(view: CacheView) -> HostView:
    """Return the view as the host reads it; the layers of a step share it."""
    # Stored like a cached property, which would make the modules import each other.
    if "_host_view" not in vars(view):
        vars(view)["_host_view"] = HostView(view)
    host: HostView = vars(view)["_host_view"]
    return host


class HostView:
    """Of one CacheView; `host_view` returns it."""

    def __init__(self, view: CacheView):
        self.view = view
        self._masks: dict[torch.dtype, Tensor] = {}
        self._copied: dict[int, tuple[Tensor, CacheView]] = {}
        self._sequences: dict[int, tuple[slice | Tensor, Tensor | None]] = {}

    @functools.cached_property
    def visible_lengths(self) -> tuple[int, ...]:
        """Number of tokens that the last query token of each sequence sees, without a window."""
        view = self.view
        if view.tree_Tn is None:
            return view.lengths
        last_rows = [stop - 1 for stop in itertools.accumulate(view.queries)]
        depths = view.tree_Tn.amax(1).tolist()
        before = view.tree_Tn.shape[1] - 1
        return tuple(length - before + depths[row] for length, row in zip(view.lengths, last_rows, strict=True))

    @property
    def visible_nodes(self) -> tuple[int, ...]:
        """Number of tokens that each node of a tree sees."""
        assert self.view.tree_Tn is not None
        before = self.view.lengths[0] - self.view.tree_Tn.shape[1] + 1
        return tuple(before + depth for depth in self.view.tree_Tn.amax(1).tolist())

    @functools.cached_property
    def dense_slots(self) -> tuple[Tensor, Tensor]:
        """Slots [S, L] int64 and visibility [S, L], for copying the rows of steps with one query token per sequence.

        Invisible entries repeat a slot of the sequence itself, because slots of other sequences may contain NaN.
        """
        view, size = self.view, self.view.block_size
        at_L = torch.arange(max(view.lengths), device=view.seq_lens_S.device)
        position_SL = view.first_S[:, None] + at_L
        slots_SL = view.block_table_SB[:, at_L // size].long() * size + at_L % size
        seen_SL = position_SL < view.seq_lens_S[:, None]
        if view.window is not None:
            seen_SL &= position_SL >= view.seq_lens_S[:, None] - view.window
        return torch.where(seen_SL, slots_SL, view.slots_N[:, None]), seen_SL

    def dense(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return `dense_slots` with the visibility as an additive mask [S, 1, 1, L] in `dtype`."""
        slots_SL, seen_SL = self.dense_slots
        if dtype not in self._masks:
            mask = torch.zeros_like(seen_SL, dtype=dtype).masked_fill_(~seen_SL, -torch.inf)
            self._masks[dtype] = mask[:, None, None]
        return slots_SL, self._masks[dtype]

    @functools.cached_property
    def gathered(self) -> tuple[Tensor, CacheView]:
        """The blocks of all sequences, concatenated, int64; and the view of a cache that consists of exactly these
        blocks."""
        view = self.view
        size, device = view.block_size, view.slots_N.device
        counts = [-(-length // size) for length in view.lengths]
        begins = [0, *itertools.accumulate(counts)]
        used_SB = torch.arange(view.block_table_SB.shape[1]) < torch.tensor(counts)[:, None]
        table_SB = torch.zeros(used_SB.shape, dtype=torch.int32)
        table_SB[used_SB] = torch.arange(begins[-1], dtype=torch.int32)
        sequences = list(zip(begins[:-1], view.lengths, view.queries, strict=True))
        slots_N = torch.cat([torch.arange(b * size + n - T, b * size + n) for b, n, T in sequences])
        # Indices instead of a mask, whose number of blocks would need a synchronisation.
        used = uploaded(used_SB.flatten().nonzero()[:, 0], device)
        return view.block_table_SB.flatten().index_select(0, used).long(), dataclasses.replace(
            view, block_table_SB=uploaded(table_SB, device), slots_N=uploaded(slots_N, device),
            runs=tuple(((begin * size, length),) for begin, length, _ in sequences),
        )  # fmt: skip

    def copied(self, index: int) -> tuple[Tensor, CacheView]:
        """Return the blocks that the query tokens of sequence `index` read, int64, and the view of a cache of exactly
        these blocks and this sequence, whose positions count from its first row."""
        if index not in self._copied:
            view, size = self.view, self.view.block_size
            T, total, device = view.queries[index], view.lengths[index], view.slots_N.device
            first = 0 if view.window is None else max(0, total - T - view.window + 1) // size
            length = total - first * size
            count = -(-length // size)
            numbers = on_device([length, 0, T, 0, *range(count)], torch.int32, device)
            self._copied[index] = (
                view.block_table_SB[index, first : first + count].long(),
                CacheView(
                    numbers[4:][None], numbers[:1], numbers[3:4], numbers[1:3], view.slots_N[:0], size, T, length,
                    view.window, (T,), (((0, length),),), lengths=(length,),
                ),
            )  # fmt: skip
        return self._copied[index]

    def sequence(self, index: int, rows_LW: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the rows of a layer that sequence `index` reads, [1, L, W], in order (a view if its slots are
        consecutive), and the mask of its T query tokens, [1, 1, T, L] bool, or None if each sees all rows."""
        if index not in self._sequences:
            self._sequences[index] = self._slots_and_mask(index)
        slots, mask = self._sequences[index]
        return (rows_LW[slots] if isinstance(slots, slice) else rows_LW.index_select(0, slots))[None], mask

    def _slots_and_mask(self, index: int) -> tuple[slice | Tensor, Tensor | None]:
        view = self.view
        T, device = view.queries[index], view.slots_N.device
        if view.positions_SK is not None:
            count = view.counts[index]
            mask = view.visible(T, count)[None, None] if T > 1 or view.tree_Tn is not None else None
            return view.block_table_SB[index, :count].long(), mask
        total = view.lengths[index]
        L = total if view.window is None else min(total, view.step_rows(T) - 1 + view.window)
        mask = view.visible(T, L)[None, None] if T > 1 or view.tree_Tn is not None else None
        runs, before = [], total - L
        for start, length in view.runs[index]:
            if length > before:
                runs.append((start + before, length - before))
            before = max(0, before - length)
        # Host values only: no synchronisation.
        if all(start + length == following for (start, length), (following, _) in itertools.pairwise(runs)):
            return slice(runs[0][0], runs[0][0] + L), mask
        return uploaded(torch.cat([torch.arange(start, start + length) for start, length in runs]), device), mask


class Runs(Sequence[SlotRuns]):
    """CacheView.runs, computed for a sequence when it is first read: most steps never read it.

    `blocks` are the lists of the block tables, which change when the step is committed: read runs before that.
    """

    def __init__(self, blocks: Sequence[Sequence[int]], lengths: Sequence[int], block_size: int):
        self._blocks, self._lengths, self._block_size = blocks, lengths, block_size
        self._computed: dict[int, SlotRuns] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def take(self, sequences: Sequence[int]) -> Runs:
        """Return the runs of some sequences, in any order and number."""
        return Runs([self._blocks[s] for s in sequences], [self._lengths[s] for s in sequences], self._block_size)

    @overload
    def __getitem__(self, index: int) -> SlotRuns: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[SlotRuns, ...]: ...

    def __getitem__(self, index: int | slice) -> SlotRuns | tuple[SlotRuns, ...]:
        selected = range(len(self))[index]
        if isinstance(selected, range):
            return tuple(self[sequence] for sequence in selected)
        if selected not in self._computed:
            self._computed[selected] = _runs(self._blocks[selected], self._lengths[selected], self._block_size)
        return self._computed[selected]


def _runs(blocks: Sequence[int], rows: int, size: int) -> SlotRuns:
    """Runs of consecutive slots (start, length) that hold the first `rows` rows of `blocks`."""
    needed = blocks[: -(-rows // size)]
    if needed == list(range(needed[0], needed[0] + len(needed))):
        # The common case, and many times faster to detect than block by block.
        return ((needed[0] * size, rows),)
    runs: list[tuple[int, int]] = []
    begin = 0
    for end in range(1, len(needed) + 1):
        if end == len(needed) or needed[end] != needed[end - 1] + 1:
            # The last block may be partly filled.
            runs.append((needed[begin] * size, min(end * size, rows) - begin * size))
            begin = end
    return tuple(runs)
