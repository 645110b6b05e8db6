"""The cached rows of one layer: their format, and the memory that holds them.

Legend: L slots (block * block_size + offset), N tokens, W numbers of a row, B blocks.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.row_format import Plain, RowFormat


@dataclasses.dataclass(frozen=True)
class PagedRows:
    """`packed` holds one unit of `format` a row, block after block. `dtype` is the model's."""

    format: RowFormat
    packed: Tensor
    dtype: torch.dtype

    @classmethod
    def empty(cls, format: RowFormat, slots: int, dtype: torch.dtype, device: torch.device) -> PagedRows:
        """Room for so many tokens, not cleared."""
        return cls(format, format.empty(slots // format.tokens, device), dtype)

    @property
    def slots(self) -> int:
        return len(self.packed) * self.format.tokens

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
        self.format.write(self.packed, slots_N, row_NW)

    def numbers(self, view: CacheView) -> tuple[Tensor, CacheView]:
        """[L, W] in the model's dtype, and what the queries of `view` see of it: the cache itself where it is plain,
        else what it holds of the view's sequences, decoded."""
        if self.plain:
            return self.packed, view
        blocks_B, gathered = view.gathered
        units = view.block_size // self.format.tokens
        at = (blocks_B[:, None] * units + torch.arange(units, device=blocks_B.device)).flatten()
        return self.format.read(self.packed, at).to(self.dtype), gathered

    def move(self, slots_N: Tensor, kept: list[int]) -> None:
        """Of the rows that a step has written to `slots_N` those numbered `kept`, rising, to where its first are."""
        assert self.format.tokens == 1, f"{self.format} packs several rows together"
        rows = self.packed.view(torch.uint8)
        rows[slots_N[: len(kept)]] = rows[slots_N[kept]]

    def copy(self, source: int, target: int, block_size: int) -> None:
        """Block `source` to block `target`."""
        units = block_size // self.format.tokens
        self.packed[target * units : (target + 1) * units] = self.packed[source * units : (source + 1) * units]
