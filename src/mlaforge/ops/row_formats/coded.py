"""Coded rows of a converted model: each coordinate of the latent with the bits it deserves."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, ClassVar, Self

from mlaforge.modeling.coded_layout_mla import CodedLayout
from mlaforge.ops.row_formats.format import Part, RowFormat

if TYPE_CHECKING:
    from torch import Tensor

    from mlaforge.modeling.coded_rows_mla import CodedRows


@dataclasses.dataclass(frozen=True)
class Coded(RowFormat):
    """Coded rows of a converted model (modeling/coded_rows_mla.py). `counts`: latent coordinates with at least 1, 2,
    ... bits; `rope_dim`: width of the rotary key."""

    counts: tuple[int, ...]
    rope_dim: int = 0

    id: ClassVar = 3
    names: ClassVar = ("coded",)
    coded: ClassVar = True
    devices: ClassVar = ("cpu", "cuda")

    @classmethod
    def make(cls, name: str, group_sizes: tuple[int, ...], counts: tuple[int, ...]) -> Self:
        """`group_sizes`: the latent and, if there is one, the rotary key."""
        assert counts and counts[0] == group_sizes[0], f"a latent of {group_sizes[0]} with the code {counts}"
        return cls(counts, sum(group_sizes[1:]))

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.rope_dim, *self.counts

    @property
    def width(self) -> int:
        return self.counts[0] + self.rope_dim

    @functools.cached_property
    def layout(self) -> CodedLayout:
        return CodedLayout(self.counts, self.rope_dim)

    @functools.cached_property
    def code(self) -> CodedRows:
        from mlaforge.modeling.coded_rows_mla import CodedRows

        return CodedRows(self.counts, self.rope_dim)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The segments of the planes, then the rotary key's scale and codes."""
        layout = self.layout
        parts = [
            Part(f"{part.bits} bits of coordinates from {part.first} on", part.bits, part.coordinates, part.offset)
            for part in layout.segments
        ]
        if self.rope_dim:
            parts += [
                Part("rotary scale", 16, 1, layout.scale_at),
                Part("rotary codes", 8, self.rope_dim, layout.rope_at),
            ]
        return tuple(parts)

    @property
    def unit_bytes(self) -> int:
        return self.layout.row_bytes

    def write(self, rows_UB: Tensor, units_U: Tensor, row_NW: Tensor) -> None:
        rows_UB.index_copy_(0, units_U, self.code.pack(row_NW))

    def read(self, rows_UB: Tensor, units_U: Tensor) -> Tensor:
        return self.code.unpack(rows_UB[units_U])
