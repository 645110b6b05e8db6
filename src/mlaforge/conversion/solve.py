"""Every converted layer from its moments: spectra, ranks, projections, and the refit of o_proj, layer by layer.

What is finished of a layer waits in a spill, so that a killed run goes on with the next one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from mlaforge.checkpoint.layerwise import LayerStream
from mlaforge.conversion.layer import LayerWeights, attention_module, mla_config
from mlaforge.evaluation.perplexity import head_losses, perplexity
from mlaforge.factorization import latent as factorize
from mlaforge.factorization import moments
from mlaforge.factorization.latent import Projections, RopeSplit, Spectrum
from mlaforge.factorization.ranks import allocate_ranks, at_every_rank, check_moments, projections, spectrum, with_ranks
from mlaforge.factorization.refit import TOKENS, refit_o_proj
from mlaforge.planning.plan import Plan, rank_limit
from mlaforge.runtime import progress
from mlaforge.tensor_store import Spill


@dataclasses.dataclass(frozen=True)
class Choices:
    """What the options come to for one model: the plan with uniform ranks, and how rotary channels are found."""

    plan: Plan
    allocated: bool
    fold: int
    one_per_pair: bool
    refit: bool
    q_lora_rank: int | None

    @property
    def o_bias(self) -> bool:
        """Whether the refit may give o_proj a bias. DeepSeek's format has none that every loader reads."""
        return self.refit and not self.one_per_pair


class Rebuild:
    """One conversion in progress. `calibration` holds each layer's moments, `work` what it has finished."""

    def __init__(self, stream: LayerStream, choices: Choices, calibration: dict[int, Spill], work: Spill):
        self.stream, self.choices = stream, choices
        self.calibration, self.work = calibration, work
        self.spectra = {i: self._spectrum(i) for i in progress(choices.plan.converted, "spectra")}
        self.plan = allocate_ranks(choices.plan, self.spectra) if choices.allocated else choices.plan
        limits = {i: rank_limit(stream.spec, stream.spec.layers[i], self.plan.layers[i].layout) for i in self.spectra}
        self.full_plan = with_ranks(self.plan, limits)

    def _spectrum(self, index: int) -> Tensor:
        name = f"spectrum-{index:03d}"
        if name not in self.work:
            part = self._part(index, projections(self.stream.attention(index)))
            self.work[name] = {"values": spectrum(part).values}
        return self.work[name]["values"]

    def _part(self, index: int, own: Projections) -> Spectrum | RopeSplit:
        """What is true of a layer at every rank."""
        m = moments.load(self.calibration[index], index, self.stream.device)
        check_moments(m, index, self.stream.dtype)
        chosen, c = self.choices.plan.layers[index], self.choices
        return at_every_rank(own, m, self.stream.spec, index, chosen, c.fold, c.one_per_pair)

    def _solved(self, index: int, plans: tuple[Plan, ...]) -> list[tuple[LayerWeights, float]]:
        """Weights and predicted loss of one layer at the rank that each plan gives it."""
        attention = self.stream.attention(index)
        own, m = projections(attention), moments.load(self.calibration[index], index, self.stream.device)
        part, layer = self._part(index, own), self.stream.spec.layers[index]
        solved = []
        for plan in plans:
            rank = plan.layers[index].kv_lora_rank
            latent = (
                factorize.to_latent(own, part, layer, rank)
                if isinstance(part, Spectrum)
                else factorize.to_latent_rope(part, layer, rank)
            )
            solved.append((LayerWeights.of(latent, attention, m, self.choices.q_lora_rank), latent.dropped))
        return solved

    def settings(self, plan: Plan, raw: dict[str, Any]) -> dict[str, Any]:
        return mla_config(raw, self.stream.spec, plan, self.choices.q_lora_rank, o_bias=self.choices.o_bias)

    def weights(self, index: int) -> LayerWeights:
        """A finished layer."""
        tensors = self.work[f"layer-{index:03d}"]
        tensors.pop("dropped")
        return LayerWeights(tensors)

    @torch.no_grad()
    def run(self, raw: dict[str, Any], tuned: Tensor, judged: Tensor | None) -> float | None:
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
        now, full = self.settings(plan, raw), self.settings(self.full_plan, raw)
        for index in progress(range(stream.num_layers), "convert layers", stream.num_layers):
            if f"layer-{index:03d}" in self.work:
                continue
            converted = index in self.spectra
            found = self._solved(index, (plan, self.full_plan) if partial_rope else (plan,)) if converted else []
            states = {name: self._states(name, ids, index) for name, ids in carried.items()}
            if carried:
                with stream.layer(index) as layer:
                    if self.choices.refit:
                        new = attention_module(stream, now, index, found[0][0]) if converted else None
                        refit_o_proj(stream, index, layer, new, states["original"], states["drifted"])
                        if new is not None:
                            found[0][0].tensors |= {f"o_proj.{n}": p for n, p in new.o_proj.named_parameters()}
                    if partial_rope:
                        if converted:
                            layer.self_attn = attention_module(stream, full, index, found[1][0])
                        states["judged"] = [stream.run(layer, index, h) for h in states["judged"]]
            for name, hidden in states.items():
                self.work[f"{name}-{index + 1:03d}"] = {f"{n:04d}": h for n, h in enumerate(hidden)}
            done = {**found[0][0].tensors, "dropped": torch.tensor(found[0][1])} if converted else {}
            self.work[f"layer-{index:03d}"] = done
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
                "cached": chosen.cached(layer),
                "gqa_cached": layer.cached,
                "predicted_loss": float(self.work[f"layer-{i:03d}"]["dropped"]) if i in self.spectra else None,
                "spectrum": [float(f"{v:.4g}") for v in self.spectra[i].tolist()] if i in self.spectra else None,
            }
            for i, (chosen, layer) in enumerate(zip(self.plan.layers, self.stream.spec.layers, strict=True))
        ]
