"""Plots of a diagnosis: heat maps by layer and head, as a self-contained HTML page and as one PNG.

All data come from diagnosis.json. The page has the style of the report.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlaforge.rendering.page import INK, MUTED, PAINT, PLOT_STYLE, bits_of, can_draw, drawing, heat, jinja_page

PAGE, PICTURE = "diagnosis.html", "diagnosis.png"
QUESTIONS = {
    "sinks": "Attention sinks", "windows": "How far heads look", "routing": "Experts", "geometry": "Keys and values",
    "cache": "KV cache, allocated", "plan": "Conversion", "bits": "Coded rows",
}  # fmt: skip


def draw(folder: Path, diagnosis: dict[str, Any]) -> None:
    """Write the page and the PNG into `folder`, without plots if matplotlib is missing. diagnosis: the content of
    diagnosis.json."""
    with_plots = can_draw(f"{PICTURE} and the plots of {PAGE}")
    figures = drawings(diagnosis) if with_plots else {part: [] for part in QUESTIONS}
    page = jinja_page("diagnosis.html.jinja").render(diagnosis, figures=figures, questions=QUESTIONS)
    (folder / PAGE).write_text(page, encoding="utf-8")
    if with_plots:
        _picture(folder / PICTURE, _figures(diagnosis))


def drawings(diagnosis: dict[str, Any], key: str = "") -> dict[str, list[dict[str, str]]]:
    """Return part of the page -> drawings, each with title, caption and svg; `key` prefixes the ids in the svg."""
    drawn: dict[str, list[dict[str, str]]] = {part: [] for part in QUESTIONS}
    for n, figure in enumerate(_figures(diagnosis)):
        svg = drawing(f"{key}{figure['part']}{n}", figure["draw"], figure["what"])
        drawn[figure["part"]].append({"title": figure["title"], "caption": figure["caption"], "svg": svg})
    return drawn


def _picture(path: Path, figures: list[dict[str, Any]]) -> None:
    """Draw all heat maps on one sheet, for use without a browser."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    maps = [figure for figure in figures if figure["draw"] is heat]
    rows = math.ceil(len(maps) / 3)
    with rc_context(PLOT_STYLE):
        sheet = Figure(figsize=(16.5, 3.3 * rows), dpi=110, layout="constrained")
        axes = sheet.subplots(rows, 3, squeeze=False).flatten()
        for ax, figure in zip(axes[: len(maps)], maps, strict=True):
            heat(ax, figure["what"])
            ax.set_title(figure["title"], loc="left", fontsize=10)
            ax.locator_params(axis="x", integer=True)
        for ax in axes[len(maps) :]:
            ax.set_axis_off()
        sheet.savefig(path, metadata={"Software": None})


def _figures(diagnosis: dict[str, Any]) -> list[dict[str, Any]]:
    """Return all figures in order: part of the page, title, caption, drawing function and its data."""
    layers = diagnosis["layers"]
    return [
        *_of_attention(layers),
        *_of_experts(layers),
        *_of_geometry(layers),
        *_of_plan(layers, diagnosis["budgets"]),
        *_of_bits(layers),
    ]


def _figure(part: str, title: str, caption: str, draw: Callable[[Any, Any], None], what: Any) -> dict[str, Any]:
    return {"part": part, "title": title, "caption": caption, "draw": draw, "what": what}


def _map(
    part: str, title: str, caption: str, columns: list[list[float]], rows: str = "head", **scale: Any
) -> dict[str, Any]:
    """Return a heat map with a column per layer. scale: may contain limits `low` and `high`."""
    return _figure(part, title, caption, heat, {"columns": columns, "rows": rows, **scale})


def _of_attention(layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    attention = [layer["attention"] for layer in layers]
    share: dict[str, Any] = {"low": 0.0, "high": 1.0, "label": "share of attention"}
    context = [[math.log2(tokens) for tokens in stats["effective_context"]] for stats in attention]
    figures = [
        _map("sinks", "On the first token", "Share of attention on the first token of a window.",
             [stats["first"]["1"] for stats in attention], **share),
        _map("sinks", "On the first 16 tokens", "Share of attention on the first 16 tokens of a window.",
             [stats["first"]["16"] for stats in attention], **share),
        _map("sinks", "Entropy", "Mean entropy of a query's attention in nats; exp(entropy) is the effective number of "
             "tokens. Dark heads attend to few.", [stats["entropy"] for stats in attention], low=0.0, label="nats"),
        _map("sinks", "Norm of the first key", "Norm of the first token's key over the mean of the others.",
             [stats["sink_key_norm"] for stats in attention], "KV head", label="ratio"),
        _map("windows", "Effective context", "Distance within which 90 % of the attention lies, excluding the first "
             "four tokens and the learned sink; log2.", context, low=0.0, label="log2 tokens"),
    ]  # fmt: skip
    if any(max(stats["learned_sink"]) > 0 for stats in attention):
        sink = [stats["learned_sink"] for stats in attention]
        caption = "Share of attention on the learned sink."
        figures.insert(1, _map("sinks", "On the learned sink", caption, sink, **share))
    for w in ("128", "1024"):
        if all(stats["recent"][w] for stats in attention):
            caption = f"Share of attention on the query's token and the {int(w) - 1} tokens before it."
            recent = [stats["recent"][w] for stats in attention]
            figures.append(_map("windows", f"Within {w} tokens", caption, recent, **share))
    return figures


def _of_experts(layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    routed = [layer["routing"] for layer in layers]
    if not any(routed):
        return []
    load = [stats["load"] if stats else [] for stats in routed]
    lines = {
        label: [stats[name] if stats else math.nan for stats in routed]
        for label, name in (("variation of the load", "cv"), ("router entropy (nats)", "router_entropy"))
    }
    return [
        _map("routing", "Load of the experts", "Tokens routed to each expert, relative to a fair share: 1 is even.",
             load, "expert", low=0.0, label="of a fair share"),
        _figure("routing", "Imbalance and router entropy", "Standard deviation of the load over its mean, and the "
                "entropy of the router's softmax.", _lines, {"lines": lines, "label": ""}),
    ]  # fmt: skip


def _of_geometry(layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    outliers = [layer["geometry"]["outliers"]["k"]["largest"] for layer in layers]
    pairs = [[sum(heads) for heads in zip(*layer["geometry"]["k_pairs"], strict=True)] for layer in layers]
    energy = [[_log(value / max(sum(row), 1e-30)) for value in row] for row in pairs]
    names = {"k": "keys", "v": "values", "joint": "both", "loss": "both, by loss"}
    ranks = {label: [layer["effective_rank"][name] for layer in layers] for name, label in names.items()}
    return [
        _map("geometry", "Largest logit", "Largest logit of a query and a key in each head.",
             [[high for _, high in layer["attention"]["logit_range"]] for layer in layers], label="logit"),
        _map("geometry", "Outlier dimension of keys", "Largest root mean square of a key dimension, relative to the "
             "median of its head; log2.", [[math.log2(max(ratio, 1)) for ratio in row] for row in outliers],
             "KV head", low=0.0, label="log2 ratio"),
        _map("geometry", "Energy of the rotary frequencies", "Share of the keys' energy in each rotary pair, summed "
             "over KV heads; pair 0 has the highest frequency.", energy, "rotary pair", label="log10 share"),
        _figure("geometry", "Effective rank", "Effective rank of keys, of values, of both, and of both weighted by the "
                "loss. The black line is the current cache per token.", _lines,
                {"lines": ranks, "label": "dimensions", "current": [layer["gqa_cached"] for layer in layers]}),
    ]  # fmt: skip


def _of_plan(layers: list[dict[str, Any]], budgets: list[float]) -> list[dict[str, Any]]:
    figures = []
    for layout in layers[0]["first_order"]:
        table = [[_log(layer["first_order"][layout][str(b)]) for b in budgets] for layer in layers]
        if not all(math.isnan(value) for row in table for value in row):
            caption = (
                f"First-order loss in nats per token of converting one layer to {layout}, by the share of its cache "
                "that is kept. It compares layers; the sum underestimates the loss."
            )
            ticks = [f"{100 * b:g} %" for b in budgets]
            title = f"First-order loss, {layout}"
            figures.append(_map("plan", title, caption, table, "cache kept", label="log10 nats", ticks=ticks))
    caption = "Latent rank of each layer in plan.json (bars), and the uniform rank with the same total (black line)."
    return [*figures, _figure("plan", "Suggested ranks", caption, _ranks, [layer["plan"] for layer in layers])]


def _of_bits(layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the bit maps of coded rows; none for a diagnosis of an older version."""
    coded = [layer.get("coded") or {} for layer in layers]
    names = next((list(layer) for layer in coded if layer), [])
    return [
        _map("bits", f"Bits per coordinate, mean {name}", "Bits of each latent coordinate for rows coded with "
             f"{name} bits per number that GQA caches. Coordinates above the colours are dropped.",
             [bits_of(layer[name]["code"] if layer else []) for layer in coded], "latent coordinate", low=0.0,
             label="bits")
        for name in names[:1]
    ]  # fmt: skip


def _log(value: float | None) -> float:
    return math.nan if value is None else math.log10(max(value, 1e-9))


def _lines(ax: Any, what: dict[str, Any]) -> None:
    # PAINT has more colours than there are lines.
    for (name, values), colour, marker in zip(what["lines"].items(), PAINT.values(), "oDs^", strict=False):
        ax.plot(range(len(values)), values, color=colour, marker=marker, ms=3.5, lw=0.9, label=name)
    if current := what.get("current"):
        ax.stairs(current, [i - 0.5 for i in range(len(current) + 1)], color=INK, lw=1, baseline=None)
    ax.set(xlabel="layer", ylabel=what["label"])
    ax.set_ylim(bottom=0)
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, borderaxespad=0.2)


def _ranks(ax: Any, plans: list[dict[str, Any]]) -> None:
    for layout in dict.fromkeys(plan["layout"] for plan in plans):
        indices = [i for i, plan in enumerate(plans) if plan["layout"] == layout]
        heights = [plans[i]["kv_lora_rank"] for i in indices]
        ax.bar(indices, heights, color=PAINT.get(layout, MUTED), label="stays GQA" if layout == "gqa" else layout)
    uniform = [plan["uniform_rank"] or math.nan for plan in plans]
    ax.stairs(uniform, [i - 0.5 for i in range(len(uniform) + 1)], color=INK, lw=1, baseline=None, label="uniform")
    ax.set(xlabel="layer", ylabel="latent rank")
    ax.grid(axis="x", visible=False)
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, borderaxespad=0.2)
