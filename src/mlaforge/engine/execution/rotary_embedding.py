"""Rotary position embedding: the rotation of each rotary pair at the positions of a step's tokens.

Legend: N tokens, P rotary pairs, L positions of the table.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mlaforge.modeling.rope_mla import pairs

# Positions of the first table.
INITIAL_POSITIONS = 1024


class RotaryEmbedding:
    """Rotations from the model's own rotary module, rounded to the model's dtype, so that they equal those of the
    model's class.

    On a CPU all positions are cached in a table that grows by doubling: computing a few positions anew takes longer
    than a small matrix product. On a GPU rotations are computed in the step, which may be a CUDA graph.
    """

    def __init__(self, rotary: Any, head_dim: int, dtype: torch.dtype):
        self.rotary, self.pairs, self.dtype = rotary, head_dim // 2, dtype
        self.table_LP = torch.empty(0, self.pairs, dtype=torch.complex64)

    def __call__(self, positions_N: Tensor, num_positions: int) -> Tensor:
        """Return cos + i sin as complex64 [N, 1, P]. All positions are below `num_positions`, which is a host
        number."""
        if positions_N.device.type != "cpu":
            return self._compute(positions_N)[:, None]
        if num_positions > len(self.table_LP):
            length = max(INITIAL_POSITIONS, 1 << (num_positions - 1).bit_length())
            self.table_LP = self._compute(torch.arange(length, device=positions_N.device))
        return self.table_LP.index_select(0, positions_N)[:, None]

    def _compute(self, positions_N: Tensor) -> Tensor:
        like = torch.empty(1, dtype=torch.float32, device=positions_N.device)
        cos_sin = (pairs(table, self.pairs)[0] for table in self.rotary(like, positions_N[None]))
        return torch.complex(*(table.to(self.dtype).float() for table in cos_sin))
