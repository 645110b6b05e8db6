"""`report`: every artifact below a folder as one self-contained HTML page, and the same numbers as JSON.

The page draws what the manifests hold and computes only units, sums and spans from it; a number that no stage
measured is shown as "not measured". It loads nothing from elsewhere and needs no script.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mlaforge.artifact import MANIFEST, Manifest
from mlaforge.runtime import UserError

GENERATOR = "mlaforge report"
COMMANDS = {
    "convert": "mlaforge convert MODEL OUT",
    "eval": "mlaforge eval MODEL OUT",
    "generate": "mlaforge generate MODEL OUT --against CONVERTED",
}
LAYOUTS = ("latent", "latent_rope", "mixed", "gqa")
CONTEXTS = {"8K": 8192, "32K": 32768, "128K": 131072}
NOT_MEASURED, NOT_FINITE = "not measured", "not finite"

# matplotlib knows no CSS, so every role is drawn in a colour of its own that the page's variable then replaces.
INK, MUTED, GRID, PAPER = "#000001", "#000002", "#000003", "#000004"
PAINT = {"latent": "#000011", "latent_rope": "#000012", "mixed": "#000013", "gqa": "#000014"}
MARKERS = {"latent": "o", "latent_rope": "D", "mixed": "s", "gqa": "^"}
VARIABLES = {INK: "ink", MUTED: "muted", GRID: "grid", PAPER: "paper", **{c: n for n, c in PAINT.items()}}
PLOT_STYLE = {
    "svg.fonttype": "none",  # text stays text: the page's font, selectable
    "text.parse_math": False,  # a folder may be called a$b$c
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
}


def write_report(folder: Path, out: Path) -> dict[str, Any]:
    """Writes the page of all artifacts below `folder` to `out`, its numbers to `out` with suffix .json.

    Returns the numbers. Raises UserError where `folder` is no directory, or where `out` cannot be written or is a
    file that an earlier report did not write.
    """
    if not folder.is_dir():
        raise UserError(f"folder {str(folder)!r} does not exist; give the folder that holds the artifacts")
    beside = out.with_suffix(".json")
    if beside == out:
        raise UserError(f"{out} would be both the page and its numbers; give a name that ends in .html")
    for path in (out, beside):
        _refuse_foreign(path)
    report = summarise(folder)
    page = _render(report)
    pages = {beside: json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n", out: page}
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = {path: path.with_name(f".{path.name}.partial") for path in pages}
        try:
            for path, text in pages.items():
                partial[path].write_text(text, encoding="utf-8")
            for path in pages:
                os.replace(partial[path], path)
        finally:
            for path in partial.values():
                path.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror}; choose another output file") from error
    return report


def _refuse_foreign(path: Path) -> None:
    """Nothing of the user's is overwritten: `report model/config.html` would replace a model's config.json."""
    if not path.exists():
        return
    head = path.open("rb").read(400) if path.is_file() else b""
    if GENERATOR.encode() not in head:
        raise UserError(f"{path} exists and is not a report of mlaforge; choose another output file")


def summarise(folder: Path) -> dict[str, Any]:
    """What the artifacts below `folder` say, as plain JSON types. Floats that are not finite become text."""
    records, unreadable = [], []
    for path in sorted(folder.rglob(MANIFEST)):
        name = path.parent.relative_to(folder).as_posix()
        # A stage at work, or what a killed one left: not an artifact yet.
        if any(part.startswith(".") and part.endswith(".partial") for part in path.parent.parts):
            continue
        manifest = Manifest.load(path.parent)
        if manifest is None:
            unreadable.append(name)
        else:
            records.append(_record(folder.resolve().name if name == "." else name, manifest))
    found: dict[str, list[dict[str, Any]]] = {
        stage: [r for r in records if r["stage"] == stage] for stage in COMMANDS
    }
    conversions = [_conversion(record) for record in found["convert"]]
    conversions.sort(key=lambda c: (LAYOUTS.index(c["layout"]), -(_number(c, "metrics", "cache", "fraction") or 0)))
    groups = [(layout, [c for c in conversions if c["layout"] == layout]) for layout in LAYOUTS]
    groups = [(layout, members) for layout, members in groups if members]
    verdicts = [(f"{layout}: " if len(groups) > 1 else "") + _verdict(members) for layout, members in groups]
    models = list(dict.fromkeys(c["model"] for c in conversions))
    return {
        "generator": GENERATOR,
        "folder": str(folder),
        "models": models,
        "verdict": "; ".join(verdicts) or "Nothing has been converted in this folder yet.",
        "missing": {stage: command for stage, command in COMMANDS.items() if not found[stage]},
        "cards": _cards(groups),
        "conversions": conversions,
        "evaluations": found["eval"],
        "generations": [{**record, "shared": _shared(record)} for record in found["generate"]],
        "artifacts": [
            {"name": r["name"], "stage": r["stage"], "seconds": r["total_seconds"], "fingerprint": r["fingerprint"]}
            for r in records
        ],
        "unreadable": unreadable,
    }


def _record(name: str, manifest: Manifest) -> dict[str, Any]:
    """A manifest as plain JSON types, with every section a dictionary."""
    for section in ("config", "inputs", "metrics", "seconds", "environment"):
        if not isinstance(getattr(manifest, section), dict):
            setattr(manifest, section, {})
    spent = [s for s in map(_finite, manifest.seconds.values()) if s is not None]
    record = {
        "name": name,
        "stage": str(manifest.stage),
        "fingerprint": manifest.fingerprint,
        "total_seconds": sum(spent) if spent else None,
        **{s: getattr(manifest, s) for s in ("config", "inputs", "metrics", "seconds", "environment")},
    }
    plain = _plain(record)
    assert isinstance(plain, dict)
    return plain


def _plain(value: Any) -> Any:
    """JSON has no NaN; a number that is not finite stays visible as text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return NOT_FINITE
    return value if isinstance(value, str | int | float | None) else str(value)


def _finite(value: Any) -> float | None:
    usable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if usable else None


def _at(record: Any, *keys: str) -> Any:
    """The value below nested dictionaries, None where one of them is missing or no dictionary."""
    for key in keys:
        record = record.get(key) if isinstance(record, dict) else None
    return record


def _number(record: Any, *keys: str) -> float | None:
    return _finite(_at(record, *keys))


def _conversion(record: dict[str, Any]) -> dict[str, Any]:
    """A `convert` record with what follows from its numbers: layout, cache by context, predicted loss summed."""
    metrics = record["metrics"]
    listed = metrics.get("layers")
    layers = [x for x in listed if isinstance(x, dict)] if isinstance(listed, list) else []
    # The options may ask for latent_rope by another name (TransMLA's), so what was made decides.
    made = {str(layer.get("layout")) for layer in layers} - {"gqa"} or {str(record["config"].get("layout"))}
    layout = made.pop() if len(made) == 1 else "mixed"
    metrics["layers"] = layers
    losses = [loss for layer in layers if (loss := _number(layer, "predicted_loss")) is not None]
    ratio = _number(metrics, "ratio")
    model = record["inputs"].get("model")
    named = _at(model, "path") or " ".join(
        str(part) for part in (_at(model, "model_type") or "model", str(_at(model, "sha256") or "")[:8]) if part
    )
    return {
        **record,
        "layout": layout if layout in LAYOUTS else "mixed",
        "model": Path(str(named)).name,
        "context_bytes": {
            label: {side: _context_bytes(metrics, side, tokens) for side in ("gqa", "mla")}
            for label, tokens in CONTEXTS.items()
        },
        "predicted_loss": sum(losses) if losses else None,
        "measured_loss": math.log(ratio) if ratio and ratio > 0 else None,
    }


def _context_bytes(metrics: dict[str, Any], side: str, tokens: int) -> int | None:
    """Bytes that one sequence of `tokens` caches; a layer with a sliding window holds no more than its window."""
    numbers, size = (_number(metrics, "cache", f"{side}_{what}") for what in ("per_token", "bytes_per_token"))
    held = 0.0
    for layer in metrics["layers"]:
        cached, window = _number(layer, "gqa_cached" if side == "gqa" else "cached"), _number(layer, "window")
        if cached is None:
            return None
        held += cached * (tokens if window is None else min(tokens, window))
    return round(held * size / numbers) if held and numbers and size is not None else None


def _verdict(conversions: list[dict[str, Any]]) -> str:
    kept = _span((_at(c, "metrics", "cache", "fraction") for c in conversions), percent)
    ratio = _span((_at(c, "metrics", "ratio") for c in conversions), times)
    return f"{kept} of the cache, perplexity {ratio}"


def _span(values: Iterable[Any], form: Callable[[Any], str]) -> str:
    """`form` of the one value, or of the least and the greatest."""
    seen = list(values)
    finite = sorted(x for x in map(_finite, seen) if x is not None)
    if not finite:
        return NOT_FINITE if NOT_FINITE in seen else NOT_MEASURED
    ends = list(dict.fromkeys((form(finite[0]), form(finite[-1]))))
    return " – ".join(ends)


def _cards(groups: list[tuple[str, list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """The few numbers that matter: per card one row for each layout."""
    everything = [c for _, members in groups for c in members]

    def card(title: str, note: str, form: Callable[[Any], str], *keys: str) -> dict[str, Any]:
        rows = [{"layout": name, "value": _span((_at(c, *keys) for c in members), form)} for name, members in groups]
        return {"title": title, "note": note, "rows": rows}

    def before(form: Callable[[Any], str], *keys: str) -> str:
        return _span((_at(c, *keys) for c in everything), form)

    return [
        card("Cache kept", "of the K and V cache, whole model", percent, "metrics", "cache", "fraction"),
        card("Perplexity", "converted / original; ×1 is lossless", times, "metrics", "ratio"),
        card(
            "Cache per token",
            f"was {before(binary, 'metrics', 'cache', 'gqa_bytes_per_token')}",
            binary,
            *("metrics", "cache", "mla_bytes_per_token"),
        ),
        card(
            "One sequence of 128K tokens",
            f"was {before(binary, 'context_bytes', '128K', 'gqa')}",
            binary,
            *("context_bytes", "128K", "mla"),
        ),
    ]  # fmt: skip


def _shared(record: dict[str, Any]) -> int:
    """Characters up to the word in which the texts of a `generate` record part; 0 for fewer than two texts."""
    runs = record["metrics"].get("runs")
    runs = [run for run in runs if isinstance(run, dict)] if isinstance(runs, list) else []
    record["metrics"]["runs"] = runs
    texts = [str(run.get("text") or "") for run in runs]
    if len(texts) < 2:
        return 0
    common = os.path.commonprefix(texts)
    return len(common) if all(text == common for text in texts) else len(common.rstrip()) and common.rfind(" ") + 1


def percent(value: Any) -> str:
    return _shown(value, lambda v: f"{100 * v:.3g} %")


def times(value: Any) -> str:
    return _shown(value, lambda v: f"×{v:.3f}")


def decimal(value: Any, digits: int = 3) -> str:
    return _shown(value, lambda v: f"{v:,.{digits}f}")


def whole(value: Any) -> str:
    return _shown(value, lambda v: f"{v:,.0f}")


def binary(value: Any) -> str:
    """Bytes in units of 1024."""

    def form(v: float) -> str:
        power = min(4, int(math.log2(v) // 10)) if v >= 1 else 0
        return f"{v / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"

    return _shown(value, form)


def duration(value: Any) -> str:
    return _shown(value, lambda v: f"{v:.2f} s" if v < 10 else f"{v:.0f} s" if v < 600 else f"{v / 60:.0f} min")


def _shown(value: Any, form: Callable[[float], str]) -> str:
    number = _finite(value)
    if number is None:
        return NOT_FINITE if value == NOT_FINITE else NOT_MEASURED
    return form(number)
