"""`report`: every artifact below a folder as one self-contained HTML page, and the same numbers as JSON.

The page draws what the manifests hold and computes only units, sums and spans from it; a number that no stage
measured is shown as "not measured". It loads nothing from elsewhere and needs no script.
"""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

from mlaforge.artifact import MANIFEST, Manifest
from mlaforge.page import INK, MARKERS, MUTED, NOT_FINITE, NOT_MEASURED, PAINT, at, drawing, jinja_page, number, shown
from mlaforge.runtime import UserError

GENERATOR = "mlaforge report"
COMMANDS = {
    "convert": "mlaforge convert MODEL OUT",
    "eval": "mlaforge eval MODEL OUT",
    "generate": "mlaforge generate MODEL OUT --against CONVERTED",
}
CACHE, RATIO, AT_128K = ("metrics", "cache"), ("metrics", "ratio"), ("context_bytes", "128K")
FRACTION = (*CACHE, "fraction")
CONTEXTS = {"8K": 8192, "32K": 32768, "128K": 131072}


def write_report(folder: Path, out: Path) -> dict[str, Any]:
    """Writes the page of all artifacts below `folder` to `out`, its numbers to `out` with suffix .json.

    Returns the numbers. Raises UserError where `folder` is no directory, and where `out` cannot be written or
    is a file that no earlier report wrote.
    """
    if not folder.is_dir():
        raise UserError(f"folder {str(folder)!r} does not exist; give the folder that holds the artifacts")
    beside = out.with_suffix(".json")
    if beside == out:
        raise UserError(f"{out} would be both the page and its numbers; give a name that ends in .html")
    for path in (out, beside):
        # Nothing of the user's is overwritten: `model/config.html` would replace a model's config.json.
        if path.exists() and not (path.is_file() and _is_report(path)):
            raise UserError(f"{path} exists and is not a report of mlaforge; choose another output file")
    report = summarise(folder)
    numbers = json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False)
    pages = {beside: numbers + "\n", out: _render(report)}
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
    """What the artifacts below `folder` say, as plain JSON types. Floats that are not finite become text."""
    records, unreadable = [], []
    for path in sorted(folder.rglob(MANIFEST)):
        name = path.parent.relative_to(folder).as_posix()
        if ".partial/" in f"{name}/":  # a stage at work, or what a killed one left: not an artifact yet
            continue
        manifest = Manifest.load(path.parent)
        if manifest is None:
            unreadable.append(name)
        else:
            records.append(_record(folder.resolve().name if name == "." else name, manifest))
    found = {stage: [record for record in records if record["stage"] == stage] for stage in COMMANDS}
    conversions = [_conversion(record) for record in found["convert"]]
    conversions.sort(key=lambda c: (list(PAINT).index(c["layout"]), -(number(c, *FRACTION) or 0)))
    layouts = dict.fromkeys(c["layout"] for c in conversions)
    groups = {layout: [c for c in conversions if c["layout"] == layout] for layout in layouts}
    verdicts = [f"{layout}: " * (len(groups) > 1) + _verdict(part) for layout, part in groups.items()]
    return {
        "generator": GENERATOR,
        "folder": str(folder),
        "models": list(dict.fromkeys(c["model"] for c in conversions)),
        "verdict": "; ".join(verdicts) or "Nothing has been converted in this folder yet.",
        "missing": {stage: command for stage, command in COMMANDS.items() if not found[stage]},
        "cards": _cards(groups),
        "conversions": conversions,
        "diagnoses": [r for r in records if r["stage"] == "diagnose"],
        "healings": [
            {**record, "first": (_dicts(record["metrics"].get("curve")) or [{}])[0]}
            for record in records
            if record["stage"] == "heal"
        ],
        "evaluations": found["eval"],
        "generations": [{**record, "shared": _shared(record)} for record in found["generate"]],
        "artifacts": [{k: r[k] for k in ("name", "stage", "total_seconds", "fingerprint")} for r in records],
        "unreadable": unreadable,
    }


def _record(name: str, manifest: Manifest) -> dict[str, Any]:
    """A manifest in which every section is a dictionary and every number one that JSON has."""
    sections = ("config", "inputs", "metrics", "seconds", "environment")
    for section in sections:
        if not isinstance(getattr(manifest, section), dict):
            setattr(manifest, section, {})
    spent = [s for s in map(number, manifest.seconds.values()) if s is not None]
    told: dict[str, Any] = {"name": name, "stage": str(manifest.stage), "fingerprint": manifest.fingerprint}
    told["total_seconds"] = sum(spent) if spent else None
    told |= {section: getattr(manifest, section) for section in sections}
    return json.loads(json.dumps(told), parse_constant=lambda _: NOT_FINITE)


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _conversion(record: dict[str, Any]) -> dict[str, Any]:
    """A `convert` record with what follows from its numbers: layout, cache by context, losses."""
    metrics = record["metrics"]
    layers = metrics["layers"] = _dicts(metrics.get("layers"))
    # The options may ask for latent_rope by another name (TransMLA's), so what was made decides.
    made = {str(layer.get("layout")) for layer in layers} - {"gqa"} or {str(record["config"].get("layout"))}
    layout = made.pop() if len(made) == 1 else "mixed"
    losses = [loss for layer in layers if (loss := number(layer, "predicted_loss")) is not None]
    ratio = number(metrics, "ratio")
    model = record["inputs"].get("model")
    kind, digest = (str(at(model, key) or "") for key in ("model_type", "sha256"))
    return {
        **record,
        "layout": layout if layout in PAINT else "mixed",
        "model": Path(str(at(model, "path") or f"{kind} {digest[:8]}")).name.strip() or "model",
        "context_bytes": {
            label: {side: _context_bytes(metrics, side, tokens) for side in ("gqa", "mla")}
            for label, tokens in CONTEXTS.items()
        },
        "predicted_loss": sum(losses) if losses else None,
        "measured_loss": math.log(ratio) if ratio and ratio > 0 else None,
    }


def _context_bytes(metrics: dict[str, Any], side: str, tokens: int) -> int | None:
    """Bytes that one sequence of `tokens` caches; a layer with a sliding window holds at most its window."""
    numbers, size = (number(metrics, "cache", f"{side}_{what}") for what in ("per_token", "bytes_per_token"))
    held = 0.0
    for layer in metrics["layers"]:
        cached, window = number(layer, "gqa_cached" if side == "gqa" else "cached"), number(layer, "window")
        if cached is None:
            return None
        held += cached * (tokens if window is None else min(tokens, window))
    return round(held * size / numbers) if held and numbers and size is not None else None


def _span(records: list[dict[str, Any]], form: str, *keys: str) -> str:
    """The value at `keys` of one record, or the least and the greatest of several."""
    seen = [at(record, *keys) for record in records]
    finite = sorted(x for x in map(number, seen) if x is not None)
    if not finite:
        return NOT_FINITE if NOT_FINITE in seen else NOT_MEASURED
    least, greatest = shown(finite[0], form), shown(finite[-1], form)
    unit = "".join(greatest.partition(" ")[1:])
    return greatest if least == greatest else f"{least.removesuffix(unit)} – {greatest}"


def _verdict(conversions: list[dict[str, Any]]) -> str:
    kept = _span(conversions, "percent", *FRACTION)
    cache = f"cache {NOT_MEASURED}" if kept == NOT_MEASURED else f"{kept} of the cache"
    return f"{cache}, perplexity {_span(conversions, 'times', *RATIO)}"


def _cards(groups: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The few numbers that matter: per card one row for each layout."""
    everything = [conversion for part in groups.values() for conversion in part]
    cards: list[dict[str, Any]] = []
    for title, form, keys, gqa in (
        ("Cache kept", "percent", FRACTION, "of the K and V cache at 128K tokens, whole model"),
        ("Perplexity", "times", RATIO, "converted / original; ×1 is lossless"),
        ("Cache per token", "bytes", (*CACHE, "mla_bytes_per_token"), (*CACHE, "gqa_bytes_per_token")),
        ("One sequence of 128K tokens", "bytes", (*AT_128K, "mla"), (*AT_128K, "gqa")),
    ):
        note = gqa if isinstance(gqa, str) else f"GQA: {_span(everything, form, *gqa)}"
        rows = [{"layout": layout, "value": _span(part, form, *keys)} for layout, part in groups.items()]
        cards.append({"title": title, "note": note, "rows": rows})
    return cards


def _shared(record: dict[str, Any]) -> int:
    """Characters before the word in which the texts of a `generate` record part; all of a single text."""
    runs = record["metrics"]["runs"] = _dicts(record["metrics"].get("runs"))
    texts = [str(run.get("text") or "") for run in runs]
    alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*texts, strict=False))
    common = "".join(letters[0] for letters in alike)
    return len(common) if all(text == common for text in texts) else common.rfind(" ") + 1


def _figures(conversions: list[dict[str, Any]]) -> dict[str, Any]:
    """The page's drawings: two of all conversions, and in `own` those of each; only of measured numbers."""
    points = [c for c in conversions if None not in (number(c, *RATIO), number(c, *FRACTION))]
    held = [c for c in conversions if None not in (number(c, *AT_128K, "gqa"), number(c, *AT_128K, "mla"))]
    height = max(2.9, 1.2 + 0.42 * len(held))
    figures: dict[str, Any] = {
        "tradeoff": drawing("tradeoff", _draw_tradeoff, points) if points else "",
        "memory": drawing("memory", _draw_memory, held, height) if held else "",
        "own": [],
    }
    for i, c in enumerate(conversions):
        drawings = (
            ("cached", _draw_cached, any(x > 0 for x in _column(c, "cached"))),
            ("spectrum", _draw_spectrum, any(map(_spectrum, c["metrics"]["layers"]))),
            ("loss", _draw_loss, c["predicted_loss"] is not None),
            ("seconds", _draw_seconds, c["total_seconds"] is not None),
        )
        figures["own"].append({name: drawing(f"{name}{i}", draw, c) for name, draw, there in drawings if there})
    return figures


def _healing(records: list[dict[str, Any]]) -> list[str]:
    """One drawing for each healing with a measured curve, "" for the others."""
    curves = [[p for p in _dicts(r["metrics"].get("curve")) if _points(p)] for r in records]
    return [drawing(f"heal{i}", _draw_healing, curve) if curve else "" for i, curve in enumerate(curves)]


def _points(point: dict[str, Any]) -> bool:
    return None not in [number(point, key) for key in ("tokens", "ppl", "teacher_ppl", "kl")]


def _draw_healing(ax: Any, curve: list[dict[str, Any]]) -> None:
    seen = [point["tokens"] / 1e6 for point in curve]
    ax.plot(seen, [p["ppl"] / p["teacher_ppl"] for p in curve], color=PAINT["latent"], marker="o", ms=3, lw=1.2)
    ax.axhline(1, color=MUTED, lw=1, ls=(0, (4, 3)))
    ax.set(xlabel="tokens seen (millions)", ylabel="validation perplexity / teacher's")


def _column(conversion: dict[str, Any], key: str) -> list[float]:
    layers = conversion["metrics"]["layers"]
    return [math.nan if (found := number(layer, key)) is None else found for layer in layers]


def _spectrum(layer: dict[str, Any]) -> list[float]:
    values = layer.get("spectrum")
    return [number(v) or 0.0 for v in values] if isinstance(values, list) else []


def _draw_tradeoff(ax: Any, conversions: list[dict[str, Any]]) -> None:
    for layout in dict.fromkeys(c["layout"] for c in conversions):
        part = [c["metrics"] for c in conversions if c["layout"] == layout]
        kept, ratio = [100 * m["cache"]["fraction"] for m in part], [m["ratio"] for m in part]
        ax.plot(kept, ratio, color=PAINT[layout], marker=MARKERS[layout], ms=7, ls="", label=layout)
        for x, y in zip(kept, ratio, strict=True) if len(conversions) <= 4 else ():
            ax.annotate(shown(y, "times"), (x, y), (7, 5), textcoords="offset points", color=INK)
    ax.axhline(1, color=MUTED, lw=1, ls=(0, (4, 3)))
    ax.set(xlim=(0, 105), xlabel="KV cache kept (% of GQA)", ylabel="perplexity / original")
    ax.margins(y=0.2)
    ax.legend(loc="upper right")


def _draw_memory(ax: Any, conversions: list[dict[str, Any]]) -> None:
    before = {(c["model"], c["context_bytes"]["128K"]["gqa"]): "gqa" for c in conversions}
    rows = [(f"{model}, GQA", size, layout) for (model, size), layout in before.items()]
    rows += [(c["name"], c["context_bytes"]["128K"]["mla"], c["layout"]) for c in conversions]
    names, sizes, layouts = zip(*rows, strict=True)
    bars = ax.barh(range(len(rows)), sizes, height=0.42, color=[PAINT[layout] for layout in layouts])
    ax.bar_label(bars, [shown(size, "bytes") for size in sizes], padding=4, color=INK)
    for y, name in enumerate(names):
        ax.text(0, y - 0.29, name, va="bottom", color=INK)
    ax.set(ylim=(len(rows) - 0.5, -0.9), xlim=(0, 1.3 * max(sizes)), xticks=[], yticks=[])
    ax.spines[:].set_visible(False)


def _draw_cached(ax: Any, conversion: dict[str, Any]) -> None:
    cached, before, rotary = (_column(conversion, k) for k in ("cached", "gqa_cached", "qk_rope_head_dim"))
    layouts = [str(layer.get("layout")) for layer in conversion["metrics"]["layers"]]
    for layout in dict.fromkeys(layouts):
        own = [i for i, other in enumerate(layouts) if other == layout]
        shared = [rotary[i] if rotary[i] > 0 else 0 for i in own]
        latent = [cached[i] - width for i, width in zip(own, shared, strict=True)]
        paint, label = PAINT.get(layout, MUTED), "stays GQA" if layout == "gqa" else "latent"
        ax.bar(own, latent, color=paint, label=label)
        if any(shared):
            ax.bar(own, shared, bottom=latent, color=paint, alpha=0.45, label="rotary key")
    ax.stairs(before, [i - 0.5 for i in range(len(before) + 1)], color=INK, lw=1, label="before")
    ax.set(xlabel="layer", ylabel="numbers cached per token")
    ax.grid(axis="x", visible=False)
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, borderaxespad=0.2)


def _draw_spectrum(ax: Any, conversion: dict[str, Any]) -> None:
    spectra = [_spectrum(layer) for layer in conversion["metrics"]["layers"]]
    deep = max(map(len, spectra))
    grid = [[math.log10(s[r]) if r < len(s) and s[r] > 0 else math.nan for s in spectra] for r in range(deep)]
    seen = sorted(v for row in grid for v in row if not math.isnan(v)) or [0.0]
    # A few directions carry nearly all and the last ones only rounding: neither may use up the colours.
    low, high = seen[len(seen) // 10], seen[len(seen) * 99 // 100]
    image = ax.imshow(
        grid, cmap="cividis", aspect="auto", origin="lower", interpolation="none", vmin=low, vmax=high,
        extent=(-0.5, len(spectra) - 0.5, 0, deep),
    )  # fmt: skip
    ranks = [r if s else math.nan for r, s in zip(_column(conversion, "kv_lora_rank"), spectra, strict=True)]
    edges = [i - 0.5 for i in range(len(ranks) + 1)]
    for colour, width in (("#000000", 3.4), ("#ffffff", 1.6)):
        ax.stairs(ranks, edges, baseline=None, color=colour, lw=width)
    ax.figure.colorbar(image, ax=ax, label="log10 loss per direction", pad=0.02, extend="both")
    ax.set(xlabel="layer", ylabel="direction of the latent")
    ax.grid(visible=False)


def _draw_loss(ax: Any, conversion: dict[str, Any]) -> None:
    loss, layout = _column(conversion, "predicted_loss"), conversion["layout"]
    ax.plot(range(len(loss)), loss, color=PAINT[layout], marker=MARKERS[layout], ms=4, lw=0.8)
    seen = [v for v in loss if not math.isnan(v)]
    if min(seen) > 0 and max(seen) / min(seen) > 50:
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(lambda v, _: f"{v:g}")
    ax.set(xlabel="layer", ylabel="predicted loss (nats per token)")


def _draw_seconds(ax: Any, conversion: dict[str, Any]) -> None:
    spent = {name: s for name, value in conversion["seconds"].items() if (s := number(value)) is not None}
    bars = ax.barh(list(spent), list(spent.values()), height=0.62, color=PAINT[conversion["layout"]])
    ax.bar_label(bars, [shown(value, "seconds") for value in spent.values()], padding=4, color=INK)
    ax.invert_yaxis()
    ax.set(xlim=(0, 1.18 * max(spent.values()) or 1), xlabel="seconds")
    ax.tick_params(axis="y", length=0, labelcolor=INK)
    ax.grid(axis="y", visible=False)


def _render(report: dict[str, Any]) -> str:
    page = jinja_page("report.html.jinja")
    return page.render(report, figures=_figures(report["conversions"]), at=at, said=_verdict,
                       healed=_healing(report["healings"]))  # fmt: skip
