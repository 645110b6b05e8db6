"""Byte layout of a coded row (coded_rows_mla.py): which bytes hold which bits of which coordinates.

Copied into checkpoints; requires only the standard library, so that plans are computed without torch.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

# `mla_code_version` of a checkpoint: the layout of its rows when it was written. 1: planes of single bits, and counts
# such that they end with whole bytes; 2: the layout of this file, and counts such that planes end with whole words.
# Rows exist only at run time, and a code is the same integer in both, so checkpoints of both are read with this layout,
# which pads what is not filled.
VERSION, VERSIONS = 2, (1, 2)
# Bits of a code in each plane. A code of 7 bits has 4 + 2 + 1, the lowest bits in the widest plane.
PLANES = (8, 4, 2, 1)
# Planes, the rotary key and rows begin at multiples of this many bytes.
ALIGNMENT = 16
# Coordinates that fill whole 32-bit words in every plane. Conversions give them equally many bits.
GROUP = 32


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not below `number`."""
    return -(-number // multiple) * multiple


def check_version(version: int) -> None:
    """Raise ValueError for a checkpoint of an unknown `mla_code_version`."""
    if version not in VERSIONS:
        raise ValueError(f"mla_code_version {version} is not one of {VERSIONS}, which this code reads")


class Segment(NamedTuple):
    """Consecutive coordinates with codes of the same number of bits, in one plane.

    bits    bits of a code in this plane: 8, 4, 2 or 1
    shift   the lowest of them, as a bit of the code
    first   first coordinate
    coordinates  their number
    offset  first byte in the row, a multiple of 4; the segment ends with a multiple of 4 bytes
    """

    bits: int
    shift: int
    first: int
    coordinates: int
    offset: int


class CodedLayout:
    """Layout of one layer's coded rows.

    counts    coordinates of the latent with at least 1, 2, ... bits, multiples of 8
    rope_dim  elements of the rotary key, 8 bits each with one bf16 scale; 0 for none

    rank      coordinates of the latent
    segments  of every plane, in the order of their bytes
    scale_at  first byte of the rotary key's scale, behind the last plane
    rope_at   first byte of the rotary key
    row_bytes length of a row
    """

    def __init__(self, counts: Sequence[int], rope_dim: int = 0):
        self.counts, self.rope_dim = tuple(counts), rope_dim
        self.rank = self.counts[0]
        self.segments, end = [], 0
        for bits in PLANES:
            end = round_up(end, ALIGNMENT)
            for width, first, count in self.runs():
                if width & bits:
                    self.segments.append(Segment(bits, width & -2 * bits, first, count, end))
                    end += round_up(count * bits, 32) // 8
        self.scale_at = end
        self.rope_at = round_up(end + 2, ALIGNMENT) if rope_dim else end
        self.row_bytes = round_up(self.rope_at + rope_dim, ALIGNMENT)

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Yield (bits, first coordinate, coordinates) of consecutive coordinates with equally many bits, falling."""
        for width in range(len(self.counts), 0, -1):
            first = self.counts[width] if width < len(self.counts) else 0
            if self.counts[width - 1] > first:
                yield width, first, self.counts[width - 1] - first

    @property
    def padding(self) -> int:
        """Bytes of a row that hold nothing."""
        return self.row_bytes - sum(self.counts) // 8 - (self.rope_dim + 2 if self.rope_dim else 0)
