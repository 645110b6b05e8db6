"""Sparse grouped-query attention, for layers that were not converted.

Takes over the projections, norms and sinks of a decoder layer's attention module. A token's row, its rotated keys and
its values, is cached as keys, and its index key as values. Copied into checkpoints; requires only torch.

Legend: B batch, T query tokens, S cached tokens, H query heads, G KV heads, D head_dim.
"""

from typing import Any

import torch
from torch import Tensor, nn

from .attention_mla import attend, attend_fused, sink_share
from .rope_mla import pairs, rotate
from .token_index_mla import SparseLayer, Sparsity, update_cache, visible_mask


class SparseAttention(nn.Module):
    """Replaces `attention`, the layer's module, and takes over its submodules. Several query tokens without selections
    are computed as in the original."""

    q_proj: Any
    k_proj: Any
    v_proj: Any
    o_proj: Any
    q_norm: Any
    k_norm: Any

    def __init__(self, attention: Any, config: Any, layer_idx: int, sparsity: Sparsity):
        super().__init__()
        for name, part in attention.named_children():
            self.add_module(name, part)
        self.sinks = getattr(attention, "sinks", None)
        self.layer_idx, self.head_dim, self.scaling = layer_idx, attention.head_dim, attention.scaling
        self.num_kv_heads = config.num_key_value_heads
        features = self.num_kv_heads * self.head_dim
        self.sparse = SparseLayer.of(config, layer_idx, sparsity, features, self.head_dim)
        assert self.sparse is not None
        self.index = self.sparse.index

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Interface of transformers' attention modules: [B, T, hidden] -> ([B, T, hidden], None). Versions before 5.24
        pass the cache as `past_key_values`."""
        assert self.sparse is not None
        cache = past_key_values if cache is None else cache
        B, T, _ = hidden_states.shape
        q, k = (project(hidden_states).view(B, T, -1, self.head_dim) for project in (self.q_proj, self.k_proj))
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        cos, sin = (pairs(table, self.head_dim // 2) for table in position_embeddings)
        index_BTI = None if self.index is None else self.index.keys(k.flatten(2), cos, sin)
        q_BHTD, k_BGTD = q.transpose(1, 2), k.transpose(1, 2)
        self.sparse.set_queries(q_BHTD, cos, sin)
        q_BHTD, k_BGTD = rotate(q_BHTD, cos, sin), rotate(k_BGTD, cos, sin)
        row_BSW = torch.cat((k_BGTD.transpose(1, 2).flatten(2), self.v_proj(hidden_states)), dim=-1)
        if cache is not None:
            row_B1SW, index_BTI = update_cache(cache, self.layer_idx, row_BSW[:, None], index_BTI)
            row_BSW = row_B1SW[:, 0]
        row_BSW, mask, _ = self.sparse.read(row_BSW, index_BTI, attention_mask, T, self.sinks)
        S = row_BSW.shape[1]
        k_BGSD, v_BGSD = (
            part.reshape(B, S, self.num_kv_heads, self.head_dim).transpose(1, 2) for part in row_BSW.chunk(2, dim=-1)
        )
        if T > 1:
            visible = visible_mask(mask, B, T, S, q.device)
            out_BHTD = attend_fused(q_BHTD, k_BGSD, v_BGSD, visible, self.scaling, self.sinks)
        else:
            out_BHTD, lse = attend(q_BHTD, k_BGSD, v_BGSD, mask, self.scaling)
            if self.sinks is not None:
                out_BHTD = out_BHTD * sink_share(lse, self.sinks)[..., None].to(out_BHTD.dtype)
        return self.o_proj(out_BHTD.transpose(1, 2).flatten(2)), None
