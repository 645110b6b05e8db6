"""Measured speed of originals and conversions by context, shown next to quality and bytes.

From `bench`: one request, plain decoding with mlaforge's engine on this machine; for contexts without such a case from
`generate`, whose answers have about a hundred tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlaforge.rendering.page import at, number
from mlaforge.report.bench_results import ENGINE, measured, spread

# Labels of contexts on the page -> tokens in the cache.
CONTEXTS = {"100": 100, "2K": 2048, "8K": 8192}
# Largest factor between a measurement's context and the context that it counts for.
NEAR = 2.0


def speeds(scenarios: list[dict[str, Any]], generations: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Model -> context label of CONTEXTS -> tokens per second. `bench` precedes `generate`; then the measurement
    nearest to the context counts. scenarios: the latest of each (bench_results.latest)."""
    best: dict[str, dict[str, tuple[tuple[int, float], float]]] = {}

    def add(model: str, tokens: float, speed: float, rank: int) -> None:
        for label, context in CONTEXTS.items():
            factor = max(tokens / context, context / tokens)
            by_label = best.setdefault(model, {})
            if factor <= NEAR and (label not in by_label or (rank, factor) < by_label[label][0]):
                by_label[label] = (rank, factor), speed

    for body in scenarios:
        for case in measured(body["cases"]):
            plain = case["batch"] == 1 and not case["num_speculative_tokens"]
            if plain and case["engine"] == ENGINE and not case["imported"]:
                add(case["model"], case["context"], spread(case)[1], 0)
    for record in generations:
        for run in record["metrics"]["runs"]:
            tokens, speed = number(run, "cached_tokens"), number(run, "tokens_per_second")
            if tokens and speed and at(run, "eagle_speculation") is None:
                add(str(run.get("model")), tokens, speed, 1)
    return {model: {label: speed for label, (_, speed) in by_label.items()} for model, by_label in best.items()}


def compare(conversion: dict[str, Any], speeds: dict[str, dict[str, float]]) -> dict[str, dict[str, float | None]]:
    """Context -> speed of the original (`gqa`) and of the conversion (`mla`), None if not measured."""
    models = {"gqa": conversion["original"], "mla": Path(conversion["name"]).name}
    return {label: {side: speeds.get(name, {}).get(label) for side, name in models.items()} for label in CONTEXTS}
