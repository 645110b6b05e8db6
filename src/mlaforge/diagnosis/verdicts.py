"""Verdicts of a diagnosis: one for each question, with its threshold.

The thresholds and their reasons are in docs/diagnose.md. `layers` are the records of diagnosis.json.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable
from typing import Any

import torch

from mlaforge.diagnosis.attention_stats import RECENT
from mlaforge.diagnosis.held_out import Loss
from mlaforge.diagnosis.routing import DEAD, HOT
from mlaforge.planning.plan import Plan, plain, unconverted
from mlaforge.rendering.table import text_table
from mlaforge.runtime import UserError

# A head rests on a sink if so much of its attention lies on the first token or the learned sink (arXiv:2410.10781).
SINK = 0.3
# A head has collapsed if its queries see fewer tokens than this: e to the mean entropy.
COLLAPSED = 1.5
# A head is local if its effective context is no longer than this.
LOCAL = 128
# Experts are loaded unevenly where the standard deviation of the load exceeds this share of its mean.
UNEVEN = 1.0
# Predicted loss of the plan, nats per token, up to which conversion is cheap, or can be healed (docs/diagnose.md).
CHEAP, COSTLY = 0.01, 0.2


def summary(
    layers: list[dict[str, Any]], mean_loss: float, shape: Iterable[int], suggested: Plan, dtype: torch.dtype,
    losses: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """The manifest's metrics. mean_loss: of the text, nats per token; shape: its windows and their length; losses: what
    `prediction.foreseen` gives.

    Raises UserError where the loss is not finite.
    """
    if not math.isfinite(mean_loss):
        raise UserError(
            f"the model's loss on the text is {mean_loss}: its weights hold NaN or infinity, or it overflows"
        )
    count, length = shape
    return {
        "ppl": math.exp(mean_loss) if mean_loss < 700 else math.inf,
        "nll": mean_loss,
        "tokens": count * (length - 1),
        "windows_judged": count,
        "sinks": sinks(layers),
        "windows": windows(layers),
        "routing": routing(layers),
        "geometry": geometry(layers),
        "cache": cache(layers, length, suggested, dtype),
        "plan": plan(layers, suggested, losses),
        "bits": bits(layers, losses["bits"]),
    }


def sinks(layers: list[dict[str, Any]]) -> dict[str, Any]:
    """How many heads rest on the first token or a learned sink, and which have collapsed."""
    heads, resting, collapsed = 0, [], []
    for layer in layers:
        attention = layer["attention"]
        for h, entropy in enumerate(attention["entropy"]):
            heads += 1
            if max(attention["first"]["1"][h], attention["learned_sink"][h]) >= SINK:
                resting.append([layer["layer"], h])
            if math.exp(entropy) < COLLAPSED:
                collapsed.append([layer["layer"], h])
    share = len(resting) / heads
    ratios = [ratio for layer in layers for ratio in layer["attention"]["sink_key_norm"]]
    learned = [mass for layer in layers for mass in layer["attention"]["learned_sink"]]
    first = [mass for layer in layers for mass in layer["attention"]["first"]["1"]]
    text = f"{len(resting)} of {heads} heads put at least {SINK:.0%} of their attention on the first token or a sink"
    return {
        "verdict": "strong sinks" if share >= 0.5 else "some sinks" if resting else "no sinks",
        "text": text + f"; collapsed: {len(collapsed) or 'none'}",
        "threshold": SINK,
        "heads": heads,
        "sink_heads": resting,
        "collapsed_heads": collapsed,
        "mean_first": statistics.fmean(first),
        "mean_learned_sink": statistics.fmean(learned),
        "sink_key_norm": statistics.median(ratios),
    }


def windows(layers: list[dict[str, Any]]) -> dict[str, Any]:
    """How far heads of layers without a sliding window look."""
    full = [layer["attention"] for layer in layers if layer["window"] is None]
    contexts = [tokens for stats in full for tokens in stats["effective_context"]]
    recent = {}
    for w in map(str, RECENT):
        masses = [mass for stats in full if stats["recent"][w] is not None for mass in stats["recent"][w]]
        recent[w] = statistics.fmean(masses) if masses else None
    local = sum(tokens <= LOCAL for tokens in contexts)
    metrics = {"threshold": LOCAL, "heads": len(contexts), "local_heads": local, "recent": recent}
    if not contexts:
        return {"verdict": "all layers slide", "text": "every layer has a sliding window", **metrics}
    middle = statistics.median(contexts)
    shares = ", ".join(f"{mass:.0%} within {w}" for w, mass in recent.items() if mass is not None)
    text = (
        f"{local} of {len(contexts)} heads of full layers look no further than {LOCAL} tokens, the median {middle:.0f}"
    )
    return {
        "verdict": "mostly local" if local > len(contexts) / 2 else "wide",
        "text": text + (f"; attention {shares} tokens" if shares else ""),
        "effective_context": middle,
        **metrics,
    }


def routing(layers: list[dict[str, Any]]) -> dict[str, Any]:
    """Whether experts are used evenly."""
    routed = [layer["routing"] for layer in layers if layer["routing"]]
    if not routed:
        return {"verdict": "dense", "text": "no experts: the MLP of every layer is dense"}
    dead, hot = (sum(len(stats[kind]) for stats in routed) for kind in ("dead", "hot"))
    worst = max(stats["cv"] for stats in routed)
    experts = len(routed[0]["load"])
    return {
        "verdict": "uneven" if worst > UNEVEN or dead else "even",
        "text": f"{experts} experts in {len(routed)} layers: load varies by {worst:.2f} of its mean at most, {dead} "
        f"below {DEAD:.0%} of a fair share, {hot} above {HOT:.0f} times it",
        "threshold": UNEVEN,
        "worst_cv": worst,
        "worst_max_over_mean": max(stats["max_over_mean"] for stats in routed),
        "dead": dead,
        "hot": hot,
        "router_entropy": statistics.fmean(stats["router_entropy"] for stats in routed),
        "uniform_entropy": math.log(experts),
    }


def geometry(layers: list[dict[str, Any]]) -> dict[str, Any]:
    """How many dimensions keys and values really fill."""
    names = layers[0]["effective_rank"]
    ranks = {name: statistics.fmean(layer["effective_rank"][name] for layer in layers) for name in names}
    size = statistics.fmean(layer["gqa_cached"] for layer in layers)
    outliers = {
        name: sum(len(layer["geometry"]["outliers"][name]["dimensions"]) for layer in layers)
        for name in ("k", "v", "x")
    }
    text = (
        f"effective rank {ranks['joint']:.0f} of {size:.0f} for keys and values together, {ranks['loss']:.0f} as the "
    )
    return {
        "verdict": "low rank" if ranks["loss"] < size / 2 else "full rank",
        "text": text + f"loss weighs them; outlier dimensions: {outliers['k']} of keys, {outliers['v']} of values",
        "effective_rank": ranks,
        "cached": size,
        "outliers": outliers,
        "largest_logit": max(high for layer in layers for _, high in layer["attention"]["logit_range"]),
    }


def cache(layers: list[dict[str, Any]], tokens: int, suggested: Plan, dtype: torch.dtype) -> dict[str, Any]:
    """Bytes that were allocated for one window, beside what the formula says."""
    before, after = (sum(layer["cache_bytes"][side] for layer in layers) for side in ("gqa", "plan"))
    stored = plain(dtype.itemsize)
    plans = unconverted(suggested.spec, stored), dataclasses.replace(suggested, stored=stored)
    formula = [plan.cache_bytes(tokens) for plan in plans]
    return {
        "verdict": f"{after / before:.1%} with the plan",
        "text": f"{before:,} bytes allocated for {tokens:,} tokens in {str(dtype).removeprefix('torch.')} (formula "
        f"{formula[0]:,}), {after:,} with the suggested plan (formula {formula[1]:,})",
        "tokens": tokens,
        "allocated": before,
        "formula": formula[0],
        "plan_allocated": after,
        "plan_formula": formula[1],
    }


def plan(layers: list[dict[str, Any]], suggested: Plan, losses: dict[str, dict[str, Loss]]) -> dict[str, Any]:
    """Whether conversion pays: the loss with the suggested ranks, with uniform ones, and by budget."""
    planned = [layer["plan"] for layer in layers if layer["plan"]["layout"] != "gqa"]
    loss, uniform = losses["plan"]["suggested"], losses["plan"]["uniform"]
    ranks = [layer["kv_lora_rank"] for layer in planned]
    verdict = "fit" if loss.nats <= CHEAP else "needs healing" if loss.nats <= COSTLY else "unfit at this budget"
    return {
        "verdict": verdict,
        "text": f"{planned[0]['layout']}, ranks {min(ranks)} to {max(ranks)} in {len(planned)} of {len(layers)} "
        f"layers, {suggested.converted_fraction:.1%} of their cache: predicted loss {_told(loss)} nats per token; "
        f"{uniform.nats:.2g} with uniform ranks",
        "thresholds": [CHEAP, COSTLY],
        "predicted_loss": loss.nats,
        "interval": loss.interval,
        "uniform_loss": uniform.nats,
        "first_order": sum(layer["first_order"] for layer in planned),
        "by_budget": {name: _described(each) for name, each in losses["budgets"].items()},
        "fraction": suggested.converted_fraction,
    }


def bits(layers: list[dict[str, Any]], losses: dict[str, Loss]) -> dict[str, Any]:
    """Whether coded rows pay (`convert --bits`): predicted loss by the bits of a number, over all converted layers."""
    coded = [layer["coded"] for layer in layers if layer["coded"]]
    found = {}
    for name, loss in losses.items():
        kept = [layer[name]["code"][0] for layer in coded]
        found[name] = {**_described(loss), "kept": [min(kept), max(kept)]}
    (first, widest), *fewer = losses.items()
    least, most = found[first]["kept"]
    text = (
        f"latent with coded rows: predicted loss {_told(widest)} nats per token at {first} bits a number (bf16 has 16)"
    )
    text += "".join(f", {_told(each)} at {name}" for name, each in fewer)
    cheap = [name for name, each in losses.items() if each.nats <= CHEAP]
    return {
        "verdict": f"{cheap[-1]} bits are cheap" if cheap else "no code is cheap",
        "text": f"{text}; {least} to {most} numbers a layer are left at {first}",
        "threshold": CHEAP,
        "by_bits": found,
    }


def _told(loss: Loss) -> str:
    """With its 95 % interval."""
    ends = "" if loss.interval is None else f" (95 %: {loss.interval[0]:.2g} to {loss.interval[1]:.2g})"
    return f"{loss.nats:.2g}{ends}"


def _described(loss: Loss) -> dict[str, Any]:
    return {"predicted_loss": loss.nats, "interval": loss.interval}


def table(metrics: dict[str, Any]) -> str:
    """The summary for a terminal: question, verdict, finding."""
    seen = f"{metrics['tokens']:,} tokens in {metrics['windows_judged']} windows, which conversions are calibrated on"
    rows = [("text", f"ppl {metrics['ppl']:.3f}", f"{seen}; their losses on {metrics['held_out']:,} other tokens")]
    rows += [(name, metrics[name]["verdict"], metrics[name]["text"]) for name in
             ("sinks", "windows", "routing", "geometry", "cache", "plan", "bits")]  # fmt: skip
    return text_table(rows)
