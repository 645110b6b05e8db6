"""Predicted loss of converting a model: first-order per layer, and measured at two sizes for the whole model.

First-order losses are computed from the calibration moments for every budget and layout and for coded rows; they
allocate ranks and bits. held_out.py maps their sum to the loss on text.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from mlaforge.checkpoint.layerwise import LayerStream
from mlaforge.diagnosis.geometry import Geometry
from mlaforge.diagnosis.held_out import Conversion, Curve, Loss, measure
from mlaforge.factorization import code, moments, ranks
from mlaforge.factorization.latent import Latent, RopeSplit, Spectrum
from mlaforge.planning.plan import LATENT_LAYOUTS, LayerPlan, Plan, make_plan, rank_limit
from mlaforge.runtime import UserError, progress
from mlaforge.tensor_store import TensorStore

# Budgets (shares of a layer's cache) with predicted losses.
BUDGETS = (0.75, 0.625, 0.5, 0.375, 0.25, 0.125)
# Bits per number with predicted losses for coded rows, in this layout for all layers that the plan converts; the first
# and the last are measured.
BITS, LATENT = (4, 3, 2), LayerPlan("latent")


class Prediction:
    """Predicted losses of one model.

    plan: the requested plan with uniform ranks. layers: the option that selects its layers. work: store for finished
    layers, from which an interrupted run resumes.
    """

    def __init__(self, stream: LayerStream, work: TensorStore, plan: Plan, budget: float, layers: str):
        self.stream, self.work, self.plan, self.budget, self.layer_names = stream, work, plan, budget, layers
        self.layout = plan.layers[plan.converted[0]].layout
        # A conversion at budget 1 has no loss, so measuring it gives no information.
        self.measured = [b for b in (budget, self._second_budget()) if b < 1]
        self.layers = {i: self._layer(i) for i in progress(range(stream.num_layers), "predict")}
        latent = tuple(LATENT if i in plan.converted else LayerPlan("gqa") for i in self.layers)
        errors = {i: self.layers[i]["errors"] for i in plan.converted}
        self.coded = Plan(plan.spec, latent)
        self.widths = {bits: code.allocate_bits(errors, code.bit_budget(self.coded, bits)) for bits in BITS}

    def _second_budget(self) -> float:
        """Return the second budget to measure: half of the first, or twice where half is too small for a rank."""
        for budget in (self.budget / 2, 2 * self.budget):
            with contextlib.suppress(UserError):
                if budget < 1:
                    make_plan(self.plan.spec, budget, self.layout, self.layer_names)
                    return budget
        return 1.0

    def _decompositions(self, index: int) -> Iterator[LayerPlan]:
        """Yield the decompositions of a layer that the plan and the measurements need, in addition to the table's."""
        if index in self.plan.converted:
            yield LATENT
            for budget in (self.budget, *self.measured):
                yield make_plan(self.plan.spec, budget, self.layout, self.layer_names).layers[index]

    def _layer(self, index: int) -> dict[str, Tensor]:
        """Return the predictions of one layer: first-order losses [layouts, BUDGETS] (NaN where a budget does not fit),
        spectra, for every decomposition its loss spectrum (`values`) and the loss of its rotary split (`lost`), and the
        errors of coded coordinates at every width (`errors`)."""
        name, stream, spec = f"predicted-{index:03d}", self.stream, self.stream.spec
        if name in self.work:
            return self.work[name]
        m, layer = moments.load(self.work, index, stream.device), spec.layers[index]
        ranks.check_moments(m, index, stream.dtype)
        projections = ranks.projections(stream.attention(index))
        results: dict[str, Tensor] = {}
        latents: dict[str, Tensor] = {}
        parts: dict[str, Spectrum | RopeSplit] = {}

        def part(layer_plan: LayerPlan) -> Spectrum | RopeSplit:
            key = _decomposition_key(layer_plan)
            if key not in parts:
                parts[key] = ranks.decompose(projections, m, spec, index, layer_plan)
                results[f"values.{key}"] = ranks.spectrum(parts[key]).values.clone()
                split_loss = ranks.loss(parts[key], len(results[f"values.{key}"]))
                results[f"lost.{key}"] = torch.tensor(split_loss, dtype=torch.float64)
            return parts[key]

        table = torch.full((len(LATENT_LAYOUTS), len(BUDGETS)), torch.nan, dtype=torch.float64)
        for row, layout in enumerate(LATENT_LAYOUTS):
            for column, budget in enumerate(BUDGETS):
                # Raised for a budget below one block of ranks, and for a layout that the layer's norms rule out.
                with contextlib.suppress(UserError):
                    layer_plan = make_plan(spec, budget, layout, str(index)).layers[index]
                    table[row, column] = ranks.loss(part(layer_plan), layer_plan.kv_lora_rank)
        for layer_plan in self._decompositions(index):
            full = ranks.latent_at_rank(part(layer_plan), layer, rank_limit(spec, layer, layer_plan.layout))
            latents |= {f"{_decomposition_key(layer_plan)}.{n}": tensor for n, tensor in full.tensors().items()}
            if layer_plan == LATENT:
                rates = code.Rates.of_layer(full, m)
                latents |= {f"rates.{n}": tensor for n, tensor in rates.tensors().items()}
                results["errors"] = rates.error
        stats = self.work[stats_key(index)]
        geometry = {n.split(".")[1]: t.to(stream.device) for n, t in stats.items() if n.startswith("geometry.")}
        spectra = {f"spectrum.{n}": v for n, v in Geometry(**geometry).spectra(projections, m, layer).items()}
        spectra["spectrum.loss"] = ranks.spectrum(part(self.plan.layers[self.plan.converted[0]])).values
        self.work[f"latents-{index:03d}"] = latents
        self.work[name] = {**results, **spectra, "loss": table}
        return self.work[name]

    def first_order(self, index: int, layer_plan: LayerPlan) -> float:
        """Return the first-order loss of one layer under its plan, in nats per token."""
        results, key = self.layers[index], _decomposition_key(layer_plan)
        return float(results[f"values.{key}"][layer_plan.kv_lora_rank :].sum()) / 2 + float(results[f"lost.{key}"])

    def total(self, plan: Plan) -> float:
        """Return the sum of the first-order losses of all converted layers."""
        return sum(self.first_order(i, plan.layers[i]) for i in plan.converted)

    def allocated(self, budget: float) -> Plan:
        """Return the plan for a budget with ranks allocated by the layers' losses. Raises UserError if none fits."""
        plan = make_plan(self.plan.spec, budget, self.layout, self.layer_names)
        spectra = {i: self.layers[i][f"values.{_decomposition_key(plan.layers[i])}"] for i in plan.converted}
        return ranks.allocate_ranks(plan, spectra)

    def bits_loss(self, index: int, bits: int) -> float:
        """Return the first-order loss of one layer with coded rows."""
        return code.predicted_loss(self.layers[index]["errors"], self.widths[bits][index])

    def curves(self, eval_NT: Tensor, tuned_NT: Tensor) -> tuple[Curve, Curve]:
        """Return the loss curves of plain and of coded rows, measured on eval_NT; tuned_NT: text of the moments."""
        plain, coded = {}, {}
        for budget in self.measured:
            plan = self.allocated(budget)
            refit = self.layout == "latent_rope"
            plain[f"{budget:g}"] = Conversion(plan, self.total(plan), self._truncated(plan), refit)
        for bits in (BITS[0], BITS[-1]):
            counts = {i: code.counts(widths) for i, widths in self.widths[bits].items()}
            first_order = sum(self.bits_loss(i, bits) for i in self.plan.converted)
            coded[f"{bits} bits"] = Conversion(ranks.with_codes(self.coded, counts), first_order, self._quantized(bits))
        measured = measure(self.stream, plain | coded, eval_NT, tuned_NT, self.work)
        return Curve.fit(plain, measured), Curve.fit(coded, measured)

    def _latent(self, index: int, layer_plan: LayerPlan) -> Latent:
        prefix = f"{_decomposition_key(layer_plan)}."
        tensors = self.work.part(f"latents-{index:03d}", prefix)
        return Latent(**{n.removeprefix(prefix): t.to(self.stream.device) for n, t in tensors.items()})

    def _truncated(self, plan: Plan) -> Callable[[int], Latent]:
        return lambda index: self._latent(index, plan.layers[index]).cut(plan.layers[index].kv_lora_rank)

    def _quantized(self, bits: int) -> Callable[[int], Latent]:
        def latent(index: int) -> Latent:
            tensors = self.work.part(f"latents-{index:03d}", "rates.")
            rates = code.Rates(**{n.removeprefix("rates."): t.to(self.stream.device) for n, t in tensors.items()})
            return code.encode(self._latent(index, LATENT), rates, self.widths[bits][index])

        return latent


def stats_key(index: int) -> str:
    """Return the store key of the statistics of a layer, written by `DiagnosisObserver`."""
    return f"seen-{index:03d}"


def _decomposition_key(layer_plan: LayerPlan) -> str:
    """Return the part of a layer's plan that identifies its decomposition."""
    return f"{layer_plan.layout}-{layer_plan.qk_rope_head_dim}"


def predicted_losses(prediction: Prediction, suggested: Plan, plain: Curve, coded: Curve) -> dict[str, dict[str, Loss]]:
    """Return the predicted losses of the whole model: for the suggested and the uniform plan, for every budget that
    fits, and for coded rows by bits."""
    budgets = {}
    for budget in BUDGETS:
        with contextlib.suppress(UserError):
            budgets[f"{budget:g}"] = plain.at(prediction.total(prediction.allocated(budget)))
    first_orders = {bits: sum(prediction.bits_loss(i, bits) for i in prediction.plan.converted) for bits in BITS}
    return {
        "plan": {
            name: plain.at(prediction.total(p)) for name, p in (("suggested", suggested), ("uniform", prediction.plan))
        },
        "budgets": budgets,
        "bits": {str(bits): coded.at(first_order) for bits, first_order in first_orders.items()},
    }
