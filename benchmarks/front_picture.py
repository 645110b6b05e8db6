"""Plots docs/front-light.svg and docs/front-dark.svg from committed measurements.

    python benchmarks/front_picture.py [--folder docs]

Quality by bytes from front.json, kv_cache.json, conversion.json and healing.json, on text of the calibration's kind and
on another; decoding speed by the same bytes from engine-rows.json. docs/results.md says how each point was measured.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlaforge.rendering.page import GRID, INK, MUTED, PLOT_STYLE

HERE = Path(__file__).parent
TEXTS = {"wiki": "WikiText: the calibration's kind of text", "code": "Python source: another kind"}
CASES = {"2048x1": "Decoding after 2,048 tokens, one request", "8000x1": "Decoding after 8,000 tokens, one request"}
# Below the first no difference is measurable; above the last a model is useless.
RATIOS = (1.001, 1.003, 1.01, 1.03, 1.1, 1.3, 2.0)
# Placeholder colours, as in page.py, which are replaced by a theme's colours.
CODED, LATENT, ROPE, RIVAL, OTHER, THIRD = "#000021", "#000022", "#000023", "#000024", "#000025", "#000026"
THEMES = {
    "light": {INK: "#1b1f24", MUTED: "#5b6470", GRID: "#e1e5ea", CODED: "#0072b2", LATENT: "#5aa9d6", ROPE: "#d55e00",
              RIVAL: "#8a939e", OTHER: "#007a5a", THIRD: "#a0529c"},
    "dark": {INK: "#e4e7eb", MUTED: "#9aa4b0", GRID: "#2d333b", CODED: "#56b4e9", LATENT: "#3d84ad", ROPE: "#f0954a",
             RIVAL: "#8b95a1", OTHER: "#3cc49a", THIRD: "#cf8fca"},
}  # fmt: skip
# Line -> colour, marker, label, and the label's position in the first panel (share of bytes, ratio).
LINES = {
    "coded": (CODED, "o", "mlaforge, coded:\n4, 3, 2 bits", (0.117, 1.0033)),
    "blocks": (RIVAL, "s", "int8, int4,\nint2* (KIVI)", (0.262, 1.0018)),
    "rotated": (THIRD, "v", "Hadamard, Lloyd-Max*\n(TurboQuant)", (0.2, 1.65)),
    "plain code": (OTHER, "D", "plain PCA*\n(KVTC)", (0.117, 1.07)),
    "latent": (LATENT, "o", "latent by rank\n○ bf16   ● int8", (0.62, 1.012)),
    "latent_rope": (ROPE, "^", "latent_rope by rank\n△ bf16   ▲ int8", (0.56, 1.2)),
}
NOTE = "* simulated rounding\n↓ healed (WikiText alone)\nat × 1.001: that or less"
# Peer -> (layout, storage), colour, marker, label, and the label's offset from the point.
SPEEDS = {
    "original": (("gqa", "bf16"), RIVAL, "s", "bf16", (0, 9, "center")),
    "original, int8 rows": (("gqa", "int8"), RIVAL, "s", "int8", (9, -3, "left")),
    "original, int4 rows": (("gqa", "int4"), RIVAL, "s", "int4", (0, 9, "center")),
    "latent": (("latent", 0.5), LATENT, "o", "latent", (0, -17, "center")),
    "latent_rope": (("latent_rope", 0.5), ROPE, "^", "latent_rope", (0, 9, "center")),
    "latent, 4 bits": (("latent", "4 bits"), CODED, "o", "coded, 4 bits", (0, -17, "center")),
}


def rows_of(name: str) -> Any:
    return json.loads((HERE / f"{name}.json").read_text(encoding="utf-8"))["rows"]


def points() -> dict[str, list[dict[str, Any]]]:
    """Points of each line, sorted by bytes: `bytes` relative to bf16, `ratio` by text, `stored`."""
    front, conversion = rows_of("front"), rows_of("conversion")
    stored = {(row["layout"], row["stored"]): row for row in rows_of("kv_cache")}
    lines: dict[str, list[dict[str, Any]]] = {name: [] for name in LINES}

    def add(line: str, row: dict[str, Any], size: float, kind: str) -> None:
        lines[line].append({"bytes": size, "ratio": row["ratio"], "stored": kind})

    for kind in ("4 bits", "3 bits", "2 bits"):
        add("coded", row := stored["latent", kind], row["bytes_ratio"], kind)
    for kind in ("int8", "int4"):
        add("blocks", row := stored["gqa", kind], row["bytes_ratio"], kind)
    for row in front:
        if row["form"] in lines and "whole" not in row["stored"]:
            add(row["form"], row, row["bytes_ratio"], row["stored"])
    measured = {(row["form"], row["budget"]) for row in front}
    for row in conversion:
        if row["calibration"] == "wiki" and (row["layout"], row["budget"]) not in measured:
            add(row["layout"], row, row["budget"], "bf16")
    return {name: sorted(line, key=lambda p: p["bytes"]) for name, line in lines.items()}


def healed() -> Iterator[tuple[str, float, list[float]]]:
    """Yield (layout, bytes relative to bf16, ratios on WikiText before and after healing)."""
    for name, row in rows_of("healing").items():
        layout, budget = name.split("-")
        yield layout, float(budget), row["ratio"]


def height(ratio: float) -> float:
    """Axis position of a ratio: logarithm of the loss, clipped at the first tick."""
    return math.log10(max(ratio, RATIOS[0]) - 1)


def draw_quality(ax: Any, text: str, lines: dict[str, list[dict[str, Any]]]) -> None:
    for name, (color, marker, label, (x, y)) in LINES.items():
        if text == "wiki" and lines[name]:
            ax.text(x, height(y), label, color=color, va="center", weight="bold" if name == "coded" else "normal")
        for kind, filled in (("bf16", False), ("int8", True)) if name.startswith("latent") else (("", True),):
            selected = [p for p in lines[name] if kind in p["stored"]]
            xs, ys = [p["bytes"] for p in selected], [height(p["ratio"][text]) for p in selected]
            width, size, above = (2.4, 7, 3) if name == "coded" else (1.2, 5, 2)
            ax.plot(xs, ys, color=color, lw=width, ls="-" if filled else (0, (4, 2)), zorder=above)
            # Points beyond the upper edge are omitted; their line shows the direction.
            inside = [(x, y) for x, y in zip(xs, ys, strict=True) if y <= height(RATIOS[-1])]
            ax.plot(
                *zip(*inside, strict=True), ls="", color=color, marker=marker, ms=size, mfc=color if filled else "none",
                zorder=above, clip_on=False,
            )  # fmt: skip
    if text == "wiki":
        for layout, size, (before, after) in healed():
            color, marker = LINES[layout][:2]
            arrow = {"arrowstyle": "->", "color": color, "lw": 1.2}
            ax.annotate("", (size, height(after)), (size, height(before)), arrowprops=arrow)
            ax.plot([size], [height(before)], marker=marker, color=color, mfc="none", ms=5)
    ax.set_yticks([height(r) for r in RATIOS], [f"× {r:g}" for r in RATIOS])
    ax.set_ylim(height(RATIOS[0]), height(2.6))


def draw_speed(ax: Any, case: str) -> None:
    sizes = {(row["layout"], row["stored"]): row["bytes_ratio"] for row in rows_of("kv_cache")}
    speeds = {row["peer"]: row["tokens_per_second"] for row in rows_of("engine-rows") if row["case"] == case}
    for peer, (stored, color, marker, name, (x, y, side)) in SPEEDS.items():
        at = sizes.get(stored, stored[1]), speeds[peer]
        ax.plot(*at, color=color, marker=marker, ms=7, ls="")
        ax.annotate(name, at, (x, y), textcoords="offset points", ha=side, color=color)
    ax.set_ylim(0, 70)


def draw(figure: Any) -> None:
    top, bottom = figure.subplots(2, 2, sharex=True, sharey="row", height_ratios=(1.6, 1))
    figure.subplots_adjust(left=0.085, right=0.985, top=0.955, bottom=0.07, hspace=0.16, wspace=0.06)
    lines = points()
    for ax, text in zip(top, TEXTS, strict=True):
        draw_quality(ax, text, lines)
        ax.set_title(TEXTS[text], loc="left", fontsize=10, color=INK)
    top[1].text(0.117, height(1.0025), NOTE, color=MUTED, va="center")
    for ax, case in zip(bottom, CASES, strict=True):
        draw_speed(ax, case)
        ax.set_title(CASES[case], loc="left", fontsize=10, color=INK)
        ax.set_xlabel("bytes of the cache, of bf16's")
    top[0].set_ylabel("perplexity, times the original's")
    bottom[0].set_ylabel("tokens per second")
    ticks = (0.125, 0.25, 0.5, 1)
    top[0].set_xscale("log", base=2)
    top[0].set_xlim(0.11, 1.12)
    top[0].set_xticks(ticks, [f"{100 * t:g} %" for t in ticks])
    top[0].set_xticks([], minor=True)


def main() -> None:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--folder", type=Path, default=HERE.parent / "docs")
    folder = arguments.parse_args().folder
    with rc_context({**PLOT_STYLE, "svg.fonttype": "path"}):
        figure = Figure(figsize=(10.5, 7.6))
        draw(figure)
        path = folder / "front.svg"
        figure.savefig(path, transparent=True, metadata={"Date": None})
    svg = path.read_text(encoding="utf-8")
    path.unlink()
    for theme, colors in THEMES.items():
        painted = svg
        for role, color in colors.items():
            painted = painted.replace(role, color)
        (folder / f"front-{theme}.svg").write_text(painted, encoding="utf-8")


if __name__ == "__main__":
    main()
