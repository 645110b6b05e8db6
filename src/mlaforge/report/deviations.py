"""Known deviations: differences of measurements from plans, predictions and promises.

Each is one sentence with its numbers. WATCHED lists what is checked; an empty list means that only these checks found
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mlaforge.rendering.page import at, model_name, number, shown
from mlaforge.report.bench_results import dicts

# A predicted loss is only an order of magnitude.
FACTOR = 2.0
# Allowed relative difference of a measured cache from the planned size.
CACHE = 0.01
# Tokens of a block of the engine's cache.
BLOCK = 16
# Below this share of distinct 4-grams, repetition makes acceptance rates too optimistic.
VARIED = 0.5
WATCHED = (
    f"measured losses that differ from the predicted ones by more than a factor of {FACTOR:g}",
    "perplexities without a confidence interval",
    "criteria that failed",
    "healing whose best step was not its last",
    f"caches that differ from the plan by more than {100 * CACHE:g} % and a block of {BLOCK} tokens per request",
    "cases that did not fit, peers that failed, broken invariants",
    "speeds above the roofline",
    "generated answers that repeat in a loop",
    f"answers with less than {100 * VARIED:g} % distinct 4-grams",
    "drafts that replay a known answer, and results imported from other machines",
    "gates that failed, could not be judged or are unreachable, and full runs that were forced",
    "uncommitted changes, several commits, devices or versions in one report",
)


def deviations(report: dict[str, Any]) -> list[dict[str, str]]:
    """`where` and `what` of each deviation. report: result of report.summarise."""
    statements = [
        *_of_conversions(report["conversions"]),
        *_of_healings(report["healings"]),
        *_of_comparisons(report["acceptances"]),
        *_of_generations(report["generations"]),
        *(statement for body in report["scenarios"] for statement in _of_scenario(body)),
        *(statement for body in report["gates"] for statement in _of_gates(body)),
        *_of_provenance(report),
    ]
    return [{"where": where, "what": what} for where, what in dict.fromkeys(statements)]


Statements = Iterator[tuple[str, str]]


def _of_conversions(conversions: list[dict[str, Any]]) -> Statements:
    for c in conversions:
        predicted, measured = c["predicted_loss"], c["measured_loss"]
        if predicted and measured and not predicted / FACTOR <= measured <= predicted * FACTOR:
            losses = f"{shown(predicted, 'small')} nats per token, measured {shown(measured, 'small')}"
            yield c["name"], f"predicted loss {losses}"
        if measured is not None and c["ratio_interval"] is None:
            yield c["name"], "the perplexity ratio has no confidence interval: give --eval-windows 4 or more"


def _of_healings(healings: list[dict[str, Any]]) -> Statements:
    for h in healings:
        best, last = (number(h, "metrics", which, "step") for which in ("best", "last"))
        if best is not None and last is not None and best < last:
            yield h["name"], f"the validation KL was best at step {best:g} of {last:g}; those weights were written"


def _of_comparisons(comparisons: list[dict[str, Any]]) -> Statements:
    for record in comparisons:
        for c in record["criteria"]:
            if c.get("passed") is not True:
                worse, limit = shown(c.get("worse"), "small"), shown(c.get("limit"), "small")
                yield record["name"], f"criterion {c.get('name')} failed: worse by {worse}, allowed {limit}"


def _of_generations(generations: list[dict[str, Any]]) -> Statements:
    for record in generations:
        for run in record["metrics"]["runs"]:
            if (token := number(run, "repeats_from")) is not None:
                model = model_name(run.get("model"))
                yield record["name"], f"the answer of {model} repeats itself from token {token:g}"


def _of_scenario(body: dict[str, Any]) -> Statements:
    where = body["name"]
    for case in body["cases"]:
        name = case["id"]
        if case["status"] not in ("ok", None):
            yield where, f"{name}: {at(case, 'limit', 'what')}; {at(case, 'limit', 'change')}"
        cache, planned = (number(case, "cache", key) for key in ("bytes", "planned_bytes"))
        # Caches consist of full blocks, while a request may end within its last block.
        tolerance = max(CACHE, BLOCK / max(1.0, (number(case, "context") or 0) + (number(case, "tokens") or 0)))
        if cache is not None and planned and abs(cache / planned - 1) > tolerance:
            yield where, f"{name}: the cache used {shown(cache, 'bytes')}, planned were {shown(planned, 'bytes')}"
        if (fraction := number(case, "roofline", "fraction")) is not None and fraction > 1:
            yield where, f"{name}: {fraction:.2f} of the roofline, so the roofline is too low"
        distinct = number(case, "distinct_4_grams")
        if distinct is not None and distinct < VARIED:
            yield where, f"{name}: only {shown(distinct, 'percent')} of the answers' 4-grams are distinct"
        if case["imported"]:
            yield where, f"{name}: imported, measured on {at(case, 'imported', 'device')}; not used in ratios"
    if any(case["draft"] == "replay" and case["num_speculative_tokens"] for case in body["cases"]):
        yield where, "its drafts replay the output of plain decoding: an upper bound of any drafter, not a claim"
    for check in dicts(body.get("perf")):
        if check.get("passed") is not True:
            yield where, f"invariant {check.get('name')}: {check.get('detail')}"
    if body.get("forced"):
        yield where, "the full run was forced before the micro gates had passed"


def _of_gates(body: dict[str, Any]) -> Statements:
    for gate in body["gates"]:
        if gate.get("verdict") != "pass":
            verdict, reason = gate.get("verdict") or "not judged", gate.get("reason") or "no reason recorded"
            yield body["name"], f"gate {gate.get('name') or 'without a name'}: {verdict}, {reason}"
    green_runs, needed = (number(body, "ledger", key) for key in ("in_a_row", "needed"))
    if green_runs is not None and needed is not None and green_runs < needed:
        yield body["name"], f"micro gates green {green_runs:g} times in a row, {needed:g} are needed before full runs"
    if body.get("forced"):
        yield body["name"], "the full run was forced before the micro gates had passed"


def _of_provenance(report: dict[str, Any]) -> Statements:
    files = [body for kind in report["results"].values() for body in kind]
    if dirty := [body["name"] for body in files if body.get("dirty")]:
        yield dirty[0], f"{len(dirty)} results were measured with uncommitted changes"
    for plural, key, length in (("commits", "commit", 12), ("devices", "device", 80)):
        if len(values := sorted({str(body[key])[:length] for body in files if body.get(key)})) > 1:
            yield "results", f"measured on several {plural}: {', '.join(values)}"
    for name in ("mlaforge", "torch", "transformers"):
        versions = {str(version) for record in report["records"] if (version := at(record, "environment", name))}
        if len(versions) > 1:
            yield "artifacts", f"made with several versions of {name}: {', '.join(sorted(versions))}"
    for name in report["unreadable"]:
        yield name, "cannot be read"
