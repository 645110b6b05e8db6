"""Attention of a decoder layer over the paged cache, made from the layer's own module: what `self_attn` becomes.

A grouped-query layer caches its rotated keys and its values side by side, a converted layer the row that its own
module caches; the mathematics of latents stays in modeling/latent_attention_mla.py.

Legend: N tokens of a step, S sequences, H query heads, G KV heads, D key, V value dimensions, R latent rank,
E rotary dimensions, W numbers a token caches.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from mlaforge.engine.batch import Batch
from mlaforge.engine.cache import LayerCache
from mlaforge.engine.linear import fused
from mlaforge.modeling.attention_mla import sink_share
from mlaforge.modeling.latent_attention_mla import LatentAttention
from mlaforge.modeling.rope_mla import pairs, rotate
from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.paged_attention import paged_attention


@dataclasses.dataclass(frozen=True)
class Step:
    """What the attention layers need of a step. Decoder layers hand it through as their `position_embeddings`.

    `cos_N1P`, `sin_N1P`: one column per rotary pair; `cos_N1D` and `sin_N1D` the same for both halves of a head, the
    first half's sines negated, so that x * cos + roll(x) * sin rotates.
    """

    batch: Batch
    cos_N1P: Tensor
    sin_N1P: Tensor
    cos_N1D: Tensor
    sin_N1D: Tensor

    @classmethod
    def make(cls, batch: Batch, rotary: nn.Module, head_dim: int, like: Tensor) -> Step:
        tables = rotary(like[None, :1], batch.positions_N[None])
        cos, sin = (pairs(table, head_dim // 2)[0][:, None].contiguous() for table in tables)
        return cls(batch, cos, sin, torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))


class PagedGroupedQueryAttention(nn.Module):
    """Grouped-query attention with one product for q, k and v; biases, norms, sinks and windows as in the source."""

    def __init__(self, attention: Any, cache: LayerCache, rows: Tensor, sinks: bool, format: str):
        super().__init__()
        self.rows_LW, self.group = rows, cache.group
        self.head_dim: int = attention.head_dim
        self.num_kv_heads = cache.width // (2 * self.head_dim)
        self.num_heads = attention.q_proj.out_features // self.head_dim
        self.scaling: float = attention.scaling
        self.qkv = fused([attention.q_proj, attention.k_proj, attention.v_proj], format)
        self.o_proj = fused([attention.o_proj], format)
        self.norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None
        self.sinks = attention.sinks if sinks else None

    def forward(self, hidden_states: Tensor, position_embeddings: Step, **_: Any) -> tuple[Tensor, None]:
        """[N, hidden] -> ([N, hidden], None); the other arguments of a decoder layer mean nothing here."""
        step = position_embeddings
        view = step.batch.views[self.group]
        N, H, G, D = len(hidden_states), self.num_heads, self.num_kv_heads, self.head_dim
        qkv = self.qkv(hidden_states)
        qk_NHD = qkv[:, : (H + G) * D].view(N, H + G, D)
        if self.norms:
            for norm, part in zip(self.norms, qk_NHD.split([H, G], dim=1), strict=True):
                part.copy_(norm(part))
        # In place: what follows the queries is then the row to cache.
        qk_NHD.copy_(torch.addcmul(qk_NHD * step.cos_N1D, qk_NHD.roll(D // 2, dims=-1), step.sin_N1D))
        self.rows_LW.index_copy_(0, view.slots_N, qkv[:, H * D :])
        k_LGD, v_LGD = self.rows_LW.view(-1, 2, G, D).unbind(1)
        out_NHD, lse_NH = paged_attention(qk_NHD[:, :H], k_LGD, v_LGD, view, self.scaling)
        if self.sinks is not None:
            out_NHD = out_NHD * sink_share(lse_NH.T, self.sinks).T[..., None].to(out_NHD.dtype)
        return self.o_proj(out_NHD.reshape(N, H * D)), None


class PagedLatentAttention(nn.Module):
    """Multi-head latent attention. `attention` is the converted layer's own module, which does the mathematics; its
    projections of the input are fused into one, and on a CPU it computes in fp32, the fastest dtype there."""

    def __init__(self, attention: LatentAttention, cache: LayerCache, rows: Tensor, format: str):
        super().__init__()
        self.rows_LW, self.group = rows, cache.group
        self.factored = attention.config.q_lora_rank is not None
        self.widths = [attention.num_heads * (attention.nope_dim + attention.rope_dim), cache.width]
        first = attention.q_a_proj if self.factored else attention.q_proj
        self.q_kv_a = fused([first, attention.kv_a_proj_with_mqa], format)
        self.q_b_proj = fused([attention.q_b_proj], format) if self.factored else None
        self.o_proj = fused([attention.o_proj], format)
        del attention.o_proj, attention.kv_a_proj_with_mqa
        # On a CPU the product with decompressed keys and values is limited by arithmetic.
        self.latent = attention.float() if rows.device.type == "cpu" else attention

    def forward(self, hidden_states: Tensor, position_embeddings: Step, **_: Any) -> tuple[Tensor, None]:
        """[N, hidden] -> ([N, hidden], None); the other arguments of a decoder layer mean nothing here."""
        step, latent = position_embeddings, self.latent
        view = step.batch.views[self.group]
        N, W = len(hidden_states), self.widths[1]
        both = self.q_kv_a(hidden_states)
        q, row_NW = both[:, :-W], both[:, -W:]
        if self.q_b_proj is not None:
            q = self.q_b_proj(q)
        q_NHD = q.view(N, latent.num_heads, -1)
        if latent.rope_dim:
            cos, sin = step.cos_N1P[..., latent.rope_index], step.sin_N1P[..., latent.rope_index]
            q_nope, q_rope = q_NHD.split([latent.nope_dim, latent.rope_dim], dim=-1)
            q_NHD = torch.cat((q_nope, _turn(q_rope, cos, sin)), dim=-1)
            c, k_rope = row_NW.split([latent.rank, latent.rope_dim], dim=-1)
            row_NW = torch.cat((c, _turn(k_rope[:, None], cos, sin)[:, 0]), dim=-1)
        elif latent.qk_norm:
            q_NHD = latent.q_norm(q_NHD)
        self.rows_LW.index_copy_(0, view.slots_N, row_NW)
        q_NHD = q_NHD.to(latent.kv_b_proj.weight.dtype)
        if latent.rope_dim and latent.cheaper_absorbed(view.max_query):
            out_NHV = self._absorbed(q_NHD, view)
        else:
            out_NHV = self._by_sequence(q_NHD, view)
        return self.o_proj(out_NHV.to(hidden_states.dtype).reshape(N, -1)), None

    def _absorbed(self, q_NHD: Tensor, view: CacheView) -> Tensor:
        """latent_rope: one cached row is key and value of all heads."""
        latent = self.latent
        q_row, shift = latent.absorbed_queries(q_NHD.transpose(0, 1)[None])
        rows_L1W = self.rows_LW[:, None]
        q_NHW = q_row[0].transpose(0, 1).to(rows_L1W.dtype)
        out_NHR, lse_NH = paged_attention(q_NHW, rows_L1W, rows_L1W[..., : latent.rank], view, latent.scaling)
        lifted = latent.lift(out_NHR.transpose(0, 1)[None].to(q_NHD.dtype), lse_NH.T[None] + shift)
        return lifted[0].transpose(0, 1)

    def _by_sequence(self, q_NHD: Tensor, view: CacheView) -> Tensor:
        """Keys are decompressed, one sequence after another; positions count from the first row that is read."""
        latent = self.latent
        outs = []
        for index, T in enumerate(view.queries):
            rows_1LW, mask = view.sequence(index, self.rows_LW)
            q_1HTD = q_NHD.narrow(0, sum(view.queries[:index]), T).transpose(0, 1)[None]
            L = rows_1LW.shape[1]
            if not latent.rope_dim:
                cos, sin = latent.table(L, q_1HTD)
                q_1HTD = rotate(q_1HTD, cos[:, L - T :], sin[:, L - T :])
            form = latent.absorbed if latent.cheaper_absorbed(T) else latent.expanded
            outs.append(form(q_1HTD, rows_1LW.to(q_1HTD.dtype), mask)[0].transpose(0, 1))
        return torch.cat(outs)


def _turn(x_NHE: Tensor, cos_N1P: Tensor, sin_N1P: Tensor) -> Tensor:
    a, b = x_NHE.chunk(2, dim=-1)
    return torch.cat((a * cos_N1P - b * sin_N1P, b * cos_N1P + a * sin_N1P), dim=-1)


def paged(attention: Any, cache: LayerCache, rows: Tensor, sinks: bool, format: str) -> nn.Module:
    """The paged attention of a decoder layer that has `attention` as its self_attn."""
    if cache.kind == "gqa":
        return PagedGroupedQueryAttention(attention, cache, rows, sinks, format)
    return PagedLatentAttention(attention, cache, rows, format)
