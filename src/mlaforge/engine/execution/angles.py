"""How far the rotary pairs of a step's tokens turn.

Legend: N tokens, P rotary pairs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mlaforge.modeling.rope_mla import pairs

# Positions of the first table.
FIRST = 1024


class Angles:
    """Made of the model's own rotary module. Angles are as they are in the model's dtype, so that the turn is the one
    its class makes.

    On a CPU a table of all positions is kept, which grows by doubling: making the angles of a few positions anew takes
    longer than a small product. On a GPU they are made in the step, which may be a graph.
    """

    def __init__(self, rotary: Any, head_dim: int, dtype: torch.dtype):
        self.rotary, self.pairs, self.dtype = rotary, head_dim // 2, dtype
        self.table_LP = torch.empty(0, self.pairs, dtype=torch.complex64)

    def __call__(self, positions_N: Tensor, below: int) -> Tensor:
        """cos + i sin, complex64 [N, 1, P]; all positions are below that host number."""
        if positions_N.device.type != "cpu":
            return self._made(positions_N)[:, None]
        if below > len(self.table_LP):
            length = max(FIRST, 1 << (below - 1).bit_length())
            self.table_LP = self._made(torch.arange(length, device=positions_N.device))
        return self.table_LP.index_select(0, positions_N)[:, None]

    def _made(self, positions_N: Tensor) -> Tensor:
        like = torch.empty(1, dtype=torch.float32, device=positions_N.device)
        made = (pairs(table, self.pairs)[0] for table in self.rotary(like, positions_N[None]))
        return torch.complex(*(table.to(self.dtype).float() for table in made))
