"""Which form to take, and why: what fits, then what loses little, then what is fastest. docs/plan.md has the rule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mlaforge.planning.costs import weight_bytes
from mlaforge.planning.forms import MEASURED_ON
from mlaforge.planning.plan import sparse
from mlaforge.planning.roofline import Row, decode_step, in_bytes, in_digits, slowdown

# A typical loss, in nats per token, that is taken for time: 1 % of perplexity.
LITTLE = math.log(1.01)
# The largest typical loss of a form that is recommended: healing wins back a part of it.
MOST = math.log(1.10)
# Steps closer to each other than this are alike: a roofline is no better.
ALIKE = 1.05


@dataclass(frozen=True)
class Recommendation:
    """The row to take; `sentence`: what to do and what it gives; `reasons`: why this one."""

    best: Row
    sentence: str
    reasons: list[str]


def recommend(rows: Sequence[Row]) -> Recommendation:
    """Of the rows that have a form. rows[0] is the original as it stands.

    What does not fit in memory is out. Of the rest, the fastest of those that typically lose at most 1 %, and of
    several within 5 % of it the one that loses least. Where none loses so little, the one that loses least, up to
    10 %. Where nothing of that kind fits, no conversion is recommended, and the form that loses little and holds most
    is named with its batch.
    """
    weighed = [row for row in rows if row.form]
    original = weighed[0]
    fitting = [row for row in weighed if row.fits]
    near = [row for row in fitting if loss(row) <= LITTLE]
    if near:
        fastest = min(near, key=lambda row: row.verify.total)
        best = min((row for row in near if row.verify.total <= ALIKE * fastest.verify.total), key=loss)
        if best is fastest:
            why = "it is the fastest of the forms that fit and typically lose at most 1 %"
        else:
            why = f"no form that fits and typically loses at most 1 % is more than {ALIKE - 1:.0%} faster"
            why += f" ({fastest.label}: {in_digits(fastest.verify.total * 1e3)} ms, {percent(fastest)})"
    elif fitting and min(map(loss, fitting)) <= MOST:
        best = min(fitting, key=loss)
        why = "nothing that fits typically loses at most 1 %, and this loses least; healing wins back a part"
    else:
        return _too_large(weighed, fitting)
    return Recommendation(best, _sentence(best, original), [f"Why: {why}.", *_beside(best, fitting, weighed)])


def _too_large(weighed: Sequence[Row], fitting: Sequence[Row]) -> Recommendation:
    """Where no form that healing can mend holds the batch: no conversion is recommended, and what would fit is said."""
    best = max((row for row in weighed if loss(row) <= LITTLE), key=lambda row: row.requests)
    requests = f"{best.batch} request{'s' * (best.batch > 1)} of {best.context:,} tokens"
    memory, weights = f"{best.gpu.memory_gib:g} GiB", in_bytes(weight_bytes(best.plan))
    sentence = (
        f"Nothing fits: no form of a typical loss up to {math.expm1(MOST):.0%} holds {requests} on "
        f"{best.gpu.name} ({memory}, of which the weights take {weights})."
    )
    advice = (
        f"Of the forms that typically lose at most 1 %, {best.label} holds most: --batch {best.requests}."
        if best.requests
        else "Not even one request fits: plan for a shorter --context, a smaller model or a machine with more memory."
    )
    return Recommendation(best, sentence, [advice, *_beside(best, fitting, weighed)])


def loss(row: Row) -> float:
    """The typical one, nats per token."""
    assert row.form is not None
    return row.form.loss


def percent(row: Row) -> str:
    """The typical loss as it is printed."""
    return f"{row.form.percent:.1f} %" if row.form else "not known"


def _sentence(best: Row, original: Row) -> str:
    assert best.form is not None
    requests = f"{best.batch} request{'s' * (best.batch > 1)} of {best.context:,} tokens take{'s' * (best.batch == 1)}"
    held, before = (in_bytes(row.plan.cache_bytes(row.context, row.batch)) for row in (best, original))
    took, base = (f"{in_digits(row.verify.total * 1e3)} ms" for row in (best, original))
    text = f"{best.form.advice(best.context)}: {requests} {held} of cache"
    if best is original:
        return f"{text} and {took} a step on {best.gpu.name}, at no loss."
    beside = f"{before} and {base}" if original.fits else f"{before}, which does not fit, and {base}"
    return f"{text} and {took} a step on {best.gpu.name} (as it is: {beside}), at a typical loss of {percent(best)}."


def _beside(best: Row, fitting: Sequence[Row], weighed: Sequence[Row]) -> list[str]:
    """What the others would give: the smallest that loses little, the fastest, and what does not fit."""
    reasons = []
    near = [row for row in weighed if loss(row) <= LITTLE]
    smallest = min(near, key=lambda row: row.plan.cache_bytes(row.context))
    if smallest is not best:
        reasons.append(
            f"Least memory within 1 %: {smallest.label} holds {smallest.requests:,} requests of this context in place "
            f"of {best.requests:,}, at {in_digits(smallest.verify.total * 1e3)} ms a step and {percent(smallest)}."
        )
    fastest = min(fitting or weighed, key=lambda row: row.verify.total)
    if fastest.verify.total * ALIKE < best.verify.total:
        reasons.append(
            f"Least time whatever it loses: {fastest.label}, {in_digits(fastest.verify.total * 1e3)} ms a step at "
            f"{percent(fastest)}."
        )
    reasons += [pays(row, weighed[0]) for row in weighed if row.form and row.form.one_of][:1]
    if lost := [row for row in weighed if not row.fits]:
        reasons.append("Does not fit: " + ", ".join(f"{row.label} ({row.requests:,} requests)" for row in lost) + ".")
    reasons.append(
        f"Losses are typical ones, measured on {MEASURED_ON} before healing: `mlaforge diagnose` measures this model's."
    )
    return reasons


def pays(row: Row, original: Row) -> str:
    """From which context on a sparse row's original is faster than the dense one, of powers of two that the model was
    made for."""
    form, gpu, batch = row.form, row.gpu, row.batch
    assert form is not None and form.one_of
    most = row.plan.spec.max_position_embeddings
    for context in (1 << power for power in range(10, most.bit_length())):
        if (topk := form.topk(context)) < context:
            steps = (decode_step(plan, gpu, context, batch) for plan in (original.plan, sparse(original.plan, topk)))
            dense, read = (step.total for step in steps)
            if read * ALIKE < dense:
                return (
                    f"A selection of {topk:,} tokens makes the original faster from {context:,} tokens on: "
                    f"{in_digits(read * 1e3)} ms a step in place of {in_digits(dense * 1e3)}."
                )
    return f"A selection of tokens makes the original no faster at any context up to {most:,}."


def analyse(row: Row, gqa: Row) -> str:
    """What limits a configuration, in sentences: attention against the ridge, step, memory, speculation."""
    T = 1 + row.drafts
    text = (
        f"At {T} query token(s) its attention does {in_digits(row.attention(T).intensity)} FLOP per cache byte "
        f"(ridge {in_digits(row.gpu.ridge)}) in {slowdown(row, gqa, T):.2f} x GQA's time. "
    )
    for each in dict.fromkeys((row.label, gqa.label)):
        own = row if each == row.label else gqa
        share = own.verify.limits[own.verify.limit] / own.verify.total
        total = in_digits(own.verify.total * 1e3)
        text += f"A step of {each} takes {total} ms, {share:.0%} of it limited by {own.verify.limit}. "
    text += (
        f"{row.requests} requests of this context (GQA: {gqa.requests}) fit beside the weights, which take "
        f"{in_bytes(weight_bytes(row.plan))} of {row.gpu.memory_gib:g} GiB."
    )
    if row.drafts:
        reads = row.verify.weight_bytes / row.plain.weight_bytes
        text += (
            f" Verifying {row.drafts} draft(s) reads {reads:.2f} x the weight bytes and takes "
            f"{row.verify_ratio:.2f} x a plain step; speculation gains at most {row.perfect_speedup:.2f} x "
            "(every draft accepted and free)."
        )
    return text
