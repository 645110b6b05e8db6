"""Decompressed keys of the layout `latent` that are kept from step to step where layers are sparse.

What a token reads is mostly what the one before it read (SmolLM2 at 8,000 tokens: 74 of 512 are others), so in a step
few keys are decompressed where all that it reads would be. The compiled kernel alone keeps them (ops/cpu/kept_keys.h).

Legend: L slots of the cache, E keys that are kept, K numbers of a token's keys.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

# Tokens of the cache for each whose keys can be kept.
EACH = 8


def kept_bytes(slots: int, width: int) -> int:
    """Of memory for so many slots, which is taken as keys are kept."""
    return 4 * slots + slots // EACH * (2 * width + 8)


@dataclasses.dataclass(frozen=True)
class KeptKeys:
    """`keys` [E, K] in bf16. `places`, int32, one behind the other: of each slot where its key is, or -1 [L]; of each
    key its slot, or -1 [E], and the step that last read it [E]; the key that is next to make room; the step's number.
    """

    keys: Tensor
    places: Tensor

    @classmethod
    def empty(cls, slots: int, width: int) -> KeptKeys:
        """For a cache of so many slots, on the CPU."""
        count = slots // EACH
        places = torch.zeros(slots + 2 * count + 2, dtype=torch.int32)
        places[: slots + count] = -1
        return cls(torch.empty(count, width, dtype=torch.bfloat16), places)

    def forget(self, slots: Tensor) -> None:
        """What is kept of slots whose rows change."""
        held = self.places[slots]
        length = len(self.places) - 2 * len(self.keys) - 2
        self.places[length + held[held >= 0].long()] = -1
        self.places[slots] = -1
