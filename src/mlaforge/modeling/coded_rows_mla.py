"""Coded rows of a latent: each coordinate is an integer with its own number of bits.

The projections around a latent are free up to an invertible matrix. Conversion chooses the basis in which errors of all
coordinates cost the same, and each coordinate's unit, so no step, offset or scale is stored: attention reads the
nearest integer. Coordinates are sorted by decreasing number of bits. A bit plane, the same bit of all coordinates that
have it, is therefore a prefix of them, and a row is its planes, lowest bit first. A rotary key in 8-bit codes with a
scale follows. Copied into checkpoints; requires only torch.

Legend: R coordinates of a latent, E elements of a rotary key, B bytes of a row.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .coded_layout_mla import CodedLayout

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
        weights = (1 << torch.arange(8, device=row.device)).int()
        parts = [
            ((codes[..., :count] >> bit & 1).unflatten(-1, (-1, 8)) * weights).sum(-1).to(torch.uint8)
            for bit, count in enumerate(self.counts)
        ]
        if self.rope_dim:
            rotary = row[..., self.rank :]
            scale = round_up_bf16(rotary.abs().amax(-1, keepdim=True) / 127)
            signed = scaled_codes(rotary, scale.float(), -127, 127).to(torch.int8)
            gap = signed.new_zeros(*row.shape[:-1], self.layout.rope_at - self.layout.plane_bytes)
            parts += [gap.view(torch.uint8), signed.view(torch.uint8), scale.view(torch.uint8)]
        return torch.cat(parts, dim=-1)

    def unpack(self, packed: Tensor) -> Tensor:
        """Decode uint8 [..., B] to bf16 [..., R+E]. Integers beyond 256 are rounded to bf16."""
        codes = (-self.halves(packed.device)).expand(*packed.shape[:-1], -1).clone()
        shifts, start = torch.arange(8, device=packed.device), 0
        for bit, count in enumerate(self.counts):
            bits = packed[..., start : start + count // 8, None] >> shifts & 1
            codes[..., :count] += bits.flatten(-2).int() << bit
            start += count // 8
        if not self.rope_dim:
            return codes.bfloat16()
        rope_at = self.layout.rope_at
        signed = packed[..., rope_at : rope_at + self.rope_dim].contiguous().view(torch.int8)
        scale = packed[..., rope_at + self.rope_dim :].contiguous().view(torch.bfloat16)
        return torch.cat((codes.bfloat16(), (signed.float() * scale.float()).bfloat16()), dim=-1)

    def rounded(self, row: Tensor) -> Tensor:
        """Return unpack(pack(row)) in the rows' dtype, with straight-through gradients."""
        read = self.unpack(self.pack(row.detach())).to(row.dtype)
        return row + (read - row).detach() if row.requires_grad else read
