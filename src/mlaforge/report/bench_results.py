"""Reader of the results of `bench` and `gate` below a folder, results/<time>/*.json, for the report.

It groups cases and computes nothing else. docs/bench.md describes the main fields.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mlaforge.rendering.page import NOT_FINITE, at, model_name, number

KINDS = ("scenario", "kernels", "conversion", "gates")
# Kinds that the report does not show: shapes for `tune`, and sweeps.
OTHERS = ("gemm_shapes", "kernels-sweep")
SCHEMA = 1
ENGINE = "mlaforge"
# Folder name of a run: its time.
RUN = re.compile(r"\d{8}-\d{6}")
# Keys that identify a series of measurements: all except context, batch and drafted tokens.
SERIES = ("engine", "model", "layout", "dtype", "cache_fraction")
# Keys of a case that the report reads: names, and optional keys.
NAMES = ("id", "engine", "model", "layout", "dtype", "draft")
CASE = (
    "cache_fraction", "context", "batch", "num_speculative_tokens", "specpv", "imported", "status", "limit",
    "tokens_per_second", "ms_per_token", "time_to_first_token", "prefill_tokens_per_second", "speedup", "peak_memory",
    "cache", "roofline", "eagle_speculation", "distinct_4_grams",
)  # fmt: skip
SPEED = ("tokens_per_second", "median")


def read_results(folder: Path) -> tuple[dict[str, list[dict[str, Any]]], list[str]]:
    """Return (kind -> its files, oldest first, each with its `name` below `folder`) and the names of files that are
    unreadable or of another schema."""
    results: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    unreadable = []
    for path in sorted(folder.resolve().rglob("*.json")):
        if not RUN.fullmatch(path.parent.name):
            continue
        name = path.relative_to(folder.resolve()).as_posix()
        try:
            body = json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda _: NOT_FINITE)
        except (OSError, ValueError):
            body = None
        if at(body, "kind") in OTHERS:
            continue
        if at(body, "kind") not in KINDS or at(body, "schema") != SCHEMA:
            unreadable.append(name)
            continue
        body["name"] = name
        results[body["kind"]].append(body)
    for files in results.values():
        files.sort(key=lambda body: str(body.get("time")))
    for body in results["scenario"]:
        body["cases"] = [_case(case) for case in dicts(body.get("cases"))]
    for kind, key in (("gates", "gates"), ("kernels", "rows"), ("conversion", "rows")):
        for body in results[kind]:
            body[key] = dicts(body.get(key))
    return results, unreadable


def _case(case: dict[str, Any]) -> dict[str, Any]:
    """The case with all keys present."""
    return {**dict.fromkeys(CASE), **case, **{name: str(case.get(name) or "not recorded") for name in NAMES}}


def latest(files: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Latest run of every scenario (or kind), scope and device. files: oldest first."""
    keys = ("scenario", "scope", "device")
    return list({tuple(str(body.get(key)) for key in keys): body for body in files}.values())


def dicts(value: Any) -> list[dict[str, Any]]:
    """Dictionaries in a list; [] if `value` is not a list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def measured(cases: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cases that ran and have a context, a batch, a number of drafted tokens and a speed."""
    keys = ("context", "batch", "num_speculative_tokens")
    return [
        case
        for case in cases
        if case["status"] == "ok" and None not in (number(case, *SPEED), *(number(case, key) for key in keys))
    ]


def spread(case: dict[str, Any], key: str = "tokens_per_second") -> tuple[float, float, float]:
    """Minimum, median and maximum of the repetitions; the median replaces missing values."""
    median = number(case, key, "median")
    assert median is not None
    minimum, maximum = number(case, key, "min"), number(case, key, "max")
    return (median if minimum is None else minimum), median, (median if maximum is None else maximum)


def groups(cases: Iterable[dict[str, Any]], *keys: str) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Group cases by the values of `keys`, preserving the order."""
    grouped: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for case in cases:
        grouped.setdefault(tuple(case[key] for key in keys), []).append(case)
    return grouped


def label(case: dict[str, Any], among: Iterable[dict[str, Any]]) -> str:
    """Label of a case's series among others: the model, the keys that differ, and its drafted tokens."""
    among = list(among)
    parts = [model_name(case["model"])]
    for key, form in (("layout", "{}"), ("engine", "{}"), ("dtype", "{}"), ("cache_fraction", "cache {}")):
        differs = len({str(other[key]) for other in among if other[key] is not None}) > 1
        if differs and case[key] not in (None, ENGINE) and str(case[key]) not in parts[0]:
            parts.append(form.format(case[key]))
    if case["imported"]:
        parts.append(f"imported: {at(case, 'imported', 'device')}")
    if drafts := case["num_speculative_tokens"]:
        parts.append(f"{drafts} by {case['draft']}" + (", specpv" if partial(case) else ""))
    return ", ".join(parts)


def partial(case: dict[str, Any]) -> bool:
    """Whether a case uses partial verification."""
    return case["specpv"] not in (None, "off")
