"""Every converted layer from its moments: spectra, ranks, projections, and the refit of o_proj, layer by layer.

Twice over the layers, because ranks are handed out by all spectra: each layer is decomposed once, and waits in a store
at the highest rank until its own is known. What is finished of a layer waits there too, so that a killed run goes on
with the next one.
"""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from mlaforge.checkpoint.layerwise import LayerStream
from mlaforge.checkpoint.token_losses import head_losses, perplexity
from mlaforge.factorization import code, moments
from mlaforge.factorization.latent import Latent, factor_query
from mlaforge.factorization.layer import LayerWeights, attention_module, kept_parts, mla_config
from mlaforge.factorization.ranks import (
    allocate_ranks,
    at_every_rank,
    at_rank,
    check_moments,
    projections,
    with_codes,
    with_ranks,
)
from mlaforge.factorization.refit import TOKENS, refit_o_proj
from mlaforge.planning.plan import Plan, rank_limit
from mlaforge.runtime import progress
from mlaforge.tensor_store import TensorStore


@dataclasses.dataclass(frozen=True)
class Choices:
    """What the options come to for one model: the plan with uniform ranks, and how rotary channels are found. `bits`:
    of a cached number in the mean, where rows are to be coded."""

    plan: Plan
    allocated: bool
    fold: int
    one_per_pair: bool
    refit: bool
    q_lora_rank: int | None
    bits: float | None = None

    @property
    def o_bias(self) -> bool:
        """Whether the refit may give o_proj a bias. DeepSeek's format has none that every loader reads."""
        return self.refit and not self.one_per_pair


class LayerSolver:
    """One conversion in progress. `calibration` holds each layer's moments, `work` what it has finished."""

    def __init__(self, stream: LayerStream, choices: Choices, calibration: dict[int, TensorStore], work: TensorStore):
        self.stream, self.choices = stream, choices
        self.calibration, self.work = calibration, work
        layers, plan = stream.spec.layers, choices.plan
        self.limits = {i: rank_limit(stream.spec, layers[i], plan.layers[i].layout) for i in plan.converted}
        self.spectra = {i: self._spectrum(i) for i in progress(plan.converted, "spectra")}
        self.full_plan = with_ranks(plan, self.limits)
        if choices.bits is not None:
            self.widths = self._widths(choices.bits)
            self.plan = with_codes(plan, {i: code.counts(widths) for i, widths in self.widths.items()})
        else:
            self.plan = allocate_ranks(plan, self.spectra) if choices.allocated else plan

    def _widths(self, bits: float) -> dict[int, Tensor]:
        """Bits of every layer's numbers, by all layers' rates."""
        plan = self.choices.plan
        errors = {i: self.work[f"rates-{i:03d}"]["error"] for i in plan.converted}
        return code.allocate_bits(errors, code.room(plan, bits))

    def _spectrum(self, index: int) -> Tensor:
        name = f"spectrum-{index:03d}"
        if name not in self.work:
            latent = self._decomposed(index)
            # Ranks follow from all layers' spectra: until they are known, each layer waits at the highest one.
            self.work[f"latent-{index:03d}"] = latent.tensors()
            self.work[name] = {"values": latent.values}
        return self.work[name]["values"]

    def _decomposed(self, index: int) -> Latent:
        """One layer at the highest rank: all that is ever asked of its moments."""
        m = moments.load(self.calibration[index], index, self.stream.device)
        check_moments(m, index, self.stream.dtype)
        own, c, spec = projections(self.stream.attention(index)), self.choices, self.stream.spec
        part = at_every_rank(own, m, spec, index, c.plan.layers[index], c.fold, c.one_per_pair)
        latent = at_rank(part, spec.layers[index], self.limits[index])
        if c.bits is not None:
            self.work[f"rates-{index:03d}"] = code.Rates.of_layer(latent, m).tensors()
        if c.q_lora_rank is None:
            return latent
        w_q, b_q = (own.w_q, own.b_q) if latent.w_q is None or latent.b_q is None else (latent.w_q, latent.b_q)
        q_a, w_q, b_q = factor_query(w_q, b_q, m, c.q_lora_rank)
        return dataclasses.replace(latent, q_a=q_a, w_q=w_q, b_q=b_q)

    def _solved(self, index: int, plans: tuple[Plan, ...], layer: Any | None) -> list[tuple[LayerWeights, float]]:
        """Weights and predicted loss of one layer at the rank that each plan gives it. layer: the source's, where it is
        loaded anyway."""
        latent = Latent(**self.work[f"latent-{index:03d}"])
        own = self.stream.attention(index, *kept_parts(latent)) if layer is None else layer.self_attn.state_dict()
        return [(LayerWeights.of(part, own), lost) for part, lost in (self._cut(latent, index, p) for p in plans)]

    def _cut(self, latent: Latent, index: int, plan: Plan) -> tuple[Latent, float]:
        """A layer as a plan has it, and its predicted loss."""
        chosen = plan.layers[index]
        if not chosen.code:
            part = latent.cut(chosen.kv_lora_rank)
            return part, part.dropped
        rates, widths = code.Rates(**self.work[f"rates-{index:03d}"]), self.widths[index]
        return code.coded(latent, rates, widths), code.lost(rates.error, widths) + float(latent.lost) / 2

    def settings(self, plan: Plan) -> dict[str, Any]:
        """config.json of the result under a plan."""
        return mla_config(self.stream.source, plan, self.choices.q_lora_rank, o_bias=self.choices.o_bias)

    def weights(self, index: int) -> LayerWeights:
        """A finished layer."""
        tensors = self.work[f"layer-{index:03d}"]
        tensors.pop("dropped")
        return LayerWeights(tensors)

    @torch.no_grad()
    def run(self, tuned: Tensor, judged: Tensor | None) -> float | None:
        """Solves every converted layer. tuned, judged: token ids [N, T].

        Returns the perplexity on `judged` after RoPE was cut to the shared rotary key and before the rank was cut,
        where there is such a thing.
        """
        stream, plan = self.stream, self.plan
        partial_rope = judged is not None and any(layer.layout == "latent_rope" for layer in plan.layers)
        carried: dict[str, Tensor] = {}
        if partial_rope and judged is not None:
            carried["judged"] = judged
        if self.choices.refit:
            few = tuned[: max(1, TOKENS // tuned.shape[1])]
            carried |= {"original": few, "drifted": few}
        now, full = self.settings(plan), self.settings(self.full_plan)
        for index in progress(range(stream.num_layers), "convert layers", stream.num_layers):
            if f"layer-{index:03d}" in self.work:
                continue
            converted = index in self.spectra
            states = {name: self._states(name, ids, index) for name, ids in carried.items()}
            # One reading of the layer for all that follows.
            opened: Any = stream.layer(index) if carried else nullcontext()
            with opened as layer:
                plans = (plan, self.full_plan) if partial_rope else (plan,)
                solved = self._solved(index, plans, layer) if converted else []
                if self.choices.refit:
                    new = attention_module(stream, now, index, solved[0][0]) if converted else None
                    refit_o_proj(stream, index, layer, new, states["original"], states["drifted"])
                    if new is not None:
                        solved[0][0].tensors |= {f"o_proj.{n}": p for n, p in new.o_proj.named_parameters()}
                if partial_rope:
                    if converted:
                        layer.self_attn = attention_module(stream, full, index, solved[1][0])
                    states["judged"] = [stream.run(layer, index, h) for h in states["judged"]]
            for name, hidden in states.items():
                self.work[f"{name}-{index + 1:03d}"] = {f"{n:04d}": h for n, h in enumerate(hidden)}
            finished = {**solved[0][0].tensors, "dropped": torch.tensor(solved[0][1])} if converted else {}
            self.work[f"layer-{index:03d}"] = finished
            self.work.drop(f"latent-{index:03d}")
            for name in carried:
                self.work.drop(f"{name}-{index:03d}")
        if not partial_rope or judged is None:
            return None
        return perplexity(head_losses(stream, self._states("judged", judged, stream.num_layers), judged))

    def _states(self, name: str, ids: Tensor, index: int) -> list[Tensor]:
        """Inputs of layer `index`, [1, T, C] per window."""
        if index == 0:
            return [self.stream.embed(window[None]) for window in ids]
        return [h.to(self.stream.device) for _, h in sorted(self.work[f"{name}-{index:03d}"].items())]

    def describe(self) -> list[dict[str, Any]]:
        """One record per layer for the manifest; spectra are in units of loss."""
        return [
            {
                "layer": i,
                "layout": chosen.layout,
                "window": layer.window,
                "kv_lora_rank": chosen.kv_lora_rank,
                "qk_rope_head_dim": chosen.qk_rope_head_dim,
                "code": list(chosen.code),
                "cached": chosen.cached(layer),
                "gqa_cached": layer.cached,
                "predicted_loss": float(self.work[f"layer-{i:03d}"]["dropped"]) if i in self.spectra else None,
                "spectrum": [float(f"{v:.4g}") for v in self.spectra[i].tolist()] if i in self.spectra else None,
            }
            for i, (chosen, layer) in enumerate(zip(self.plan.layers, self.stream.spec.layers, strict=True))
        ]
