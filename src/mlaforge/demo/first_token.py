"""Attention to the first token by layer: most heads attend mainly to it, which a learned sink can replace.

Legend: H query heads, G KV heads, D head_dim, T tokens. Measured on the running model, so that a sliding window beyond
the first token can get a sink of the same weight, and the lost value as a bias.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

# Queries per chunk, which bounds the memory of their logits.
ROWS = 256


@dataclasses.dataclass
class FirstToken:
    """Means over the queries from position `after` on: scaled logit [H] of the first token, its softmax share [H], and
    share times its value [H, D]; root mean squares of queries, keys and values."""

    logit: Tensor
    share: Tensor
    value: Tensor
    query_rms: float
    key_rms: float
    value_rms: float


@torch.no_grad()
def measure(model: Any, windows: Iterable[Tensor], after: int) -> list[FirstToken]:
    """One FirstToken per layer of a causal LM with full attention in every layer, over token windows [T]."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    per_layer: dict[int, list[FirstToken]] = {}

    def record(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, scale=scaling, is_causal=True, enable_gqa=True
        )
        per_layer.setdefault(module.layer_idx, []).append(_first_token(query[0], key[0], value[0], scaling, after))
        return out.transpose(1, 2), None

    name = "mlaforge_first_token"
    AttentionInterface.register(name, record)
    AttentionMaskInterface.register(name, sdpa_mask)
    model.set_attn_implementation(name)
    for ids in windows:
        if len(ids) <= after:
            raise ValueError(f"a window of {len(ids)} tokens has no query after position {after}")
        model.model(ids[None].to(model.device), use_cache=False)
    model.set_attn_implementation("sdpa")
    fields = [field.name for field in dataclasses.fields(FirstToken)]
    return [
        FirstToken(
            *(
                sum(getattr(statistics, name) for statistics in per_layer[layer]) / len(per_layer[layer])
                for name in fields
            )
        )
        for layer in sorted(per_layer)
    ]


def _first_token(query: Tensor, key: Tensor, value: Tensor, scaling: float, after: int) -> FirstToken:
    """Statistics of one window: query [H, T, D], key and value [G, T, D]."""
    heads, tokens, _ = query.shape
    key, value = (x.repeat_interleave(heads // len(x), dim=0) for x in (key, value))
    logit, share = torch.zeros(heads), torch.zeros(heads)
    for start in range(after, tokens, ROWS):
        stop = min(start + ROWS, tokens)
        scores = query[:, start:stop] @ key[:, :stop].transpose(1, 2) * scaling
        later = torch.arange(stop) > torch.arange(start, stop)[:, None]
        total = scores.masked_fill(later, -torch.inf).logsumexp(dim=-1)
        logit += scores[..., 0].sum(dim=-1)
        share += (scores[..., 0] - total).exp().sum(dim=-1)
    logit, share = logit / (tokens - after), share / (tokens - after)
    rms = [float(x.square().mean().sqrt()) for x in (query, key, value)]
    return FirstToken(logit, share, share[:, None] * value[:, 0], *rms)
