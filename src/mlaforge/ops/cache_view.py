"""What the queries of one step may see of the paged cache. Built by engine/batch.py alone, read by attention ops.

Every layer keeps one tensor of cached rows, [num_blocks * block_size, width]: slot = block * block_size + offset.
Keys are rotated when they are written (or where they are read, in the `latent` layout), so gaps in a view are legal.

Legend: S sequences of the step, N query tokens of all of them one after another, B columns of the block table.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor


@dataclasses.dataclass(frozen=True)
class CacheView:
    """Query token t (0-based, of T) of sequence s stands at position seq_len - T + t and sees every cached position
    up to its own, the last `window` of them (its own included) where there is a window.

    block_table_SB  int32: column b holds the block of positions first + b * block_size onwards; unused columns are 0
    seq_lens_S      int32: positions that exist after this step's tokens were written
    first_S         int32: position of the table's first row; a multiple of block_size, 0 without a window
    query_start_S1  int32: row of each sequence's first query token among the N, and N itself last
    slots_N         int64: where this step's tokens are written

    Host numbers, so that no kernel launch waits for the device: `max_query` and `max_seq_len` bound the step (graphs
    round them up), `queries` is T per sequence, and `runs` per sequence the stretches of consecutive slots
    (start, length) that make up its table from `first` to its length.
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
    runs: tuple[tuple[tuple[int, int], ...], ...] = ()
