"""Loss of conversions on held-out text: measured at two sizes, with a power law for all others.

First-order predictions (factorization/latent.py, code.py) order layers and sizes well but are too small: they omit
products of the errors of different tokens and layers, and everything that a short calibration did not see. So the model
is converted in memory at two sizes, layer by layer, and compared with the original. For other sizes the loss is a power
of the first-order one.

Legend: N windows, T tokens, C hidden size.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mlaforge.checkpoint.layerwise import HEAD_ROWS, LayerStream
from mlaforge.factorization.latent import Latent
from mlaforge.factorization.layer import LayerWeights, attention_module, mla_config
from mlaforge.factorization.refit import TOKENS, refit_o_proj
from mlaforge.planning.plan import Plan
from mlaforge.rendering.page import interval
from mlaforge.runtime import progress
from mlaforge.tensor_store import TensorStore

# Tokens per block for variances: tokens of a window are not independent, means of blocks of this size nearly are.
BLOCK = 128
# Standard deviations of loss / divergence: prior to measurements, and of one conversion from the common factor
# (measured: docs/notes/conversion.md).
PRIOR_STD, SIZE_STD = 0.5, 0.15
# Loss below the resolution of any measurement, nats per token.
NEGLIGIBLE = 1e-7


@dataclasses.dataclass(frozen=True)
class Conversion:
    """A conversion to measure.

    first_order: sum of the predicted losses. latent: layer -> its projections. refit: whether o_proj is refitted, as
    `convert` does in this layout.
    """

    plan: Plan
    first_order: float
    latent: Callable[[int], Latent]
    refit: bool = False


@dataclasses.dataclass(frozen=True)
class Loss:
    """Loss in nats per token, with its 95 % interval (None for too little text)."""

    nats: float
    interval: tuple[float, float] | None


@torch.no_grad()
def measure(
    stream: LayerStream, conversions: Mapping[str, Conversion], eval_NT: Tensor, tuned_NT: Tensor, work: TensorStore
) -> dict[str, Loss]:
    """Measure the loss of each conversion relative to the original on eval_NT; o_proj is refitted on tuned_NT.

    Finished layers are stored in `work`, from which an interrupted run resumes.
    """
    settings = {
        name: mla_config(stream.source, conversion.plan, None, o_bias=conversion.refit)
        for name, conversion in conversions.items()
    }
    refit_NT = tuned_NT[: max(1, TOKENS // tuned_NT.shape[1])]
    # Hidden-state stream -> its text: the original, each conversion, and for refits both on the tuned text.
    texts = {"original": eval_NT, **dict.fromkeys(conversions, eval_NT)}
    texts |= {f"tuned {name}": refit_NT for name, conversion in conversions.items() if conversion.refit}
    if len(texts) > len(conversions) + 1:
        texts["tuned original"] = refit_NT
    last = stream.num_layers
    start = max((index for index in range(last + 1) if f"held-{index:03d}" in work), default=0)
    for index in progress(range(start, last), "judge conversions", last - start):
        states = _states(stream, work, index, texts)
        with stream.layer(index) as layer:
            for name, conversion in conversions.items():
                _run_layer(stream, index, layer, conversion, settings[name], states, name)
            for name in {"original", "tuned original"} & states.keys():
                states[name] = [stream.run(layer, index, h) for h in states[name]]
        work[f"held-{index + 1:03d}"] = {
            f"{name}.{n}": hidden for name, windows in states.items() for n, hidden in enumerate(windows)
        }
        work.drop(f"held-{index:03d}")
    return _compare_with_original(stream, conversions, _states(stream, work, last, texts), eval_NT)


def _states(stream: LayerStream, work: TensorStore, index: int, texts: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    """Return the inputs of layer `index`, [1, T, C] per window of every stream."""
    if index == 0:
        return {name: [stream.embed(ids[None]) for ids in text] for name, text in texts.items()}
    hidden = work[f"held-{index:03d}"]
    return {name: [hidden[f"{name}.{n}"].to(stream.device) for n in range(len(text))] for name, text in texts.items()}


def _run_layer(
    stream: LayerStream, index: int, layer: Any, conversion: Conversion, settings: dict[str, Any],
    states: dict[str, list[Tensor]], name: str,
) -> None:  # fmt: skip
    """Run the streams of one conversion through a layer, in place."""
    original, converted = layer.self_attn, None
    if conversion.plan.layers[index].layout != "gqa":
        weights = LayerWeights.of(conversion.latent(index), original.state_dict())
        converted = attention_module(stream, settings, index, weights)
    if conversion.refit:
        refit_o_proj(stream, index, layer, converted, list(states["tuned original"]), states[f"tuned {name}"])
    try:
        layer.self_attn = converted or original
        states[name] = [stream.run(layer, index, h) for h in states[name]]
    finally:
        layer.self_attn = original


def _compare_with_original(
    stream: LayerStream, conversions: Mapping[str, Conversion], states: dict[str, list[Tensor]], eval_NT: Tensor
) -> dict[str, Loss]:
    """Compute losses from the last layer's outputs: every token's loss difference and its KL from the original."""
    by_window: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in conversions}
    with stream.head() as (norm, head):
        for n, ids in enumerate(eval_NT):
            # The last token has no successor.
            parts = {name: norm(states[name][n][0, :-1]).split(HEAD_ROWS) for name in ("original", *conversions)}
            chunks: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in conversions}
            for chunk, targets in enumerate(ids[1:].to(stream.device).split(HEAD_ROWS)):
                logp = (parts["original"][chunk] @ head.T).float().log_softmax(-1)
                for name in conversions:
                    change = logp - (parts[name][chunk] @ head.T).float().log_softmax(-1)
                    chunks[name].append((change.gather(1, targets[:, None])[:, 0], (logp.exp() * change).sum(-1)))
            for name in conversions:
                differences, divergences = zip(*chunks[name], strict=True)
                by_window[name].append((torch.cat(differences).double(), torch.cat(divergences).double()))
    return estimates(
        {name: TokenStatistics.of(*map(list, zip(*windows, strict=True))) for name, windows in by_window.items()}
    )


@dataclasses.dataclass(frozen=True)
class TokenStatistics:
    """Means of a conversion's loss differences and divergences over tokens, and the variances of these means, from
    `count` blocks (None for a single block)."""

    means: tuple[float, float]
    variances: tuple[float, float] | None
    count: int

    @classmethod
    def of(cls, differences: Sequence[Tensor], divergences: Sequence[Tensor]) -> TokenStatistics:
        """Return the statistics of values per window, [T - 1] each."""
        blocks = [
            torch.stack([part.mean() for window in values for part in window.chunk(max(1, round(len(window) / BLOCK)))])
            for values in (differences, divergences)
        ]
        first, second = (float(torch.cat(list(values)).mean()) for values in (differences, divergences))
        count = len(blocks[0])
        variances = None if count == 1 else (float(blocks[0].var()) / count, float(blocks[1].var()) / count)
        return cls((first, second), variances, count)


def estimates(statistics: Mapping[str, TokenStatistics]) -> dict[str, Loss]:
    """Return the loss of every conversion from the loss differences and the divergences of all of them.

    Both have the same mean if the text follows the original's distribution. The difference is unbiased but noisy; the
    divergence has little noise, but on other text it is off by a factor that is about the same for all conversions.
    That factor is estimated from all of them, weighted by precision; each loss is the precision-weighted mean of its
    difference and of its divergence times the factor.
    """
    measured = [(s.means, s.variances) for s in statistics.values() if s.variances is not None]
    weights = [(d, k, 1 / max(v, NEGLIGIBLE**2)) for (d, k), (v, _) in measured]
    precision = PRIOR_STD**-2 + sum(k * k * w for _, k, w in weights)
    factor = (PRIOR_STD**-2 + sum(d * k * w for d, k, w in weights)) / precision
    return {name: _estimate(tokens, factor, precision) for name, tokens in statistics.items()}


def _estimate(statistics: TokenStatistics, factor: float, precision: float) -> Loss:
    (difference, divergence), scaled = statistics.means, factor * statistics.means[1]
    if statistics.variances is None:
        return Loss(scaled, None)
    variances = (
        statistics.variances[0],
        factor**2 * statistics.variances[1] + divergence**2 / precision + (SIZE_STD * scaled) ** 2,
    )
    shares = [1 / max(variance, NEGLIGIBLE**2) for variance in variances]
    loss = (shares[0] * difference + shares[1] * scaled) / sum(shares)
    return Loss(loss, interval(loss, sum(shares) ** -0.5, statistics.count))


@dataclasses.dataclass(frozen=True)
class Curve:
    """Loss as a function of the first-order prediction: a power law through two points, proportional to one."""

    points: tuple[tuple[float, Loss], ...]

    @classmethod
    def fit(cls, conversions: Mapping[str, Conversion], measured: Mapping[str, Loss]) -> Curve:
        points = [
            (conversion.first_order, measured[name])
            for name, conversion in conversions.items()
            if conversion.first_order > 0
        ]
        points.sort(key=lambda point: point[0])
        losses = [loss for _, loss in points]
        if len(points) > 1 and losses[0].nats > losses[1].nats:
            # A smaller cache cannot lose less: that is noise, so both points are pooled.
            ends = [end for loss in losses for end in loss.interval or ()]
            pooled = Loss(sum(loss.nats for loss in losses) / 2, (min(ends), max(ends)) if len(ends) == 4 else None)
            points = [(first_order, pooled) for first_order, _ in points]
        return cls(tuple(points))

    def at(self, first_order: float) -> Loss:
        """Return the loss of a conversion by its first-order prediction; 0 for a prediction of 0."""
        if first_order <= 0 or not self.points:
            return Loss(0.0, None)
        nats = self._power(first_order, [loss.nats for _, loss in self.points])
        intervals = [loss.interval for _, loss in self.points]
        if any(ends is None for ends in intervals):
            return Loss(nats, None)
        low, high = sorted(
            self._power(first_order, [ends[side] for ends in intervals if ends is not None]) for side in (0, 1)
        )
        return Loss(nats, (low, high))

    def _power(self, first_order: float, losses: Sequence[float]) -> float:
        for (x, _), y in zip(self.points, losses, strict=True):
            if x == first_order:
                return y
        losses = [max(y, NEGLIGIBLE) for y in losses]
        (x, _), y = self.points[0], losses[0]
        slope = 1.0
        if len(losses) > 1 and self.points[1][0] > x:
            slope = max(0.0, math.log(losses[1] / y) / math.log(self.points[1][0] / x))
        return y * (first_order / x) ** slope
