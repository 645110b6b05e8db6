"""Indexes of a model's layers from the statistics of their queries and keys: the model runs once over a text, one layer
at a time.

Legend: n tokens of all windows, T tokens of a window, H query heads, G KV heads, D head_dim, P rotary pairs, E features
of a query, F features of a key, R latent rank.
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

# Tokens of text that the indexes of a conversion are computed from, four windows of 2,048, and at most one of
# INDEX_SHARE calibration windows: the index then takes less than a tenth of the conversion's time.
INDEX_TOKENS, INDEX_SHARE = 8192, 4
# Rotations are also collected at positions shifted by this many tokens, to cover more angles of low frequencies.
LATER_POSITIONS = 4096


def as_complex(x: Tensor) -> Tensor:
    """Convert half-split [..., 2P] to complex [..., P]."""
    return torch.complex(*x.float().chunk(2, dim=-1))


class LayerObserver:
    """Collects the statistics of one loaded layer, window by window, and builds its index."""

    def __init__(self, stream: LayerStream, index: int):
        self.stream, self.layer = stream, stream.decoder.layers[index]
        self.attention: Any = self.layer.self_attn
        self.spec = stream.spec.layers[index]
        self.latent = self.attention if isinstance(self.attention, LatentAttention) else None
        self.rotary = self.latent is not None and self.latent.layout == "latent_rope"
        num_groups, num_pairs = (1, self.latent.rope_dim // 2) if self.rotary and self.latent else (
            self.spec.num_kv_heads, self.spec.head_dim // 2)  # fmt: skip
        self.moments = PairMoments(num_groups, num_pairs)
        self.features: list[Tensor] = []
        self.queries: Tensor | float = 0.0

    @torch.no_grad()
    def add(self, states_1TC: Tensor) -> None:
        """Add one window. states_1TC: input of the layer."""
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
        rotations = self._rotations(T, x)
        if self.rotary and latent is not None:
            rotations = [rotation[:, latent.rope_index] for rotation in rotations]
            keys_TG = features[:, None, latent.rank :]
            unrotated = q_HTE[..., :D].unflatten(0, (self.spec.num_kv_heads, -1)).double()
            self.queries = self.queries + torch.einsum("ghtd,ghte->gde", unrotated, unrotated)
            q_HTE = q_HTE[..., D:]
        elif latent is not None and not latent.qk_norm:
            w_uk, _, b_k, _ = latent.up_projections()
            keys_TG = torch.einsum("tr,gdr->tgd", features, w_uk) + b_k
        else:
            keys_TG = features.unflatten(1, (-1, D))
        self.moments.add(as_complex(keys_TG).cpu(), as_complex(q_HTE.transpose(0, 1)).cpu(), rotations)

    def _rotations(self, T: int, like: Tensor) -> list[Tensor]:
        """Return RoPE's rotations as complex [T, P] of modulus 1, from position 0 and from LATER_POSITIONS."""
        rotations = []
        for start in (0, LATER_POSITIONS):
            positions = torch.arange(start, start + T, device=like.device)[None]
            tables = self.stream.decoder.rotary_emb(like, positions)
            cos, sin = (pairs(table, self.spec.head_dim // 2)[0].float() for table in tables)
            rotation = torch.complex(cos, sin).cpu()
            rotations.append(rotation / rotation.abs())
        return rotations

    def index(self, width: int) -> dict[str, Tensor]:
        """Return the parameters of the layer's PairsIndex with `width` elements per key.

        Raises UserError if the layer has fewer elements, and for a model that overflows.
        """
        features, latent = torch.cat(self.features).cpu().double(), self.latent
        if not (features.isfinite().all() and self.moments.power.isfinite().all()):
            raise UserError(f"the model's keys or queries are NaN or infinity: it overflows in {self.stream.dtype}")
        candidates = Candidates.rotary(self.moments)
        if latent is not None and not latent.qk_norm:
            w_uk, _, b_k, _ = (t.cpu() for t in latent.up_projections())
            if self.rotary:
                unrotated = features[:, : latent.rank]
                assert isinstance(self.queries, Tensor)
                candidates.frequency = latent.rope_index.cpu()[candidates.frequency]
                candidates.query = candidates.query.expand(len(w_uk), -1, -1, -1)
                query_moments = self.queries.cpu() / self.moments.tokens
                candidates = Candidates.unrotated(torch.cov(unrotated.T), query_moments, w_uk).concatenate(candidates)
            else:
                candidates = candidates.on_latents(w_uk.flatten(0, 1), b_k.flatten())
        scaling = self.stream.spec.rope.attention_scaling
        return candidates.best(width, features, self.stream.spec.softmax_scale, scaling)


def learn_indexes(stream: LayerStream, ids_NT: Tensor, kinds: list[str], width: int) -> dict[str, Tensor]:
    """Return the index tensors of all layers of kind full, by checkpoint name."""
    tensors: dict[str, Tensor] = {}
    observers: dict[int, LayerObserver] = {}

    def observe(index: int, number: int, states: Tensor) -> None:
        if kinds[index] != "full":
            return
        if index not in observers:
            observers[index] = LayerObserver(stream, index)
        observers[index].add(states)
        if number == len(ids_NT) - 1:
            prefix = f"model.layers.{index}.self_attn.index."
            tensors.update({prefix + name: tensor for name, tensor in observers.pop(index).index(width).items()})

    stream.last_states(list(ids_NT), "index", observe)
    return tensors
