"""Plain rows: elements of one dtype, not packed."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar, Self

from mlaforge.ops.row_formats.format import Part, RowFormat, as_bytes, consecutive

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Name of the rows of each dtype, and bits of an element.
DTYPES = {
    "float32": ("fp32", 32),
    "float16": ("fp16", 16),
    "bfloat16": ("bf16", 16),
    "float8_e4m3fn": ("fp8", 8),
}
LARGEST_FP8 = 448.0


@dataclasses.dataclass(frozen=True)
class Plain(RowFormat):
    """Rows of one dtype. float8_e4m3fn saturates at 448."""

    width: int
    dtype: str

    id: ClassVar = 0
    names: ClassVar = ("bf16", "fp8")
    compute_names: ClassVar = ("fp32", "fp16")
    devices: ClassVar = ("cpu", "cuda")

    def __post_init__(self) -> None:
        assert self.dtype in DTYPES, f"{self.dtype!r} is not one of {', '.join(DTYPES)}"

    @classmethod
    def make(cls, name: str, group_sizes: tuple[int, ...], counts: tuple[int, ...]) -> Self:
        return cls(sum(group_sizes), next(dtype for dtype, (other, _) in DTYPES.items() if other == name))

    @property
    def name(self) -> str:
        return plain_name(self.dtype)

    @property
    def sizes(self) -> tuple[int, ...]:
        return ()

    @property
    def parts(self) -> tuple[Part, ...]:
        return consecutive(("elements", DTYPES[self.dtype][1], self.width))

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch

        return getattr(torch, self.dtype)

    def unquantized_bytes(self, tokens: int) -> int:
        return tokens * self.unit_bytes

    def empty(self, units: int, device: torch.device) -> Tensor:
        import torch

        return torch.empty(units, self.width, dtype=self.torch_dtype, device=device)

    def write(self, rows_UB: Tensor, units_U: Tensor, row_NW: Tensor) -> None:
        import torch

        if self.torch_dtype == torch.float8_e4m3fn:
            row_NW = row_NW.clamp(-LARGEST_FP8, LARGEST_FP8).masked_fill(row_NW.isinf(), torch.nan)
            # Not every device indexes float8.
            rows_UB.view(torch.uint8).index_copy_(0, units_U, as_bytes(row_NW.to(self.torch_dtype)))
        else:
            rows_UB.index_copy_(0, units_U, row_NW.to(self.torch_dtype))

    def read(self, rows_UB: Tensor, units_U: Tensor) -> Tensor:
        import torch

        if self.torch_dtype == torch.float8_e4m3fn:
            return rows_UB.view(torch.uint8)[units_U].view(self.torch_dtype).bfloat16()
        return rows_UB[units_U]


def plain_name(dtype: str) -> str:
    """Return the name of plain rows of a dtype: `bf16` for `bfloat16`."""
    return DTYPES[dtype][0]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype: `bfloat16`."""
    return str(dtype).removeprefix("torch.")
