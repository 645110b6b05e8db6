"""The cached rows of one layer: their storage format and their memory.

Legend: L slots (block * block_size + offset), N tokens, W elements of a row, B blocks, K blocks that are quantized.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.coded_rows import PACK_ROWS, UNPACK_ROWS
from mlaforge.ops.decompressed_keys import DecompressedKeys
from mlaforge.ops.dispatch import Op
from mlaforge.ops.host_view import host_view
from mlaforge.ops.native import kernel, supports_device, supports_row_format
from mlaforge.ops.row_formats.format import RowFormat
from mlaforge.ops.row_formats.int8 import Int8
from mlaforge.ops.row_formats.plain import Plain
from mlaforge.ops.token_selection import KEY_TILE, empty_keys, keys_at


@dataclasses.dataclass(frozen=True)
class PagedRows:
    """packed             one unit of `format` per row, block after block
    unquantized        [L, W] in bf16, or None: the blocks that stay unquantized; their slots follow those of `packed`
    dtype              the model's
    index              index keys of a sparse layer, or None (ops/token_selection.py)
    decompressed_keys  of a sparse `latent` layer, or None (ops/decompressed_keys.py)
    """

    format: RowFormat
    packed: Tensor
    dtype: torch.dtype
    unquantized: Tensor | None = None
    index: Tensor | None = None
    decompressed_keys: DecompressedKeys | None = None

    @classmethod
    def empty(
        cls, format: RowFormat, slots: int, dtype: torch.dtype, device: torch.device, unquantized: int = 0,
        index_width: int = 0, key_format: Int8 | None = None,
    ) -> PagedRows:  # fmt: skip
        """Allocate uninitialised memory for `slots` tokens, and `unquantized` more in unquantized blocks. Elements of
        an index key: `index_width`, 0 for none. key_format: of a token's decompressed keys."""
        if isinstance(format, Plain):
            slots, unquantized = slots + unquantized, 0
        rows = torch.empty(unquantized, format.width, dtype=torch.bfloat16, device=device) if unquantized else None
        index_keys = empty_keys(slots, index_width, device) if index_width else None
        keys = DecompressedKeys.empty(slots + unquantized, key_format) if key_format else None
        return cls(format, format.empty(slots // format.tokens, device), dtype, rows, index_keys, keys)

    @property
    def device(self) -> torch.device:
        return self.packed.device

    @property
    def slots(self) -> int:
        """Number of slots in `packed`."""
        return len(self.packed) * self.format.tokens

    @property
    def tensors(self) -> list[Tensor]:
        keys = self.decompressed_keys
        parts = (self.packed, self.unquantized, self.index, *((keys.keys, keys.metadata) if keys is not None else ()))
        return [tensor for tensor in parts if tensor is not None]

    @property
    def plain(self) -> bool:
        """Whether `packed` is [L, W] in the model's dtype, which every attention op reads in place."""
        return isinstance(self.format, Plain) and self.format.torch_dtype == self.dtype

    @property
    def direct(self) -> bool:
        """Whether attention reads `packed` in place: on a GPU the kernel casts other dtypes itself."""
        return self.plain or (isinstance(self.format, Plain) and self.packed.device.type == "cuda")

    def write(self, slots_N: Tensor, row_NW: Tensor) -> None:
        """Write the rows of a step's tokens to their slots."""
        if self.unquantized is None:
            if self.format.coded:
                PACK_ROWS(row_NW, self.format, self.packed, slots_N)
            else:
                self.format.write(self.packed, slots_N, row_NW)
            return
        unquantized = slots_N >= self.slots
        self.unquantized.index_copy_(0, slots_N[unquantized] - self.slots, row_NW[unquantized].bfloat16())
        if not bool(unquantized.all()):
            assert self.format.tokens == 1, "a row alone is not packed"
            self.format.write(self.packed, slots_N[~unquantized], row_NW[~unquantized])

    def pack(self, packs_2K: Tensor, block_size: int) -> None:
        """Quantize full unquantized blocks into packed ones (CacheView.packs_2K)."""
        PACK_BLOCKS(self, packs_2K, block_size)

    def decode(self, view: CacheView) -> tuple[Tensor, CacheView]:
        """Return rows [L, W] in the model's dtype, and `view` addressing them: the cache itself if it is plain, else
        the decoded rows of the view's sequences."""
        if self.plain:
            return self.packed, view
        if view.positions_SK is not None:
            # Blocks of a selection have one row.
            table_SK = view.block_table_SB
            rows = self._unpacked(table_SK.flatten().long())
            row_ids = torch.arange(table_SK.numel(), dtype=torch.int32, device=table_SK.device)
            return rows, dataclasses.replace(view, block_table_SB=row_ids.view_as(table_SK))
        blocks_B, gathered = host_view(view).gathered
        return self.read_blocks(blocks_B, view.block_size), gathered

    def _unpacked(self, units_N: Tensor) -> Tensor:
        """Return the rows at some units of `packed`, [N, W] in the model's dtype."""
        if not self.format.coded:
            return self.format.read(self.packed, units_N).to(self.dtype)
        rows: Tensor = UNPACK_ROWS(self.packed, self.format, units_N)
        return rows.to(self.dtype)

    def read_blocks(self, blocks_B: Tensor, size: int) -> Tensor:
        """Return the rows of blocks of `size` slots, [B size, W] in the model's dtype."""
        if self.unquantized is None:
            return self._unpacked(self.units(blocks_B, size))
        mask_B = blocks_B * size >= self.slots
        rows = torch.empty(len(blocks_B), size, self.format.width, dtype=torch.bfloat16, device=blocks_B.device)
        rows[mask_B] = self.unquantized_rows(blocks_B[mask_B], size).view(-1, *rows.shape[1:])
        rows[~mask_B] = self.format.read(self.packed, self.units(blocks_B[~mask_B], size)).view(-1, *rows.shape[1:])
        return rows.flatten(0, 1).to(self.dtype)

    def move(self, slots_N: Tensor, rows_K: Tensor) -> None:
        """Compact the rows that a step wrote to `slots_N`: rows number `rows_K`, ascending, move to its first slots."""
        assert self.unquantized is None, "a packed row cannot become unquantized again"
        rows = self.packed.view(torch.uint8)
        target, source = slots_N[: len(rows_K)], slots_N[rows_K]
        rows[target] = rows[source]
        if self.decompressed_keys is not None:
            self.decompressed_keys.invalidate(target)
        if self.index is not None:
            self.index[target // KEY_TILE, :, target % KEY_TILE] = keys_at(self.index, source)

    def copy(self, source: int, target: int, block_size: int) -> None:
        """Copy block `source` to block `target`: both packed, or both unquantized."""
        unquantized = self.unquantized is not None and source * block_size >= self.slots
        if self.decompressed_keys is not None:
            self.decompressed_keys.invalidate(torch.arange(target * block_size, (target + 1) * block_size))
        if self.index is not None:
            tiles = block_size // KEY_TILE
            self.index[target * tiles : (target + 1) * tiles] = self.index[source * tiles : (source + 1) * tiles]
        rows, size = self.packed, block_size // self.format.tokens
        if unquantized:
            assert self.unquantized is not None
            first = self.slots // block_size
            rows, size, source, target = self.unquantized, block_size, source - first, target - first
        rows[target * size : (target + 1) * size] = rows[source * size : (source + 1) * size]

    def units(self, blocks_B: Tensor, block_size: int) -> Tensor:
        """Unit numbers of packed blocks."""
        units = block_size // self.format.tokens
        return (blocks_B[:, None] * units + torch.arange(units, device=blocks_B.device)).flatten()

    def unquantized_rows(self, blocks_B: Tensor, block_size: int) -> Tensor:
        """Rows of unquantized blocks."""
        assert self.unquantized is not None
        rows = blocks_B[:, None] * block_size - self.slots + torch.arange(block_size, device=blocks_B.device)
        return self.unquantized[rows.flatten()]


def native_reads(rows: PagedRows) -> bool:
    """Whether the compiled kernels read and write rows like these."""
    return native_supports(rows) is True


def native_supports(rows: PagedRows, *others: Any) -> Literal[True] | str:
    """Return True, or the reason why the compiled kernels do not read and write rows like these."""
    if (reason := supports_device(rows.device)) is not True:
        return reason
    if rows.dtype != torch.bfloat16:
        return f"it supports bfloat16 models, this one is {rows.dtype}"
    if rows.packed.stride(-1) != 1:
        return "elements of a row are not contiguous"
    if not (rows.plain or supports_row_format(rows.format.id)):
        return f"it does not support rows in {rows.format.name}"
    return True


def native_rows(rows: PagedRows) -> tuple[Tensor, Tensor | None, list[int]]:
    """Return the arguments by which the compiled kernels take a layer's rows."""
    return rows.packed, rows.unquantized, rows.format.descriptor


def written_rows(rows: PagedRows, slots_N: Tensor) -> Tensor:
    """Return the rows at some slots in fp32, in units of each row's largest magnitude, so that a step of a quantized
    row is the same for all rows. Slots of a format with several tokens per unit must be unquantized."""
    unquantized = slots_N >= rows.slots
    row_NW = torch.empty(len(slots_N), rows.format.width, device=slots_N.device)
    if rows.unquantized is not None:
        row_NW[unquantized] = rows.unquantized[slots_N[unquantized] - rows.slots].float()
    row_NW[~unquantized] = rows.format.read(rows.packed, slots_N[~unquantized]).float()
    return row_NW / row_NW.abs().amax(1, keepdim=True).clamp_min(1e-30)


def pack_blocks_reference(rows: PagedRows, packs_2K: Tensor, block_size: int) -> None:
    """As PagedRows.pack."""
    sources, targets = packs_2K
    rows.format.write(rows.packed, rows.units(targets, block_size), rows.unquantized_rows(sources, block_size))


def _pack_blocks_native(rows: PagedRows, packs_2K: Tensor, block_size: int) -> None:
    kernel("pack_blocks")(*native_rows(rows), *packs_2K, block_size)


def _packed_blocks(inputs: Sequence[Any], outputs: None) -> Sequence[Tensor]:
    rows, packs_2K, block_size = inputs
    return (rows.format.read(rows.packed, rows.units(packs_2K[1], block_size)),)


PACK_BLOCKS = Op("pack_blocks", pack_blocks_reference, mutates=(0,), observe=_packed_blocks)
PACK_BLOCKS.register_native(native_supports, _pack_blocks_native)
