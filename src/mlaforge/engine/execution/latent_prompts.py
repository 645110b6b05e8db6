"""Prompt tokens of a converted layer on a GPU: paged attention over decompressed keys and values.

A prompt has many query tokens per cached token, which pays for decompressing it once per chunk and layer; over latents
the products would be several times as large. KV heads are computed so many at a time that their keys and values fit
into a workspace.

Legend: T query tokens, L rows that they read, P rows with the rest of the last block, H query heads, G KV heads, D key
and V value dimensions, R latent rank, E rotary dimensions, K = D + E.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mlaforge.modeling.latent_attention_mla import LatentAttention
from mlaforge.modeling.rope_mla import rotate
from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.host_view import host_view
from mlaforge.ops.paged_attention import paged_attention
from mlaforge.ops.paged_rows import PagedRows

# Bytes of decompressed keys and values, unless those of one KV head are more.
WORKSPACE = 256 << 20
# Rows that are decompressed at a time.
STRETCH = 8192


def attend_prompt(latent: LatentAttention, q_THK: Tensor, rows: PagedRows, view: CacheView, index: int) -> Tensor:
    """Return attention with sinks of a prompt, sequence `index` of a view, [T, H V].

    q_THK: its queries, normed, and rotated in `latent_rope`; the rows of the step are written.
    """
    blocks_B, copied = host_view(view).copied(index)
    T, G, V, K = len(q_THK), latent.num_kv_heads, latent.v_dim, latent.nope_dim + latent.rope_dim
    if not latent.rope_dim:
        L = copied.max_seq_len
        cos, sin = (table[:, L - T : L] for table in latent.table(L, q_THK))
        q_THK = rotate(q_THK.transpose(0, 1)[None], cos, sin)[0].transpose(0, 1).contiguous()
    P = len(blocks_B) * view.block_size
    most = max(1, WORKSPACE // (P * (K + V) * q_THK.element_size()))
    sinks = latent.sinks if latent.config.mla_sinks else None
    outs = []
    for first in range(0, G, most):
        heads = slice(first, min(G, first + most))
        of_heads = slice(heads.start * latent.num_key_value_groups, heads.stop * latent.num_key_value_groups)
        kv = _decompressed(latent, rows, blocks_B, view.block_size, heads)
        out_THV, _ = paged_attention(
            q_THK[:, of_heads], kv[..., :K], kv[..., K:], copied, latent.scaling,
            None if sinks is None else sinks[of_heads],
        )  # fmt: skip
        outs.append(out_THV)
    return torch.cat(outs, dim=1).flatten(1)


def _decompressed(latent: LatentAttention, rows: PagedRows, blocks_B: Tensor, size: int, heads: slice) -> Tensor:
    """Return keys and values of some KV heads, [P, heads, K + V]."""
    R, D, count = latent.rank, latent.nope_dim, heads.stop - heads.start
    weight, bias = (
        of.view(latent.num_kv_heads, -1, *of.shape[1:])[heads].flatten(0, 1)
        for of in (latent.kv_b_proj.weight, latent.kv_b_proj.bias)
    )
    K = D + latent.rope_dim
    kv = weight.new_empty(len(blocks_B) * size, count, K + latent.v_dim)
    step = max(1, STRETCH // size)
    for begin in range(0, len(blocks_B), step):
        row_LW = rows.read_blocks(blocks_B[begin : begin + step], size).to(weight.dtype)
        part = kv[begin * size : begin * size + len(row_LW)]
        decompressed = F.linear(row_LW[:, :R], weight, bias).view(len(row_LW), count, -1)
        part[..., K:] = decompressed[..., D:]
        if latent.rope_dim:
            part[..., :D] = decompressed[..., :D]
            part[..., D:K] = row_LW[:, None, R:]
        else:
            at_L = torch.arange(begin * size, begin * size + len(row_LW), device=kv.device)
            part[..., :D] = latent.rotated_keys(decompressed[None, ..., :D].transpose(1, 2), at_L)[0].transpose(0, 1)
    return kv
