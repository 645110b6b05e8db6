"""What the queries of one step may see of the paged cache: engine/execution/batch.py alone builds it, attention ops
read it.

Every layer keeps one tensor of cached rows, [num_blocks * block_size, width]: slot = block * block_size + offset. Where
rows are packed it may have a second one, of whole blocks (ops/paged_rows.py), whose slots follow.
Keys are rotated when they are written (or where they are read, in the `latent` layout), so gaps in a view are legal.

Legend: S sequences of the step, N query tokens of all of them one after another, B columns of the block table; of one
sequence T query tokens, L rows that they read, n rows of a tree.
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
    """Query token t (0-based, of T) of sequence s stands at position seq_len - T + t and sees every cached position
    up to its own, the last `window` of them (its own included) where there is a window.

    block_table_SB  int32: column b holds the block of positions first + b * block_size onwards; columns behind a
                    sequence's last block hold the number of some block
    seq_lens_S      int32: positions that exist after this step's tokens were written
    first_S         int32: position of the table's first row; a multiple of block_size, 0 without a window
    query_start_S1  int32: row of each sequence's first query token among the N, and N itself last
    slots_N         int64: where this step's tokens are written
    packs_2K        int64, or None: whole blocks that are full then, and the packed ones that they become before any
                    query reads

    tree_Tn         int32, for one sequence alone: its last n rows are no text but a tree of drafted tokens. How many
                    positions before query token t the j-th of them stands, -1 where it is not seen: only ancestors
                    and the token itself are. Token t then stands max(tree_Tn[t]) behind the first row of the tree,
                    and sees all rows before the tree that its window reaches

    generating      per sequence, whether its tokens were generated or drafted: in sparse layers they read a selection;
                    nothing said, none were
    positions_SK    int32, or None: of a selection (ops/token_selection.py), where the tokens of the table's rows stand
                    in their text; `counts`, host numbers, are the rows of each sequence. All other positions count what
                    is read, from first_S on

    Host numbers, so that no kernel launch waits for the device: `max_query` and `max_seq_len` bound the step (graphs
    round them up), `queries` is T per sequence, `lengths` per sequence how many tokens its table holds, this step's
    among them, and `runs` the stretches of consecutive slots (start, length) that hold them. Computing `runs` takes a
    look at every block: what needs only the number of tokens reads `lengths`. `runs` must be read in the step that the
    view was built for (engine/cache/view.py).
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

    def own(self, queries: int) -> int:
        """The last rows, of which not every query token of a sequence sees all: its own, or the tree."""
        return queries if self.tree_Tn is None else self.tree_Tn.shape[1]

    def visible(self, T: int, L: int) -> Tensor:
        """bool [T, L]: which of the last L rows of a sequence its T query tokens see. L holds the tree."""
        at_L = torch.arange(L, device=self.slots_N.device)
        if self.tree_Tn is None:
            distance = at_L[-T:, None] - at_L
        else:
            before = L - self.tree_Tn.shape[1]
            stands_T1 = before + self.tree_Tn.amax(1, keepdim=True)
            distance = torch.cat((stands_T1 - at_L[:before], self.tree_Tn), dim=1)
        return (distance >= 0) & (distance < (self.window or L))

    def places(self, index: int, L: int) -> Tensor | None:
        """int64 [L]: positions of sequence `index`'s last L rows, of a selection in the text, else counted from the
        first of them; None where they are one by one. The query tokens are the whole tree."""
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

    def reads(self, topk: int, window: int) -> tuple[int, ...] | None:
        """How many tokens of each sequence a sparse layer reads that has such a budget and always reads so many of the
        newest; None where it reads all of every sequence. Of a step longer than that nobody could be left out."""
        if not any(self.generating):
            return None
        if (topk, window) not in self._reads:
            counts = tuple(
                min(length, topk) if sparse and window >= T else length
                for length, T, sparse in zip(self.lengths, self.queries, self.generating, strict=True)
            )
            self._reads[topk, window] = None if counts == self.lengths else counts
        return self._reads[topk, window]

    @functools.cached_property
    def _reads(self) -> dict[tuple[int, int], tuple[int, ...] | None]:
        return {}

    @functools.cached_property
    def dense_slots(self) -> tuple[Tensor, Tensor]:
        """For one query token per sequence: slots [S, L] int64 and which of them it sees [S, L], by copying.

        Where nothing is to be seen stands a slot of the sequence's own: what other sequences left in theirs, even
        NaN, is never read.
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
        """The blocks that hold the sequences' rows, int64, one sequence after another; and this view of a cache in
        which they lie so. From host numbers alone."""
        size, device = self.block_size, self.slots_N.device
        counts = [-(-length // size) for length in self.lengths]
        begins = [0, *itertools.accumulate(counts)]
        held_SB = torch.arange(self.block_table_SB.shape[1]) < torch.tensor(counts)[:, None]
        table_SB = torch.zeros(held_SB.shape, dtype=torch.int32)
        table_SB[held_SB] = torch.arange(begins[-1], dtype=torch.int32)
        sequences = list(zip(begins[:-1], self.lengths, self.queries, strict=True))
        slots_N = torch.cat([torch.arange(b * size + n - T, b * size + n) for b, n, T in sequences])
        # By places rather than by a mask, whose number of blocks the host would wait for.
        places = uploaded(held_SB.flatten().nonzero()[:, 0], device)
        return self.block_table_SB.flatten().index_select(0, places).long(), dataclasses.replace(
            self, block_table_SB=uploaded(table_SB, device), slots_N=uploaded(slots_N, device),
            runs=tuple(((begin * size, length),) for begin, length, _ in sequences),
        )  # fmt: skip

    @functools.cached_property
    def _masks(self) -> dict[torch.dtype, Tensor]:
        return {}

    def dense(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """`dense_slots` with an additive mask [S, 1, 1, L] in `dtype`."""
        slots_SL, seen_SL = self.dense_slots
        if dtype not in self._masks:
            mask = torch.zeros_like(seen_SL, dtype=dtype).masked_fill_(~seen_SL, -torch.inf)
            self._masks[dtype] = mask[:, None, None]
        return slots_SL, self._masks[dtype]

    def sequence(self, index: int, rows_LW: Tensor) -> tuple[Tensor, Tensor | None]:
        """What sequence `index` sees of a layer's rows, [1, L, W], its own last: a view where its slots lie one after
        another. With it the mask of its T query tokens over them, [1, 1, T, L] bool, None where each sees all."""
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
        L = total if self.window is None else min(total, self.own(T) - 1 + self.window)
        mask = self.visible(T, L)[None, None] if T > 1 or self.tree_Tn is not None else None
        runs, before = [], total - L
        for start, length in self.runs[index]:
            if length > before:
                runs.append((start + before, length - before))
            before = max(0, before - length)
        # From host numbers alone: nothing of a step waits for a tensor's value.
        if all(start + length == following for (start, length), (following, _) in itertools.pairwise(runs)):
            return slice(runs[0][0], runs[0][0] + L), mask
        return uploaded(torch.cat([torch.arange(start, start + length) for start, length in runs]), device), mask
