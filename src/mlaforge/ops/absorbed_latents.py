"""Both ends of attention in DeepSeek's absorbed form (arXiv:2405.04434), layout `latent_rope`, on a GPU: W_uk is
multiplied with the queries before, and W_uv with the attended latents after ops.paged_attention. The mathematics is
modeling/latent_attention_mla.py's.

Legend: N tokens, H query heads, G KV heads, D key and V value dimensions, R latent rank, E rotary dimensions, P rotary
pairs of the model.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from mlaforge.modeling.attention_mla import sink_share
from mlaforge.modeling.latent_attention_mla import LatentAttention
from mlaforge.modeling.rope_mla import rotate
from mlaforge.ops.dispatch import Op
from mlaforge.ops.paged_rows import PagedRows


@dataclasses.dataclass(frozen=True)
class AbsorbedWeights:
    """w_uk [G, D, R] and w_uv [G, V, R], views of kv_b_proj; b_k [G, D], b_v [G, V]; sinks [H], or None; rope_index
    [E / 2]: the model's frequency of each rotary pair."""

    w_uk: Tensor
    w_uv: Tensor
    b_k: Tensor
    b_v: Tensor
    sinks: Tensor | None
    rope_index: Tensor

    @classmethod
    def of(cls, attention: LatentAttention) -> AbsorbedWeights:
        """Return the weights of a layer's module."""
        w_uk, w_uv, b_k, b_v = (part.detach() for part in attention.up_projections())
        sinks = attention.sinks.detach() if attention.config.mla_sinks else None
        return cls(w_uk, w_uv, b_k.contiguous(), b_v.contiguous(), sinks, attention.rope_index)


def absorb_reference(
    q_kv_NX: Tensor, rotation_N1P: Tensor, weights: AbsorbedWeights, rows: PagedRows, slots_N: Tensor, scale: float
) -> tuple[Tensor, Tensor | None]:
    """Rotate, write the rows [c, rotary key] to their slots, and multiply the queries by W_uk.

    q_kv_NX: [q (H (D + E)), c (R), rotary key (E)]; rotation_N1P: cos + i sin. Returns queries [N, H, R + E] in the
    input's dtype and, with sinks, the key bias' shift of each query's logits, [N, H] in fp32: it cancels in the
    softmax, but not in a sink's share.
    """
    W, (G, D), E = rows.format.width, weights.b_k.shape, 2 * len(weights.rope_index)
    rotation_N1P = rotation_N1P[..., weights.rope_index]
    q_NHX = q_kv_NX[:, :-W].float().unflatten(1, (-1, D + E))
    q_NHE, k_N1E = (_rotated(x.float(), rotation_N1P) for x in (q_NHX[..., D:], q_kv_NX[:, None, -E:]))
    rows.write(slots_N, torch.cat((q_kv_NX[:, -W:-E], k_N1E[:, 0].to(q_kv_NX.dtype)), dim=1))
    q_NGJD = q_NHX[..., :D].unflatten(1, (G, -1))
    q_NHR = torch.einsum("ngjd,gdr->ngjr", q_NGJD, weights.w_uk.float()).flatten(1, 2)
    shift = None
    if weights.sinks is not None:
        shift = torch.einsum("ngjd,gd->ngj", q_NGJD, weights.b_k.float()).flatten(1) * scale
    return torch.cat((q_NHR, q_NHE), dim=-1).to(q_kv_NX.dtype), shift


def up_project_reference(out_NHR: Tensor, lse_NH: Tensor, shift_NH: Tensor | None, weights: AbsorbedWeights) -> Tensor:
    """Multiply attended latents by W_uv and apply the sinks by the lse and its shift: [N, H V] in the input's dtype."""
    c_NGJR = out_NHR.float().unflatten(1, (len(weights.b_v), -1))
    out_NGJV = torch.einsum("ngjr,gvr->ngjv", c_NGJR, weights.w_uv.float()) + weights.b_v.float()[:, None]
    out_NHV = out_NGJV.flatten(1, 2)
    if weights.sinks is not None and shift_NH is not None:
        out_NHV = out_NHV * sink_share((lse_NH + shift_NH).T, weights.sinks).T[..., None]
    return out_NHV.to(out_NHR.dtype).flatten(1)


def _rotated(x_NHE: Tensor, rotation_N1P: Tensor) -> Tensor:
    """Rotate the pairs (i, i + E / 2)."""
    return rotate(x_NHE[:, :, None], rotation_N1P.real, rotation_N1P.imag)[:, :, 0]


def _observe(inputs: Any, outputs: Any) -> list[Tensor]:
    rows, slots_N = inputs[3:5]
    return [tensor for tensor in outputs if tensor is not None] + [rows.packed[slots_N].float()]


ABSORB_AND_STORE = Op("absorb_and_store", absorb_reference, mutates=(3,), observe=_observe)
ABSORB_AND_STORE.register_triton("absorbed_latents_triton", "absorb_and_store", "absorb_supports")
UP_PROJECT_VALUES = Op("up_project_values", up_project_reference)
UP_PROJECT_VALUES.register_triton("absorbed_latents_triton", "up_project_values", "up_project_supports")
