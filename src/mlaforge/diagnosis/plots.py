"""Plots of a diagnosis: heat maps by layer and head, in one page that needs no other file, and as one PNG.

Everything is drawn from diagnosis.json; nothing is computed here but colours. The page looks as the report's does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlaforge.rendering.page import INK, MUTED, PAINT, PLOT_STYLE, bits_of, drawing, heat, jinja_page

PAGE, PICTURE = "diagnosis.html", "diagnosis.png"
QUESTIONS = {
    "sinks": "Attention sinks", "windows": "How far heads look", "routing": "Experts", "geometry": "Keys and values",
    "cache": "KV cache, allocated", "plan": "Conversion", "bits": "Coded rows",
}  # fmt: skip


def draw(folder: Path, diagnosis: dict[str, Any]) -> None:
    """Writes the page and the PNG into `folder`. diagnosis: as diagnosis.json holds it."""
    page = jinja_page("diagnosis.html.jinja").render(diagnosis, figures=drawings(diagnosis), questions=QUESTIONS)
    (folder / PAGE).write_text(page, encoding="utf-8")
    _picture(folder / PICTURE, _figures(diagnosis))


def drawings(diagnosis: dict[str, Any], key: str = "") -> dict[str, list[dict[str, str]]]:
    """Part of the page -> its drawings, each with title, caption and svg, whose ids start with `key`."""
    drawn: dict[str, list[dict[str, str]]] = {part: [] for part in QUESTIONS}
    for n, figure in enumerate(_figures(diagnosis)):
        svg = drawing(f"{key}{figure['part']}{n}", figure["draw"], figure["what"])
        drawn[figure["part"]].append({"title": figure["title"], "caption": figure["caption"], "svg": svg})
    return drawn


def _picture(path: Path, figures: list[dict[str, Any]]) -> None:
    """All heat maps on one sheet, for where no browser is."""
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
    """The drawings in order: part of the page, title, caption, and how each is drawn from what."""
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
    """A heat map: a column for each layer. `low` and `high` are the ends of a scale that has some."""
    return _figure(part, title, caption, heat, {"columns": columns, "rows": rows, **scale})


def _of_attention(layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    attention = [layer["attention"] for layer in layers]
    share: dict[str, Any] = {"low": 0.0, "high": 1.0, "label": "share of attention"}
    context = [[math.log2(tokens) for tokens in stats["effective_context"]] for stats in attention]
    figures = [
        _map("sinks", "On the first token", "Share of attention that lies on the first token of a window.",
             [stats["first"]["1"] for stats in attention], **share),
        _map("sinks", "On the first 16 tokens", "As before, for the first sixteen tokens together.",
             [stats["first"]["16"] for stats in attention], **share),
        _map("sinks", "Entropy", "Mean entropy of a query's attention in nats: e to it is how many tokens it spreads "
             "over. Dark heads look at few.", [stats["entropy"] for stats in attention], low=0.0, label="nats"),
        _map("sinks", "Norm of the first key", "Norm of the first token's key over the mean of the others.",
             [stats["sink_key_norm"] for stats in attention], "KV head", label="ratio"),
        _map("windows", "Effective context", "Tokens back that hold 90 % of what rests neither on the first four "
             "tokens nor on a learned sink, as a power of two.", context, low=0.0, label="log2 tokens"),
    ]  # fmt: skip
    if any(max(stats["learned_sink"]) > 0 for stats in attention):
        sink = [stats["learned_sink"] for stats in attention]
        caption = "Share of attention that the learned sink takes, so that no token gets it."
        figures.insert(1, _map("sinks", "On the learned sink", caption, sink, **share))
    for w in ("128", "1024"):
        if all(stats["recent"][w] for stats in attention):
            caption = f"Share of attention on the query's own token and the {int(w) - 1} before it."
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
        _map("routing", "Load of the experts", "Tokens routed to each expert over its fair share: 1 is even.", load,
             "expert", low=0.0, label="of a fair share"),
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
        _map("geometry", "Largest logit", "The greatest logit that a query of each head gave a key.",
             [[high for _, high in layer["attention"]["logit_range"]] for layer in layers], label="logit"),
        _map("geometry", "Outlier dimension of keys", "Largest root mean square of a key dimension over the median of "
             "its head, as a power of two.", [[math.log2(max(ratio, 1)) for ratio in row] for row in outliers],
             "KV head", low=0.0, label="log2 ratio"),
        _map("geometry", "Energy of the rotary frequencies", "Share of the keys' energy in each rotary pair, all KV "
             "heads together; pair 0 turns fastest.", energy, "rotary pair", label="log10 share"),
        _figure("geometry", "Effective rank", "Dimensions that keys, values and both fill, and both as the loss weighs "
                "them. The black line is what a token caches now.", _lines,
                {"lines": ranks, "label": "dimensions", "now": [layer["gqa_cached"] for layer in layers]}),
    ]  # fmt: skip


def _of_plan(layers: list[dict[str, Any]], budgets: list[float]) -> list[dict[str, Any]]:
    figures = []
    for layout in layers[0]["first_order"]:
        table = [[_log(layer["first_order"][layout][str(b)]) for b in budgets] for layer in layers]
        if not all(math.isnan(value) for row in table for value in row):
            caption = (
                f"Loss in nats per token that converting one layer to {layout} adds to first order, by the share of "
                "its cache that is kept: it compares layers; their sum comes out too small."
            )
            ticks = [f"{100 * b:g} %" for b in budgets]
            title = f"First-order loss, {layout}"
            figures.append(_map("plan", title, caption, table, "cache kept", label="log10 nats", ticks=ticks))
    caption = "Latent rank of each layer in plan.json as bars; the black line is the uniform rank of the same total."
    return [*figures, _figure("plan", "Suggested ranks", caption, _ranks, [layer["plan"] for layer in layers])]


def _of_bits(layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Nothing of a diagnosis that an older version made."""
    coded = [layer.get("coded") or {} for layer in layers]
    names = next((list(each) for each in coded if each), [])
    return [
        _map("bits", f"Bits by number, {name} in the mean", "How many bits each number of a latent is given where rows "
             f"are coded with {name} bits for each number that GQA caches. Numbers above the colours are cut.",
             [bits_of(each[name]["code"] if each else []) for each in coded], "number of the latent", low=0.0,
             label="bits")
        for name in names[:1]
    ]  # fmt: skip


def _log(value: float | None) -> float:
    return math.nan if value is None else math.log10(max(value, 1e-9))


def _lines(ax: Any, what: dict[str, Any]) -> None:
    # There are more colours than lines.
    for (name, values), colour, marker in zip(what["lines"].items(), PAINT.values(), "oDs^", strict=False):
        ax.plot(range(len(values)), values, color=colour, marker=marker, ms=3.5, lw=0.9, label=name)
    if now := what.get("now"):
        ax.stairs(now, [i - 0.5 for i in range(len(now) + 1)], color=INK, lw=1, baseline=None)
    ax.set(xlabel="layer", ylabel=what["label"])
    ax.set_ylim(bottom=0)
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, borderaxespad=0.2)


def _ranks(ax: Any, plans: list[dict[str, Any]]) -> None:
    for layout in dict.fromkeys(plan["layout"] for plan in plans):
        own = [i for i, plan in enumerate(plans) if plan["layout"] == layout]
        heights = [plans[i]["kv_lora_rank"] for i in own]
        ax.bar(own, heights, color=PAINT.get(layout, MUTED), label="stays GQA" if layout == "gqa" else layout)
    uniform = [plan["uniform_rank"] or math.nan for plan in plans]
    ax.stairs(uniform, [i - 0.5 for i in range(len(uniform) + 1)], color=INK, lw=1, baseline=None, label="uniform")
    ax.set(xlabel="layer", ylabel="latent rank")
    ax.grid(axis="x", visible=False)
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, borderaxespad=0.2)
