"""Cache of decompressed keys for sparse layers of the `latent` layout.

Consecutive tokens select mostly the same tokens (SmolLM2 at 8,000 tokens: 74 of 512 differ), so a step decompresses few
new keys. Only the compiled kernel reads and fills the cache (ops/cpu/attention/decompressed_keys.h). Keys without room
are decompressed when they are read.

Legend: L slots of the paged cache, E entries (keys in memory), K elements of a token's keys (KV heads * head_dim).
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from mlaforge.ops.row_formats.int8 import Int8

# One entry per this many slots of the paged cache.
TOKENS_PER_KEY = 8


def key_format(kv_heads: int, head_dim: int) -> Int8:
    """Return the format of an entry."""
    return Int8((head_dim,) * kv_heads)


def decompressed_keys_bytes(slots: int, format: Int8) -> int:
    """Bytes for `slots` slots. The OS commits the memory when entries are written."""
    return 4 * slots + slots // TOKENS_PER_KEY * (format.bytes(1) + 4)


@dataclasses.dataclass(frozen=True)
class DecompressedKeys:
    """keys: uint8 [E, bytes of a token's keys]. metadata, int32, concatenates: the entry of each slot or -1 [L]; the
    slot of each entry or -1 [E]; the clock hand (the next entry to evict)."""

    keys: Tensor
    metadata: Tensor

    @classmethod
    def empty(cls, slots: int, format: Int8) -> DecompressedKeys:
        """Return a cache without keys for `slots` slots, on the CPU."""
        count = slots // TOKENS_PER_KEY
        metadata = torch.full((slots + count + 1,), -1, dtype=torch.int32)
        metadata[-1] = 0
        return cls(format.empty(count, torch.device("cpu")), metadata)

    def invalidate(self, slots: Tensor) -> None:
        """Drop the keys of slots whose rows change."""
        entries = self.metadata[slots]
        length = len(self.metadata) - len(self.keys) - 1
        self.metadata[length + entries[entries >= 0].long()] = -1
        self.metadata[slots] = -1
