"""Statistics of a case's repetitions (medians, spreads, ratios, share of the roofline), and tables of a run: one for
the terminal, a short one for a file of tables."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import statistics
from typing import TYPE_CHECKING, Any

from mlaforge.bench.checkout_peer import CheckoutPeer
from mlaforge.bench.engine_peer import EnginePeer
from mlaforge.bench.peer import PLAIN, Repetition
from mlaforge.bench.roof import layout_of, limit, sparse_view_limit, stored_in
from mlaforge.engine.speculation.statistics import SpeculationStats
from mlaforge.planning.costs import Gpu
from mlaforge.planning.plan import Plan
from mlaforge.rendering.page import interval
from mlaforge.rendering.table import text_table
from mlaforge.synthesis.repetition import distinct_ngram_ratio

if TYPE_CHECKING:
    from mlaforge.bench.recipe import Recipe
    from mlaforge.bench.row import Row


def spread(runs: list[float]) -> dict[str, Any]:
    """Median, minimum and maximum of the repetitions, and their list."""
    return {"median": statistics.median(runs), "min": min(runs), "max": max(runs), "runs": runs}


def speeds(row: Row) -> list[float]:
    """Decoded tokens per second of every repetition, all requests together."""
    return [repetition.tokens / repetition.seconds for repetition in row.repetitions]


def case(
    row: Row, rows: list[Row], plan: Plan, gpu: Gpu | None, recipe: Recipe, fraction: float, context: int, batch: int
) -> dict[str, Any]:  # fmt: skip
    """One entry of `cases`. rows: the rows interleaved with this one, for ratios."""
    peer, variant = row.peer, row.variant
    stored = getattr(peer, "rows", "") or "auto"
    is_engine, partial = peer.name == EnginePeer.name, variant.specpv != "off"
    drafting = f"k{variant.count} {variant.draft}" + (" specpv" if partial else "")
    rows_label = "" if stored == "auto" else f" {stored} rows"
    entry: dict[str, Any] = {
        "id": f"{peer.name} {peer.model} {peer.dtype}{rows_label} {context}x{batch} {drafting} {fraction:g}",
        "engine": peer.name, "model": peer.model, "layout": layout_of(plan), "dtype": peer.dtype, "context": context,
        "batch": batch, "tokens": recipe.tokens, "num_speculative_tokens": variant.count, "draft": variant.draft,
        "specpv": variant.specpv, "kv_cache_dtype": stored if is_engine else None,
        "cache_fraction": fraction if is_engine else None,
        "prefix_caching": recipe.prefix_caching if is_engine else None, "imported": None, "status": row.status,
        "limit": row.limit,
    }  # fmt: skip
    # A broken invariant ends the run and leaves cases without repetitions.
    if not row.repetitions:
        return entry
    if stored != "auto":
        plan = dataclasses.replace(plan, stored=stored)
    runs = speeds(row)
    ttfts = [repetition.ttft for repetition in row.repetitions if repetition.ttft is not None]
    token_seconds = [seconds for repetition in row.repetitions for seconds in repetition.token_seconds]
    plain = next((r for r in rows if r.peer is peer and r.variant == PLAIN and r is not row), None)
    full_variant = dataclasses.replace(variant, specpv="off")
    full_row = next((r for r in rows if partial and r.peer is peer and r.variant == full_variant), None)
    others = [r for r in rows if r.peer.name == "transformers" and r.peer.model == peer.model and r.repetitions]
    fastest = max(others, key=lambda r: statistics.median(speeds(r)), default=None)
    transformers = fastest if peer.name != "transformers" else None
    base = next((r for r in rows if r.peer.name == CheckoutPeer.name and r is not row), None)
    baselines = {
        "speedup": plain, "over_transformers": transformers, "over_base": base, "over_full_verification": full_row,
    }  # fmt: skip
    answers = [ids for repetition in row.repetitions for ids in repetition.token_ids]
    distinct = [share for ids in answers if (share := distinct_ngram_ratio(ids)) is not None]
    block = _block(row.repetitions)
    entry |= {
        "repetitions": len(runs), "tokens_per_second": spread(runs), "ms_per_token": _percentiles(token_seconds),
        "time_to_first_token": spread(ttfts) if ttfts else None,
        "time_to_first_token_cached": _median([t.ttft_cached for t in row.repetitions if t.ttft_cached is not None]),
        "prefill_tokens_per_second": spread([batch * context / ttft for ttft in ttfts]) if ttfts and context else None,
        **{name: _ratio(row, baseline) for name, baseline in baselines.items()},
        "distinct_4_grams": statistics.mean(distinct) if distinct else None,
        "answers": len(answers), "answers_unlike_plain": _unlike(row, plain),
        "output_sha256": hashlib.sha256(json.dumps(answers).encode()).hexdigest() if answers else None,
        "peak_memory": _memory(row), "cache": _cache(row.repetitions, plan, peer.dtype, context + recipe.tokens, batch),
        "roofline": None, "eagle_speculation": block,
    }  # fmt: skip
    if gpu is not None:
        step = (plan, gpu, peer.dtype, context + recipe.tokens // 2, batch, variant.count)
        if block and block["partial_steps"]:
            assert isinstance(peer, EnginePeer)
            roofline = sparse_view_limit(*step, peer.view, peer.sparse_view_format_name, block)
        else:
            roofline = limit(*step, block["mean_acceptance_length"] if block else None)
        entry["roofline"] = {**roofline, "fraction": statistics.median(runs) / roofline["tokens_per_second"]}
    return entry


def _ratio(row: Row, baseline: Row | None) -> dict[str, Any] | None:
    """Ratio of speeds, paired by repetition, as paired repetitions are adjacent in time: spread, mean, and how far the
    mean's 95 % interval reaches to each side (None for one repetition)."""
    if baseline is None or not row.repetitions or len(baseline.repetitions) != len(row.repetitions):
        return None
    ratios = [a / b for a, b in zip(speeds(row), speeds(baseline), strict=True)]
    mean, count = statistics.fmean(ratios), len(ratios)
    ends = interval(mean, statistics.stdev(ratios) / count**0.5, count) if count > 1 else None
    return {**spread(ratios), "mean": mean, "interval": None if ends is None else ends[1] - mean}


def _unlike(row: Row, plain: Row | None) -> int | None:
    """Number of answers that are not those of plain decoding; None if there is none beside them."""
    if plain is None or len(plain.repetitions) != len(row.repetitions):
        return None
    pairs = zip(row.repetitions, plain.repetitions, strict=True)
    return sum(a != b for run, plain_run in pairs for a, b in zip(run.token_ids, plain_run.token_ids, strict=True))


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def _percentiles(token_seconds: list[float]) -> dict[str, float | None]:
    """Percentiles in milliseconds."""
    if len(token_seconds) < 2:
        return {"p50": None, "p90": None, "p99": None}
    cuts = statistics.quantiles(token_seconds, n=100, method="inclusive")
    return {f"p{at}": 1e3 * cuts[at - 1] for at in (50, 90, 99)}


def _memory(row: Row) -> dict[str, Any] | None:
    memory = getattr(row.peer, "memory", None)
    if memory is None:
        return None
    cache = max((repetition.cache_bytes or 0 for repetition in row.repetitions), default=0) or None
    parts = {"weights": row.peer.weight_bytes, "cache": cache, "activations": row.activations}
    return {**parts, "total": sum(size or 0 for size in parts.values()), "how": memory.how}


def _cache(repetitions: list[Repetition], plan: Plan, dtype: str, length: int, batch: int) -> dict[str, Any] | None:
    sizes = [repetition.cache_bytes for repetition in repetitions if repetition.cache_bytes is not None]
    if not sizes:
        return None
    return {"bytes": max(sizes), "planned_bytes": stored_in(plan, dtype).cache_bytes(length, batch)}


def _block(repetitions: list[Repetition]) -> dict[str, Any] | None:
    """`eagle_speculation` over all repetitions."""
    stats = [repetition.speculation for repetition in repetitions if repetition.speculation is not None]
    return functools.reduce(_add_stats, stats).block() if stats else None


def _add_stats(a: SpeculationStats, b: SpeculationStats) -> SpeculationStats:
    """Sum the counters of two repetitions."""
    sums: dict[str, Any] = {}
    for field in dataclasses.fields(a):
        x, y = getattr(a, field.name), getattr(b, field.name)
        sums[field.name] = [m + n for m, n in zip(x, y, strict=True)] if isinstance(x, list) else x + y
    return SpeculationStats(**{
        **sums, "num_speculative_tokens": a.num_speculative_tokens,
        "active_min": min(a.active_min, b.active_min), "active_max": max(a.active_max, b.active_max),
    })  # fmt: skip


def table(body: dict[str, Any]) -> str:
    """Table of a scenario's cases for the terminal."""
    heads = ("engine", "model", "dtype", "tokens x batch", "drafts", "tok/s", "min..max", "ms p50", "p99", "first s",
             "speed-up", "/transformers", "length", "of roofline")  # fmt: skip
    lines: list[tuple[str, ...]] = [heads]
    for entry in body["cases"]:
        drafts = f"{entry['num_speculative_tokens']} {entry['draft']}" if entry["num_speculative_tokens"] else "–"
        # Imported results may predate partial verification.
        drafts += " specpv" if entry.get("specpv", "off") != "off" else ""
        name = entry["engine"] + (" (imported)" if entry["imported"] else "")
        labels = (name, entry["model"], entry["dtype"], f"{entry['context']} x {entry['batch']}", drafts)
        if "tokens_per_second" not in entry:
            limit = entry["limit"] or {"what": "not measured", "change": "–"}
            lines.append((*labels, f"{entry['status']}: {limit['what']}; change: {limit['change']}"))
            continue
        rate, ms = entry["tokens_per_second"], entry["ms_per_token"]
        block, top = entry["eagle_speculation"], entry["roofline"]
        lines.append((
            *labels, f"{rate['median']:.1f}", f"{rate['min']:.1f}..{rate['max']:.1f}", _cell(ms["p50"], ".1f"),
            _cell(ms["p99"], ".1f"),
            *(_cell((entry[k] or {}).get("median"), ".2f")
              for k in ("time_to_first_token", "speedup", "over_transformers")),
            _cell((block or {}).get("mean_acceptance_length"), ".2f") + _retained(block),
            _cell((top or {}).get("fraction"), ".0%"),
        ))  # fmt: skip
    return text_table(lines)


# What a short table records of a run.
FACTS = ("command", "time", "commit", "dirty", "base", "device", "kernels", "environment", "roof", "unknown")


def short(body: dict[str, Any]) -> dict[str, Any]:
    """Facts of a run and a row per measured case, for a file of tables (results.add_table)."""
    cases = [case for case in body["cases"] if not case["imported"]]
    dtypes: dict[tuple[str, str], str] = {}
    for case in cases:
        dtypes.setdefault((case["engine"], case["model"]), case["dtype"])
    models = [model["name"] for model in body["models"]]

    def row(case: dict[str, Any]) -> dict[str, Any]:
        peer, dtype, rows = case["model"], case["dtype"], case.get("kv_cache_dtype")
        if case["engine"] == "transformers":
            peer = f"transformers {dtype}" + (f", {peer}" if peer != models[0] else "")
        elif case["engine"] != EnginePeer.name:
            peer = case["engine"] + (f", {peer}" if peer != models[0] else "")
        elif dtype != dtypes[EnginePeer.name, peer]:
            peer += f", {dtype} weights"
        peer += f", {rows} rows" if rows not in (None, "auto") else ""
        entry: dict[str, Any] = {"peer": peer, "case": f"{case['context']}x{case['batch']}"}
        if case["num_speculative_tokens"]:
            fixed = "" if case["draft"] == "default" else f"{case['num_speculative_tokens']} "
            entry |= {"drafts": fixed + case["draft"], "specpv": case.get("specpv", "off")}
        if "tokens_per_second" not in case:
            return entry | {"status": case["status"], "limit": (case["limit"] or {}).get("what")}
        block, first = case["eagle_speculation"] or {}, case["time_to_first_token"]
        entry |= {
            "ms_per_step": case["ms_per_token"]["p50"], "tokens_per_second": case["tokens_per_second"]["median"],
            "rounds": case["repetitions"], "first_token_s": first and first["median"],
            "cache_bytes": case["cache"] and case["cache"]["bytes"],
            "roof_share": case["roofline"] and case["roofline"]["fraction"],
            "tokens_per_step": block.get("mean_acceptance_length"), "accepted_at": block.get("acceptance_per_position"),
            "kept_share": block.get("kept_share"), "unlike_plain": case.get("answers_unlike_plain"),
            "distinct_4_grams": case.get("distinct_4_grams"),
        }  # fmt: skip
        for name in ("speedup", "over_transformers", "over_base", "over_full_verification"):
            ratio = case.get(name) or {}
            entry[name] = {key: value for key, value in ratio.items() if key != "runs"} or None
        return {key: value for key, value in entry.items() if value is not None}

    return {**{name: body[name] for name in FACTS if name in body}, "rows": [*map(row, cases)]}


def _retained(block: dict[str, Any] | None) -> str:
    """Suffix of an acceptance length: the share of pending tokens that full verification retained."""
    share = (block or {}).get("kept_share")
    return "" if share is None else f", {share:.0%} kept"


def _cell(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
