"""Block tables with a copy on the device, so that a step uploads only the columns that have changed.

A sequence has a row of the copy from its start to its end. Before a step, the changed columns of the step's sequences
are written there, and the step's table is selected from it: a decode step of a long context uploads a few numbers
instead of the whole table.

Legend: G cache groups, R rows of the copy, C columns of the copy, S sequences of a step, B columns of a step's table.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

from mlaforge.engine.cache.block_tables import BlockTables, CacheGroup
from mlaforge.runtime import on_device

# Initial size of the copy, which grows by doubling.
ROWS, COLUMNS = 16, 64


class DeviceTables(BlockTables):
    """BlockTables with a copy on `device`: int32 [G, R, C]. No method waits for the device."""

    def __init__(
        self, groups: Sequence[CacheGroup], block_size: int, caching: bool = True, lookback: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        super().__init__(groups, block_size, caching, lookback)
        self.device = torch.device(device)
        self._copy_GRC = torch.zeros(len(self.groups), ROWS, COLUMNS, dtype=torch.int32, device=self.device)
        self._rows: dict[int, int] = {}
        self._free_rows: list[int] = []

    def start(self, seq: int, token_ids: Sequence[int], reuse: bool = True) -> int:
        cached = super().start(seq, token_ids, reuse)
        self._add_row(seq)
        return cached

    def fork(self, parent: int, child: int) -> None:
        super().fork(parent, child)
        self._add_row(child)

    def free(self, seq: int) -> None:
        super().free(seq)
        heapq.heappush(self._free_rows, self._rows.pop(seq))

    def _add_row(self, seq: int) -> None:
        # A sequence that starts again after a rewind to nothing has a row.
        if seq not in self._rows:
            self._rows[seq] = heapq.heappop(self._free_rows) if self._free_rows else len(self._rows)

    @torch.inference_mode()
    def table_SB(self, seqs: Sequence[int], group: int) -> Tensor:
        """Return the blocks of these sequences as int32 [S, B] on the device, as in `table`. B is the number of blocks
        of the longest sequence; columns after the last block of a shorter one have arbitrary block numbers."""
        columns = max(len(self.table(seq, group)[1]) for seq in seqs)
        self._grow(len(self._rows) + len(self._free_rows), columns)
        _, R, C = self._copy_GRC.shape
        rows = [self._rows[seq] for seq in seqs]
        indices: list[int] = []
        blocks: list[int] = []
        for seq, row in zip(seqs, rows, strict=True):
            column, changed = self.take_changes(seq, group)
            begin = (group * R + row) * C + column
            indices += range(begin, begin + len(changed))
            blocks += changed
        # In one upload.
        uploaded = on_device([*rows, *indices, *blocks], torch.int64, self.device)
        rows_S, indices_n, blocks_n = uploaded.split([len(rows), len(indices), len(blocks)])
        if indices:
            self._copy_GRC.view(-1).index_copy_(0, indices_n, blocks_n.int())
        return self._copy_GRC[group, :, :columns].index_select(0, rows_S)

    def _grow(self, rows: int, columns: int) -> None:
        """Make room for this many rows and columns."""
        G, R, C = self._copy_GRC.shape
        if rows <= R and columns <= C:
            return
        while rows > R:
            R *= 2
        while columns > C:
            C *= 2
        grown = self._copy_GRC.new_zeros(G, R, C)
        grown[:, : self._copy_GRC.shape[1], : self._copy_GRC.shape[2]] = self._copy_GRC
        self._copy_GRC = grown
