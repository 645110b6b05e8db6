"""What converting a model would lose: layer by layer to first order, in sum as conversions of two sizes measured it.

First-order losses come from calibration's moments, at every budget and layout and for coded rows. They hand out ranks
and bits; held_out.py brings their sum to what text loses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from mlaforge.checkpoint.layerwise import LayerStream
from mlaforge.diagnosis.geometry import Geometry
from mlaforge.diagnosis.held_out import Curve, Loss, Size, measure
from mlaforge.factorization import code, moments, ranks
from mlaforge.factorization.latent import Latent, RopeSplit, Spectrum
from mlaforge.planning.plan import LATENT_LAYOUTS, LayerPlan, Plan, make_plan, rank_limit
from mlaforge.runtime import UserError, progress
from mlaforge.tensor_store import TensorStore

# Shares of a layer's cache at which its loss is predicted.
BUDGETS = (0.75, 0.625, 0.5, 0.375, 0.25, 0.125)
# Bits of a number at which the loss of coded rows is predicted, of this layout in all layers that the plan converts;
# the first and the last are measured.
BITS, LATENT = (4, 3, 2), LayerPlan("latent")


class Prediction:
    """Of one model. `plan`: what was asked for, with uniform ranks; `layers` are the layers that it names. What is
    finished of a layer waits in `work`."""

    def __init__(self, stream: LayerStream, work: TensorStore, plan: Plan, budget: float, layers: str):
        self.stream, self.work, self.plan, self.budget, self.names = stream, work, plan, budget, layers
        self.layout = plan.layers[plan.converted[0]].layout
        # Twice a budget that cannot be halved; a conversion that loses nothing tells nothing of others.
        self.measured = [b for b in (budget, self._other()) if b < 1]
        self.layers = {i: self._layer(i) for i in progress(range(stream.num_layers), "predict")}
        latent = tuple(LATENT if i in plan.converted else LayerPlan("gqa") for i in self.layers)
        errors = {i: self.layers[i]["errors"] for i in plan.converted}
        self.coded = Plan(plan.spec, latent)
        self.widths = {bits: code.allocate_bits(errors, code.bit_budget(self.coded, bits)) for bits in BITS}

    def _other(self) -> float:
        """The second budget to be measured: half of the first, where it holds a rank."""
        for budget in (self.budget / 2, 2 * self.budget):
            with contextlib.suppress(UserError):
                if budget < 1:
                    make_plan(self.plan.spec, budget, self.layout, self.names)
                    return budget
        return 1.0

    def _kinds(self, index: int) -> Iterator[LayerPlan]:
        """The decompositions of a layer that the plan and what is measured need, beside those of the table."""
        if index in self.plan.converted:
            yield LATENT
            for budget in (self.budget, *self.measured):
                yield make_plan(self.plan.spec, budget, self.layout, self.names).layers[index]

    def _layer(self, index: int) -> dict[str, Tensor]:
        """Of one layer: first-order loss [layouts, BUDGETS] (NaN where it does not fit), and spectra; of every
        decomposition its spectrum by loss (`values`) and what the rotary split loses (`lost`); and what numbers lose at
        every width, coded (`errors`)."""
        name, stream, spec = f"predicted-{index:03d}", self.stream, self.stream.spec
        if name in self.work:
            return self.work[name]
        m, layer = moments.load(self.work, index, stream.device), spec.layers[index]
        ranks.check_moments(m, index, stream.dtype)
        own = ranks.projections(stream.attention(index))
        found: dict[str, Tensor] = {}
        latents: dict[str, Tensor] = {}
        parts: dict[str, Spectrum | RopeSplit] = {}

        def part(chosen: LayerPlan) -> Spectrum | RopeSplit:
            key = _kind(chosen)
            if key not in parts:
                parts[key] = ranks.decompose(own, m, spec, index, chosen)
                found[f"values.{key}"] = ranks.spectrum(parts[key]).values.clone()
                lost = ranks.loss(parts[key], len(found[f"values.{key}"]))
                found[f"lost.{key}"] = torch.tensor(lost, dtype=torch.float64)
            return parts[key]

        table = torch.full((len(LATENT_LAYOUTS), len(BUDGETS)), torch.nan, dtype=torch.float64)
        for row, layout in enumerate(LATENT_LAYOUTS):
            for column, budget in enumerate(BUDGETS):
                # Too small for one block of ranks, or a layout that the layer's norms rule out.
                with contextlib.suppress(UserError):
                    chosen = make_plan(spec, budget, layout, str(index)).layers[index]
                    table[row, column] = ranks.loss(part(chosen), chosen.kv_lora_rank)
        for chosen in self._kinds(index):
            full = ranks.latent_at_rank(part(chosen), layer, rank_limit(spec, layer, chosen.layout))
            latents |= {f"{_kind(chosen)}.{n}": tensor for n, tensor in full.tensors().items()}
            if chosen == LATENT:
                rates = code.Rates.of_layer(full, m)
                latents |= {f"rates.{n}": tensor for n, tensor in rates.tensors().items()}
                found["errors"] = rates.error
        stats = self.work[stats_key(index)]
        geometry = {n.split(".")[1]: t.to(stream.device) for n, t in stats.items() if n.startswith("geometry.")}
        spectra = {f"spectrum.{n}": v for n, v in Geometry(**geometry).spectra(own, m, layer).items()}
        spectra["spectrum.loss"] = ranks.spectrum(part(self.plan.layers[self.plan.converted[0]])).values
        self.work[f"latents-{index:03d}"] = latents
        self.work[name] = {**found, **spectra, "loss": table}
        return self.work[name]

    def first_order(self, index: int, chosen: LayerPlan) -> float:
        """The loss of one layer as a plan has it, nats per token."""
        found, key = self.layers[index], _kind(chosen)
        return float(found[f"values.{key}"][chosen.kv_lora_rank :].sum()) / 2 + float(found[f"lost.{key}"])

    def total(self, plan: Plan) -> float:
        """Of all layers that it converts."""
        return sum(self.first_order(i, plan.layers[i]) for i in plan.converted)

    def allocated(self, budget: float) -> Plan:
        """The plan of a budget with ranks by all layers' losses. Raises UserError where it does not fit."""
        plan = make_plan(self.plan.spec, budget, self.layout, self.names)
        spectra = {i: self.layers[i][f"values.{_kind(plan.layers[i])}"] for i in plan.converted}
        return ranks.allocate_ranks(plan, spectra)

    def bits_lost(self, index: int, bits: int) -> float:
        """The loss of one layer with coded rows, to first order."""
        return code.predicted_loss(self.layers[index]["errors"], self.widths[bits][index])

    def curves(self, held: Tensor, tuned: Tensor) -> tuple[Curve, Curve]:
        """Losses of plain and of coded rows as measured on `held` [N, T]; `tuned` is what the moments are of."""
        plain, coded = {}, {}
        for budget in self.measured:
            plan = self.allocated(budget)
            refit = self.layout == "latent_rope"
            plain[f"{budget:g}"] = Size(plan, self.total(plan), self._cut(plan), refit)
        for bits in (BITS[0], BITS[-1]):
            counts = {i: code.counts(widths) for i, widths in self.widths[bits].items()}
            lost = sum(self.bits_lost(i, bits) for i in self.plan.converted)
            coded[f"{bits} bits"] = Size(ranks.with_codes(self.coded, counts), lost, self._rounded(bits))
        measured = measure(self.stream, plain | coded, held, tuned, self.work)
        return Curve.through(plain, measured), Curve.through(coded, measured)

    def _latent(self, index: int, chosen: LayerPlan) -> Latent:
        start = f"{_kind(chosen)}."
        tensors = self.work.part(f"latents-{index:03d}", start)
        return Latent(**{n.removeprefix(start): t.to(self.stream.device) for n, t in tensors.items()})

    def _cut(self, plan: Plan) -> Callable[[int], Latent]:
        return lambda index: self._latent(index, plan.layers[index]).cut(plan.layers[index].kv_lora_rank)

    def _rounded(self, bits: int) -> Callable[[int], Latent]:
        def latent(index: int) -> Latent:
            tensors = self.work.part(f"latents-{index:03d}", "rates.")
            rates = code.Rates(**{n.removeprefix("rates."): t.to(self.stream.device) for n, t in tensors.items()})
            return code.encode(self._latent(index, LATENT), rates, self.widths[bits][index])

        return latent


def stats_key(index: int) -> str:
    """What `Watch` left of a layer."""
    return f"seen-{index:03d}"


def _kind(chosen: LayerPlan) -> str:
    """What tells decompositions of one layer apart."""
    return f"{chosen.layout}-{chosen.qk_rope_head_dim}"


def foreseen(prediction: Prediction, suggested: Plan, plain: Curve, coded: Curve) -> dict[str, dict[str, Loss]]:
    """Losses of the whole model: of the `plan` as it is suggested and with uniform ranks, of every budget that fits, of
    coded rows by their bits."""
    budgets = {}
    for budget in BUDGETS:
        with contextlib.suppress(UserError):
            budgets[f"{budget:g}"] = plain.at(prediction.total(prediction.allocated(budget)))
    first_orders = {bits: sum(prediction.bits_lost(i, bits) for i in prediction.plan.converted) for bits in BITS}
    return {
        "plan": {
            name: plain.at(prediction.total(p)) for name, p in (("suggested", suggested), ("uniform", prediction.plan))
        },
        "budgets": budgets,
        "bits": {str(bits): coded.at(first_order) for bits, first_order in first_orders.items()},
    }
