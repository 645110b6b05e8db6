"""4-bit rows of keys and values, packed 32 tokens at a time."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar, Self

from mlaforge.ops.row_formats.format import Part, RowFormat, as_bytes, consecutive

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Tokens per unit.
INT4_TOKENS = 32


@dataclasses.dataclass(frozen=True)
class Int4(RowFormat):
    """4-bit codes of 32 tokens' keys and values. A bf16 scale and minimum per key channel over the 32 tokens, and per
    token and head of the values (KIVI, arXiv:2402.02750).

    A unit's bytes: key codes [32, G * D / 2], the even channel in the low nibble; value codes, likewise; key scales
    [G * D], key minima [G * D], value scales [32, G], value minima [32, G]. A scale is (maximum - minimum) / 15,
    rounded up. A code is (x - minimum) / scale, rounded half to even, 0 for a zero scale. It decodes to
    bf16(minimum + code * scale), whose product is exact in fp32.
    """

    num_kv_heads: int
    head_dim: int

    id: ClassVar = 2
    names: ClassVar = ("int4",)
    tokens: ClassVar = INT4_TOKENS
    # Until the block has its 32 tokens.
    newest_unquantized: ClassVar = True
    grouped_query_only: ClassVar = True

    @classmethod
    def make(cls, name: str, group_sizes: tuple[int, ...], counts: tuple[int, ...]) -> Self:
        """An even number of equal groups, keys and values."""
        assert len(group_sizes) % 2 == 0 and len(set(group_sizes)) == 1, f"int4 for groups of {group_sizes}"
        return cls(len(group_sizes) // 2, group_sizes[0])

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.num_kv_heads, self.head_dim

    @property
    def width(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def parts(self) -> tuple[Part, ...]:
        T, G, channels = INT4_TOKENS, self.num_kv_heads, self.num_kv_heads * self.head_dim
        return consecutive(
            ("key codes", 4, T * channels), ("value codes", 4, T * channels),
            ("key scales", 16, channels), ("key minima", 16, channels),
            ("value scales", 16, T * G), ("value minima", 16, T * G),
        )  # fmt: skip

    def empty(self, units: int, device: torch.device) -> Tensor:
        assert self.num_kv_heads * self.head_dim % 2 == 0, f"{self} has an odd number of channels"
        return super().empty(units, device)

    def write(self, rows_UB: Tensor, units_U: Tensor, row_NW: Tensor) -> None:
        import torch

        from mlaforge.modeling.coded_rows_mla import round_up_bf16, scaled_codes

        x = row_NW.bfloat16().float().view(-1, self.tokens, 2, self.num_kv_heads, self.head_dim)
        packed_codes: list[Tensor] = []
        scales_and_minima: list[Tensor] = []
        for values, dim in zip(x.unbind(2), (1, 3), strict=True):
            minimum = values.amin(dim, keepdim=True)
            scale = round_up_bf16((values.amax(dim, keepdim=True) - minimum) / 15)
            codes = scaled_codes(values - minimum, scale.float(), 0, 15).to(torch.uint8).flatten(1)
            packed_codes.append(codes[:, ::2] | codes[:, 1::2] << 4)
            scales_and_minima += [as_bytes(scale).flatten(1), as_bytes(minimum.bfloat16()).flatten(1)]
        rows_UB.index_copy_(0, units_U, torch.cat((*packed_codes, *scales_and_minima), dim=1))

    def read(self, rows_UB: Tensor, units_U: Tensor) -> Tensor:
        import torch

        U, T, G, D = len(units_U), INT4_TOKENS, self.num_kv_heads, self.head_dim
        packed = rows_UB[units_U]
        parts = [packed[:, part.range] for part in self.parts]
        scales = [part.contiguous().view(torch.bfloat16).float() for part in parts[2:]]
        x = torch.empty(U, T, 2, G, D, dtype=torch.bfloat16, device=rows_UB.device)
        for i, shape in enumerate(((U, 1, G, D), (U, T, G, 1))):
            codes = torch.stack((parts[i] & 15, parts[i] >> 4), dim=-1).view(U, T, G, D)
            scale, minimum = (part.view(shape) for part in scales[2 * i : 2 * i + 2])
            x[:, :, i] = codes.float() * scale + minimum
        return x.view(U * T, self.width)
