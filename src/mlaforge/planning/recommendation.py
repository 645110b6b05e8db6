"""Recommendation of a form, with reasons: it fits, then its loss is small, then it is fastest (rule: docs/plan.md)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mlaforge.planning.forms import MEASURED_ON, SELECTED_FROM
from mlaforge.planning.roofline import Row, decode_step, in_bytes, in_digits, slowdown
from mlaforge.planning.selection import sparse

# Largest typical loss of a recommended form, in nats per token: 2 % of perplexity.
SMALL_LOSS = math.log(1.02)
# Step times within this ratio count as equal: a roofline is no more precise.
SPEED_TOLERANCE = 1.05


@dataclass(frozen=True)
class Recommendation:
    """Recommended row. sentence: action and result; reasons: sentences that justify it."""

    best: Row
    sentence: str
    reasons: list[str]


def recommend(rows: Sequence[Row]) -> Recommendation:
    """Choose among the rows that have a form. rows[0] is the unchanged original.

    Forms that do not fit in memory, and those that typically lose more than 2 %, are excluded. Of the rest, take the
    fastest, or within 5 % of its time the one with the smallest loss. If there is none, recommend no conversion and
    name the form that holds most requests at such a loss.
    """
    candidates = [row for row in rows if row.form]
    original = candidates[0]
    fitting = [row for row in candidates if row.fits]
    near = [row for row in fitting if loss(row) <= SMALL_LOSS]
    if near:
        fastest = min(near, key=lambda row: row.verify.total)
        best = min((row for row in near if row.verify.total <= SPEED_TOLERANCE * fastest.verify.total), key=loss)
        if best is fastest:
            why = "it is the fastest of the forms that fit and typically lose at most 2 %"
        else:
            why = f"no form that fits and typically loses at most 2 % is more than {SPEED_TOLERANCE - 1:.0%} faster"
            why += f" ({fastest.label}: {in_digits(fastest.verify.total * 1e3)} ms, {percent(fastest)})"
    else:
        return _too_large(candidates, fitting)
    return Recommendation(best, _sentence(best, original), [f"Why: {why}.", *_alternatives(best, fitting, candidates)])


def _too_large(candidates: Sequence[Row], fitting: Sequence[Row]) -> Recommendation:
    """Recommendation if no form with a loss that healing can reduce fits the batch: name what would fit instead."""
    best = max((row for row in candidates if loss(row) <= SMALL_LOSS), key=lambda row: row.requests)
    requests = f"{best.batch} request{'s' * (best.batch > 1)} of {best.context:,} tokens"
    memory, weights = f"{best.gpu.memory_gib:g} GiB", in_bytes(best.weight_bytes)
    sentence = (
        f"Nothing fits: no form of a typical loss up to {math.expm1(SMALL_LOSS):.0%} holds {requests} on "
        f"{best.machine} ({memory}, of which the weights take {weights})."
    )
    advice = (
        f"Of the forms that typically lose at most 2 %, {best.label} holds most: --batch {best.requests}."
        if best.requests
        else "Not even one request fits: plan for a shorter --context, a smaller model or a machine with more memory."
    )
    return Recommendation(best, sentence, [advice, *_alternatives(best, fitting, candidates)])


def loss(row: Row) -> float:
    """Typical loss, nats per token."""
    assert row.form is not None
    return row.form.loss


def percent(row: Row) -> str:
    """Typical loss for display."""
    return f"{row.form.percent:.1f} %" if row.form else "unknown"


def _sentence(best: Row, original: Row) -> str:
    assert best.form is not None
    requests = f"{best.batch} request{'s' * (best.batch > 1)} of {best.context:,} tokens take{'s' * (best.batch == 1)}"
    cache, original_cache = (in_bytes(row.cache_bytes(row.batch)) for row in (best, original))
    step, original_step = (f"{in_digits(row.verify.total * 1e3)} ms" for row in (best, original))
    text = f"{best.form.advice(best.context)}: {requests} {cache} of cache"
    if best is original:
        return f"{text} and {step} a step on {best.machine}, at no loss."
    does_not_fit = "" if original.fits else ", which does not fit,"
    baseline = f"as it is: {original_cache}{does_not_fit} and {original_step}"
    return f"{text} and {step} a step on {best.machine} ({baseline}), at a typical loss of {percent(best)}."


def _alternatives(best: Row, fitting: Sequence[Row], candidates: Sequence[Row]) -> list[str]:
    """Sentences on other forms: the smallest with a small loss, the fastest, and those that do not fit."""
    reasons = []
    near = [row for row in candidates if loss(row) <= SMALL_LOSS]
    smallest = min(near, key=lambda row: row.cache_bytes(1))
    if smallest is not best:
        reasons.append(
            f"Least memory within 2 %: {smallest.label} holds {smallest.requests:,} requests of this context instead "
            f"of {best.requests:,}, at {in_digits(smallest.verify.total * 1e3)} ms a step and {percent(smallest)}."
        )
    fastest = min(fitting or candidates, key=lambda row: row.verify.total)
    if fastest.verify.total * SPEED_TOLERANCE < best.verify.total:
        reasons.append(
            f"Least time at any loss: {fastest.label}, {in_digits(fastest.verify.total * 1e3)} ms a step at "
            f"{percent(fastest)}."
        )
    reasons += [break_even(row, candidates[0]) for row in candidates if row.form and row.form.sparse][:1]
    if too_large := [row for row in candidates if not row.fits]:
        labels = ", ".join(f"{row.label} ({row.requests:,} requests)" for row in too_large)
        reasons.append(f"Does not fit: {labels}.")
    reasons.append(
        f"Losses are typical ones of {MEASURED_ON} before healing, at 2,048 tokens, and of selections at "
        f"{SELECTED_FROM:,}: `mlaforge diagnose` and `mlaforge eval --seqlen` measure this model's."
    )
    return reasons


def break_even(row: Row, original: Row) -> str:
    """Sentence on the shortest context, of the powers of two up to the model's maximum, at which a selection makes the
    original faster."""
    form, gpu, batch = row.form, row.gpu, row.batch
    assert form is not None and form.sparse
    max_context = row.plan.spec.max_position_embeddings
    for context in (1 << power for power in range(10, max_context.bit_length())):
        if (topk := form.topk(context)) < context:
            plans = (original.plan, sparse(original.plan, topk))
            steps = (decode_step(plan, gpu, context, batch, 1, row.ranks) for plan in plans)
            dense_seconds, sparse_seconds = (step.total for step in steps)
            if sparse_seconds * SPEED_TOLERANCE < dense_seconds:
                return (
                    f"A selection of {topk:,} tokens makes the original faster from {context:,} tokens on: "
                    f"{in_digits(sparse_seconds * 1e3)} ms a step instead of {in_digits(dense_seconds * 1e3)}."
                )
    return f"A selection of tokens makes the original no faster at any context up to {max_context:,}."


def analyse(row: Row, gqa: Row) -> str:
    """Sentences on the limits of a configuration: attention against the ridge, step, memory, speculation."""
    T = 1 + row.drafts
    text = (
        f"At {T} query token(s) its attention does {in_digits(row.attention(T).intensity)} FLOP per cache byte "
        f"(ridge {in_digits(row.gpu.ridge)}) in {slowdown(row, gqa, T):.2f} x GQA's time. "
    )
    steps = {row.label: row.verify}
    steps.setdefault(gqa.label, gqa.verify)
    for label, step in steps.items():
        share = step.limits[step.limit] / step.total
        text += f"A step of {label} takes {in_digits(step.total * 1e3)} ms, {share:.0%} of it limited by {step.limit}. "
    text += (
        f"{row.requests} requests of this context (GQA: {gqa.requests}) fit beside the weights, which take "
        f"{in_bytes(row.weight_bytes)} of {row.gpu.memory_gib:g} GiB."
    )
    if row.drafts:
        reads = row.verify.weight_bytes / row.plain.weight_bytes
        text += (
            f" Verifying {row.drafts} draft(s) reads {reads:.2f} x the weight bytes and takes "
            f"{row.verify_ratio:.2f} x a plain step; speculation gains at most {row.perfect_speedup:.2f} x "
            "(every draft accepted and free)."
        )
    return text
