"""Known deviations: where what was measured departs from what was planned, predicted or promised.

Each is one sentence with its numbers. That a list is short says what was looked for and not found, never that all
is well: WATCHED says what is looked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mlaforge.rendering.page import at, model_name, number, shown
from mlaforge.report.bench_results import dicts

# A predicted loss is an order of magnitude, no more.
FACTOR = 2.0
# Cache measured beside the plan's arithmetic.
CACHE = 0.01
# Tokens of a block of the engine's cache.
BLOCK = 16
# Answers that repeat themselves more than this flatter whoever drafts them.
VARIED = 0.5
WATCHED = (
    f"measured losses that a factor of {FACTOR:g} does not bring to the predicted",
    "perplexities without a confidence interval",
    "criteria that failed",
    "healing whose best step was not its last",
    f"caches more than {100 * CACHE:g} % and a block of {BLOCK} tokens a request off the plan",
    "settings that did not fit, peers that failed, invariants that broke",
    "numbers beyond the roofline",
    "generated answers that fall into a loop",
    f"answers of which less than {100 * VARIED:g} % of the 4-grams are distinct",
    "drafts that replay a known answer, and numbers imported from other machines",
    "gates that failed, could not be judged or cannot be reached, and full runs that were forced",
    "uncommitted changes, several commits, devices or versions in one report",
)


def deviations(report: dict[str, Any]) -> list[dict[str, str]]:
    """`where` and `what` of each. report: as report.summarise makes it."""
    statements = [
        *_of_conversions(report["conversions"]),
        *_of_healings(report["healings"]),
        *_of_comparisons(report["acceptances"]),
        *_of_generations(report["generations"]),
        *(statement for body in report["scenarios"] for statement in _of_scenario(body)),
        *(statement for body in report["gates"] for statement in _of_gates(body)),
        *_of_surroundings(report),
    ]
    return [{"where": where, "what": what} for where, what in dict.fromkeys(statements)]


Statements = Iterator[tuple[str, str]]


def _of_conversions(conversions: list[dict[str, Any]]) -> Statements:
    for c in conversions:
        predicted, measured = c["predicted_loss"], c["measured_loss"]
        if predicted and measured and not predicted / FACTOR <= measured <= predicted * FACTOR:
            both = f"{shown(predicted, 'small')} nats per token, measured {shown(measured, 'small')}"
            yield c["name"], f"predicted loss {both}"
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
                who = model_name(run.get("model"))
                yield record["name"], f"the answer of {who} repeats itself from token {token:g}"


def _of_scenario(body: dict[str, Any]) -> Statements:
    where = body["name"]
    for case in body["cases"]:
        name = case["id"]
        if case["status"] not in ("ok", None):
            yield where, f"{name}: {at(case, 'limit', 'what')}; {at(case, 'limit', 'change')}"
        held, planned = (number(case, "cache", key) for key in ("bytes", "planned_bytes"))
        # A cache is made of whole blocks, which a request's last one need not fill.
        slack = max(CACHE, BLOCK / max(1.0, (number(case, "context") or 0) + (number(case, "tokens") or 0)))
        if held is not None and planned and abs(held / planned - 1) > slack:
            yield where, f"{name}: the cache held {shown(held, 'bytes')}, planned were {shown(planned, 'bytes')}"
        if (reached := number(case, "roofline", "fraction")) is not None and reached > 1:
            yield where, f"{name}: {reached:.2f} of the roofline, so that the roof is set too low"
        varied = number(case, "distinct_4_grams")
        if varied is not None and varied < VARIED:
            yield where, f"{name}: only {shown(varied, 'percent')} of the answers' 4-grams are distinct"
        if case["imported"]:
            yield where, f"{name}: imported, measured on {at(case, 'imported', 'device')}; in no ratio"
    if any(case["draft"] == "replay" and case["num_speculative_tokens"] for case in body["cases"]):
        yield where, "its drafts replay what plain decoding gave: a ceiling of any drafter, never a claim"
    for check in dicts(body.get("perf")):
        if check.get("passed") is not True:
            yield where, f"invariant {check.get('name')}: {check.get('told')}"
    if body.get("forced"):
        yield where, "the full run was forced before the micro gates had passed"


def _of_gates(body: dict[str, Any]) -> Statements:
    for gate in body["gates"]:
        if gate.get("verdict") != "pass":
            verdict, reason = gate.get("verdict") or "not judged", gate.get("told") or "nothing told"
            yield body["name"], f"gate {gate.get('name') or 'without a name'}: {verdict}, {reason}"
    held, needed = (number(body, "ledger", key) for key in ("in_a_row", "needed"))
    if held is not None and needed is not None and held < needed:
        yield body["name"], f"micro gates green {held:g} times in a row, {needed:g} are needed before full runs"
    if body.get("forced"):
        yield body["name"], "the full run was forced before the micro gates had passed"


def _of_surroundings(report: dict[str, Any]) -> Statements:
    files = [body for kind in report["results"].values() for body in kind]
    if dirty := [body["name"] for body in files if body.get("dirty")]:
        yield dirty[0], f"{len(dirty)} results were measured with uncommitted changes"
    for what, key, length in (("commits", "commit", 12), ("devices", "device", 80)):
        if len(seen := sorted({str(body[key])[:length] for body in files if body.get(key)})) > 1:
            yield "results", f"measured on several {what}: {', '.join(seen)}"
    for name in ("mlaforge", "torch", "transformers"):
        versions = {str(seen) for record in report["records"] if (seen := at(record, "environment", name))}
        if len(versions) > 1:
            yield "artifacts", f"made with several versions of {name}: {', '.join(sorted(versions))}"
    for name in report["unreadable"]:
        yield name, "cannot be read"
