"""What a layer's attention looks for, and what it finds: what an index is made of.

Legend: n tokens of all windows, T of one, H query heads, G KV heads, D head_dim, P rotary pairs, E a query's features,
F a key's, R latent rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mlaforge.checkpoint.layerwise import LayerStream
from mlaforge.factorization.token_index import FIRST, Candidates, PairMoments
from mlaforge.modeling.latent_attention_mla import LatentAttention
from mlaforge.modeling.rope_mla import pairs
from mlaforge.runtime import UserError

# Keys are also turned as if they stood so much later, that slow frequencies are seen at more angles.
LATER = 4096


def as_complex(x: Tensor) -> Tensor:
    """[..., 2P] half-split -> complex [..., P]."""
    return torch.complex(*x.float().chunk(2, dim=-1))


class Observation:
    """Of one layer, window by window; then its index. Works on a layer that is loaded."""

    def __init__(self, stream: LayerStream, index: int):
        self.stream, self.layer = stream, stream.decoder.layers[index]
        self.attention: Any = self.layer.self_attn
        self.spec = stream.spec.layers[index]
        self.latent = self.attention if isinstance(self.attention, LatentAttention) else None
        self.rotary = self.latent is not None and self.latent.layout == "latent_rope"
        groups, pairs_ = (1, self.latent.rope_dim // 2) if self.rotary and self.latent else (
            self.spec.num_kv_heads, self.spec.head_dim // 2)  # fmt: skip
        self.moments = PairMoments(groups, pairs_)
        self.features: list[Tensor] = []
        self.queries: Tensor | float = 0.0

    @torch.no_grad()
    def add(self, states_1TC: Tensor) -> None:
        """The layer's input on one window."""
        x = self.layer.input_layernorm(states_1TC)
        T, D, latent = x.shape[1], self.spec.head_dim, self.latent
        if latent is not None:
            q_HTE, features = latent.queries(x)[0], latent.index_features(latent.kv_a_proj_with_mqa(x))[0]
        else:
            q, k = (getattr(self.attention, name)(x).view(1, T, -1, D) for name in ("q_proj", "k_proj"))
            if self.spec.qk_norm:
                q, k = self.attention.q_norm(q), self.attention.k_norm(k)
            q_HTE, features = q[0].transpose(0, 1), k[0].flatten(1)
        self.features.append(features[FIRST:])
        turns = self._turns(T, x)
        if self.rotary and latent is not None:
            turns = [turn[:, latent.rope_index] for turn in turns]
            keys_TG = features[:, None, latent.rank :]
            still = q_HTE[..., :D].unflatten(0, (self.spec.num_kv_heads, -1)).double()
            self.queries = self.queries + torch.einsum("ghtd,ghte->gde", still, still)
            q_HTE = q_HTE[..., D:]
        elif latent is not None and not latent.qk_norm:
            w_uk, _, b_k, _ = latent.up_projections()
            keys_TG = torch.einsum("tr,gdr->tgd", features, w_uk) + b_k
        else:
            keys_TG = features.unflatten(1, (-1, D))
        self.moments.add(as_complex(keys_TG).cpu(), as_complex(q_HTE.transpose(0, 1)).cpu(), turns)

    def _turns(self, T: int, like: Tensor) -> list[Tensor]:
        """Complex [T, P] of length 1: by what positions turn, and those that stand LATER."""
        found = []
        for start in (0, LATER):
            at = torch.arange(start, start + T, device=like.device)[None]
            cos, sin = (pairs(t, self.spec.head_dim // 2)[0].float() for t in self.stream.decoder.rotary_emb(like, at))
            turn = torch.complex(cos, sin).cpu()
            found.append(turn / turn.abs())
        return found

    def index(self, width: int) -> dict[str, Tensor]:
        """The parameters of the layer's PairsIndex. UserError where it has fewer numbers than `width`, and for a model
        that overflows."""
        features, latent = torch.cat(self.features).cpu().double(), self.latent
        if not (features.isfinite().all() and self.moments.power.isfinite().all()):
            raise UserError(f"the model's keys or queries are NaN or infinity: it overflows in {self.stream.dtype}")
        found = Candidates.rotary(self.moments)
        if latent is not None and not latent.qk_norm:
            w_uk, _, b_k, _ = (t.cpu() for t in latent.up_projections())
            if self.rotary:
                still = features[:, : latent.rank]
                assert isinstance(self.queries, Tensor)
                found.frequency = latent.rope_index.cpu()[found.frequency]
                found.query = found.query.expand(len(w_uk), -1, -1, -1)
                rest = Candidates.unrotated(torch.cov(still.T), self.queries.cpu() / self.moments.tokens, w_uk)
                found = rest.concatenate(found)
            else:
                found = found.on_latents(w_uk.flatten(0, 1), b_k.flatten())
        scaling = self.stream.spec.rope.attention_scaling
        return found.best(width, features, self.stream.spec.softmax_scale, scaling)
