"""Rotary position embedding in the half-split convention of transformers, for queries and cached keys.

Copied into checkpoints; requires only torch.

Legend: B batch, H heads, T tokens, P pairs (half of the rotated dimensions).
"""

import torch
from torch import Tensor, nn


def rotate(x_BHT2P: Tensor, cos_BTP: Tensor, sin_BTP: Tensor) -> Tensor:
    """Rotate the pairs (i, i + P) of the last dimension; `cos` and `sin` include any attention scaling."""
    a, b = x_BHT2P.chunk(2, dim=-1)
    cos, sin = cos_BTP.unsqueeze(-3), sin_BTP.unsqueeze(-3)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def pairs(cos_or_sin: Tensor, num_pairs: int) -> Tensor:
    """Return one column per pair: families pass either P columns or the same P columns twice."""
    return cos_or_sin[..., :num_pairs]


class RotationTable:
    """Table of cos and sin of positions 0, 1, 2, ..., computed by the model's rotary module and cached between steps.

    Keys that are cached unrotated are rotated when they are read, so every step needs all earlier positions. All layers
    of a model share one table; it grows by doubling.
    """

    def __init__(self, rotary: nn.Module, num_pairs: int):
        self.rotary = rotary
        self.num_pairs = num_pairs
        self.cos = self.sin = torch.empty(0)

    @property
    def length(self) -> int:
        """Number of positions in the table."""
        return self.cos.shape[1] if self.cos.ndim == 3 else 0

    def __call__(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each [1, length, P], in the dtype and on the device of `like`."""
        stale = self.cos.device != like.device or self.cos.dtype != like.dtype or self.cos.ndim != 3
        if stale or self.cos.shape[1] < length:
            size = max(64, 1 << (length - 1).bit_length())
            with torch.no_grad():
                cos, sin = self.rotary(like[:1, :1], torch.arange(size, device=like.device)[None])
            # Compiled kernels read contiguous rows.
            self.cos, self.sin = (pairs(table, self.num_pairs).contiguous() for table in (cos, sin))
        return self.cos[:, :length], self.sin[:, :length]
