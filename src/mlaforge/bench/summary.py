"""What the repetitions of a case come to: medians, spreads, ratios, the share of the roof; and the table of a run."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import statistics
from typing import TYPE_CHECKING, Any

from mlaforge.bench.engine_peer import EnginePeer
from mlaforge.bench.peer import PLAIN, Repetition
from mlaforge.bench.roof import layout_of, limit, partial_limit, stored_in
from mlaforge.engine.speculation.statistics import SpeculationStats
from mlaforge.planning.costs import Gpu
from mlaforge.planning.plan import Plan
from mlaforge.rendering.table import text_table
from mlaforge.synthesis.repetition import distinct_ngram_ratio

if TYPE_CHECKING:
    from mlaforge.bench.recipe import Recipe
    from mlaforge.bench.row import Row


def spread(runs: list[float]) -> dict[str, Any]:
    """Median, least and most of the repetitions, and each of them."""
    return {"median": statistics.median(runs), "min": min(runs), "max": max(runs), "runs": runs}


def speeds(row: Row) -> list[float]:
    """Decoded tokens per second of every repetition, all requests together."""
    return [repetition.tokens / repetition.seconds for repetition in row.repetitions]


def case(
    row: Row, rows: list[Row], plan: Plan, gpu: Gpu | None, recipe: Recipe, fraction: float, context: int, batch: int
) -> dict[str, Any]:  # fmt: skip
    """One entry of `cases`; `rows` are those that took turns with this one."""
    peer, variant = row.peer, row.variant
    own, partial = peer.name == EnginePeer.name, variant.specpv != "off"
    way = f"k{variant.count} {variant.draft}" + (" specpv" if partial else "")
    entry: dict[str, Any] = {
        "id": f"{peer.name} {peer.model} {peer.dtype} {context}x{batch} {way} {fraction:g}",
        "engine": peer.name, "model": peer.model, "layout": layout_of(plan), "dtype": peer.dtype, "context": context,
        "batch": batch, "tokens": recipe.tokens, "num_speculative_tokens": variant.count, "draft": variant.draft,
        "specpv": variant.specpv, "cache_fraction": fraction if own else None,
        "prefix_caching": recipe.prefix_caching if own else None, "imported": None, "status": row.status,
        "limit": row.limit,
    }  # fmt: skip
    # A run that was ended by an invariant leaves cases that were not repeated.
    if not row.repetitions:
        return entry
    runs = speeds(row)
    firsts = [repetition.first for repetition in row.repetitions if repetition.first is not None]
    gaps = [gap for repetition in row.repetitions for gap in repetition.gaps]
    plain = next((r for r in rows if r.peer is peer and r.variant == PLAIN and r is not row), None)
    judged = dataclasses.replace(variant, specpv="off")
    whole = next((r for r in rows if partial and r.peer is peer and r.variant == judged), None)
    others = [r for r in rows if r.peer.name == "transformers" and r.peer.model == peer.model and r.repetitions]
    best = max(others, key=lambda r: statistics.median(speeds(r)), default=None)
    theirs = best if peer.name != "transformers" else None
    ratios = {"speedup": plain, "over_transformers": theirs, "over_full_verification": whole}
    answers = [ids for repetition in row.repetitions for ids in repetition.token_ids]
    grams = [share for ids in answers if (share := distinct_ngram_ratio(ids)) is not None]
    block = _block(row.repetitions)
    entry |= {
        "repetitions": len(runs), "tokens_per_second": spread(runs), "ms_per_token": _percentiles(gaps),
        "time_to_first_token": spread(firsts) if firsts else None,
        "time_to_first_token_cached": _median([t.first_cached for t in row.repetitions if t.first_cached is not None]),
        "prefill_tokens_per_second": spread([batch * context / first for first in firsts]) if firsts else None,
        **{name: _ratio(row, other) for name, other in ratios.items()},
        "distinct_4_grams": statistics.mean(grams) if grams else None,
        "output_sha256": hashlib.sha256(json.dumps(answers).encode()).hexdigest() if answers else None,
        "peak_memory": _memory(row), "cache": _cache(row.repetitions, plan, peer.dtype, context + recipe.tokens, batch),
        "roofline": None, "eagle_speculation": block,
    }  # fmt: skip
    if gpu is not None:
        roofed = (plan, gpu, peer.dtype, context + recipe.tokens // 2, batch, variant.count)
        if block and block["partial_steps"]:
            assert isinstance(peer, EnginePeer)
            roofline = partial_limit(*roofed, peer.view, peer.judged, block)
        else:
            roofline = limit(*roofed, block["mean_acceptance_length"] if block else None)
        entry["roofline"] = {**roofline, "fraction": statistics.median(runs) / roofline["tokens_per_second"]}
    return entry


def _ratio(row: Row, other: Row | None) -> dict[str, Any] | None:
    """Speed over another's, repetition by repetition: those are neighbours in time."""
    if other is None or len(other.repetitions) != len(row.repetitions):
        return None
    return spread([a / b for a, b in zip(speeds(row), speeds(other), strict=True)])


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def _percentiles(gaps: list[float]) -> dict[str, float | None]:
    if len(gaps) < 2:
        return {"p50": None, "p90": None, "p99": None}
    cuts = statistics.quantiles(gaps, n=100, method="inclusive")
    return {f"p{at}": 1e3 * cuts[at - 1] for at in (50, 90, 99)}


def _memory(row: Row) -> dict[str, Any] | None:
    memory = getattr(row.peer, "memory", None)
    if memory is None:
        return None
    cache = max((repetition.cache_bytes or 0 for repetition in row.repetitions), default=0) or None
    parts = {"weights": row.peer.weight_bytes, "cache": cache, "activations": row.activations}
    return {**parts, "total": sum(size or 0 for size in parts.values()), "how": memory.how}


def _cache(repetitions: list[Repetition], plan: Plan, dtype: str, length: int, batch: int) -> dict[str, Any] | None:
    held = [repetition.cache_bytes for repetition in repetitions if repetition.cache_bytes is not None]
    if not held:
        return None
    return {"bytes": max(held), "planned_bytes": stored_in(plan, dtype).cache_bytes(length, batch)}


def _block(repetitions: list[Repetition]) -> dict[str, Any] | None:
    """`eagle_speculation` over all repetitions."""
    counted = [repetition.speculation for repetition in repetitions if repetition.speculation is not None]
    return functools.reduce(_plus, counted).block() if counted else None


def _plus(a: SpeculationStats, b: SpeculationStats) -> SpeculationStats:
    """Both repetitions' counters."""
    added: dict[str, Any] = {}
    for field in dataclasses.fields(a):
        x, y = getattr(a, field.name), getattr(b, field.name)
        added[field.name] = [m + n for m, n in zip(x, y, strict=True)] if isinstance(x, list) else x + y
    least, most = min(a.active_min, b.active_min), max(a.active_max, b.active_max)
    return SpeculationStats(**{
        **added, "num_speculative_tokens": a.num_speculative_tokens, "active_min": least, "active_max": most,
    })  # fmt: skip


def table(body: dict[str, Any]) -> str:
    """A scenario's cases for the terminal."""
    heads = ("engine", "model", "dtype", "tokens x batch", "drafts", "tok/s", "min..max", "ms p50", "p99", "first s",
             "speed-up", "/transformers", "length", "of roof")  # fmt: skip
    lines: list[tuple[str, ...]] = [heads]
    for entry in body["cases"]:
        drafts = f"{entry['num_speculative_tokens']} {entry['draft']}" if entry["num_speculative_tokens"] else "–"
        # What was imported may be older than partial verification.
        drafts += " specpv" if entry.get("specpv", "off") != "off" else ""
        name = entry["engine"] + (" (imported)" if entry["imported"] else "")
        start = (name, entry["model"], entry["dtype"], f"{entry['context']} x {entry['batch']}", drafts)
        if "tokens_per_second" not in entry:
            limit = entry["limit"] or {"what": "not measured", "change": "–"}
            lines.append((*start, f"{entry['status']}: {limit['what']}; change: {limit['change']}"))
            continue
        rate, ms = entry["tokens_per_second"], entry["ms_per_token"]
        block, top = entry["eagle_speculation"], entry["roofline"]
        lines.append((
            *start, f"{rate['median']:.1f}", f"{rate['min']:.1f}..{rate['max']:.1f}", _cell(ms["p50"], ".1f"),
            _cell(ms["p99"], ".1f"),
            *(_cell((entry[k] or {}).get("median"), ".2f")
              for k in ("time_to_first_token", "speedup", "over_transformers")),
            _cell((block or {}).get("mean_acceptance_length"), ".2f") + _kept(block),
            _cell((top or {}).get("fraction"), ".0%"),
        ))  # fmt: skip
    return text_table(lines)


def _kept(block: dict[str, Any] | None) -> str:
    """Beside an acceptance length: the share of the pending tokens that full steps kept."""
    kept = (block or {}).get("kept_share")
    return "" if kept is None else f", {kept:.0%} kept"


def _cell(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
