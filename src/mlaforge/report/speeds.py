"""Measured speed of originals and conversions by context: what stands beside quality and bytes.

From `bench`, one request decoding plainly with mlaforge's engine on this machine; where it did not run at a context,
from `generate`, whose answers are of about a hundred tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlaforge.rendering.page import at, number
from mlaforge.report.bench_results import ENGINE, measured, spread

# Tokens in the cache, as the page calls them.
CONTEXTS = {"100": 100, "2K": 2048, "8K": 8192}
# A measurement is of the context that it is nearest to, and off by no more than this factor.
NEAR = 2.0


def speeds(scenarios: list[dict[str, Any]], generations: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Model -> context as in CONTEXTS -> tokens per second. scenarios: the last of each, as bench_results.latest gives
    them; of several measurements of a context the one nearest to it, of `bench` before `generate`."""
    found: dict[str, dict[str, tuple[tuple[int, float], float]]] = {}

    def see(model: str, tokens: float, speed: float, rank: int) -> None:
        for label, context in CONTEXTS.items():
            off = max(tokens / context, context / tokens)
            own = found.setdefault(model, {})
            if off <= NEAR and (label not in own or (rank, off) < own[label][0]):
                own[label] = (rank, off), speed

    for body in scenarios:
        for case in measured(body["cases"]):
            plain = case["batch"] == 1 and not case["num_speculative_tokens"]
            if plain and case["engine"] == ENGINE and not case["imported"]:
                see(case["model"], case["context"], spread(case)[1], 0)
    for record in generations:
        for run in record["metrics"]["runs"]:
            tokens, speed = number(run, "cached_tokens"), number(run, "tokens_per_second")
            if tokens and speed and at(run, "eagle_speculation") is None:
                see(str(run.get("model")), tokens, speed, 1)
    return {model: {label: speed for label, (_, speed) in own.items()} for model, own in found.items()}


def beside(conversion: dict[str, Any], known: dict[str, dict[str, float]]) -> dict[str, dict[str, float | None]]:
    """Context -> speed before (`gqa`) and after (`mla`) one conversion, None where nobody measured."""
    sides = {"gqa": conversion["original"], "mla": Path(conversion["name"]).name}
    return {label: {side: known.get(name, {}).get(label) for side, name in sides.items()} for label in CONTEXTS}
