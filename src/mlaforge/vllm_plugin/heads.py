"""Tensor parallelism: the heads of a rank, and its shards of the attention tensors.

A rank has its share of the query heads and the KV heads that they read (a KV head of several ranks is replicated).
Latents and rotary keys are computed and cached on every rank. The outputs of o_proj are summed over ranks.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

# Projections sharded by rows or input columns; all others are replicated.
QUERY_ROWS, KV_ROWS, QUERY_COLUMNS = ("q_proj", "q_b_proj", "sinks"), ("k_proj", "v_proj", "kv_b_proj"), ("o_proj",)


class Heads:
    """The heads of one rank."""

    def __init__(self, num_kv_heads: int, rank: int, size: int):
        self.rank, self.size = rank, size
        # The KV heads are split into `kv_parts` equal parts, of which the rank has number `kv_part`.
        self.kv_parts = min(size, num_kv_heads)
        self.kv_part = rank * self.kv_parts // size

    def config(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the config.json of a model with only these heads."""
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        rank_heads = {"num_attention_heads": heads // self.size, "num_key_value_heads": kv_heads // self.kv_parts}
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
