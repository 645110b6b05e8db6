"""Tensor parallelism: which of a model's heads, and so which parts of its attention's tensors, a rank has.

A rank has its share of the query heads and of the KV heads that they read (a KV head that several ranks read is on all
of them); latents and rotary keys are computed and cached on every rank. The outputs of o_proj are summed over ranks.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

# Projections whose rows, or input columns, belong to heads; all others are whole on every rank.
QUERY_ROWS, KV_ROWS, QUERY_COLUMNS = ("q_proj", "q_b_proj", "sinks"), ("k_proj", "v_proj", "kv_b_proj"), ("o_proj",)


class Heads:
    """Which heads of a model a rank has."""

    def __init__(self, num_kv_heads: int, rank: int, size: int):
        self.rank, self.size = rank, size
        # Of so many equal parts of the KV heads, which one.
        self.kv_parts = min(size, num_kv_heads)
        self.kv_part = rank * self.kv_parts // size

    def config(self, config: dict[str, Any]) -> dict[str, Any]:
        """config.json of a model that has these heads only."""
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        own = {"num_attention_heads": heads // self.size, "num_key_value_heads": kv_heads // self.kv_parts}
        return {**config, **own, "head_dim": head_dim}

    def share(self, name: str, tensor: Tensor) -> Tensor:
        """The rank's part of the attention tensor `name`, such as "o_proj.weight"."""
        module, _, kind = name.partition(".")
        if module in QUERY_ROWS:
            return tensor.chunk(self.size)[self.rank]
        if module in KV_ROWS:
            return tensor.chunk(self.kv_parts)[self.kv_part]
        if module in QUERY_COLUMNS:
            # Added once, not by every rank.
            return tensor.chunk(self.size, dim=1)[self.rank] if kind == "weight" else tensor * float(self.rank == 0)
        return tensor
