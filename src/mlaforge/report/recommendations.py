"""Recommended settings, derived from measurements, each by a rule that stands beside it.

A rule that lacks its measurement gives no setting but the command that makes it. What was imported from another
machine, and drafts that only replay a known answer, decide nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mlaforge.rendering.page import at, number, shown
from mlaforge.report.bench_results import ENGINE, SERIES, groups, measured, partial, spread

# A conversion that costs more perplexity than this is not recommended.
COST = 1.05
# Throughput that counts as the best.
NEAR = 0.95
RULES = {
    "cache": "the smallest cache of a layout whose perplexity over the original's stays at or below "
    f"×{COST:g} with the upper end of its 95 % interval (with the value itself where there is no interval)",
    "layout": "at each context and batch the fastest plain decoding; where the ranges of the repetitions overlap, of "
    "those models the one that caches least",
    "drafts": "the number of drafted tokens with the most tokens per second; where the ranges of the repetitions "
    "overlap, the fewest, and full verification before partial (0 is plain decoding)",
    "batch": f"the smallest batch that reaches {100 * NEAR:g} % of the best throughput over batches, without drafts",
    "context": "the longest context that ran; the shortest that did not, and what would have to change",
}
COMMANDS = {
    "cache": "mlaforge convert MODEL OUT",
    "layout": "mlaforge bench single MODEL OUT",
    "drafts": "mlaforge bench single MODEL OUT --draft ngram",
    "batch": "mlaforge bench batch MODEL OUT",
    "context": "mlaforge bench large-context MODEL OUT",
}


def recommend(conversions: list[dict[str, Any]], scenarios: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry for each rule: `setting`, `rule`, `found` (rows with `where`, `value` and `because`), and `command`,
    which would measure it, where there are no rows. scenarios: the last of each, as bench_results.latest gives them."""
    cases = [
        {**case, "device": body.get("device")}
        for body in scenarios
        for case in body["cases"]
        if case["engine"] == ENGINE and not case["imported"]
    ]
    rules = {"cache": _cache(conversions), "layout": _layout(cases), "drafts": _drafts(cases), "batch": _batch(cases),
             "context": _context(cases)}  # fmt: skip
    recommendations = []
    for setting, derived in rules.items():
        rows = list(derived)
        recommendations.append({
            "setting": setting, "rule": RULES[setting], "found": rows,
            "command": None if rows else COMMANDS[setting],
        })  # fmt: skip
    return recommendations


def _row(where: Any, value: Any, because: str) -> dict[str, str]:
    return {"where": str(where), "value": str(value), "because": because}


def _cache(conversions: list[dict[str, Any]]) -> Iterator[dict[str, str]]:
    judged = [c for c in conversions if None not in (number(c, "metrics", "ratio"), _fraction(c))]
    for (model, layout), own in groups(judged, "model", "layout").items():

        def worst(c: dict[str, Any]) -> float:
            return float((c["ratio_interval"] or [0, c["metrics"]["ratio"]])[1])

        good = [c for c in own if worst(c) <= COST]
        if good:
            best = min(good, key=_fraction)
            cost = shown(best["metrics"]["ratio"], "times")
            ends = " to ".join(shown(end, "times") for end in best["ratio_interval"] or ())
            spans = f"95 % interval {ends}" if ends else "no interval"
            yield _row(f"{model}, {layout}", shown(_fraction(best), "percent"), f"{best['name']}: {cost} ({spans})")
        else:
            least = min(own, key=worst)
            cost, end = shown(least["metrics"]["ratio"], "times"), shown(worst(least), "times")
            told = f"upper end of its interval {end}" if least["ratio_interval"] else "no interval"
            yield _row(f"{model}, {layout}", "none", f"the best is {least['name']}: {cost}, {told}")


def _fraction(conversion: dict[str, Any]) -> float:
    return number(conversion, "metrics", "cache", "fraction") or 0.0


def _near_best(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The fastest, and what its repetitions cannot be told from."""
    best = max(cases, key=lambda case: spread(case)[1])
    return [case for case in cases if spread(case)[2] >= spread(best)[0]]


def _speeds(cases: list[dict[str, Any]], name: str) -> str:
    ordered = sorted(cases, key=lambda case: -spread(case)[1])
    return ", ".join(f"{case[name]}: {spread(case)[1]:,.1f}" for case in ordered) + " tokens/s"


def _fastest(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of what was measured more than once with other dtypes or cache fractions, the fastest."""
    kept: dict[tuple[Any, ...], dict[str, Any]] = {}
    for case in cases:
        keys = ("device", "model", "layout", "context", "batch", "num_speculative_tokens", "specpv")
        key = tuple(case[k] for k in keys)
        if key not in kept or spread(kept[key])[1] < spread(case)[1]:
            kept[key] = case
    return list(kept.values())


def _plain(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return _fastest([case for case in measured(cases) if not case["num_speculative_tokens"]])


def _layout(cases: list[dict[str, Any]]) -> Iterator[dict[str, str]]:
    for (device, context, batch), own in groups(_plain(cases), "device", "context", "batch").items():
        if len({case["layout"] for case in own}) < 2:
            continue
        alike = _near_best(own)

        def held(case: dict[str, Any]) -> float:
            return number(case, "cache", "planned_bytes") or float("inf")

        best = min(alike, key=held)
        why = _speeds([{**case, "who": f"{case['model']} ({case['layout']})"} for case in own], "who")
        why += f"; {len(alike)} of them overlap" if len(alike) > 1 else ""
        yield _row(f"{device}, {context:,} tokens × {batch}", f"{best['layout']} ({best['model']})", why)


def _drafts(cases: list[dict[str, Any]]) -> Iterator[dict[str, str]]:
    real = _fastest([case for case in measured(cases) if case["draft"] != "replay"])
    for (device, model, context, batch), own in groups(real, "device", "model", "context", "batch").items():
        if len({case["num_speculative_tokens"] for case in own}) < 2:
            continue
        told = [
            {**case, "told": f"{case['num_speculative_tokens']}{', specpv' if partial(case) else ''}"} for case in own
        ]
        best = min(_near_best(told), key=lambda case: (case["num_speculative_tokens"], partial(case)))
        where = f"{device}, {model}, {context:,} tokens × {batch}"
        yield _row(where, best["told"], _speeds(told, "told"))


def _batch(cases: list[dict[str, Any]]) -> Iterator[dict[str, str]]:
    for (device, model, context), own in groups(_plain(cases), "device", "model", "context").items():
        if len({case["batch"] for case in own}) < 2:
            continue
        most = max(spread(case)[1] for case in own)
        best = min((case for case in own if spread(case)[1] >= NEAR * most), key=lambda case: case["batch"])
        yield _row(f"{device}, {model}, {context:,} tokens", best["batch"], _speeds(own, "batch"))


def _context(cases: list[dict[str, Any]]) -> Iterator[dict[str, str]]:
    sized = [case for case in cases if None not in (number(case, "context"), number(case, "batch"))]
    for (device, *_), own in groups(sized, "device", *SERIES, "batch").items():
        ran = [case["context"] for case in measured(own)]
        full = sorted((case for case in own if case["status"] == "capacity"), key=lambda case: case["context"])
        where = f"{device}, {own[0]['model']}, batch {own[0]['batch']}, cache fraction {own[0]['cache_fraction']}"
        if full:
            limit = full[0]
            why = f"{limit['context']:,} does not fit: {at(limit, 'limit', 'what')}; {at(limit, 'limit', 'change')}"
        else:
            why = "nothing longer was tried"
        if ran or full:
            yield _row(where, f"{max(ran):,} tokens" if ran else "none", why)
