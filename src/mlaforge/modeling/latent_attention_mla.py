"""Multi-head latent attention with two cache layouts: replaces a decoder layer's `self_attn`.

`latent`: a token caches c (R elements). Keys are decompressed from c, normed if the source norms them, and rotated when
they are read, so RoPE is preserved completely; values can be absorbed (attend over c, then apply W_uv). `latent_rope`:
a token caches c and one rotary key that all heads share (R + E elements), DeepSeek-V2's layout (arXiv:2405.04434), with
a table of the model frequency of each rotary pair.

Works with any transformers cache: the latent row is stored as keys, with empty values. Coded rows are stored as bytes,
and attention reads the decoded rows of all tokens, including the current ones. Copied into checkpoints; requires only
torch and transformers.

Legend: B batch, T query tokens, S cached tokens, H query heads, G KV heads, D head_dim (= qk_nope_head_dim), V
v_head_dim, R kv_lora_rank, E qk_rope_head_dim.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .attention_mla import FUSED, attend, attend_fused, sink_share
from .coded_layout_mla import check_version
from .coded_rows_mla import CodedRows
from .rope_mla import RotationTable, pairs, rotate
from .token_index_mla import SparseLayer, Sparsity, update_cache


class HeadRMSNorm(nn.Module):
    """RMS norm over the last dimension, weight · x / sqrt(mean(x²) + eps), in fp32 until the weight is applied."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        full = x.float()
        return self.weight * (full * torch.rsqrt(full.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class LatentAttention(nn.Module):
    """MLA of one layer. `config` is a `<Family>MlaConfig`; `table` rotates the cached keys of the `latent` layout.

    Parameters (DeepSeek's names; kv_b_proj has one block per KV head instead of one per query head):
        q_proj               [H·(D+E), hidden], or q_a_proj [q_lora_rank, hidden] and q_b_proj [H·(D+E), q_lora_rank]
        kv_a_proj_with_mqa   [R+E, hidden], no norm; has a bias only for coded rows, and in latent_rope if the source's
                             keys have one
        kv_b_proj            [G·(D+V), R] with bias; rows per KV head: D of the key, then V of the value
        o_proj               [hidden, H·V]
        rope_index           [E/2] int64, only in latent_rope: the model frequency of each rotary pair
        sinks                [H], only with learned sinks
        q_norm, k_norm       [D], only in latent, if the source has them: RMS norms per head, between projection (for
                             keys: decompression) and RoPE

    Key positions are cache indices: RoPE depends only on differences, and the positions that a mask makes visible are
    contiguous in every cache and padding of transformers.
    """

    is_causal = True
    rope_index: Tensor

    def __init__(self, config: Any, layer_idx: int, table: RotationTable, sparsity: Sparsity | None = None):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.table = table
        self.layout = config.mla_layer_types[layer_idx]
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.num_key_value_groups = self.num_heads // self.num_kv_heads
        self.nope_dim, self.v_dim = config.qk_nope_head_dim, config.v_head_dim
        self.rope_dim = config.qk_rope_head_dim if self.layout == "latent_rope" else 0
        self.rank = config.mla_kv_lora_ranks[layer_idx]
        self.scaling = config.softmax_scale
        self.attention_dropout = config.attention_dropout
        counts = config.mla_code_counts[layer_idx] if config.mla_code_counts else []
        check_version(config.mla_code_version)
        self.coded = CodedRows(counts, self.rope_dim) if counts else None
        kinds = getattr(config, "layer_types", None)
        windowed = kinds is None or kinds[layer_idx] == "sliding_attention"
        self.sliding_window = getattr(config, "sliding_window", None) if windowed else None
        # True and False force the absorbed or the expanded form; None selects the one with fewer FLOPs.
        self.absorb: bool | None = None

        hidden, q_rank = config.hidden_size, config.q_lora_rank
        q_out = self.num_heads * (self.nope_dim + self.rope_dim)
        if q_rank is None:
            self.q_proj = nn.Linear(hidden, q_out, bias=config.mla_q_bias)
        else:
            self.q_a_proj = nn.Linear(hidden, q_rank, bias=False)
            self.q_b_proj = nn.Linear(q_rank, q_out, bias=config.mla_q_bias)
        kv_a_bias = self.coded is not None or (config.mla_k_bias and self.layout == "latent_rope")
        self.kv_a_proj_with_mqa = nn.Linear(hidden, self.rank + self.rope_dim, bias=kv_a_bias)
        self.kv_b_proj = nn.Linear(self.rank, self.num_kv_heads * (self.nope_dim + self.v_dim), bias=True)
        self.o_proj = nn.Linear(self.num_heads * self.v_dim, hidden, bias=config.mla_o_bias)
        if self.rope_dim:
            self.register_buffer("rope_index", torch.zeros(self.rope_dim // 2, dtype=torch.int64))
        if config.mla_sinks:
            self.sinks = nn.Parameter(torch.zeros(self.num_heads))
        self.qk_norm = config.mla_qk_norm
        if self.qk_norm:
            # A norm spans the whole head, so no part of a key could stay rotary.
            assert self.layout == "latent"
            self.q_norm = HeadRMSNorm(self.nope_dim, config.rms_norm_eps)
            self.k_norm = HeadRMSNorm(self.nope_dim, config.rms_norm_eps)
        # An index key is a linear map of the decoded row, or of the keys if a norm follows the decompression.
        features = self.num_kv_heads * self.nope_dim if self.qk_norm else self.rank + self.rope_dim
        self.sparse = SparseLayer.of(config, layer_idx, sparsity, features, self.nope_dim + self.rope_dim)
        self.index = self.sparse.index if self.sparse is not None else None

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
        cache = past_key_values if cache is None else cache
        out_BHTV = self.heads(hidden_states, position_embeddings, attention_mask, cache, **kwargs)
        return self.o_proj(out_BHTV.transpose(1, 2).flatten(2)), None

    def heads(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """Compute everything before o_proj: [B, T, hidden] -> [B, H, T, V]."""
        T = hidden_states.shape[1]
        q_BHTD = self.queries(hidden_states)
        row_BTR = self.kv_a_proj_with_mqa(hidden_states)

        first = 0
        if cache is not None:
            # transformers builds masks in this frame: cached row j has index first_key + j.
            seen = cache.get_seq_length(self.layer_idx)
            first = int(seen - cache.get_mask_sizes(T, self.layer_idx)[1])
        if self.layout == "latent":
            cos, sin = (table[:, first:] for table in self.table(first + T, q_BHTD))
        else:
            cos, sin = (pairs(table, self.nope_dim // 2) for table in position_embeddings)
        index_BTI = None
        if self.index is not None:
            index_BTI = self.index.keys(self.index_features(row_BTR), cos, sin)
        if self.sparse is not None:
            self.sparse.set_queries(q_BHTD, cos, sin)

        if self.layout == "latent":
            q_BHTD = rotate(q_BHTD, cos, sin)
        else:
            cos, sin = cos[..., self.rope_index], sin[..., self.rope_index]
            q_nope, q_rope = q_BHTD.split([self.nope_dim, self.rope_dim], dim=-1)
            q_BHTD = torch.cat((q_nope, rotate(q_rope, cos, sin)), dim=-1)
            latent, k_rope = row_BTR.split([self.rank, self.rope_dim], dim=-1)
            row_BTR = torch.cat((latent, rotate(k_rope[:, None], cos, sin)[:, 0]), dim=-1)

        row_B1SR = row_BTR[:, None]
        if self.coded is not None:
            row_B1SR = self.coded.rounded(row_B1SR) if cache is None else self.coded.pack(row_B1SR)
        if cache is not None:
            row_B1SR, index_BTI = update_cache(cache, self.layer_idx, row_B1SR, index_BTI)
            if self.coded is not None:
                row_B1SR = self.coded.unpack(row_B1SR).to(row_BTR.dtype)
        row_BSR, at = row_B1SR[:, 0], None
        if self.sparse is not None:
            row_BSR, attention_mask, at = self.sparse.read(row_BSR, index_BTI, attention_mask, T, self._sinks)
        absorb = self.cheaper_absorbed(T) if self.absorb is None else self.absorb
        form = self.absorbed if absorb else self.expanded
        return form(q_BHTD, row_BSR, attention_mask, at, **kwargs)

    def queries(self, hidden_BTC: Tensor) -> Tensor:
        """Return queries [B, H, T, D+E] before RoPE, normed if the source norms them."""
        x = hidden_BTC if self.config.q_lora_rank is None else self.q_a_proj(hidden_BTC)
        q = (self.q_proj if self.config.q_lora_rank is None else self.q_b_proj)(x)
        q_BHTD: Tensor = q.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        return self.q_norm(q_BHTD) if self.qk_norm else q_BHTD

    def index_features(self, row_BTR: Tensor) -> Tensor:
        """Return the input of the index key projection: the decoded row with an unrotated rotary part, or the normed
        keys of all heads."""
        if self.coded is not None:
            whole = self.coded.nearest(row_BTR[..., : self.rank]).to(row_BTR.dtype)
            row_BTR = torch.cat((whole, row_BTR[..., self.rank :]), dim=-1)
        if not self.qk_norm:
            return row_BTR
        w_uk, _, b_k, _ = self.up_projections()
        keys = nn.functional.linear(row_BTR, w_uk.flatten(0, 1), b_k.flatten())
        return self.k_norm(keys.unflatten(-1, (self.num_kv_heads, -1))).flatten(-2)

    @property
    def _sinks(self) -> Tensor | None:
        return self.sinks if self.config.mla_sinks else None

    def cheaper_absorbed(self, num_queries: int) -> bool:
        """Whether T query tokens need fewer FLOPs per cached token over the latent than over decompressed heads."""
        per_head = self.num_heads * num_queries
        if self.layout == "latent":
            saved = self.rank * self.num_kv_heads * self.v_dim
            return per_head * (self.rank - self.v_dim) < saved
        saved = self.rank * self.num_kv_heads * (self.nope_dim + self.v_dim)
        return per_head * (2 * self.rank - self.nope_dim - self.v_dim) < saved

    def up_projections(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return W_uk [G, D, R], W_uv [G, V, R] and their biases b_k [G, D], b_v [G, V]."""
        shape = (self.num_kv_heads, self.nope_dim + self.v_dim, self.rank)
        w_uk, w_uv = self.kv_b_proj.weight.view(shape).split([self.nope_dim, self.v_dim], dim=1)
        b_k, b_v = self.kv_b_proj.bias.view(shape[:2]).split([self.nope_dim, self.v_dim], dim=1)
        return w_uk, w_uv, b_k, b_v

    def rotated_keys(self, k_BGSD: Tensor, at_S: Tensor | None) -> Tensor:
        """Norm and rotate decompressed keys of the `latent` layout. Positions `at_S` must be below a length that
        `table` was called with before: checking them would synchronise with the device."""
        if self.qk_norm:
            k_BGSD = self.k_norm(k_BGSD)
        length = k_BGSD.shape[2]
        cos, sin = self.table(length if at_S is None else max(length, self.table.length), k_BGSD)
        if at_S is not None:
            cos, sin = cos[0][at_S], sin[0][at_S]
        return rotate(k_BGSD, cos, sin)

    def expanded(
        self, q_BHTD: Tensor, row_BSR: Tensor, mask: Tensor | None, at_S: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """Attention over decompressed keys and values of every KV head: fewer FLOPs for many query tokens. `at_S`:
        positions of the rows, [S] or [B, S]; None for 0 to S - 1."""
        B, S, _ = row_BSR.shape
        kv = self.kv_b_proj(row_BSR[..., : self.rank]).view(B, S, self.num_kv_heads, -1).transpose(1, 2)
        k_BGSD, v_BGSV = kv.split([self.nope_dim, self.v_dim], dim=-1)
        if self.layout == "latent":
            k_BGSD = self.rotated_keys(k_BGSD, at_S)
        else:
            k_rope = row_BSR[:, None, :, self.rank :].expand(-1, self.num_kv_heads, -1, -1)
            k_BGSD = torch.cat((k_BGSD, k_rope), dim=-1)
        sinks = self._sinks
        if self.config._attn_implementation == FUSED:
            return attend_fused(q_BHTD, k_BGSD, v_BGSV, mask, self.scaling, sinks)
        if sinks is not None:
            out, lse = attend(q_BHTD, k_BGSD, v_BGSV, mask, self.scaling)
            return out * sink_share(lse, sinks)[..., None].to(out.dtype)
        backend: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, self._eager
        )
        # Fused kernels require keys and values of one width.
        v_BGSV = nn.functional.pad(v_BGSV, (0, self.rope_dim + self.nope_dim - self.v_dim))
        dropout = self.attention_dropout if self.training else 0.0
        out_BTHV, _ = backend(
            self, q_BHTD, k_BGSD, v_BGSV, mask, dropout=dropout, scaling=self.scaling,
            sliding_window=self.sliding_window, **kwargs,
        )  # fmt: skip
        return out_BTHV[..., : self.v_dim].transpose(1, 2)

    @staticmethod
    def _eager(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scaling: float, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """transformers' `eager` interface on `attend`, without dropout, which no supported model uses."""
        assert not kwargs.get("dropout")
        return attend(q, k, v, mask, scaling)[0].transpose(1, 2), None

    def absorbed(
        self, q_BHTD: Tensor, row_BSR: Tensor, mask: Tensor | None, at_S: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """Attention over latent values, in latent_rope over latent keys too: all heads share one cached row. `at_S`: as
        in `expanded`."""
        B, G, R = len(q_BHTD), self.num_kv_heads, self.rank
        latent_B1SR = row_BSR[:, None, :, :R]
        if self.layout == "latent":
            w_uk, _, b_k, _ = self.up_projections()
            k = nn.functional.linear(row_BSR, w_uk.reshape(-1, R), b_k.reshape(-1))
            k_BGSD = self.rotated_keys(k.view(B, -1, G, self.nope_dim).transpose(1, 2), at_S)
            out_BHTR, lse = attend(q_BHTD, k_BGSD, latent_B1SR.expand(-1, G, -1, -1), mask, self.scaling)
        else:
            q_row, shift = self.absorbed_queries(q_BHTD)
            out_BHTR, lse = attend(q_row, row_BSR[:, None], latent_B1SR, mask, self.scaling)
            lse = lse + shift
        return self.up_project(out_BHTR, lse)

    def absorbed_queries(self, q_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        """latent_rope: fold W_uk into the queries. Returns queries to multiply with cached rows, [B, H, T, R+E], and
        the key bias' shift of each query's logits, [B, H, T] in fp32: it cancels in the softmax, but not in a sink's
        share."""
        B, H, T, _ = q_BHTD.shape
        w_uk, _, b_k, _ = self.up_projections()
        q_nope, q_rope = q_BHTD.split([self.nope_dim, self.rope_dim], dim=-1)
        q_nope = q_nope.reshape(B, self.num_kv_heads, -1, self.nope_dim)
        q_row = torch.cat(((q_nope @ w_uk).view(B, H, T, self.rank), q_rope), dim=-1)
        return q_row, (q_nope @ b_k[..., None]).view(B, H, T).float() * self.scaling

    def up_project(self, out_BHTR: Tensor, lse_BHT: Tensor) -> Tensor:
        """Map attention over latents to attention over values, [B, H, T, V], and apply a learned sink by `lse_BHT`."""
        B, H, T, R = out_BHTR.shape
        _, w_uv, _, b_v = self.up_projections()
        out = out_BHTR.reshape(B, self.num_kv_heads, -1, R) @ w_uv.transpose(1, 2) + b_v[:, None]
        out = out.view(B, H, T, self.v_dim)
        if self.config.mla_sinks:
            out = out * sink_share(lse_BHT, self.sinks)[..., None].to(out.dtype)
        return out


def _fused(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scaling: float,
    s_aux: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """transformers' attention interface on `attend_fused`, for layers that keep their attention module."""
    assert not kwargs.get("dropout")
    return attend_fused(q, k, v, mask, scaling, s_aux).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register(FUSED, _fused)
# Same name as the attention function: otherwise transformers passes no mask.
ALL_MASK_ATTENTION_FUNCTIONS.register(FUSED, sdpa_mask)
