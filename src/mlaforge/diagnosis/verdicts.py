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
from mlaforge.diagnosis.routing import DEAD_LOAD, HOT_LOAD
from mlaforge.ops.row_formats.plain import dtype_name, plain_name
from mlaforge.planning.plan import Plan, unconverted
from mlaforge.rendering.table import text_table
from mlaforge.runtime import UserError

# A head has a sink if this share of its attention is on the first token or the learned sink (arXiv:2410.10781).
SINK_SHARE = 0.3
# A head has collapsed if exp(mean entropy), its effective number of tokens, is below this.
COLLAPSED_TOKENS = 1.5
# A head is local if its effective context, in tokens, is at most this.
LOCAL_TOKENS = 128
# The load of experts is uneven if its coefficient of variation exceeds this.
UNEVEN_CV = 1.0
# Predicted loss of the plan in nats per token up to which conversion is cheap, or can be healed (docs/diagnose.md).
CHEAP_LOSS, COSTLY_LOSS = 0.01, 0.2


def summary(
    layers: list[dict[str, Any]], mean_loss: float, shape: Iterable[int], suggested: Plan, dtype: torch.dtype,
    losses: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Return the manifest's metrics.

    mean_loss: of the text, nats per token. shape: number and length of the windows. losses: from
    `prediction.predicted_losses`. Raises UserError if the loss is not finite.
    """
    if not math.isfinite(mean_loss):
        raise UserError(
            f"the model's loss on the text is {mean_loss}: its weights contain NaN or infinity, or it overflows"
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
    """Count heads with an attention sink (first token or learned sink), and list the collapsed ones."""
    heads, resting, collapsed = 0, [], []
    for layer in layers:
        attention = layer["attention"]
        for h, entropy in enumerate(attention["entropy"]):
            heads += 1
            if max(attention["first"]["1"][h], attention["learned_sink"][h]) >= SINK_SHARE:
                resting.append([layer["layer"], h])
            if math.exp(entropy) < COLLAPSED_TOKENS:
                collapsed.append([layer["layer"], h])
    share = len(resting) / heads
    ratios = [ratio for layer in layers for ratio in layer["attention"]["sink_key_norm"]]
    learned = [mass for layer in layers for mass in layer["attention"]["learned_sink"]]
    first = [mass for layer in layers for mass in layer["attention"]["first"]["1"]]
    text = (
        f"{len(resting)} of {heads} heads put at least {SINK_SHARE:.0%} of their attention on the first token or a sink"
    )
    return {
        "verdict": "strong sinks" if share >= 0.5 else "some sinks" if resting else "no sinks",
        "text": text + f"; collapsed: {len(collapsed) or 'none'}",
        "threshold": SINK_SHARE,
        "heads": heads,
        "sink_heads": resting,
        "collapsed_heads": collapsed,
        "mean_first": statistics.fmean(first),
        "mean_learned_sink": statistics.fmean(learned),
        "sink_key_norm": statistics.median(ratios),
    }


def windows(layers: list[dict[str, Any]]) -> dict[str, Any]:
    """Effective context of the heads in layers without a sliding window."""
    full = [layer["attention"] for layer in layers if layer["window"] is None]
    contexts = [tokens for stats in full for tokens in stats["effective_context"]]
    recent = {}
    for w in map(str, RECENT):
        masses = [mass for stats in full if stats["recent"][w] is not None for mass in stats["recent"][w]]
        recent[w] = statistics.fmean(masses) if masses else None
    local = sum(tokens <= LOCAL_TOKENS for tokens in contexts)
    metrics = {"threshold": LOCAL_TOKENS, "heads": len(contexts), "local_heads": local, "recent": recent}
    if not contexts:
        return {"verdict": "all layers slide", "text": "every layer has a sliding window", **metrics}
    middle = statistics.median(contexts)
    shares = ", ".join(f"{mass:.0%} within {w}" for w, mass in recent.items() if mass is not None)
    text = (
        f"{local} of {len(contexts)} heads of full layers attend within {LOCAL_TOKENS} tokens, the median {middle:.0f}"
    )
    return {
        "verdict": "mostly local" if local > len(contexts) / 2 else "wide",
        "text": text + (f"; attention {shares} tokens" if shares else ""),
        "effective_context": middle,
        **metrics,
    }


def routing(layers: list[dict[str, Any]]) -> dict[str, Any]:
    """Balance of the experts' load."""
    routed = [layer["routing"] for layer in layers if layer["routing"]]
    if not routed:
        return {"verdict": "dense", "text": "no experts: the MLP of every layer is dense"}
    dead, hot = (sum(len(stats[kind]) for stats in routed) for kind in ("dead", "hot"))
    worst = max(stats["cv"] for stats in routed)
    experts = len(routed[0]["load"])
    return {
        "verdict": "uneven" if worst > UNEVEN_CV or dead else "even",
        "text": f"{experts} experts in {len(routed)} layers: load varies by {worst:.2f} of its mean at most, {dead} "
        f"below {DEAD_LOAD:.0%} of a fair share, {hot} above {HOT_LOAD:.0f} times it",
        "threshold": UNEVEN_CV,
        "worst_cv": worst,
        "worst_max_over_mean": max(stats["max_over_mean"] for stats in routed),
        "dead": dead,
        "hot": hot,
        "router_entropy": statistics.fmean(stats["router_entropy"] for stats in routed),
        "uniform_entropy": math.log(experts),
    }


def geometry(layers: list[dict[str, Any]]) -> dict[str, Any]:
    """Effective rank and outlier dimensions of keys and values."""
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
    """Bytes allocated for the cache of one window, compared with the formula."""
    before, after = (sum(layer["cache_bytes"][side] for layer in layers) for side in ("gqa", "plan"))
    stored = plain_name(dtype_name(dtype))
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
    """Predicted loss of conversion: with suggested ranks, with uniform ranks, and by budget."""
    planned = [layer["plan"] for layer in layers if layer["plan"]["layout"] != "gqa"]
    loss, uniform = losses["plan"]["suggested"], losses["plan"]["uniform"]
    ranks = [layer["kv_lora_rank"] for layer in planned]
    verdict = (
        "fit" if loss.nats <= CHEAP_LOSS else "needs healing" if loss.nats <= COSTLY_LOSS else "unfit at this budget"
    )
    return {
        "verdict": verdict,
        "text": f"{planned[0]['layout']}, ranks {min(ranks)} to {max(ranks)} in {len(planned)} of {len(layers)} "
        f"layers, {suggested.converted_fraction:.1%} of their cache: predicted loss {_format_loss(loss)} nats per "
        f"token; {uniform.nats:.2g} with uniform ranks",
        "thresholds": [CHEAP_LOSS, COSTLY_LOSS],
        "predicted_loss": loss.nats,
        "interval": loss.interval,
        "uniform_loss": uniform.nats,
        "first_order": sum(layer["first_order"] for layer in planned),
        "by_budget": {name: _loss_fields(loss) for name, loss in losses["budgets"].items()},
        "fraction": suggested.converted_fraction,
    }


def bits(layers: list[dict[str, Any]], losses: dict[str, Loss]) -> dict[str, Any]:
    """Whether coded rows pay (`convert --bits`): predicted loss of all converted layers, by bits per number."""
    coded = [layer["coded"] for layer in layers if layer["coded"]]
    by_bits = {}
    for name, loss in losses.items():
        sizes = [layer[name]["code"][0] for layer in coded]
        by_bits[name] = {**_loss_fields(loss), "kept": [min(sizes), max(sizes)]}
    (first, widest), *narrower = losses.items()
    smallest, largest = by_bits[first]["kept"]
    text = (
        f"latent with coded rows: predicted loss {_format_loss(widest)} nats per token at {first} bits per number "
        "(bf16 has 16)"
    )
    text += "".join(f", {_format_loss(loss)} at {name}" for name, loss in narrower)
    cheap = [name for name, loss in losses.items() if loss.nats <= CHEAP_LOSS]
    return {
        "verdict": f"{cheap[-1]} bits are cheap" if cheap else "no code is cheap",
        "text": f"{text}; a layer keeps {smallest} to {largest} coordinates at {first}",
        "threshold": CHEAP_LOSS,
        "by_bits": by_bits,
    }


def _format_loss(loss: Loss) -> str:
    """Format a loss with its 95 % interval."""
    ends = "" if loss.interval is None else f" (95 %: {loss.interval[0]:.2g} to {loss.interval[1]:.2g})"
    return f"{loss.nats:.2g}{ends}"


def _loss_fields(loss: Loss) -> dict[str, Any]:
    return {"predicted_loss": loss.nats, "interval": loss.interval}


def table(metrics: dict[str, Any]) -> str:
    """Format the summary for a terminal: question, verdict, details."""
    size = f"{metrics['tokens']:,} tokens in {metrics['windows_judged']} windows, which conversions are calibrated on"
    rows = [("text", f"ppl {metrics['ppl']:.3f}", f"{size}; their losses on {metrics['held_out']:,} other tokens")]
    rows += [(name, metrics[name]["verdict"], metrics[name]["text"]) for name in
             ("sinks", "windows", "routing", "geometry", "cache", "plan", "bits")]  # fmt: skip
    return text_table(rows)
