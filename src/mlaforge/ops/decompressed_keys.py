"""Cache of decompressed keys for sparse layers of the `latent` layout.

Consecutive tokens select mostly the same tokens (SmolLM2 at 8,000 tokens: 74 of 512 differ), so a step decompresses few
new keys. Only the compiled kernel reads and fills the cache (ops/cpu/attention/decompressed_keys.h). A layer with a
cache rounds all its keys to the cache's format, so that no result depends on which are cached.

Legend: L slots of the paged cache, E entries (keys in memory), B bytes of a token's keys, D head_dim.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from mlaforge.ops.row_formats.int8 import Int8

# One entry per this many slots of the paged cache.
TOKENS_PER_KEY = 8


def key_format(kv_heads: int, head_dim: int) -> Int8:
    """Return the format of a token's keys: int8 with a scale per KV head."""
    return Int8((head_dim,) * kv_heads)


def rounded_keys(keys_LGD: Tensor) -> Tensor:
    """Round keys [L, KV heads, D] as the cache does; fp32."""
    L, G, D = keys_LGD.shape
    format = key_format(G, D)
    stored, units = torch.empty(L, format.unit_bytes, dtype=torch.uint8), torch.arange(L)
    format.write(stored, units, keys_LGD.flatten(1))
    return format.read(stored, units).float().view(L, G, D)


def decompressed_keys_bytes(slots: int, key_bytes: int) -> int:
    """Bytes for `slots` slots and keys of `key_bytes`. The OS commits the memory when entries are written."""
    return 4 * slots + slots // TOKENS_PER_KEY * (key_bytes + 4)


@dataclasses.dataclass(frozen=True)
class DecompressedKeys:
    """keys [E, B] in bytes of `key_format`. metadata, int32, concatenates: the entry of each slot or -1 [L]; the slot
    of each entry or -1 [E]; the clock hand (the next entry to evict)."""

    keys: Tensor
    metadata: Tensor

    @classmethod
    def empty(cls, slots: int, key_bytes: int) -> DecompressedKeys:
        """Return a cache without keys for `slots` slots, on the CPU."""
        count = slots // TOKENS_PER_KEY
        metadata = torch.full((slots + count + 1,), -1, dtype=torch.int32)
        metadata[-1] = 0
        return cls(torch.empty(count, key_bytes, dtype=torch.uint8), metadata)

    def invalidate(self, slots: Tensor) -> None:
        """Drop the keys of slots whose rows change."""
        entries = self.metadata[slots]
        length = len(self.metadata) - len(self.keys) - 1
        self.metadata[length + entries[entries >= 0].long()] = -1
        self.metadata[slots] = -1
