"""Storage formats of a layer's cached rows: plain elements, or packed into fewer bytes.

A row format is a codec: packed rows decode to rows of bf16 by definition, so attention over a packed cache is attention
over the decoded rows in every implementation. Only kernels that multiply int8 codes directly use the values before they
are rounded to bf16. Codes and scales are computed from the row that a bf16 cache would hold.

Legend: N tokens, W elements of a row, U units (the tokens that are packed together: 1 or 32), B bytes of a unit,
P groups of a row (elements with one scale), G KV heads, D head_dim.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from mlaforge.modeling.coded_rows_mla import CodedRows, round_up_bf16, scaled_codes

# Tokens per unit of int4.
INT4_TOKENS = 32
LARGEST_FP8 = 448.0


def row_format(name: str, group_sizes: Sequence[int], dtype: torch.dtype) -> RowFormat:
    """Return the format called `name`; `auto` is plain rows in the model's `dtype`. `group_sizes`: elements of each
    group with its own scale: the keys, then the values of each KV head; a latent; a rotary key. int4 requires an even
    number of equal groups, keys and values."""
    if name == "int8":
        return Int8(tuple(group_sizes))
    if name == "int4":
        assert len(group_sizes) % 2 == 0 and len(set(group_sizes)) == 1, f"int4 for groups of {group_sizes}"
        return Int4(len(group_sizes) // 2, group_sizes[0])
    return Plain(sum(group_sizes), {"auto": dtype, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}[name])


class RowFormat(Protocol):
    """A codec of cached rows.

    width               elements of a token's row
    tokens              tokens per unit
    unit_bytes          bytes of a unit
    newest_unquantized  whether the newest block of a sequence stays in bf16 (engine/cache/block_tables.py)
    descriptor          the format's id and sizes, as the compiled kernels take them
    """

    @property
    def width(self) -> int: ...

    @property
    def tokens(self) -> int: ...

    @property
    def newest_unquantized(self) -> bool: ...

    @property
    def unit_bytes(self) -> int: ...

    @property
    def descriptor(self) -> list[int]: ...

    def empty(self, units: int, device: torch.device) -> Tensor:
        """Allocate `units` units, one per row: [units, ...], uninitialised."""

    def write(self, rows_UB: Tensor, units_U: Tensor, row_NW: Tensor) -> None:
        """Pack rows of any float dtype, N = U * tokens, into units `units_U`. A NaN or an infinity makes every element
        of its group NaN."""

    def read(self, rows_UB: Tensor, units_U: Tensor) -> Tensor:
        """Decode units to [U * tokens, W], in bf16 (a plain format that is not fp8: in its dtype)."""


@dataclasses.dataclass(frozen=True)
class Plain:
    """Rows of one dtype. float8_e4m3fn saturates at 448."""

    width: int
    dtype: torch.dtype

    tokens = 1
    newest_unquantized = False

    @property
    def unit_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    @property
    def descriptor(self) -> list[int]:
        return [0]

    def empty(self, units: int, device: torch.device) -> Tensor:
        return torch.empty(units, self.width, dtype=self.dtype, device=device)

    def write(self, rows_UB: Tensor, units_U: Tensor, row_NW: Tensor) -> None:
        if self.dtype == torch.float8_e4m3fn:
            row_NW = row_NW.clamp(-LARGEST_FP8, LARGEST_FP8).masked_fill(row_NW.isinf(), torch.nan)
            # Not every device indexes float8.
            rows_UB.view(torch.uint8).index_copy_(0, units_U, _as_bytes(row_NW.to(self.dtype)))
        else:
            rows_UB.index_copy_(0, units_U, row_NW.to(self.dtype))

    def read(self, rows_UB: Tensor, units_U: Tensor) -> Tensor:
        if self.dtype == torch.float8_e4m3fn:
            return rows_UB.view(torch.uint8)[units_U].view(self.dtype).bfloat16()
        return rows_UB[units_U]


@dataclasses.dataclass(frozen=True)
class Int8:
    """8-bit codes with one bf16 scale per group of a row, symmetric.

    A token's bytes: the codes in order, a zero byte if their number is odd, the scales. A scale is the group's largest
    magnitude / 127, rounded up so that no code is clipped. A code is x / scale, rounded half to even, 0 for a zero
    scale. It decodes to bf16(code * scale).
    """

    group_sizes: tuple[int, ...]

    tokens = 1
    newest_unquantized = False

    @property
    def width(self) -> int:
        return sum(self.group_sizes)

    @property
    def unit_bytes(self) -> int:
        return self.width + self.width % 2 + 2 * len(self.group_sizes)

    @property
    def descriptor(self) -> list[int]:
        return [1, *self.group_sizes]

    def empty(self, units: int, device: torch.device) -> Tensor:
        return torch.empty(units, self.unit_bytes, dtype=torch.uint8, device=device)

    def write(self, rows_UB: Tensor, units_U: Tensor, row_NW: Tensor) -> None:
        x = row_NW.bfloat16().float()
        groups = x.split(self.group_sizes, dim=1)
        scale_NP = torch.stack([round_up_bf16(group.abs().amax(1) / 127) for group in groups], dim=1)
        codes = scaled_codes(x, self._expand(scale_NP), -127, 127).to(torch.int8)
        padded = torch.nn.functional.pad(codes, (0, self.width % 2))
        rows_UB.index_copy_(0, units_U, torch.cat((_as_bytes(padded), _as_bytes(scale_NP)), dim=1))

    def read(self, rows_UB: Tensor, units_U: Tensor) -> Tensor:
        packed = rows_UB[units_U]
        scale_NP = packed[:, self.width + self.width % 2 :].contiguous().view(torch.bfloat16)
        return (packed[:, : self.width].view(torch.int8).float() * self._expand(scale_NP)).bfloat16()

    def _expand(self, scale_NP: Tensor) -> Tensor:
        """Scales by element: fp32 [N, W]."""
        return scale_NP.float().repeat_interleave(torch.tensor(self.group_sizes, device=scale_NP.device), dim=1)


@dataclasses.dataclass(frozen=True)
class Int4:
    """4-bit codes of 32 tokens' keys and values. A bf16 scale and minimum per key channel over the 32 tokens, and per
    token and head of the values (KIVI, arXiv:2402.02750).

    A unit's bytes: key codes [32, G * D / 2], the even channel in the low nibble; value codes, likewise; key scales
    [G * D], key minima [G * D], value scales [32, G], value minima [32, G]. A scale is (maximum - minimum) / 15,
    rounded up. A code is (x - minimum) / scale, rounded half to even, 0 for a zero scale. It decodes to
    bf16(minimum + code * scale), whose product is exact in fp32.
    """

    num_kv_heads: int
    head_dim: int

    tokens = INT4_TOKENS
    # Until the block has its 32 tokens.
    newest_unquantized = True

    @property
    def width(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def unit_bytes(self) -> int:
        return sum(map(math.prod, self._shapes))

    @property
    def descriptor(self) -> list[int]:
        return [2, self.num_kv_heads, self.head_dim]

    @property
    def _shapes(self) -> tuple[tuple[int, int], ...]:
        """Shapes, in bytes, of a unit's six parts."""
        T, G, channels = INT4_TOKENS, self.num_kv_heads, self.num_kv_heads * self.head_dim
        codes = (T, channels // 2)
        return codes, codes, (1, 2 * channels), (1, 2 * channels), (T, 2 * G), (T, 2 * G)

    def empty(self, units: int, device: torch.device) -> Tensor:
        assert self.num_kv_heads * self.head_dim % 2 == 0, f"{self} has an odd number of channels"
        return torch.empty(units, self.unit_bytes, dtype=torch.uint8, device=device)

    def write(self, rows_UB: Tensor, units_U: Tensor, row_NW: Tensor) -> None:
        x = row_NW.bfloat16().float().view(-1, self.tokens, 2, self.num_kv_heads, self.head_dim)
        packed_codes: list[Tensor] = []
        scales_and_minima: list[Tensor] = []
        for values, dim in zip(x.unbind(2), (1, 3), strict=True):
            minimum = values.amin(dim, keepdim=True)
            scale = round_up_bf16((values.amax(dim, keepdim=True) - minimum) / 15)
            codes = scaled_codes(values - minimum, scale.float(), 0, 15).to(torch.uint8).flatten(1)
            packed_codes.append(codes[:, ::2] | codes[:, 1::2] << 4)
            scales_and_minima += [_as_bytes(scale).flatten(1), _as_bytes(minimum.bfloat16()).flatten(1)]
        rows_UB.index_copy_(0, units_U, torch.cat((*packed_codes, *scales_and_minima), dim=1))

    def read(self, rows_UB: Tensor, units_U: Tensor) -> Tensor:
        U, T, G, D = len(units_U), INT4_TOKENS, self.num_kv_heads, self.head_dim
        parts = rows_UB[units_U].split([math.prod(shape) for shape in self._shapes], dim=1)
        scales = [part.contiguous().view(torch.bfloat16).float() for part in parts[2:]]
        x = torch.empty(U, T, 2, G, D, dtype=torch.bfloat16, device=rows_UB.device)
        for i, shape in enumerate(((U, 1, G, D), (U, T, G, 1))):
            codes = torch.stack((parts[i] & 15, parts[i] >> 4), dim=-1).view(U, T, G, D)
            scale, minimum = (part.view(shape) for part in scales[2 * i : 2 * i + 2])
            x[:, :, i] = codes.float() * scale + minimum
        return x.view(U * T, self.width)


@dataclasses.dataclass(frozen=True)
class Coded:
    """Coded rows of a converted model (modeling/coded_rows_mla.py). `counts`: latent coordinates with at least 1, 2,
    ... bits; `rope_dim`: width of the rotary key."""

    counts: tuple[int, ...]
    rope_dim: int = 0

    tokens = 1
    newest_unquantized = False

    @functools.cached_property
    def code(self) -> CodedRows:
        return CodedRows(self.counts, self.rope_dim)

    @property
    def width(self) -> int:
        return self.counts[0] + self.rope_dim

    @property
    def unit_bytes(self) -> int:
        return self.code.layout.row_bytes

    @property
    def descriptor(self) -> list[int]:
        return [3, self.rope_dim, *self.counts]

    def empty(self, units: int, device: torch.device) -> Tensor:
        return torch.empty(units, self.unit_bytes, dtype=torch.uint8, device=device)

    def write(self, rows_UB: Tensor, units_U: Tensor, row_NW: Tensor) -> None:
        rows_UB.index_copy_(0, units_U, self.code.pack(row_NW))

    def read(self, rows_UB: Tensor, units_U: Tensor) -> Tensor:
        return self.code.unpack(rows_UB[units_U])


def format_from_descriptor(descriptor: Sequence[int], rows_UB: Tensor) -> RowFormat:
    """Return the format of grouped-query rows with this RowFormat.descriptor."""
    if descriptor[0] == 0:
        return Plain(rows_UB.shape[1], rows_UB.dtype)
    return Int8(tuple(descriptor[1:])) if descriptor[0] == 1 else Int4(*descriptor[1:])


def _as_bytes(x: Tensor) -> Tensor:
    """View `x` as uint8."""
    return x.contiguous().view(torch.uint8)
