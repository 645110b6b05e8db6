"""LayerSolver: the converted layers from their moments: spectra, ranks, projections, and the refit of o_proj.

It makes two passes over the layers, because ranks are allocated from the spectra of all layers: the first decomposes
each layer at the maximal rank and stores it, the second cuts it to its rank. Finished layers are stored, too, so that a
killed run resumes with the next one.
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
from mlaforge.factorization.layer import LayerWeights, attention_module, mla_config, retained_modules
from mlaforge.factorization.ranks import (
    allocate_ranks,
    check_moments,
    decompose,
    latent_at_rank,
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
    """Options resolved for one model: the plan with uniform ranks, and the selection of rotary channels. `bits`: mean
    bits per cached element of coded rows."""

    plan: Plan
    allocated: bool
    fold: int
    one_per_pair: bool
    refit: bool
    q_lora_rank: int | None
    bits: float | None = None

    @property
    def o_bias(self) -> bool:
        """Whether the refit may add a bias to o_proj. Not every loader of DeepSeek's format reads one."""
        return self.refit and not self.one_per_pair


class LayerSolver:
    """One conversion in progress. `calibration`: each layer's moments; `work`: the store of its finished work."""

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
        """Return the bits of every layer's coordinates, allocated from the rates of all layers."""
        plan = self.choices.plan
        errors = {i: self.work[f"rates-{i:03d}"]["error"] for i in plan.converted}
        return code.allocate_bits(errors, code.bit_budget(plan, bits), code.rotary_widths(plan))

    def _spectrum(self, index: int) -> Tensor:
        name = f"spectrum-{index:03d}"
        if name not in self.work:
            latent = self._decomposed(index)
            # The rank is not known before the spectra of all layers are: store the maximal one.
            self.work[f"latent-{index:03d}"] = latent.tensors()
            self.work[name] = {"values": latent.values}
        return self.work[name]["values"]

    def _decomposed(self, index: int) -> Latent:
        """Return one layer at the maximal rank; the moments are not needed afterwards."""
        m = moments.load(self.calibration[index], index, self.stream.device)
        check_moments(m, index, self.stream.dtype)
        source, c, spec = projections(self.stream.attention(index)), self.choices, self.stream.spec
        part = decompose(source, m, spec, index, c.plan.layers[index], c.fold, c.one_per_pair)
        latent = latent_at_rank(part, spec.layers[index], self.limits[index])
        if c.bits is not None:
            self.work[f"rates-{index:03d}"] = code.Rates.of_layer(latent, m).tensors()
        if c.q_lora_rank is None:
            return latent
        w_q, b_q = (source.w_q, source.b_q) if latent.w_q is None or latent.b_q is None else (latent.w_q, latent.b_q)
        q_a, w_q, b_q = factor_query(w_q, b_q, m, c.q_lora_rank)
        return dataclasses.replace(latent, q_a=q_a, w_q=w_q, b_q=b_q)

    def _solved(self, index: int, plans: tuple[Plan, ...], layer: Any | None) -> list[tuple[LayerWeights, float]]:
        """Return weights and predicted loss of one layer under each plan. layer: the source's, if it is loaded."""
        latent = Latent(**self.work[f"latent-{index:03d}"])
        if layer is None:
            attention = self.stream.attention(index, *retained_modules(latent))
        else:
            attention = layer.self_attn.state_dict()
        return [(LayerWeights.of(part, attention), loss) for part, loss in (self._cut(latent, index, p) for p in plans)]

    def _cut(self, latent: Latent, index: int, plan: Plan) -> tuple[Latent, float]:
        """Return a layer at its rank or code under a plan, and its predicted loss."""
        chosen = plan.layers[index]
        if not chosen.code:
            part = latent.cut(chosen.kv_lora_rank)
            return part, part.dropped
        rates, widths = code.Rates(**self.work[f"rates-{index:03d}"]), self.widths[index]
        return code.encode(latent, rates, widths), code.predicted_loss(rates.error, widths) + float(latent.lost) / 2

    def settings(self, plan: Plan) -> dict[str, Any]:
        """Return config.json of the result under a plan."""
        return mla_config(self.stream.source, plan, self.choices.q_lora_rank, o_bias=self.choices.o_bias)

    def weights(self, index: int) -> LayerWeights:
        """Return the weights of a finished layer."""
        tensors = self.work[f"layer-{index:03d}"]
        tensors.pop("dropped")
        return LayerWeights(tensors)

    @torch.no_grad()
    def run(self, calibration_ids: Tensor, eval_ids: Tensor | None) -> float | None:
        """Solve every converted layer. calibration_ids, eval_ids: token ids [N, T].

        Returns the perplexity on `eval_ids` with RoPE restricted to the shared rotary key and full rank, or None for
        layout `latent`.
        """
        stream, plan = self.stream, self.plan
        partial_rope = eval_ids is not None and any(layer.layout == "latent_rope" for layer in plan.layers)
        # Streams of hidden states -> their token ids. The names are those of files in the store.
        carried: dict[str, Tensor] = {}
        if partial_rope and eval_ids is not None:
            carried["judged"] = eval_ids
        if self.choices.refit:
            refit_ids = calibration_ids[: max(1, TOKENS // calibration_ids.shape[1])]
            carried |= {"original": refit_ids, "drifted": refit_ids}
        settings, full_settings = self.settings(plan), self.settings(self.full_plan)
        for index in progress(range(stream.num_layers), "convert layers", stream.num_layers):
            if f"layer-{index:03d}" in self.work:
                continue
            converted = index in self.spectra
            states = {name: self._states(name, ids, index) for name, ids in carried.items()}
            # The layer is loaded once for all of the following.
            opened: Any = stream.layer(index) if carried else nullcontext()
            with opened as layer:
                plans = (plan, self.full_plan) if partial_rope else (plan,)
                solved = self._solved(index, plans, layer) if converted else []
                if self.choices.refit:
                    new = attention_module(stream, settings, index, solved[0][0]) if converted else None
                    refit_o_proj(stream, index, layer, new, states["original"], states["drifted"])
                    if new is not None:
                        solved[0][0].tensors |= {f"o_proj.{n}": p for n, p in new.o_proj.named_parameters()}
                if partial_rope:
                    if converted:
                        layer.self_attn = attention_module(stream, full_settings, index, solved[1][0])
                    states["judged"] = [stream.run(layer, index, h) for h in states["judged"]]
            for name, hidden in states.items():
                self.work[f"{name}-{index + 1:03d}"] = {f"{n:04d}": h for n, h in enumerate(hidden)}
            finished = {**solved[0][0].tensors, "dropped": torch.tensor(solved[0][1])} if converted else {}
            self.work[f"layer-{index:03d}"] = finished
            self.work.drop(f"latent-{index:03d}")
            for name in carried:
                self.work.drop(f"{name}-{index:03d}")
        if not partial_rope or eval_ids is None:
            return None
        return perplexity(head_losses(stream, self._states("judged", eval_ids, stream.num_layers), eval_ids))

    def _states(self, name: str, ids: Tensor, index: int) -> list[Tensor]:
        """Return the inputs of layer `index`, [1, T, C] per window."""
        if index == 0:
            return [self.stream.embed(window[None]) for window in ids]
        return [h.to(self.stream.device) for _, h in sorted(self.work[f"{name}-{index:03d}"].items())]

    def describe(self) -> list[dict[str, Any]]:
        """Return one record per layer for the manifest; spectra are in units of loss."""
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
