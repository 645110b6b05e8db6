"""The cached rows of one layer: their format, and the memory that holds them.

Legend: L slots (block * block_size + offset), N tokens, W numbers of a row, B blocks, K blocks that become full.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.kept_keys import KeptKeys
from mlaforge.ops.native import kernels
from mlaforge.ops.row_format import Plain, RowFormat
from mlaforge.ops.token_selection import TOGETHER, empty_keys, keys_at


@dataclasses.dataclass(frozen=True)
class PagedRows:
    """`packed` holds one unit of `format` a row, block after block; the slots behind its own are those of `whole`,
    [L, W] in bf16. `dtype` is the model's. Of a sparse layer `index` are index keys (ops/token_selection.py), and
    `kept` decompressed keys (ops/kept_keys.py)."""

    format: RowFormat
    packed: Tensor
    dtype: torch.dtype
    whole: Tensor | None = None
    index: Tensor | None = None
    kept: KeptKeys | None = None

    @classmethod
    def empty(
        cls, format: RowFormat, slots: int, dtype: torch.dtype, device: torch.device, whole: int = 0, index: int = 0,
        keys: int = 0,
    ) -> PagedRows:  # fmt: skip
        """Room for so many tokens, and so many more in whole blocks; not cleared. `index`: numbers of an index key;
        `keys`: of decompressed keys that are kept."""
        if isinstance(format, Plain):
            slots, whole = slots + whole, 0
        rows = torch.empty(whole, format.width, dtype=torch.bfloat16, device=device) if whole else None
        index_keys = empty_keys(slots, index, device) if index else None
        kept = KeptKeys.empty(slots + whole, keys) if keys else None
        return cls(format, format.empty(slots // format.tokens, device), dtype, rows, index_keys, kept)

    @property
    def slots(self) -> int:
        """Those of `packed`."""
        return len(self.packed) * self.format.tokens

    @property
    def tensors(self) -> list[Tensor]:
        kept = (self.kept.keys, self.kept.places) if self.kept is not None else ()
        return [tensor for tensor in (self.packed, self.whole, self.index, *kept) if tensor is not None]

    @property
    def plain(self) -> bool:
        """Whether `packed` is [L, W] in the model's dtype, which any attention reads as it lies."""
        return isinstance(self.format, Plain) and self.format.dtype == self.dtype

    @property
    def direct(self) -> bool:
        """Whether attention reads `packed` as it lies: what a GPU's kernel multiplies, it casts before."""
        return self.plain or (isinstance(self.format, Plain) and self.packed.device.type == "cuda")

    def write(self, slots_N: Tensor, row_NW: Tensor) -> None:
        """The rows of a step's tokens, each to its slot."""
        if self.whole is None:
            self.format.write(self.packed, slots_N, row_NW)
            return
        whole = slots_N >= self.slots
        self.whole.index_copy_(0, slots_N[whole] - self.slots, row_NW[whole].bfloat16())
        if not bool(whole.all()):
            assert self.format.tokens == 1, "a row alone is not packed"
            self.format.write(self.packed, slots_N[~whole], row_NW[~whole])

    def pack(self, packs_2K: Tensor, block_size: int) -> None:
        """Whole blocks, all written, to packed ones: CacheView.packs_2K."""
        sources, targets = packs_2K
        native = kernels() if native_reads(self) else None
        if native is not None:
            native.pack_blocks(*native_rows(self), sources, targets, block_size)
        else:
            self.format.write(self.packed, self._units(targets, block_size), self._whole_rows(sources, block_size))

    def numbers(self, view: CacheView) -> tuple[Tensor, CacheView]:
        """[L, W] in the model's dtype, and what the queries of `view` see of it: the cache itself where it is plain,
        else what it holds of the view's sequences, decoded."""
        if self.plain:
            return self.packed, view
        if view.positions_SK is not None:
            # A selection's blocks are rows.
            table_SK = view.block_table_SB
            rows = self.format.read(self.packed, table_SK.flatten().long()).to(self.dtype)
            places = torch.arange(table_SK.numel(), dtype=torch.int32, device=table_SK.device)
            return rows, dataclasses.replace(view, block_table_SB=places.view_as(table_SK))
        blocks_B, gathered = view.gathered
        size = view.block_size
        if self.whole is None:
            return self.format.read(self.packed, self._units(blocks_B, size)).to(self.dtype), gathered
        whole = blocks_B * size >= self.slots
        rows = torch.empty(len(blocks_B), size, self.format.width, dtype=torch.bfloat16, device=blocks_B.device)
        rows[whole] = self._whole_rows(blocks_B[whole], size).view(-1, *rows.shape[1:])
        rows[~whole] = self.format.read(self.packed, self._units(blocks_B[~whole], size)).view(-1, *rows.shape[1:])
        return rows.flatten(0, 1).to(self.dtype), gathered

    def move(self, slots_N: Tensor, rows_K: Tensor) -> None:
        """Of the rows that a step has written to `slots_N` those numbered `rows_K`, rising, to where its first are."""
        assert self.whole is None, "a row that is packed does not become whole again"
        rows = self.packed.view(torch.uint8)
        to, of = slots_N[: len(rows_K)], slots_N[rows_K]
        rows[to] = rows[of]
        if self.kept is not None:
            self.kept.forget(to)
        if self.index is not None:
            self.index[to // TOGETHER, :, to % TOGETHER] = keys_at(self.index, of)

    def copy(self, source: int, target: int, block_size: int) -> None:
        """Block `source` to block `target`, of one kind."""
        whole = self.whole is not None and source * block_size >= self.slots
        if self.kept is not None:
            self.kept.forget(torch.arange(target * block_size, (target + 1) * block_size))
        if self.index is not None:
            tiles = block_size // TOGETHER
            self.index[target * tiles : (target + 1) * tiles] = self.index[source * tiles : (source + 1) * tiles]
        rows, size = self.packed, block_size // self.format.tokens
        if whole:
            assert self.whole is not None
            first = self.slots // block_size
            rows, size, source, target = self.whole, block_size, source - first, target - first
        rows[target * size : (target + 1) * size] = rows[source * size : (source + 1) * size]

    def _units(self, blocks_B: Tensor, block_size: int) -> Tensor:
        """Of packed blocks."""
        units = block_size // self.format.tokens
        return (blocks_B[:, None] * units + torch.arange(units, device=blocks_B.device)).flatten()

    def _whole_rows(self, blocks_B: Tensor, block_size: int) -> Tensor:
        assert self.whole is not None
        at = blocks_B[:, None] * block_size - self.slots + torch.arange(block_size, device=blocks_B.device)
        return self.whole[at.flatten()]


def native_reads(rows: PagedRows) -> bool:
    """Whether the compiled kernels read and write rows like these."""
    packed = rows.packed
    # They write rows without gaps between them.
    if packed.device.type != "cpu" or rows.dtype != torch.bfloat16 or not packed.is_contiguous():
        return False
    return (rows.plain or packed.dtype == torch.uint8) and kernels() is not None


def native_rows(rows: PagedRows) -> tuple[Tensor, Tensor | None, list[int]]:
    """What the compiled kernels take for a layer's rows."""
    return rows.packed, rows.whole, rows.format.numbers
