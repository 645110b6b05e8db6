"""Coded rows of a latent: each number a whole one, of as many bits as it deserves.

The projections around a latent are free up to an invertible matrix. Conversion chooses the basis in which errors of all
numbers cost alike, and for each number the unit in which it is rounded, so no step, offset or scale is stored: what
attention reads is the nearest whole number. Numbers stand in falling order of their bits. So a plane, the same bit of
all numbers that have it, is a stretch of them from the first on, and a row is its planes one after another, the lowest
first. A rotary key stands behind them in bytes, with a scale. Copied into checkpoints; needs only torch.

Legend: R numbers of a latent, E of a rotary key, B bytes of a row.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

# Bits of a number at the most.
LARGEST_CODE = 11


def rounded_up(x: Tensor) -> Tensor:
    """To bf16, nothing below x; NaN and infinity stay."""
    near = x.bfloat16()
    return torch.where(near.float() < x, near.nextafter(torch.full_like(near, torch.inf)), near)


def scaled_codes(x: Tensor, scale: Tensor, least: int, most: int) -> Tensor:
    """Whole numbers of fp32: 0 where the scale is 0, infinite or none, which alone then says what is read."""
    good = (scale > 0) & (scale < torch.inf)
    return torch.where(good, (x / scale).round(), 0.0).clamp(least, most)


class CodedRows:
    """The code of one layer's rows. `counts`: how many numbers of the latent, a multiple of 8, have at least 1, 2, ...
    bits; a number of b bits is -2^(b-1) to 2^(b-1) - 1. `rope_dim` is E: 8 bits each and a scale in bf16."""

    def __init__(self, counts: Sequence[int], rope_dim: int = 0):
        self.counts, self.rope_dim = tuple(counts), rope_dim
        self.rank = self.counts[0]
        self.plane_bytes = sum(self.counts) // 8
        # A scale lies at an even place.
        self.rope_at = self.plane_bytes + (self.plane_bytes + rope_dim) % 2 if rope_dim else self.plane_bytes
        self.row_bytes = self.rope_at + (rope_dim + 2 if rope_dim else 0)

    def halves(self, device: torch.device) -> Tensor:
        """int32 [R]: 2^(bits - 1)."""
        halves = torch.ones(self.rank, dtype=torch.int32, device=device)
        for count in self.counts[1:]:
            halves[:count] *= 2
        return halves

    def nearest(self, latent: Tensor) -> Tensor:
        """[..., R] in fp32: the whole numbers that a latent is stored as."""
        halves = self.halves(latent.device)
        return torch.maximum(torch.minimum(latent.bfloat16().float().round(), halves - 1.0), -halves.float())

    def pack(self, row: Tensor) -> Tensor:
        """[..., R+E] of any float dtype -> uint8 [..., B]. What is no number in a latent becomes 0: no code says it."""
        row = row.bfloat16().float()
        codes = self.nearest(row[..., : self.rank]).nan_to_num().int() + self.halves(row.device)
        weights = (1 << torch.arange(8, device=row.device)).int()
        parts = [
            ((codes[..., :count] >> bit & 1).unflatten(-1, (-1, 8)) * weights).sum(-1).to(torch.uint8)
            for bit, count in enumerate(self.counts)
        ]
        if self.rope_dim:
            rotary = row[..., self.rank :]
            scale = rounded_up(rotary.abs().amax(-1, keepdim=True) / 127)
            signed = scaled_codes(rotary, scale.float(), -127, 127).to(torch.int8)
            gap = signed.new_zeros(*row.shape[:-1], self.rope_at - self.plane_bytes)
            parts += [gap.view(torch.uint8), signed.view(torch.uint8), scale.view(torch.uint8)]
        return torch.cat(parts, dim=-1)

    def unpack(self, packed: Tensor) -> Tensor:
        """uint8 [..., B] -> bf16 [..., R+E]: what attention reads. Whole numbers beyond 256 are the nearest of bf16."""
        codes = (-self.halves(packed.device)).expand(*packed.shape[:-1], -1).clone()
        shifts, start = torch.arange(8, device=packed.device), 0
        for bit, count in enumerate(self.counts):
            bits = packed[..., start : start + count // 8, None] >> shifts & 1
            codes[..., :count] += bits.flatten(-2).int() << bit
            start += count // 8
        if not self.rope_dim:
            return codes.bfloat16()
        signed = packed[..., self.rope_at : self.rope_at + self.rope_dim].contiguous().view(torch.int8)
        scale = packed[..., self.rope_at + self.rope_dim :].contiguous().view(torch.bfloat16)
        return torch.cat((codes.bfloat16(), (signed.float() * scale.float()).bfloat16()), dim=-1)

    def rounded(self, row: Tensor) -> Tensor:
        """What is read of rows, in their dtype; gradients pass as if nothing were rounded (straight through)."""
        read = self.unpack(self.pack(row.detach())).to(row.dtype)
        return row + (read - row).detach() if row.requires_grad else read
