"""What conversions of a model lose on text that nothing was fitted to: measured at a few sizes, interpolated between.

First-order predictions (factorization/latent.py, code.py) order layers and sizes well, and come out too small, since
products of different tokens' and layers' errors, and all that a short calibration did not see, are left out. So the
model is converted in memory at two sizes, layer by layer, and judged beside the original. Between and beyond these
sizes the loss is a power of the first-order one.

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

# Tokens whose mean loss counts as one draw: those of a window are not independent, those so far apart nearly are.
BLOCK = 128
# How far the loss may be from the divergence before anything is measured, as a share of it; and how far a size may be
# from what all sizes say of that (measured: docs/notes/conversion.md).
PRIOR, DOUBT = 0.5, 0.15
# What no measurement tells from nothing, nats per token.
NOTHING = 1e-7


@dataclasses.dataclass(frozen=True)
class Size:
    """A conversion to be measured. `latent` gives a converted layer's projections, `first_order` is what was predicted
    in sum, `refit`: o_proj is solved anew, as `convert` does it in this layout."""

    plan: Plan
    first_order: float
    latent: Callable[[int], Latent]
    refit: bool = False


@dataclasses.dataclass(frozen=True)
class Loss:
    """Nats per token, and the 95 % interval; None where there was too little text for one."""

    nats: float
    interval: tuple[float, float] | None


@torch.no_grad()
def measure(
    stream: LayerStream, sizes: Mapping[str, Size], held_NT: Tensor, tuned_NT: Tensor, work: TensorStore
) -> dict[str, Loss]:
    """The loss of each size beside the original on `held_NT`; o_proj is solved on `tuned_NT` where it is refitted.

    What a killed run had finished waits in `work`, layer by layer.
    """
    settings = {name: mla_config(stream.source, size.plan, None, o_bias=size.refit) for name, size in sizes.items()}
    few = tuned_NT[: max(1, TOKENS // tuned_NT.shape[1])]
    # Stream -> its texts: the original, each size, and for a refit both on the tuned text.
    texts = {"original": held_NT, **dict.fromkeys(sizes, held_NT)}
    texts |= {f"tuned {name}": few for name, size in sizes.items() if size.refit}
    if len(texts) > len(sizes) + 1:
        texts["tuned original"] = few
    last = stream.num_layers
    start = max((index for index in range(last + 1) if f"held-{index:03d}" in work), default=0)
    for index in progress(range(start, last), "judge conversions", last - start):
        states = _states(stream, work, index, texts)
        with stream.layer(index) as layer:
            for name, size in sizes.items():
                _through(stream, index, layer, size, settings[name], states, name)
            for name in {"original", "tuned original"} & states.keys():
                states[name] = [stream.run(layer, index, h) for h in states[name]]
        work[f"held-{index + 1:03d}"] = {f"{name}.{n}": h for name, each in states.items() for n, h in enumerate(each)}
        work.drop(f"held-{index:03d}")
    return _judged(stream, sizes, _states(stream, work, last, texts), held_NT)


def _states(stream: LayerStream, work: TensorStore, index: int, texts: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    """Inputs of layer `index`, [1, T, C] per window of every stream."""
    if index == 0:
        return {name: [stream.embed(ids[None]) for ids in text] for name, text in texts.items()}
    found = work[f"held-{index:03d}"]
    return {name: [found[f"{name}.{n}"].to(stream.device) for n in range(len(text))] for name, text in texts.items()}


def _through(
    stream: LayerStream, index: int, layer: Any, size: Size, settings: dict[str, Any],
    states: dict[str, list[Tensor]], name: str,
) -> None:  # fmt: skip
    """Takes one size's streams through a layer, in place."""
    own, new = layer.self_attn, None
    if size.plan.layers[index].layout != "gqa":
        new = attention_module(stream, settings, index, LayerWeights.of(size.latent(index), own.state_dict()))
    if size.refit:
        refit_o_proj(stream, index, layer, new, list(states["tuned original"]), states[f"tuned {name}"])
    try:
        layer.self_attn = new or own
        states[name] = [stream.run(layer, index, h) for h in states[name]]
    finally:
        layer.self_attn = own


def _judged(
    stream: LayerStream, sizes: Mapping[str, Size], states: dict[str, list[Tensor]], held_NT: Tensor
) -> dict[str, Loss]:
    """By the last layer's outputs: the loss of every token beside the original's, and the divergence from it."""
    found: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in sizes}
    with stream.head() as (norm, head):
        for n, ids in enumerate(held_NT):
            # The last token has no next one.
            parts = {name: norm(states[name][n][0, :-1]).split(HEAD_ROWS) for name in ("original", *sizes)}
            each: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in sizes}
            for rows, wanted in enumerate(ids[1:].to(stream.device).split(HEAD_ROWS)):
                logs = (parts["original"][rows] @ head.T).float().log_softmax(-1)
                for name in sizes:
                    less = logs - (parts[name][rows] @ head.T).float().log_softmax(-1)
                    each[name].append((less.gather(1, wanted[:, None])[:, 0], (logs.exp() * less).sum(-1)))
            for name in sizes:
                differences, divergences = zip(*each[name], strict=True)
                found[name].append((torch.cat(differences).double(), torch.cat(divergences).double()))
    return estimates({name: Seen.of(*map(list, zip(*windows, strict=True))) for name, windows in found.items()})


@dataclasses.dataclass(frozen=True)
class Seen:
    """What a size's tokens say: means of their loss difference and of their divergence, the variances of these means
    over `count` blocks, None of a single one."""

    means: tuple[float, float]
    variances: tuple[float, float] | None
    count: int

    @classmethod
    def of(cls, differences: Sequence[Tensor], divergences: Sequence[Tensor]) -> Seen:
        """Of every window's tokens [T-1]."""
        blocks = [
            torch.stack([part.mean() for window in values for part in window.chunk(max(1, round(len(window) / BLOCK)))])
            for values in (differences, divergences)
        ]
        first, second = (float(torch.cat(list(values)).mean()) for values in (differences, divergences))
        count = len(blocks[0])
        variances = None if count == 1 else (float(blocks[0].var()) / count, float(blocks[1].var()) / count)
        return cls((first, second), variances, count)


def estimates(seen: Mapping[str, Seen]) -> dict[str, Loss]:
    """The loss of every size from the loss differences and the divergences of all.

    Both have the same mean where the text is as the original believes. The difference is what perplexity shows, and
    varies; the divergence hardly varies, and is off where text is not what the model expects, by a factor that is about
    the same for all sizes. So that factor is measured over all of them, most where much is lost, and each size's loss
    is the mean of its difference and its divergence times the factor, by certainty.
    """
    known = [(size.means, size.variances) for size in seen.values() if size.variances is not None]
    weights = [(d, k, 1 / max(v, NOTHING**2)) for (d, k), (v, _) in known]
    precision = PRIOR**-2 + sum(k * k * w for _, k, w in weights)
    factor = (PRIOR**-2 + sum(d * k * w for d, k, w in weights)) / precision
    return {name: _estimate(size, factor, precision) for name, size in seen.items()}


def _estimate(size: Seen, factor: float, precision: float) -> Loss:
    (difference, divergence), scaled = size.means, factor * size.means[1]
    if size.variances is None:
        return Loss(scaled, None)
    spreads = (
        size.variances[0],
        factor**2 * size.variances[1] + divergence**2 / precision + (DOUBT * scaled) ** 2,
    )
    shares = [1 / max(spread, NOTHING**2) for spread in spreads]
    loss = (shares[0] * difference + shares[1] * scaled) / sum(shares)
    return Loss(loss, interval(loss, sum(shares) ** -0.5, size.count))


@dataclasses.dataclass(frozen=True)
class Curve:
    """Loss by first-order prediction: a power law through the measured points, of one point a proportion."""

    points: tuple[tuple[float, Loss], ...]

    @classmethod
    def through(cls, sizes: Mapping[str, Size], measured: Mapping[str, Loss]) -> Curve:
        found = [(size.first_order, measured[name]) for name, size in sizes.items() if size.first_order > 0]
        found.sort(key=lambda point: point[0])
        losses = [loss for _, loss in found]
        if len(found) > 1 and losses[0].nats > losses[1].nats:
            # No less is lost with fewer numbers: that is noise, and both are one measurement.
            ends = [end for loss in losses for end in loss.interval or ()]
            pooled = Loss(sum(loss.nats for loss in losses) / 2, (min(ends), max(ends)) if len(ends) == 4 else None)
            found = [(first_order, pooled) for first_order, _ in found]
        return cls(tuple(found))

    def at(self, first_order: float) -> Loss:
        """The loss of a size; nothing is lost where nothing was predicted."""
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
        losses = [max(y, NOTHING) for y in losses]
        (x, _), y = self.points[0], losses[0]
        slope = 1.0
        if len(losses) > 1 and self.points[1][0] > x:
            slope = max(0.0, math.log(losses[1] / y) / math.log(self.points[1][0] / x))
        return y * (first_order / x) ** slope
