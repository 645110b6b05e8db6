"""`report`: all artifacts below a folder as one self-contained HTML page, and the same numbers as JSON.

The page shows the numbers of manifests and results and computes only units, sums, spans and 95 % intervals from them;
missing numbers are shown as "not measured". It loads no other resource and needs no script.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

from mlaforge.artifact import Manifest, artifacts_below, record_name
from mlaforge.ops.row_formats.coded import Coded
from mlaforge.rendering.page import (
    NOT_FINITE,
    NOT_MEASURED,
    PAINT,
    at,
    interval,
    jinja_page,
    model_name,
    number,
    shown,
)
from mlaforge.report.bench_results import dicts, latest, read_results
from mlaforge.report.deviations import WATCHED, deviations
from mlaforge.report.plots import figures
from mlaforge.report.recommendations import recommend
from mlaforge.report.speeds import CONTEXTS as SPEEDS
from mlaforge.report.speeds import compare, speeds
from mlaforge.runtime import UserError, install

GENERATOR = "mlaforge report"
# Parts of a report: stage or kind of result -> its content, and the command that creates it.
PARTS = {
    "diagnose": ("heat maps by layer and head", "mlaforge diagnose MODEL DIAGNOSIS --text TEXT"),
    "calibrate": ("calibration sets", "mlaforge calibrate --source TEXT --out SETS"),
    "convert": ("conversions: perplexity and cache", "mlaforge convert MODEL OUT --calibration TEXT"),
    "sparsify": ("tokens read by sparse layers", "mlaforge sparsify OUT SPARSE"),
    "heal": ("healing curves", "mlaforge heal --teacher MODEL --student OUT --out HEALED --text TEXT"),
    "draft train": ("learning curves of draft heads", "mlaforge draft train MODEL --text TEXT --out HEAD"),
    "acceptance": (
        "criteria by which a student may replace its teacher",
        "mlaforge eval --teacher MODEL --student OUT --criteria criteria.yaml",
    ),
    "eval": (
        "loss at long contexts and on other text",
        "mlaforge eval OUT EVALUATED --teacher MODEL --seqlen 8192 --text OTHER_TEXT",
    ),
    "generate": ("generated text compared", "mlaforge generate MODEL TALK --against OUT"),
    "scenario": ("speed, acceptance, memory, the roofline", "mlaforge bench speed MODEL OUT"),
    "kernels": ("kernels against the roofline", "mlaforge bench kernels"),
    "gates": ("gates", "mlaforge gate"),
}
CACHE, RATIO = ("metrics", "cache"), ("metrics", "ratio")
FRACTION = (*CACHE, "fraction")
DIAGNOSIS = "diagnosis.json"
CONTEXTS = {"8K": 8192, "32K": 32768, "128K": 131072}


def write_report(folder: Path, out: Path) -> dict[str, Any]:
    """Write the page of all artifacts below `folder` to `out`, and its numbers to `out` with suffix .json.

    Return the numbers. Raise UserError if `folder` is not a directory, or if `out` cannot be written or exists and is
    not a report.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(f"the report needs matplotlib: {install('report')}")
    numbers_file = out.with_suffix(".json")
    if numbers_file == out:
        raise UserError(f"{out} would be both the page and its numbers; give a name that ends in .html")
    for path in (out, numbers_file):
        # Never overwrite user files: `model/config.html` would replace a model's config.json.
        if path.exists() and not (path.is_file() and _is_report(path)):
            raise UserError(f"{path} exists and is not a report of mlaforge; choose another output file")
    report = summarise(folder)
    numbers = json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False)
    pages = {numbers_file: numbers + "\n", out: _render(report, folder)}
    partial = {path: path.with_name(f".{path.name}.partial") for path in pages}
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        for path, text in pages.items():
            partial[path].write_text(text, encoding="utf-8")
        for path in pages:
            os.replace(partial[path], path)
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror}; choose another output file") from error
    finally:
        for path in partial.values():
            with suppress(OSError):
                path.unlink()
    return report


def _is_report(path: Path) -> bool:
    with path.open("rb") as file:
        return GENERATOR.encode() in file.read(400)


def summarise(folder: Path) -> dict[str, Any]:
    """Content of all artifacts and results below `folder` as plain JSON types; non-finite floats become text.

    Raise UserError if `folder` is not a directory.
    """
    artifacts = artifacts_below(folder)
    unreadable = [name for name, manifest in artifacts.items() if manifest is None]
    records = [
        _record(folder.resolve().name if name == "." else name, manifest)
        for name, manifest in artifacts.items()
        if manifest is not None
    ]
    results, unreadable_results = read_results(folder)
    of = {stage: [record for record in records if record["stage"] == stage] for stage in PARTS}
    max_positions = [n for record in of["convert"] if (n := number(record["metrics"], "cache", "positions"))]
    # Contexts that every model supports; the shortest if there are none.
    fit = [label for label, tokens in CONTEXTS.items() if tokens <= min(max_positions, default=tokens)]
    contexts = {label: CONTEXTS[label] for label in fit or [min(CONTEXTS, key=lambda label: CONTEXTS[label])]}
    conversions = [_conversion(record, contexts) for record in of["convert"]]
    conversions.sort(key=lambda c: (list(PAINT).index(c["layout"]), -(number(c, *FRACTION) or 0)))
    layouts = dict.fromkeys(c["layout"] for c in conversions)
    groups = {layout: [c for c in conversions if c["layout"] == layout] for layout in layouts}
    verdicts = [f"{layout}: " * (len(groups) > 1) + _verdict(part) for layout, part in groups.items()]
    comparisons = [_comparison(record) for record in of["acceptance"]]
    selections = [_selection(record) for record in of["sparsify"] + [c for c in conversions if _is_sparse(c)]]
    parts = {
        **of,
        **results,
        "sparsify": selections,
        "acceptance": comparisons or [r for r in records if r["acceptance"]],
    }
    report: dict[str, Any] = {
        "generator": GENERATOR,
        "folder": record_name(folder),
        "models": list(dict.fromkeys(c["model"] for c in conversions)),
        "verdict": "; ".join(verdicts) or "Nothing has been converted in this folder yet.",
        "missing": {part: {"what": w, "command": c} for part, (w, c) in PARTS.items() if not parts[part]},
        "cards": _cards(groups, longest := [*contexts][-1]),
        "longest": longest,
        "conversions": conversions,
        "calibrations": of["calibrate"],
        "diagnoses": of["diagnose"],
        "selections": selections,
        "healings": [_learning(record) for record in of["heal"]],
        "trainings": [_learning(record) for record in of["draft train"]],
        "acceptances": comparisons or [_comparison({**r, "metrics": r["acceptance"]}) for r in parts["acceptance"]],
        "evaluations": (evaluations := [_evaluation(record) for record in of["eval"]]),
        "diverging": [record for record in evaluations if number(record["metrics"], "kl") is not None],
        "generations": [{**record, "shared": _shared(record)} for record in of["generate"]],
        # The latest of each kind, scope and device; `results` has all.
        "scenarios": latest(results["scenario"]),
        "kernels": latest(results["kernels"]),
        "gates": latest(results["gates"]),
        "compared": latest(results["conversion"]),
        "results": results,
        "records": records,
        "unreadable": unreadable + unreadable_results,
    }
    measured_speeds = speeds(report["scenarios"], report["generations"])
    for c in conversions:
        c["speed"] = compare(c, measured_speeds)
    report["speeds"] = [n for n in SPEEDS if any(s is not None for c in conversions for s in c["speed"][n].values())]
    report["settings"] = recommend(conversions, report["scenarios"])
    report["deviations"] = deviations(report)
    # Every record is part of the section of its stage.
    columns = ("name", "stage", "canonical", "total_seconds", "fingerprint")
    report["artifacts"] = [{key: record[key] for key in columns} for record in report.pop("records")]
    return report


def _record(name: str, manifest: Manifest) -> dict[str, Any]:
    """Manifest as a record whose sections are dictionaries and whose numbers are valid JSON."""
    sections = ("config", "inputs", "metrics", "seconds", "environment", "acceptance")
    for section in sections:
        if not isinstance(getattr(manifest, section), dict):
            setattr(manifest, section, {})
    seconds = [s for s in map(number, manifest.seconds.values()) if s is not None]
    record: dict[str, Any] = {"name": name, "stage": str(manifest.stage), "fingerprint": manifest.fingerprint}
    record |= {"total_seconds": sum(seconds) if seconds else None, "canonical": manifest.canonical is True}
    record |= {section: getattr(manifest, section) for section in sections}
    return json.loads(json.dumps(record), parse_constant=lambda _: NOT_FINITE)


def _evaluation(record: dict[str, Any]) -> dict[str, Any]:
    """An `eval` record with the 95 % intervals of its perplexity, and of its ratio to the original's. `on`: its
    text, and what a token reads of it."""
    metrics = record["metrics"]
    return {
        **record,
        "on": _measured_on(record, at(record, "inputs", "text", "source"), number(metrics, "topk")),
        "ppl_interval": _exponential(metrics, "nll", "nll_stderr"),
        "ratio_interval": _ratio_interval(metrics),
    }


def _measured_on(record: dict[str, Any], source: Any, topk: float | None = None) -> str:
    """Text, length of its windows, and number of tokens that a token reads per layer if it is not all."""
    seqlen = number(record["config"], "seqlen")
    windows = f", {shown(seqlen, 'whole')} tokens" if seqlen else ""
    return f"{source or 'not recorded'}{windows}" + (f", {shown(topk, 'whole')} read" if topk else "")


def _ratio_interval(metrics: dict[str, Any], prefix: str = "") -> list[float] | None:
    """95 % interval of a perplexity ratio; prefix: of its names in the metrics."""
    ratio = number(metrics, f"{prefix}ratio")
    loss = math.log(ratio) if ratio and ratio > 0 else None
    return _exponential({**metrics, "loss": loss}, "loss", f"{prefix}log_ratio_stderr")


def _exponential(metrics: dict[str, Any], mean: str, stderr: str) -> list[float] | None:
    """exp of the 95 % interval of a mean over windows."""
    center, error, n = (number(metrics, key) for key in (mean, stderr, "windows"))
    if center is None or error is None or n is None or not (ends := interval(center, error, int(n))):
        return None
    return [math.exp(min(end, 700.0)) for end in ends]


def _learning(record: dict[str, Any]) -> dict[str, Any]:
    """Record with a curve, and the first evaluation of it."""
    return {**record, "first": (dicts(record["metrics"].get("curve")) or [{}])[0]}


def _is_sparse(record: dict[str, Any]) -> bool:
    """Whether a conversion has an index."""
    return any(number(layer, "topk") is not None for layer in dicts(record["metrics"].get("layers")))


def _selection(record: dict[str, Any]) -> dict[str, Any]:
    """`sparsify` or `convert` record with its sparse layers by number, and the number of layers with an index."""
    layers = dict(enumerate(dicts(record["metrics"].get("layers"))))
    sparse = {i: layer for i, layer in layers.items() if number(layer, "topk") is not None}
    return {**record, "sparse": sparse, "indexes": sum(layer.get("kind") == "full" for layer in sparse.values())}


def _comparison(record: dict[str, Any]) -> dict[str, Any]:
    return {**record, "criteria": dicts(record["metrics"].get("criteria"))}


def _conversion(record: dict[str, Any], contexts: dict[str, int]) -> dict[str, Any]:
    """`convert` record with derived numbers: layout, cache by context, losses."""
    metrics = record["metrics"]
    layers = metrics["layers"] = dicts(metrics.get("layers"))
    # From the layers, as the options may name latent_rope differently (TransMLA's name).
    layouts = {str(layer.get("layout")) for layer in layers} - {"gqa"} or {str(record["config"].get("layout"))}
    layout = layouts.pop() if len(layouts) == 1 else "mixed"
    layout = layout if layout in PAINT else "mixed"
    losses = [loss for layer in layers if (loss := number(layer, "predicted_loss")) is not None]
    rows, ratio = _row_bytes(metrics), number(metrics, "ratio")
    bits, fraction = _bits(layers, rows), _requested_fraction(record["config"], layers)
    loss = math.log(ratio) if ratio and ratio > 0 else None
    indexes = [number(layer, "index") or 0 for layer in layers]
    cached = rows and {"gqa": rows["gqa"], "mla": [a + b for a, b in zip(rows["mla"], indexes, strict=True)]}
    model = record["inputs"].get("model")
    kind, digest = (str(at(model, key) or "") for key in ("model_type", "sha256"))
    return {
        **record,
        "layout": layout,
        # The name in results of bench and generate, and the short name for display.
        "original": str(at(model, "path") or ""),
        "model": model_name(at(model, "path") or f"{kind} {digest[:8]}").strip() or "model",
        "row_bytes": rows,
        "bits": bits,
        "kept": fraction,
        "context_bytes": {
            label: {side: _context_bytes(layers, cached[side], tokens) if cached else None for side in ("gqa", "mla")}
            for label, tokens in contexts.items()
        },
        "predicted_loss": sum(losses) if losses else None,
        "measured_loss": loss,
        "form": f"{layout}, {_size(bits, fraction)}",
        "ratio_interval": _ratio_interval(metrics),
        "sparse_interval": _ratio_interval(metrics, "sparse_"),
        "on": _measured_on(record, at(record, "inputs", "evaluation", "source")),
    }


def _size(bits: float | None, fraction: float | None) -> str:
    """Requested size of a conversion."""
    if bits is not None:
        return f"{bits:.3g} bits"
    return "ranks by layer" if fraction is None else f"{shown(fraction, 'percent')} of the cache"


def _requested_fraction(config: dict[str, Any], layers: list[dict[str, Any]]) -> float | None:
    """Requested share of the converted layers' cache: the budget, or the share that the requested rank results in."""
    if number(config, "kv_lora_rank") is None:
        return number(config, "budget")
    converted = [layer for layer in layers if layer.get("layout") != "gqa"]
    sizes = [(number(layer, "cached"), number(layer, "gqa_cached")) for layer in converted]
    if not sizes or any(None in pair for pair in sizes):
        return None
    return sum(after or 0 for after, _ in sizes) / sum(before or 0 for _, before in sizes)


def _row_bytes(metrics: dict[str, Any]) -> dict[str, list[float]] | None:
    """Bytes per token of every layer before (`gqa`) and after (`mla`), None if the manifest lacks them."""
    elements, size = (number(metrics, "cache", f"gqa_{prefix}per_token") for prefix in ("", "bytes_"))
    if not elements or size is None:
        return None
    rows: dict[str, list[float]] = {"gqa": [], "mla": []}
    for layer in metrics["layers"]:
        before, after = number(layer, "gqa_cached"), number(layer, "cached")
        if before is None or after is None:
            return None
        code, rotary = layer.get("code") or (), int(number(layer, "qk_rope_head_dim") or 0)
        rows["gqa"].append(before * size / elements)
        coded = Coded(tuple(code), rotary).unit_bytes if code else None
        rows["mla"].append(after * size / elements if coded is None else coded)
    return rows


def _bits(layers: list[dict[str, Any]], rows: dict[str, list[float]] | None) -> float | None:
    """Mean bits of the coded layers per element that GQA caches there; None without coded layers."""
    coded = [i for i, layer in enumerate(layers) if layer.get("code")]
    if not coded or rows is None:
        return None
    return 8 * sum(rows["mla"][i] for i in coded) / sum(layers[i]["gqa_cached"] for i in coded)


def _context_bytes(layers: list[dict[str, Any]], rows: list[float], tokens: int) -> int:
    """Cache bytes of one sequence of `tokens`; a layer with a sliding window caches at most its window."""
    windows = (number(layer, "window") for layer in layers)
    return round(sum(row * (tokens if w is None else min(tokens, w)) for row, w in zip(rows, windows, strict=True)))


def _span(records: list[dict[str, Any]], form: str, *keys: str) -> str:
    """Value at `keys` of one record, or the range of several."""
    values = [at(record, *keys) for record in records]
    finite = sorted(x for x in map(number, values) if x is not None)
    if not finite:
        return NOT_FINITE if NOT_FINITE in values else NOT_MEASURED
    minimum, maximum = shown(finite[0], form), shown(finite[-1], form)
    unit = "".join(maximum.partition(" ")[1:])
    return maximum if minimum == maximum else f"{minimum.removesuffix(unit)} – {maximum}"


def _verdict(conversions: list[dict[str, Any]]) -> str:
    """Cache share and perplexity ratio of conversions in one phrase."""
    share = _span(conversions, "percent", *FRACTION)
    cache = f"cache {NOT_MEASURED}" if share == NOT_MEASURED else f"{share} of the cache"
    return f"{cache}, perplexity {_span(conversions, 'times', *RATIO)}"


def _cards(groups: dict[str, list[dict[str, Any]]], longest: str) -> list[dict[str, Any]]:
    """Cards with the main numbers, one row per layout. longest: label of the context for bytes."""
    conversions = [conversion for part in groups.values() for conversion in part]
    cards: list[dict[str, Any]] = []
    kinds: list[tuple[str, str, tuple[str, ...], str | tuple[str, ...]]] = [
        ("Cache kept", "percent", FRACTION, f"of the K and V cache at {longest} tokens, whole model"),
        ("Perplexity", "times", RATIO, "converted / original; ×1 is lossless"),
        ("Cache per token", "bytes", (*CACHE, "mla_bytes_per_token"), (*CACHE, "gqa_bytes_per_token")),
        (
            f"One sequence of {longest} tokens",
            "bytes",
            ("context_bytes", longest, "mla"),
            ("context_bytes", longest, "gqa"),
        ),
    ]
    for title, form, keys, gqa in kinds:
        note = gqa if isinstance(gqa, str) else f"GQA: {_span(conversions, form, *gqa)}"
        rows = [{"layout": layout, "value": _span(part, form, *keys)} for layout, part in groups.items()]
        cards.append({"title": title, "note": note, "rows": rows})
    return cards


def _shared(record: dict[str, Any]) -> int:
    """Length of the common prefix, in whole words, of the texts of a `generate` record."""
    runs = record["metrics"]["runs"] = dicts(record["metrics"].get("runs"))
    texts = [str(run.get("text") or "") for run in runs]
    # zip stops at the end of the shortest text.
    equal = takewhile(lambda letters: len(set(letters)) == 1, zip(*texts, strict=False))
    common = "".join(letters[0] for letters in equal)
    return len(common) if all(text == common for text in texts) else common.rfind(" ") + 1


def _diagnoses(folder: Path, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Content of each diagnosis file, {} if unreadable. Not part of the report because of its size."""
    bodies = []
    for record in records:
        # The folder may be the artifact itself.
        directory = folder / record["name"] if (folder / record["name"]).is_dir() else folder
        try:
            body = json.loads((directory / DIAGNOSIS).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            body = None
        bodies.append(body if isinstance(body, dict) else {})
    return bodies


def _render(report: dict[str, Any], folder: Path) -> str:
    svgs = figures(report, _diagnoses(folder, report["diagnoses"]))
    page = jinja_page("report.html.jinja")
    return str(page.render(report, figures=svgs, at=at, verdict_of=_verdict, watched=WATCHED))
