"""Coded rows of a latent: each coordinate is an integer with its own number of bits.

The projections around a latent are free up to an invertible matrix. Conversion chooses the basis in which errors of all
coordinates cost the same, and each coordinate's unit, so no step, offset or scale is stored: attention reads the
nearest integer. Coordinates are sorted by decreasing number of bits. A code is split into parts of 8, 4, 2 and 1 bits;
a plane holds one part of all coordinates that have it (coded_layout_mla.py). Within a plane of 4, 2 or 1 bits, 32-bit
words are arranged for wide loads: one shift and one mask give two neighbouring coordinates, in the lower and the upper
half. A rotary key in 8-bit codes with a scale follows. Copied into checkpoints; requires only torch.

Legend: R coordinates of a latent, E elements of a rotary key, B bytes of a row, W words of a segment, M groups of four
coordinates in a word.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .coded_layout_mla import CodedLayout, Segment

# Maximum bits per coordinate.
LARGEST_CODE = 11


def round_up_bf16(x: Tensor) -> Tensor:
    """Round fp32 up to bf16. NaN and infinity are preserved."""
    near = x.bfloat16()
    return torch.where(near.float() < x, near.nextafter(torch.full_like(near, torch.inf)), near)


def scaled_codes(x: Tensor, scale: Tensor, least: int, most: int) -> Tensor:
    """Quantize x to integers, returned in fp32. A scale that is 0, infinite or NaN gives code 0 and alone determines
    the decoded value."""
    good = (scale > 0) & (scale < torch.inf)
    return torch.where(good, (x / scale).round(), 0.0).clamp(least, most)


class CodedRows:
    """Codec of one layer's rows.

    counts    coordinates of the latent with at least 1, 2, ... bits, multiples of 8; a coordinate of b bits is an
              integer from -2^(b-1) to 2^(b-1) - 1
    rope_dim  E: elements of the rotary key, 8 bits each with one bf16 scale; 0 for none
    """

    def __init__(self, counts: Sequence[int], rope_dim: int = 0):
        self.layout = CodedLayout(counts, rope_dim)
        self.counts, self.rope_dim, self.rank = self.layout.counts, rope_dim, self.layout.rank

    def halves(self, device: torch.device) -> Tensor:
        """Return 2^(bits - 1) of each coordinate: int32 [R]."""
        halves = torch.ones(self.rank, dtype=torch.int32, device=device)
        for count in self.counts[1:]:
            halves[:count] *= 2
        return halves

    def nearest(self, latent: Tensor) -> Tensor:
        """Quantize a latent to integers within each coordinate's range: [..., R] in fp32."""
        halves = self.halves(latent.device)
        return torch.maximum(torch.minimum(latent.bfloat16().float().round(), halves - 1.0), -halves.float())

    def pack(self, row: Tensor) -> Tensor:
        """Encode rows [..., R+E] of any float dtype as uint8 [..., B]. A NaN in a latent becomes 0, because no code
        represents it."""
        row = row.bfloat16().float()
        codes = self.nearest(row[..., : self.rank]).nan_to_num().int() + self.halves(row.device)
        packed = torch.zeros(*row.shape[:-1], self.layout.row_bytes, dtype=torch.uint8, device=row.device)
        for part in self.layout.segments:
            fields = codes[..., part.first : part.first + part.coordinates] >> part.shift & (1 << part.bits) - 1
            stored = fields.to(torch.uint8) if part.bits == 8 else _to_words(fields, part)
            packed[..., part.offset : part.offset + stored.shape[-1]] = stored
        if self.rope_dim:
            rotary, layout = row[..., self.rank :], self.layout
            scale = round_up_bf16(rotary.abs().amax(-1, keepdim=True) / 127)
            signed = scaled_codes(rotary, scale.float(), -127, 127).to(torch.int8)
            packed[..., layout.scale_at : layout.scale_at + 2] = scale.view(torch.uint8)
            packed[..., layout.rope_at : layout.rope_at + self.rope_dim] = signed.view(torch.uint8)
        return packed

    def unpack(self, packed: Tensor) -> Tensor:
        """Decode uint8 [..., B] to bf16 [..., R+E]. Integers beyond 256 are rounded to bf16."""
        codes = (-self.halves(packed.device)).expand(*packed.shape[:-1], -1).clone()
        for part in self.layout.segments:
            size = part.coordinates if part.bits == 8 else -(-part.coordinates * part.bits // 32) * 4
            stored = packed[..., part.offset : part.offset + size].int()
            fields = stored if part.bits == 8 else _from_words(stored, part)
            codes[..., part.first : part.first + part.coordinates] += fields << part.shift
        if not self.rope_dim:
            return codes.bfloat16()
        layout = self.layout
        signed = packed[..., layout.rope_at : layout.rope_at + self.rope_dim].contiguous().view(torch.int8)
        scale = packed[..., layout.scale_at : layout.scale_at + 2].contiguous().view(torch.bfloat16)
        return torch.cat((codes.bfloat16(), (signed.float() * scale.float()).bfloat16()), dim=-1)

    def rounded(self, row: Tensor) -> Tensor:
        """Return unpack(pack(row)) in the rows' dtype, with straight-through gradients."""
        read = self.unpack(self.pack(row.detach())).to(row.dtype)
        return row + (read - row).detach() if row.requires_grad else read


def _shifts(part: Segment, device: torch.device) -> Tensor:
    """Return the shift of each group of four coordinates in a word: int32 [M, 1]."""
    return torch.arange(0, 8, part.bits, dtype=torch.int32, device=device)[:, None]


def _to_words(fields: Tensor, part: Segment) -> Tensor:
    """Arrange a segment's fields of 4, 2 or 1 bits, int32 [..., count], as the bytes of words, uint8 [..., 4 W]."""
    padded = torch.nn.functional.pad(fields, (0, -part.coordinates % (32 // part.bits)))
    fours_WM4 = _byte_order(padded.unflatten(-1, (-1, 8 // part.bits, 4)))
    return (fours_WM4 << _shifts(part, fields.device)).sum(-2).flatten(-2).to(torch.uint8)


def _from_words(stored: Tensor, part: Segment) -> Tensor:
    """Inverse of _to_words: int32 bytes [..., 4 W] to fields [..., count]."""
    words_W14 = stored.unflatten(-1, (-1, 1, 4))
    fours_WM4 = words_W14 >> _shifts(part, stored.device) & (1 << part.bits) - 1
    return _byte_order(fours_WM4).flatten(-3)[..., : part.coordinates]


def word_fields(part: Segment) -> tuple[Tensor, Tensor]:
    """Return of each coordinate of a segment the byte of the segment that holds its field, and the field's first bit
    there: int32 [count]."""
    if part.bits == 8:
        return torch.arange(part.coordinates, dtype=torch.int32), torch.zeros(part.coordinates, dtype=torch.int32)
    words, shifts = -(-part.coordinates * part.bits // 32), _shifts(part, torch.device("cpu"))
    bytes_W14 = torch.arange(4 * words, dtype=torch.int32).view(words, 1, 4)
    whole = torch.zeros(words, len(shifts), 4, dtype=torch.int32)
    byte, bit = (_byte_order(of + whole).flatten()[: part.coordinates] for of in (bytes_W14, shifts))
    return byte, bit


def _byte_order(fours_WM4: Tensor) -> Tensor:
    """Order four consecutive coordinates as the bytes 0, 2, 1, 3 of a word hold them, and back. Views only: a list of
    indices would have to wait for the device."""
    return fours_WM4.unflatten(-1, (2, 2)).mT.flatten(-2)
