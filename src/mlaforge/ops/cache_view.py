"""What the queries of one step see of the paged cache. Built only in engine/cache/view.py, read by attention ops.

Every layer has one tensor of cached rows, [num_blocks * block_size, width]: slot = block * block_size + offset. Packed
rows may have a second tensor, of unquantized blocks (ops/paged_rows.py), whose slots follow. Keys are rotated when they
are written (or, in the `latent` layout, when they are read), so a view may have gaps.

Legend: S sequences of the step, N query tokens of all of them, concatenated, B columns of the block table; of one
sequence: T query tokens, L rows that they read, n rows of a tree.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mlaforge.runtime import on_device


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
                    within its window. Token selection also takes it with each token as a sequence of the same rows

    generating      per sequence, whether its tokens were generated or drafted, as opposed to prompt tokens, which
                    latent layers compute in another form. Empty: none were
    selecting       per sequence, whether sparse layers read a selection for its tokens. Empty: for none
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
    selecting: tuple[bool, ...] = ()
    positions_SK: Tensor | None = None
    counts: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()

    @property
    def prompts(self) -> list[bool]:
        """Whether each sequence's tokens are prompt tokens."""
        return [not generated for generated in self.generating] or [True] * len(self.seq_lens_S)

    @property
    def readings(self) -> list[int]:
        """How each sequence's tokens read the cache in the layout `latent`: 0 all rows, 1 as prompt tokens, 2
        selections (which may be all rows). As `enum class Reading` in ops/cpu/attention/prompt_attention.h."""
        selecting = self.selecting or (False,) * len(self.seq_lens_S)
        return [1 if prompt else 2 * chosen for prompt, chosen in zip(self.prompts, selecting, strict=True)]

    def part(self, sequences: Sequence[int]) -> tuple[CacheView, Tensor]:
        """Return the view of some sequences of a step without a tree, and the rows of their tokens among the N,
        int64."""
        assert self.tree_Tn is None
        device = self.slots_N.device
        starts = [0, *itertools.accumulate(self.queries)]
        rows_N = on_device([n for s in sequences for n in range(starts[s], starts[s + 1])], torch.int64, device)
        index_S = on_device(list(sequences), torch.int64, device)

        def of_part(values: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(values[s] for s in sequences) if values else ()

        queries = of_part(self.queries)
        return dataclasses.replace(
            self, block_table_SB=self.block_table_SB[index_S], seq_lens_S=self.seq_lens_S[index_S],
            first_S=self.first_S[index_S], slots_N=self.slots_N[rows_N], queries=queries,
            lengths=of_part(self.lengths), runs=of_part(self.runs),
            query_start_S1=on_device([0, *itertools.accumulate(queries)], torch.int32, device),
            max_query=max(queries), generating=of_part(self.generating), selecting=of_part(self.selecting),
            counts=of_part(self.counts), positions_SK=None if self.positions_SK is None else self.positions_SK[index_S],
        ), rows_N  # fmt: skip

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
