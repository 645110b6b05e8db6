"""Spectra and ranks: a layer's error at every rank, in either layout, and the allocation of ranks to layers.

Conversion solves layers with it, diagnosis predicts their loss.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from mlaforge.factorization import latent
from mlaforge.factorization.latent import Latent, Projections, RopeSplit, Spectrum
from mlaforge.factorization.moments import LayerMoments
from mlaforge.families.spec import LayerSpec, ModelSpec
from mlaforge.planning.plan import LayerPlan, Plan, rank_limit
from mlaforge.runtime import UserError


def projections(attention: dict[str, Tensor]) -> Projections:
    """Return a GQA module's tensors as fp64 projections on their device."""

    def weight(name: str) -> Tensor:
        return attention[f"{name}.weight"].double()

    def bias(name: str) -> Tensor:
        stored = attention.get(f"{name}.bias")
        return weight(name).new_zeros(len(weight(name))) if stored is None else stored.double()

    return Projections(
        weight("q_proj"), weight("k_proj"), weight("v_proj"), weight("o_proj"),
        bias("q_proj"), bias("k_proj"), bias("v_proj"),
    )  # fmt: skip


def check_moments(m: LayerMoments, index: int, dtype: torch.dtype) -> None:
    """Raises UserError if calibration in `dtype` gave NaN or infinity."""
    if not math.isfinite(float(m.g_outer.sum() + m.x_outer.sum() + m.key_outer.sum())):
        raise UserError(
            f"calibration gave NaN or infinity in layer {index}: the model overflows in {dtype}; "
            "float32 (--device cpu) has the largest range"
        )


def decompose(
    source: Projections, m: LayerMoments, spec: ModelSpec, index: int, chosen: LayerPlan, fold: int = 1,
    one_per_pair: bool = False,
) -> Spectrum | RopeSplit:  # fmt: skip
    """Decompose layer `index` at all ranks, with the layout and the rotary dimensions of `chosen`.

    fold, one_per_pair: selection of rotary channels (docs/conversion.md, "Two variants").
    """
    layer = spec.layers[index]
    if chosen.layout == "latent":
        return latent.latent_spectrum(source, m, layer)
    candidates = latent.channels(source, m, layer, fold)
    pairs = chosen.qk_rope_head_dim // 2
    selected = candidates.one_per_pair(pairs) if one_per_pair else candidates.best(pairs)
    return latent.split_rope(
        source, m, layer, candidates, selected, spec.rope.attention_scaling, centred=not one_per_pair
    )


def latent_at_rank(part: Spectrum | RopeSplit, layer: LayerSpec, rank: int) -> Latent:
    """Return the layer's projections at a rank; `Latent.cut` gives lower ranks."""
    if isinstance(part, Spectrum):
        return latent.to_latent(part, layer, rank)
    return latent.to_latent_rope(part, layer, rank)


def spectrum(part: Spectrum | RopeSplit) -> Spectrum:
    """Return the spectrum that the rank truncates."""
    return part if isinstance(part, Spectrum) else part.spectrum


def loss(part: Spectrum | RopeSplit, rank: int) -> float:
    """Return the predicted loss at a rank, nats per token; in latent_rope including the channels that lose RoPE."""
    return spectrum(part).loss(rank) + (0.0 if isinstance(part, Spectrum) else part.lost / 2)


def with_ranks(plan: Plan, ranks: dict[int, int]) -> Plan:
    """Return `plan` with other latent ranks for some layers."""
    layers: list[LayerPlan] = [
        dataclasses.replace(layer, kv_lora_rank=ranks.get(i, layer.kv_lora_rank)) for i, layer in enumerate(plan.layers)
    ]
    return Plan(plan.spec, tuple(layers))


def with_codes(plan: Plan, codes: dict[int, tuple[int, ...]]) -> Plan:
    """Return `plan` with coded rows for some layers, and the ranks of their codes."""
    layers: list[LayerPlan] = [
        dataclasses.replace(layer, kv_lora_rank=codes[i][0], code=codes[i]) if i in codes else layer
        for i, layer in enumerate(plan.layers)
    ]
    return Plan(plan.spec, tuple(layers), "coded")


def allocate_ranks(plan: Plan, spectra: dict[int, Tensor]) -> Plan:
    """Allocate the total rank of `plan` to layers by predicted loss; every layer gets at least a third of the uniform
    rank."""
    total = sum(plan.layers[i].kv_lora_rank for i in spectra)
    minimum = min(plan.layers[i].kv_lora_rank for i in spectra) // 3 // 8 * 8
    limits = {i: rank_limit(plan.spec, plan.spec.layers[i], plan.layers[i].layout) for i in spectra}
    usable = {i: values[: limits[i]] for i, values in spectra.items()}
    return with_ranks(plan, latent.allocate(usable, total, max(8, minimum)))
