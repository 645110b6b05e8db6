"""Which blocks of its text a query token attends to most, in each layer that sees everything.

Legend: H query heads, L rows of a sequence, B blocks.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F

from mlaforge.ops.cache_view import CacheView


class BlockMass:
    """Attention that falls on each block, summed over heads, for the last query token of those sequences of a step that
    are numbered `wanted` in it; layer by layer, in their order."""

    def __init__(self, wanted: list[int]):
        self.wanted = wanted
        self.layers: list[dict[int, Tensor]] = []

    def add(self, view: CacheView, logits: Callable[[int, int], Tensor], blocks: bool = False) -> None:
        """A layer's: `logits` gives for a sequence of the view, and a row of the step, the logits of its query token
        over all rows [H, L], or with `blocks` over summaries of the blocks [H, B]."""
        if view.window is not None:
            return
        found = {}
        for s in self.wanted:
            mass = logits(s, sum(view.queries[: s + 1]) - 1).float().softmax(-1).sum(0)
            if not blocks:
                mass = F.pad(mass, (0, -len(mass) % view.block_size)).view(-1, view.block_size).sum(1)
            found[s] = mass
        self.layers.append(found)

    def heaviest(self, sequence: int, count: int) -> list[list[int]]:
        """Per layer the numbers of the blocks with most mass."""
        return [mass[sequence].topk(min(count, len(mass[sequence]))).indices.tolist() for mass in self.layers]
