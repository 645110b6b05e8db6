"""What every storage format of cached rows has: a descriptor of its bytes, and a codec.

A row format is a codec: packed rows decode to rows of bf16 by definition, so attention over a packed cache is attention
over the decoded rows in every implementation. Only kernels that multiply int8 codes directly use the values before they
are rounded to bf16. Codes and scales are computed from the row that a bf16 cache would hold.

Legend of the package: N tokens, W elements of a row, U units (the tokens that are packed together: 1 or 32), B bytes of
a unit, P groups of a row (elements with one scale), G KV heads, D head_dim.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import TYPE_CHECKING, ClassVar, Self

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Bytes of an element of a row that is not packed yet: bf16.
UNQUANTIZED_BYTES = 2


@dataclasses.dataclass(frozen=True)
class Part:
    """Consecutive elements of a unit: `elements` of `bits` bits each, from byte `offset` on."""

    name: str
    bits: int
    elements: int
    offset: int

    @property
    def stop(self) -> int:
        """The byte after the last one."""
        return self.offset + -(-self.bits * self.elements // 8)

    @property
    def range(self) -> slice:
        """The part's bytes in a unit."""
        return slice(self.offset, self.stop)


class RowFormat(abc.ABC):
    """The rows of one layer in one format. A subclass is a frozen dataclass whose module imports torch only inside the
    functions of the codec.

    id                  first number of the descriptor; the compiled kernels know the format by it
    names               values of kv_cache_dtype that choose the format
    compute_names       names of the rows that `auto` is in a model of such a dtype, where users do not choose them
    tokens              tokens per unit
    newest_unquantized  the newest block of a sequence stays in bf16 (engine/cache/block_tables.py)
    grouped_query_only  the format stores keys and values of heads, not a latent
    latent_rope_only    the format stores a latent and a rotary key; layers of keys and values have plain rows
    coded               the format needs a layer's code
    devices             types of devices on which the engine accepts the format
    """

    id: ClassVar[int]
    names: ClassVar[tuple[str, ...]]
    compute_names: ClassVar[tuple[str, ...]] = ()
    tokens: ClassVar[int] = 1
    newest_unquantized: ClassVar[bool] = False
    grouped_query_only: ClassVar[bool] = False
    latent_rope_only: ClassVar[bool] = False
    coded: ClassVar[bool] = False
    devices: ClassVar[tuple[str, ...]] = ("cpu",)

    # The descriptor

    @classmethod
    @abc.abstractmethod
    def make(cls, name: str, group_sizes: tuple[int, ...], counts: tuple[int, ...]) -> Self:
        """Return the format for one layer. `name` is one of `names`; for the others see `row_format`."""

    @property
    def name(self) -> str:
        """Name of the format among `names` and `compute_names`."""
        return self.names[0]

    @property
    @abc.abstractmethod
    def sizes(self) -> tuple[int, ...]:
        """The numbers by which the compiled kernels know the layout of a row."""

    @functools.cached_property
    def descriptor(self) -> list[int]:
        """`id` and `sizes`, as the compiled kernels take them."""
        return [self.id, *self.sizes]

    if TYPE_CHECKING:
        # Not at run time, where a dataclass with a field of this name would take the property for its default.
        @property
        def width(self) -> int:
            """Elements of a token's row."""

    @property
    @abc.abstractmethod
    def parts(self) -> tuple[Part, ...]:
        """Parts of a unit, by offset."""

    @property
    def alignment(self) -> int:
        """Bytes of which `unit_bytes` is a multiple, so that every unit of an aligned tensor is aligned."""
        return max(1, *(part.bits // 8 for part in self.parts))

    @functools.cached_property
    def unit_bytes(self) -> int:
        """Bytes of a unit."""
        return -(-self.parts[-1].stop // self.alignment) * self.alignment

    @property
    def bytes_per_token(self) -> float:
        """Bytes of a packed row, with its share of what a unit stores once."""
        return self.unit_bytes / self.tokens

    def bytes(self, tokens: int) -> int:
        """Bytes of the rows of `tokens` tokens of one sequence. Tokens that do not fill a unit stay in bf16."""
        units, rest = divmod(tokens, self.tokens)
        assert not rest or self.newest_unquantized, f"{tokens} tokens are not whole units of {self}"
        return units * self.unit_bytes + self.unquantized_bytes(rest)

    def unquantized_bytes(self, tokens: int) -> int:
        """Bytes of the rows of `tokens` tokens in blocks that stay unquantized."""
        return tokens * UNQUANTIZED_BYTES * self.width

    # The codec

    def empty(self, units: int, device: torch.device) -> Tensor:
        """Allocate `units` units, one per row: [units, ...], uninitialised."""
        import torch

        return torch.empty(units, self.unit_bytes, dtype=torch.uint8, device=device)

    @abc.abstractmethod
    def write(self, rows_UB: Tensor, units_U: Tensor, row_NW: Tensor) -> None:
        """Pack rows of any float dtype, N = U * tokens, into units `units_U`. A NaN or an infinity makes every element
        of its group NaN."""

    @abc.abstractmethod
    def read(self, rows_UB: Tensor, units_U: Tensor) -> Tensor:
        """Decode units to [U * tokens, W], in bf16 (a plain format that is not fp8: in its dtype)."""


def consecutive(*parts: tuple[str, int, int]) -> tuple[Part, ...]:
    """Return parts (name, bits, elements) one after the other, elements of whole bytes aligned to their size."""
    laid: list[Part] = []
    offset = 0
    for name, bits, elements in parts:
        size = max(1, bits // 8)
        laid.append(Part(name, bits, elements, -(-offset // size) * size))
        offset = laid[-1].stop
    return tuple(laid)


def as_bytes(x: Tensor) -> Tensor:
    """View `x` as uint8."""
    import torch

    return x.contiguous().view(torch.uint8)
