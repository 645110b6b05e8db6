"""Tensor parallelism: the heads of a rank, and its shards of the attention tensors.

A rank has its share of the query heads and the KV heads that they read (a KV head of several ranks is replicated).
Latents and rotary keys are computed and cached on every rank. The outputs of o_proj are summed over ranks. Where a
group of ranks shares out tokens (shards.py), each of them has the KV heads of the group.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

# Projections sharded by rows or input columns; all others are replicated.
QUERY_ROWS, KV_ROWS, QUERY_COLUMNS = ("q_proj", "q_b_proj", "sinks"), ("k_proj", "v_proj", "kv_b_proj"), ("o_proj",)


class Heads:
    """The heads of one rank. grouped: with the KV heads of its group of `context` consecutive ranks."""

    def __init__(self, num_kv_heads: int, rank: int, size: int, context: int = 1, grouped: bool = False):
        self.rank, self.size, self.num_kv_heads = rank, size, num_kv_heads
        # The KV heads are split into `kv_parts` equal parts, of which the rank has number `kv_part`.
        self.kv_parts, self.kv_part = self._part(rank, size)
        # KV heads that the rank's query heads read, among those that it has.
        self.kv_slice = slice(0, num_kv_heads // self.kv_parts)
        if grouped:
            parts, part = self._part(rank // context, size // context)
            first = self.kv_part * self.kv_slice.stop - part * (num_kv_heads // parts)
            self.kv_slice = slice(first, first + self.kv_slice.stop)
            self.kv_parts, self.kv_part = parts, part

    def _part(self, index: int, count: int) -> tuple[int, int]:
        """Number of parts of the KV heads, and the part of ranks (or groups) number `index` of `count`."""
        parts = min(count, self.num_kv_heads)
        return parts, index * parts // count

    def config(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the config.json of a model with only these heads."""
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        kv_heads = self.num_kv_heads // self.kv_parts
        rank_heads = {"num_attention_heads": heads // self.size, "num_key_value_heads": kv_heads}
        return {**config, **rank_heads, "head_dim": head_dim}

    def share(self, name: str, tensor: Tensor, by_head: bool = False) -> Tensor:
        """Return the rank's shard of an attention tensor, such as "o_proj.weight". by_head: its layer's index keys are
        maps of the keys of heads."""
        module, _, kind = name.partition(".")
        if name == "index.query":
            return tensor.chunk(self.kv_parts)[self.kv_part]
        if name == "index.key.weight" and by_head:
            # Summed over ranks, of which several may have the same heads.
            return tensor.chunk(self.kv_parts, dim=1)[self.kv_part] * (self.kv_parts / self.size)
        if name == "index.key.bias" and by_head:
            return tensor / self.size
        if module in QUERY_ROWS:
            return tensor.chunk(self.size)[self.rank]
        if module in KV_ROWS:
            return tensor.chunk(self.kv_parts)[self.kv_part]
        if module in QUERY_COLUMNS:
            # A bias is added on rank 0 only, because outputs are summed.
            return tensor.chunk(self.size, dim=1)[self.rank] if kind == "weight" else tensor * float(self.rank == 0)
        return tensor
