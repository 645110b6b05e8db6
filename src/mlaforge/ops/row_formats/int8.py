"""8-bit rows: codes with one scale per group of a row."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar, Self

from mlaforge.ops.row_formats.format import Part, RowFormat, as_bytes, consecutive

if TYPE_CHECKING:
    from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Int8(RowFormat):
    """8-bit codes with one bf16 scale per group of a row, symmetric.

    A token's bytes: the codes in order, a zero byte if their number is odd, the scales. A scale is the group's largest
    magnitude / 127, rounded up so that no code is clipped. A code is x / scale, rounded half to even, 0 for a zero
    scale. It decodes to bf16(code * scale).
    """

    group_sizes: tuple[int, ...]

    id: ClassVar = 1
    names: ClassVar = ("int8",)
    devices: ClassVar = ("cpu", "cuda")

    @classmethod
    def make(cls, name: str, group_sizes: tuple[int, ...], counts: tuple[int, ...]) -> Self:
        return cls(group_sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.group_sizes

    @property
    def width(self) -> int:
        return sum(self.group_sizes)

    @property
    def parts(self) -> tuple[Part, ...]:
        return consecutive(("codes", 8, self.width), ("scales", 16, len(self.group_sizes)))

    def write(self, rows_UB: Tensor, units_U: Tensor, row_NW: Tensor) -> None:
        import torch

        from mlaforge.modeling.coded_rows_mla import round_up_bf16, scaled_codes

        x = row_NW.bfloat16().float()
        groups = x.split(self.group_sizes, dim=1)
        scale_NP = torch.stack([round_up_bf16(group.abs().amax(1) / 127) for group in groups], dim=1)
        codes = scaled_codes(x, self._expand(scale_NP), -127, 127).to(torch.int8)
        padded = torch.nn.functional.pad(codes, (0, self.parts[1].offset - self.width))
        rows_UB.index_copy_(0, units_U, torch.cat((as_bytes(padded), as_bytes(scale_NP)), dim=1))

    def read(self, rows_UB: Tensor, units_U: Tensor) -> Tensor:
        import torch

        codes, scales = self.parts
        packed = rows_UB[units_U]
        scale_NP = packed[:, scales.range].contiguous().view(torch.bfloat16)
        return (packed[:, codes.range].view(torch.int8).float() * self._expand(scale_NP)).bfloat16()

    def _expand(self, scale_NP: Tensor) -> Tensor:
        """Scales by element: fp32 [N, W]."""
        import torch

        return scale_NP.float().repeat_interleave(torch.tensor(self.group_sizes, device=scale_NP.device), dim=1)
