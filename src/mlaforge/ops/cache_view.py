"""What the queries of one step see of the paged cache. Built only in engine/execution/batch.py, read by attention ops.

Every layer has one tensor of cached rows, [num_blocks * block_size, width]: slot = block * block_size + offset. Packed
rows may have a second tensor, of unquantized blocks (ops/paged_rows.py), whose slots follow. Keys are rotated when they
are written (or, in the `latent` layout, when they are read), so a view may have gaps.

Legend: S sequences of the step, N query tokens of all of them, concatenated, B columns of the block table; of one
sequence: T query tokens, L rows that they read, n rows of a tree.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from mlaforge.runtime import uploaded


@dataclasses.dataclass(frozen=True)
class CacheView:
    """Query token t (0-based, of T) of sequence s is at position seq_len - T + t. It sees every cached position up to
    and including its own, or the last `window` of these.

    block_table_SB  int32: column b is the block of positions first + b * block_size onwards; columns after a sequence's
                    last block contain any valid block number
    seq_lens_S      int32: length after this step's tokens are written
    first_S         int32: position of the table's first row; a multiple of block_size, 0 without a window
    query_start_S1  int32: row of each sequence's first query token among the N; the last element is N
    slots_N         int64: slots that this step's tokens are written to
    packs_2K        int64, or None: unquantized blocks that become full, and the packed blocks that replace them before
                    any query reads

    tree_Tn         int32, for a single sequence: its last n rows are a tree of drafted tokens instead of text. Distance
                    from query token t back to the j-th of them, -1 if not visible: only ancestors and the token itself
                    are. Token t is max(tree_Tn[t]) behind the first row of the tree, and sees all rows before the tree
                    within its window

    generating      per sequence, whether its tokens were generated or drafted: sparse layers then read a selection.
                    Empty: none were
    positions_SK    int32, or None: for a selection (ops/token_selection.py), text positions of the table's rows;
                    `counts`, on the host, are the rows of each sequence. Otherwise positions count rows from first_S

    Host values, so that no kernel launch synchronises: `max_query` and `max_seq_len` are upper bounds for the step
    (graphs round them up), `queries` is T per sequence, `lengths` the tokens in each sequence's table, including this
    step's, and `runs` the ranges of consecutive slots (start, length) with these tokens. Computing `runs` reads every
    block number; use `lengths` if only the number of tokens matters. `runs` must be read in the step that the view was
    built for (engine/cache/view.py).
    """

    block_table_SB: Tensor
    seq_lens_S: Tensor
    first_S: Tensor
    query_start_S1: Tensor
    slots_N: Tensor
    block_size: int
    max_query: int
    max_seq_len: int
    window: int | None = None
    queries: tuple[int, ...] = ()
    runs: Sequence[tuple[tuple[int, int], ...]] = ()
    tree_Tn: Tensor | None = None
    packs_2K: Tensor | None = None
    generating: tuple[bool, ...] = ()
    positions_SK: Tensor | None = None
    counts: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()

    def step_rows(self, queries: int) -> int:
        """Number of last rows that not every query token of a sequence sees: the step's own rows, or the tree."""
        return queries if self.tree_Tn is None else self.tree_Tn.shape[1]

    def visible(self, T: int, L: int) -> Tensor:
        """Visibility of a sequence's last L rows, including a tree, for its T query tokens: bool [T, L]."""
        at_L = torch.arange(L, device=self.slots_N.device)
        if self.tree_Tn is None:
            distance = at_L[-T:, None] - at_L
        else:
            before = L - self.tree_Tn.shape[1]
            position_T1 = before + self.tree_Tn.amax(1, keepdim=True)
            distance = torch.cat((position_T1 - at_L[:before], self.tree_Tn), dim=1)
        return (distance >= 0) & (distance < (self.window or L))

    def positions(self, index: int, L: int) -> Tensor | None:
        """Positions of sequence `index`'s last L rows, int64 [L]: text positions for a selection, otherwise relative to
        the first of these rows. None if they are 0, 1, 2, .... For a tree, the query tokens must be the whole tree."""
        if self.positions_SK is not None:
            at_L = self.positions_SK[index, :L].long()
        elif self.tree_Tn is None:
            return None
        else:
            at_L = torch.arange(L, device=self.tree_Tn.device)
        if self.tree_Tn is None:
            return at_L
        T, n = self.tree_Tn.shape
        assert n == T, f"{T} query tokens of a tree of {n}"
        return torch.cat((at_L[: L - n], at_L[L - n] + self.tree_Tn.amax(1).long()))

    def selected_counts(self, topk: int, window: int) -> tuple[int, ...] | None:
        """Number of tokens per sequence that a sparse layer with this budget reads, if it always reads the newest
        `window`; None if it reads all tokens. Steps longer than the window read all: no token could be left out."""
        if not any(self.generating):
            return None
        if (topk, window) not in self._selected_counts:
            counts = tuple(
                min(length, topk) if sparse and window >= T else length
                for length, T, sparse in zip(self.lengths, self.queries, self.generating, strict=True)
            )
            self._selected_counts[topk, window] = None if counts == self.lengths else counts
        return self._selected_counts[topk, window]

    @functools.cached_property
    def _selected_counts(self) -> dict[tuple[int, int], tuple[int, ...] | None]:
        return {}

    @functools.cached_property
    def dense_slots(self) -> tuple[Tensor, Tensor]:
        """Slots [S, L] int64 and visibility [S, L], for copying the rows of steps with one query token per sequence.

        Invisible entries repeat a slot of the sequence itself, because slots of other sequences may contain NaN.
        """
        at_L = torch.arange(max(self.lengths), device=self.seq_lens_S.device)
        position_SL = self.first_S[:, None] + at_L
        slots_SL = self.block_table_SB[:, at_L // self.block_size].long() * self.block_size + at_L % self.block_size
        seen_SL = position_SL < self.seq_lens_S[:, None]
        if self.window is not None:
            seen_SL &= position_SL >= self.seq_lens_S[:, None] - self.window
        return torch.where(seen_SL, slots_SL, self.slots_N[:, None]), seen_SL

    @functools.cached_property
    def gathered(self) -> tuple[Tensor, CacheView]:
        """The blocks of all sequences, concatenated, int64; and this view of a cache that consists of exactly these
        blocks. Uses host values only."""
        size, device = self.block_size, self.slots_N.device
        counts = [-(-length // size) for length in self.lengths]
        begins = [0, *itertools.accumulate(counts)]
        used_SB = torch.arange(self.block_table_SB.shape[1]) < torch.tensor(counts)[:, None]
        table_SB = torch.zeros(used_SB.shape, dtype=torch.int32)
        table_SB[used_SB] = torch.arange(begins[-1], dtype=torch.int32)
        sequences = list(zip(begins[:-1], self.lengths, self.queries, strict=True))
        slots_N = torch.cat([torch.arange(b * size + n - T, b * size + n) for b, n, T in sequences])
        # Indices instead of a mask, whose number of blocks would need a synchronisation.
        used = uploaded(used_SB.flatten().nonzero()[:, 0], device)
        return self.block_table_SB.flatten().index_select(0, used).long(), dataclasses.replace(
            self, block_table_SB=uploaded(table_SB, device), slots_N=uploaded(slots_N, device),
            runs=tuple(((begin * size, length),) for begin, length, _ in sequences),
        )  # fmt: skip

    @functools.cached_property
    def _masks(self) -> dict[torch.dtype, Tensor]:
        return {}

    def dense(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return `dense_slots` with the visibility as an additive mask [S, 1, 1, L] in `dtype`."""
        slots_SL, seen_SL = self.dense_slots
        if dtype not in self._masks:
            mask = torch.zeros_like(seen_SL, dtype=dtype).masked_fill_(~seen_SL, -torch.inf)
            self._masks[dtype] = mask[:, None, None]
        return slots_SL, self._masks[dtype]

    def sequence(self, index: int, rows_LW: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the rows of a layer that sequence `index` reads, [1, L, W], in order (a view if its slots are
        consecutive), and the mask of its T query tokens, [1, 1, T, L] bool, or None if each sees all rows."""
        if index not in self._sequences:
            self._sequences[index] = self._slots_and_mask(index)
        slots, mask = self._sequences[index]
        return (rows_LW[slots] if isinstance(slots, slice) else rows_LW.index_select(0, slots))[None], mask

    @functools.cached_property
    def _sequences(self) -> dict[int, tuple[slice | Tensor, Tensor | None]]:
        return {}

    def _slots_and_mask(self, index: int) -> tuple[slice | Tensor, Tensor | None]:
        T, device = self.queries[index], self.slots_N.device
        if self.positions_SK is not None:
            count = self.counts[index]
            mask = self.visible(T, count)[None, None] if T > 1 or self.tree_Tn is not None else None
            return self.block_table_SB[index, :count].long(), mask
        total = self.lengths[index]
        L = total if self.window is None else min(total, self.step_rows(T) - 1 + self.window)
        mask = self.visible(T, L)[None, None] if T > 1 or self.tree_Tn is not None else None
        runs, before = [], total - L
        for start, length in self.runs[index]:
            if length > before:
                runs.append((start + before, length - before))
            before = max(0, before - length)
        # Host values only: no synchronisation.
        if all(start + length == following for (start, length), (following, _) in itertools.pairwise(runs)):
            return slice(runs[0][0], runs[0][0] + L), mask
        return uploaded(torch.cat([torch.arange(start, start + length) for start, length in runs]), device), mask
