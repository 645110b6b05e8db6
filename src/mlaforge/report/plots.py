"""Plots of the report, from the measured numbers that report/report.py collects."""

from __future__ import annotations

import math
from typing import Any

from mlaforge.diagnosis import plots
from mlaforge.rendering.page import INK, MARKERS, MUTED, PAINT, bits_of, drawing, heat, logarithmic, number, shown
from mlaforge.report import bench_plots
from mlaforge.report.bench_results import dicts

RATIO, FRACTION = ("metrics", "ratio"), ("metrics", "cache", "fraction")
SIDES = ("mla", "gqa")


def figures(report: dict[str, Any], diagnoses: list[dict[str, Any]]) -> dict[str, Any]:
    """Plots of the page as SVG: `tradeoff`, `memory` and `ranks` of all conversions, and lists with one entry per
    conversion (`by_layer`), healing, training, acceptance and diagnosis. diagnoses: contents of their files."""
    conversions = report["conversions"]
    points = [c for c in conversions if None not in (number(c, *RATIO), number(c, *FRACTION))]
    sized = [c for c in conversions if None not in (number(_longest(c), "gqa"), number(_longest(c), "mla"))]
    return {
        "tradeoff": drawing("tradeoff", _draw_tradeoff, points) if points else "",
        "memory": drawing("memory", _draw_memory, sized, max(2.9, 1.2 + 0.42 * len(sized))) if sized else "",
        "ranks": _ranks(conversions),
        "by_layer": [_by_layer(i, c) for i, c in enumerate(conversions)],
        "selections": [_selection(i, record) for i, record in enumerate(report["selections"])],
        "healings": [_healing(i, record) for i, record in enumerate(report["healings"])],
        "trainings": [_training(i, record) for i, record in enumerate(report["trainings"])],
        "acceptances": [_comparison(i, record) for i, record in enumerate(report["acceptances"])],
        "diagnoses": [_diagnosis(i, body) for i, body in enumerate(diagnoses)],
        "scenarios": [bench_plots.scenario(body, f"s{i}") for i, body in enumerate(report["scenarios"])],
        "kernels": [bench_plots.kernels(body, f"k{i}") for i, body in enumerate(report["kernels"])],
    }


def _by_layer(i: int, c: dict[str, Any]) -> dict[str, str]:
    """Plots of one conversion, for which there are numbers."""
    drawings = (
        ("cached", _draw_cached, any(x > 0 for x in _column(c, "cached"))),
        ("bits", _draw_bits, c["bits"] is not None),
        ("spectrum", _draw_spectrum, any(map(_spectrum, c["metrics"]["layers"]))),
        ("loss", _draw_loss, c["predicted_loss"] is not None),
        ("seconds", _draw_seconds, c["total_seconds"] is not None),
    )
    return {name: drawing(f"{name}{i}", draw, c) for name, draw, available in drawings if available}


def _ranks(conversions: list[dict[str, Any]]) -> list[dict[str, str]]:
    """For each model with several conversions, the cache share of every layer."""
    by_model: list[dict[str, str]] = []
    for model in dict.fromkeys(c["model"] for c in conversions):
        shares = {
            c["name"]: [a / b if b else math.nan for a, b in zip(*map(c["row_bytes"].get, SIDES), strict=True)]
            for c in conversions if c["model"] == model and c["row_bytes"] and c["metrics"]["layers"]
        }  # fmt: skip
        if len(shares) > 1 and len({len(row) for row in shares.values()}) == 1:
            columns = [list(column) for column in zip(*shares.values(), strict=True)]
            data = {"columns": columns, "rows": "", "ticks": [name[-24:] for name in shares], "label": "of GQA's cache"}
            svg = drawing(f"ranks{len(by_model)}", heat, data, 1.5 + 0.22 * len(shares))
            by_model.append({"model": model, "svg": svg})
    return by_model


def _selection(i: int, record: dict[str, Any]) -> dict[str, str]:
    """Tokens read by layer, and the loss of a selection in one layer only, if measured."""
    sparse = record["sparse"]
    if len({(layer.get("kind"), layer["topk"]) for layer in sparse.values()}) < 2:
        return {}  # no layer differs from another
    drawings = {"read": drawing(f"read{i}", _draw_read, sparse)}
    if all(number(layer, "kl") is not None for layer in sparse.values()):
        drawings["kl"] = drawing(f"readkl{i}", _draw_read_kl, sparse)
    return drawings


def _draw_read(ax: Any, sparse: dict[int, dict[str, Any]]) -> None:
    for kind, label in (("full", "with an index"), ("shared", "with an earlier layer's selection")):
        bars = {i: layer["topk"] for i, layer in sparse.items() if layer.get("kind") == kind}
        if bars:
            ax.bar(
                list(bars), list(bars.values()), color=PAINT["latent"], alpha=1 if kind == "full" else 0.4, label=label
            )
    ax.set(xlabel="layer", ylabel="tokens read")
    if any(layer.get("kind") == "shared" for layer in sparse.values()):
        ax.legend()


def _draw_read_kl(ax: Any, sparse: dict[int, dict[str, Any]]) -> None:
    ax.bar(list(sparse), [1000 * layer["kl"] for layer in sparse.values()], color=PAINT["latent"])
    ax.set(xlabel="layer", ylabel="KL (thousandths of a nat)")


def _healing(i: int, record: dict[str, Any]) -> dict[str, str]:
    """Perplexity and KL by tokens seen, if there is a measured curve."""
    keys = ("tokens", "ppl", "teacher_ppl", "kl")
    curve = [p for p in dicts(record["metrics"].get("curve")) if None not in [number(p, key) for key in keys]]
    draws = {"ppl": _draw_healing, "kl": _draw_kl}
    return {name: drawing(f"heal{name}{i}", draw, curve) for name, draw in draws.items()} if curve else {}


def _draw_healing(ax: Any, curve: list[dict[str, Any]]) -> None:
    tokens = [point["tokens"] / 1e6 for point in curve]
    ax.plot(tokens, [p["ppl"] / p["teacher_ppl"] for p in curve], color=PAINT["latent"], marker="o", ms=3, lw=1.2)
    ax.axhline(1, color=MUTED, lw=1, ls=(0, (4, 3)))
    ax.set(xlabel="tokens seen (millions)", ylabel="validation perplexity / teacher's")


def _draw_kl(ax: Any, curve: list[dict[str, Any]]) -> None:
    tokens, kl = [point["tokens"] / 1e6 for point in curve], [point["kl"] for point in curve]
    ax.plot(tokens, kl, color=PAINT["latent"], marker="o", ms=3, lw=1.2)
    if min(kl) > 0:
        logarithmic(ax.yaxis)
    ax.set(xlabel="tokens seen (millions)", ylabel="validation KL (nats per token)")


def _training(i: int, record: dict[str, Any]) -> dict[str, str]:
    """Acceptance by drafted token, tokens per step and loss by tokens seen, each if measured."""
    curve = [p for p in dicts(record["metrics"].get("curve")) if number(p, "tokens") is not None]
    positions: list[list[tuple[float, float]]] = []
    for point in curve:
        shares = point.get("acceptance")
        for position, share in enumerate(shares if isinstance(shares, list) else []):
            if position == len(positions):
                positions.append([])
            if number(share) is not None:
                positions[position].append((point["tokens"] / 1e6, share))
    drawings = {"acceptance": drawing(f"draftacceptance{i}", _draw_acceptance, positions)} if any(positions) else {}
    for key, label in (("acceptance_length", "tokens per step, 3 drafted"), ("loss", "loss")):
        line = [(p["tokens"] / 1e6, p[key]) for p in curve if number(p, key) is not None]
        if line:
            drawings[key] = drawing(f"draft{key}{i}", _draw_learning, (line, label))
    return drawings


def _draw_acceptance(ax: Any, positions: list[list[tuple[float, float]]]) -> None:
    for position, line in ((position, line) for position, line in enumerate(positions) if line):
        # Later tokens are paler.
        alpha, xy = 1 - 0.8 * position / len(positions), zip(*line, strict=True)
        ax.plot(*xy, color=PAINT["latent"], alpha=alpha, marker="o", ms=3, lw=1.2, label=position + 1)
    ax.set(xlabel="tokens seen (millions)", ylabel="accepted, by drafted token")
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=8, borderaxespad=0.2, handlelength=1, columnspacing=1)


def _draw_learning(ax: Any, data: tuple[list[tuple[float, float]], str]) -> None:
    line, label = data
    ax.plot(*zip(*line, strict=True), color=PAINT["latent"], marker="o", ms=3, lw=1.2)
    ax.set(xlabel="tokens seen (millions)", ylabel=label)


def _comparison(i: int, record: dict[str, Any]) -> str:
    """Used share of each criterion's allowance."""
    evaluated = [c for c in record["criteria"] if number(c, "worse") is not None and number(c, "limit")]
    return drawing(f"criteria{i}", _draw_criteria, evaluated, 1.3 + 0.45 * len(evaluated)) if evaluated else ""


def _draw_criteria(ax: Any, criteria: list[dict[str, Any]]) -> None:
    for y, c in enumerate(criteria):
        used, color = c["worse"] / c["limit"], INK if c.get("passed") is True else PAINT["latent_rope"]
        ends = c.get("interval")
        if isinstance(ends, list) and len(ends) == 2 and None not in map(number, ends):
            ax.plot([end / c["limit"] for end in ends], [y, y], color=MUTED, lw=2)
        ax.plot([used], [y], color=color, marker="o", ms=6, ls="")
    ax.axvline(1, color=MUTED, lw=1, ls=(0, (4, 3)))
    ax.set_yticks(range(len(criteria)), [str(c.get("name"))[:32] for c in criteria])
    ax.set(ylim=(len(criteria) - 0.5, -0.5), xlabel="share of the criterion's allowance (below 1 passes)")
    ax.grid(axis="y", visible=False)


def _diagnosis(i: int, body: dict[str, Any]) -> list[dict[str, str]]:
    """Plots of a diagnosis; [] if its file has another format than `diagnose` writes."""
    try:
        return [figure for part in plots.drawings(body, f"d{i}").values() for figure in part]
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        return []


def _column(conversion: dict[str, Any], key: str) -> list[float]:
    layers = conversion["metrics"]["layers"]
    return [math.nan if (value := number(layer, key)) is None else value for layer in layers]


def _spectrum(layer: dict[str, Any]) -> list[float]:
    values = layer.get("spectrum")
    return [number(v) or 0.0 for v in values] if isinstance(values, list) else []


def _draw_tradeoff(ax: Any, conversions: list[dict[str, Any]]) -> None:
    for layout in dict.fromkeys(c["layout"] for c in conversions):
        part = [c for c in conversions if c["layout"] == layout]
        percent = [100 * c["metrics"]["cache"]["fraction"] for c in part]
        ratio = [c["metrics"]["ratio"] for c in part]
        ax.plot(percent, ratio, color=PAINT[layout], marker=MARKERS[layout], ms=7, ls="", label=layout)
        for x, c in zip(percent, part, strict=True):
            if c["ratio_interval"]:
                ax.plot([x, x], c["ratio_interval"], color=PAINT[layout], lw=1.2, marker="_", ms=9)
        for x, y in zip(percent, ratio, strict=True) if len(conversions) <= 4 else ():
            ax.annotate(shown(y, "times"), (x, y), (7, 5), textcoords="offset points", color=INK)
    ax.axhline(1, color=MUTED, lw=1, ls=(0, (4, 3)))
    ax.set(xlim=(0, 105), xlabel="KV cache kept (% of GQA)", ylabel="perplexity / original")
    ax.margins(y=0.2)
    ax.legend(loc="upper right")


def _longest(conversion: dict[str, Any]) -> dict[str, float | None]:
    """Bytes at the longest reported context."""
    return list(conversion["context_bytes"].values())[-1]


def _draw_memory(ax: Any, conversions: list[dict[str, Any]]) -> None:
    before = {(c["model"], _longest(c)["gqa"]): "gqa" for c in conversions}
    rows = [(f"{model}, GQA", size, layout) for (model, size), layout in before.items()]
    rows += [(c["name"], _longest(c)["mla"], c["layout"]) for c in conversions]
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
        layers = [i for i, other in enumerate(layouts) if other == layout]
        shared = [rotary[i] if rotary[i] > 0 else 0 for i in layers]
        latent = [cached[i] - width for i, width in zip(layers, shared, strict=True)]
        paint, label = PAINT.get(layout, MUTED), "stays GQA" if layout == "gqa" else "latent"
        ax.bar(layers, latent, color=paint, label=label)
        if any(shared):
            ax.bar(layers, shared, bottom=latent, color=paint, alpha=0.45, label="rotary key")
    ax.stairs(before, [i - 0.5 for i in range(len(before) + 1)], color=INK, lw=1, label="before")
    ax.set(xlabel="layer", ylabel="elements cached per token")
    ax.grid(axis="x", visible=False)
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, borderaxespad=0.2)


def _draw_bits(ax: Any, conversion: dict[str, Any]) -> None:
    columns = [bits_of(layer.get("code") or []) for layer in conversion["metrics"]["layers"]]
    heat(ax, {"columns": columns, "rows": "coordinate of the latent", "label": "bits", "low": 0.0})
    before = _column(conversion, "gqa_cached")
    ax.stairs(before, [i - 0.5 for i in range(len(before) + 1)], baseline=None, color=INK, lw=1)
    ax.set_ylim(-0.5, 1.03 * max(before))


def _draw_spectrum(ax: Any, conversion: dict[str, Any]) -> None:
    spectra = [_spectrum(layer) for layer in conversion["metrics"]["layers"]]
    depth = max(map(len, spectra))
    grid = [[math.log10(s[r]) if r < len(s) and s[r] > 0 else math.nan for s in spectra] for r in range(depth)]
    values = sorted(v for row in grid for v in row if not math.isnan(v)) or [0.0]
    # Percentiles, as a few directions dominate and the last ones are only rounding: neither may use up the colours.
    low, high = values[len(values) // 10], values[len(values) * 99 // 100]
    image = ax.imshow(
        grid, cmap="cividis", aspect="auto", origin="lower", interpolation="none", vmin=low, vmax=high,
        extent=(-0.5, len(spectra) - 0.5, 0, depth),
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
    values = [v for v in loss if not math.isnan(v)]
    if min(values) > 0 and max(values) / min(values) > 50:
        logarithmic(ax.yaxis)
    ax.set(xlabel="layer", ylabel="predicted loss (nats per token)")


def _draw_seconds(ax: Any, conversion: dict[str, Any]) -> None:
    seconds = {name: s for name, value in conversion["seconds"].items() if (s := number(value)) is not None}
    bars = ax.barh(list(seconds), list(seconds.values()), height=0.62, color=PAINT[conversion["layout"]])
    ax.bar_label(bars, [shown(value, "seconds") for value in seconds.values()], padding=4, color=INK)
    ax.invert_yaxis()
    ax.set(xlim=(0, 1.18 * max(seconds.values()) or 1), xlabel="seconds")
    ax.tick_params(axis="y", length=0, labelcolor=INK)
    ax.grid(axis="y", visible=False)
