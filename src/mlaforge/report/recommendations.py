"""Recommended settings, derived from measurements by stated rules.

A rule without measurements yields the command that would measure it. Results imported from other machines and drafts
that replay a known answer are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mlaforge.rendering.page import at, number, shown
from mlaforge.report.bench_results import ENGINE, SERIES, groups, measured, partial, spread

# Largest perplexity ratio of a recommended conversion.
COST = 1.05
# Share of the best throughput that counts as equal to it.
NEAR = 0.95
RULES = {
    "cache": "the smallest cache of a layout whose perplexity ratio to the original is at most "
    f"×{COST:g} at the upper end of its 95 % interval (at the value itself if there is no interval)",
    "layout": "the fastest plain decoding at each context and batch; if the ranges of the repetitions overlap, the "
    "model with the smallest cache among them",
    "drafts": "the number of drafted tokens with the most tokens per second; if the ranges of the repetitions "
    "overlap, the fewest, and full before partial verification (0 is plain decoding)",
    "batch": f"the smallest batch that reaches {100 * NEAR:g} % of the best throughput over batches, without drafts",
    "context": "the longest context that ran; the shortest that did not fit, and the setting to change",
}
COMMANDS = {
    "cache": "mlaforge convert MODEL OUT",
    "layout": "mlaforge bench single MODEL OUT",
    "drafts": "mlaforge bench single MODEL OUT --draft ngram",
    "batch": "mlaforge bench batch MODEL OUT",
    "context": "mlaforge bench large-context MODEL OUT",
}


def recommend(conversions: list[dict[str, Any]], scenarios: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry per rule: `setting`, `rule`, `found` (rows with `where`, `value` and `because`), and `command`, which
    would measure it, if there are no rows. scenarios: the latest of each (bench_results.latest)."""
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
    evaluated = [c for c in conversions if None not in (number(c, "metrics", "ratio"), _fraction(c))]
    for (model, layout), group in groups(evaluated, "model", "layout").items():

        def upper_end(c: dict[str, Any]) -> float:
            return float((c["ratio_interval"] or [0, c["metrics"]["ratio"]])[1])

        acceptable = [c for c in group if upper_end(c) <= COST]
        if acceptable:
            best = min(acceptable, key=_fraction)
            cost = shown(best["metrics"]["ratio"], "times")
            ends = " to ".join(shown(end, "times") for end in best["ratio_interval"] or ())
            interval = f"95 % interval {ends}" if ends else "no interval"
            yield _row(f"{model}, {layout}", shown(_fraction(best), "percent"), f"{best['name']}: {cost} ({interval})")
        else:
            best = min(group, key=upper_end)
            cost, end = shown(best["metrics"]["ratio"], "times"), shown(upper_end(best), "times")
            interval = f"upper end of its interval {end}" if best["ratio_interval"] else "no interval"
            yield _row(f"{model}, {layout}", "none", f"the best is {best['name']}: {cost}, {interval}")


def _fraction(conversion: dict[str, Any]) -> float:
    return number(conversion, "metrics", "cache", "fraction") or 0.0


def _near_best(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The fastest case and those whose ranges of repetitions overlap with it."""
    best = max(cases, key=lambda case: spread(case)[1])
    return [case for case in cases if spread(case)[2] >= spread(best)[0]]


def _speeds(cases: list[dict[str, Any]], name: str) -> str:
    ordered = sorted(cases, key=lambda case: -spread(case)[1])
    return ", ".join(f"{case[name]}: {spread(case)[1]:,.1f}" for case in ordered) + " tokens/s"


def _fastest(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The fastest case among those that differ only in dtype or cache fraction."""
    fastest: dict[tuple[Any, ...], dict[str, Any]] = {}
    for case in cases:
        keys = ("device", "model", "layout", "context", "batch", "num_speculative_tokens", "specpv")
        key = tuple(case[k] for k in keys)
        if key not in fastest or spread(fastest[key])[1] < spread(case)[1]:
            fastest[key] = case
    return list(fastest.values())


def _plain(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return _fastest([case for case in measured(cases) if not case["num_speculative_tokens"]])


def _layout(cases: list[dict[str, Any]]) -> Iterator[dict[str, str]]:
    for (device, context, batch), group in groups(_plain(cases), "device", "context", "batch").items():
        if len({case["layout"] for case in group}) < 2:
            continue
        overlapping = _near_best(group)

        def planned_bytes(case: dict[str, Any]) -> float:
            return number(case, "cache", "planned_bytes") or float("inf")

        best = min(overlapping, key=planned_bytes)
        reason = _speeds([{**case, "label": f"{case['model']} ({case['layout']})"} for case in group], "label")
        reason += f"; {len(overlapping)} of them overlap" if len(overlapping) > 1 else ""
        yield _row(f"{device}, {context:,} tokens × {batch}", f"{best['layout']} ({best['model']})", reason)


def _drafts(cases: list[dict[str, Any]]) -> Iterator[dict[str, str]]:
    real = _fastest([case for case in measured(cases) if case["draft"] != "replay"])
    for (device, model, context, batch), group in groups(real, "device", "model", "context", "batch").items():
        if len({case["num_speculative_tokens"] for case in group}) < 2:
            continue
        labelled = [
            {**case, "label": f"{case['num_speculative_tokens']}{', specpv' if partial(case) else ''}"}
            for case in group
        ]
        best = min(_near_best(labelled), key=lambda case: (case["num_speculative_tokens"], partial(case)))
        where = f"{device}, {model}, {context:,} tokens × {batch}"
        yield _row(where, best["label"], _speeds(labelled, "label"))


def _batch(cases: list[dict[str, Any]]) -> Iterator[dict[str, str]]:
    for (device, model, context), group in groups(_plain(cases), "device", "model", "context").items():
        if len({case["batch"] for case in group}) < 2:
            continue
        maximum = max(spread(case)[1] for case in group)
        best = min((case for case in group if spread(case)[1] >= NEAR * maximum), key=lambda case: case["batch"])
        yield _row(f"{device}, {model}, {context:,} tokens", best["batch"], _speeds(group, "batch"))


def _context(cases: list[dict[str, Any]]) -> Iterator[dict[str, str]]:
    sized = [case for case in cases if None not in (number(case, "context"), number(case, "batch"))]
    for (device, *_), group in groups(sized, "device", *SERIES, "batch").items():
        contexts = [case["context"] for case in measured(group)]
        too_large = sorted((case for case in group if case["status"] == "capacity"), key=lambda case: case["context"])
        first = group[0]
        where = f"{device}, {first['model']}, batch {first['batch']}, cache fraction {first['cache_fraction']}"
        if too_large:
            limit = too_large[0]
            reason = f"{limit['context']:,} does not fit: {at(limit, 'limit', 'what')}; {at(limit, 'limit', 'change')}"
        else:
            reason = "no longer context was tried"
        if contexts or too_large:
            yield _row(where, f"{max(contexts):,} tokens" if contexts else "none", reason)
