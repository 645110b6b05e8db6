"""Rotary position embedding: one convention (half-split, as in transformers) for queries and for cached keys.

Copied into checkpoints; needs only torch.

Legend: B batch, H heads, T tokens, P pairs (half of the rotated dimensions).
"""

import torch
from torch import Tensor, nn


def rotate(x_BHT2P: Tensor, cos_BTP: Tensor, sin_BTP: Tensor) -> Tensor:
    """Rotates the pairs (i, i + P) of the last dimension; `cos` and `sin` carry any attention scaling."""
    a, b = x_BHT2P.chunk(2, dim=-1)
    cos, sin = cos_BTP.unsqueeze(-3), sin_BTP.unsqueeze(-3)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def pairs(cos_or_sin: Tensor, num_pairs: int) -> Tensor:
    """One column per pair. Families hand over either P columns or the same P columns twice."""
    return cos_or_sin[..., :num_pairs]


class RotationTable:
    """cos and sin of positions 0, 1, 2, ..., made by the model's own rotary module and kept between steps.

    Keys that are cached unrotated are rotated where they are read, so all earlier positions are needed at every
    step. One table serves all layers of a model; it grows by doubling.
    """

    def __init__(self, rotary: nn.Module, num_pairs: int):
        self.rotary = rotary
        self.num_pairs = num_pairs
        self.cos = self.sin = torch.empty(0)

    @property
    def length(self) -> int:
        """How many positions the table has now."""
        return self.cos.shape[1] if self.cos.ndim == 3 else 0

    def __call__(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, each [1, length, P], in the dtype and on the device of `like`."""
        stale = self.cos.device != like.device or self.cos.dtype != like.dtype or self.cos.ndim != 3
        if stale or self.cos.shape[1] < length:
            size = max(64, 1 << (length - 1).bit_length())
            with torch.no_grad():
                cos, sin = self.rotary(like[:1, :1], torch.arange(size, device=like.device)[None])
            # Compiled kernels read rows that lie one after another.
            self.cos, self.sin = (pairs(table, self.num_pairs).contiguous() for table in (cos, sin))
        return self.cos[:, :length], self.sin[:, :length]
