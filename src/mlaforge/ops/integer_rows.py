"""Coded latents as bytes that a GPU's tensor cores multiply, and W_uk in 8 bits.

A coordinate of up to 8 bits is one signed byte. One of more bits is a high and a low byte, 256 high + low + 128: the
high bytes of all such coordinates come first in a row, so that a product multiplies its sum by 256 behind them. Columns
are ordered as the words of a coded row hold coordinates (modeling/coded_layout_mla.py), because reordering four bytes
would cost more than decoding them; weights are ordered alike.

Legend: R coordinates of a latent, K columns of a row, G KV heads, D key and V value dimensions.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from mlaforge.modeling.coded_layout_mla import PLANES, CodedLayout, Segment, round_up

# Columns are padded to multiples of this: a step of a product's loop.
STEP = 64
# Coordinates of four consecutive columns, relative to the first, where planes of words hold them.
WORD_ORDER = (0, 2, 1, 3)


@dataclasses.dataclass(frozen=True)
class IntegerColumns:
    """Columns of a layer's rows.

    wide         columns of high bytes, a multiple of STEP
    coordinates  int64 [K]: the coordinate of each column, -1 for padding
    offset       float [R]: added to a coordinate's 256 high + low
    words        int32 [2 + 2 PLANES, K / 4], for every four columns: what is added to their four bytes, and what is
                 then exchanged in them; of each plane the byte of the row where the word with their codes begins, -1 if
                 there is none, and (first bit in the word) + 32 (first bit in the column)
    """

    wide: int
    coordinates: Tensor
    offset: Tensor
    words: Tensor

    @property
    def width(self) -> int:
        return len(self.coordinates)

    def integers(self, codes: Tensor) -> Tensor:
        """Return rows [..., K] int8 of codes [..., R], integers around 0."""
        biased = codes.long() - self.offset.long()
        high = torch.where(self.offset == 0, 0, biased + 128 >> 8)
        values = torch.where(torch.arange(self.width) < self.wide, high[..., self.coordinates], 0)
        low = (biased - 256 * high)[..., self.coordinates]
        values = torch.where(torch.arange(self.width) < self.wide, values, low)
        return torch.where(self.coordinates < 0, 0, values).to(torch.int8)


@functools.lru_cache(maxsize=256)
def integer_columns(counts: tuple[int, ...]) -> IntegerColumns:
    """Return the columns of rows with a code of these counts (modeling/coded_rows_mla.py), on the CPU."""
    layout = CodedLayout(counts)
    many = counts[8] if len(counts) > 8 else 0
    wide = round_up(many, STEP)
    coordinates = torch.full((wide + round_up(layout.rank, STEP),), -1)
    words = torch.zeros(2 + 2 * len(PLANES), len(coordinates) // 4, dtype=torch.int32)
    words[2::2] = -1
    for bits, first, count in layout.runs():
        fours = torch.arange(first, first + count).view(-1, 4)
        at = (wide + first) // 4
        columns = coordinates[wide + first : wide + first + count].view(-1, 4)
        # The plane of 8 bits holds bytes in order.
        columns.copy_(fours if bits >= 8 else fours[:, WORD_ORDER])
        words[0, at : at + count // 4] = 0x01010101 * max(0, 128 - (1 << bits - 1))
        words[1, at : at + count // 4] = -0x7F7F7F80
        if bits > 8:
            coordinates[first : first + count] = fours[:, WORD_ORDER].flatten()
            # A high byte counts from the middle of its range.
            words[0, first // 4 : (first + count) // 4] = 0x01010101 * (128 - (1 << bits - 9))
            words[1, first // 4 : (first + count) // 4] = -0x7F7F7F80
    for part in layout.segments:
        high = part.shift >= 8
        _locate(words, part, 0 if high else wide, part.shift - 8 * high)
    offset = torch.zeros(layout.rank)
    offset[:many] = 128
    return IntegerColumns(wide, coordinates, offset, words)


def _locate(words: Tensor, part: Segment, first: int, bit: int) -> None:
    """Enter where a segment has the codes of its columns, which begin behind column `first`."""
    entry = words[2 + 2 * PLANES.index(part.bits) :][:2, (first + part.first) // 4 :]
    four = torch.arange(part.coordinates // 4, dtype=torch.int32)
    per_word = 8 // part.bits
    entry[0, : len(four)] = part.offset + 4 * (four // per_word)
    entry[1, : len(four)] = four % per_word * part.bits + 32 * bit


def rounded_weight(w_GDR: Tensor, columns: IntegerColumns) -> tuple[Tensor, Tensor]:
    """Return W_uk in 8 bits, int8 [G, D, K], rounded to nearest, and the scale of each output, fp32 [G, D]."""
    scales = w_GDR.float().abs().amax(-1).clamp_min(torch.finfo(torch.float32).tiny) / 127
    rounded = (w_GDR.float() / scales[..., None]).round().clamp(-127, 127)
    return in_columns(rounded, columns).to(torch.int8), scales


def in_columns(w_XR: Tensor, columns: IntegerColumns) -> Tensor:
    """Return the columns of a weight [..., R] that multiply those of rows, [..., K], without the factor of high
    bytes."""
    coordinates = columns.coordinates.to(w_XR.device)
    return torch.where(coordinates < 0, 0, w_XR[..., coordinates.clamp_min(0)])
