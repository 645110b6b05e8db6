"""Plots docs/front-*.svg and docs/speed-*.svg, light and dark, from committed measurements.

    python -m research.front_picture [--folder docs]

front: quality by bytes of the cache from research/front.json and benchmarks/ kv_cache, conversion and healing.json, on
text of the calibration's kind and on another. speed: decoding after 8,000 tokens by the same bytes from
benchmarks/speed.json. docs/results.md says how each point was measured.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlaforge.bench.results import read_table
from mlaforge.rendering.page import GRID, INK, MUTED, PLOT_STYLE

HERE = Path(__file__).parent
BENCHMARKS = HERE.parent / "benchmarks"
# File and name of each table of measurements.
TABLES = {
    "front": (HERE / "front.json", "front"), "kv_cache": (BENCHMARKS / "kv_cache.json", "kv cache"),
    "conversion": (BENCHMARKS / "conversion.json", "conversion"), "healing": (BENCHMARKS / "healing.json", "healing"),
    "amx": (BENCHMARKS / "speed.json", "amx"), "avx512": (BENCHMARKS / "speed.json", "avx512"),
}  # fmt: skip
TEXTS = {"wiki": "WikiText: the calibration's kind of text", "code": "Python source: another kind"}
# Table of speeds -> processor.
MACHINES = {"amx": "Two cores with AMX", "avx512": "Two cores with AVX-512 (Zen 4)"}
CASE = "8000x1"
# Below the first no difference is measurable; above the last a model is useless.
RATIOS = (1.001, 1.003, 1.01, 1.03, 1.1, 1.3, 2.0)
# Placeholder colours, as in page.py, which are replaced by a theme's colours.
CODED, LATENT, ROPE, RIVAL, OTHER, THIRD = "#000021", "#000022", "#000023", "#000024", "#000025", "#000026"
FOURTH = "#000027"
THEMES = {
    "light": {INK: "#1b1f24", MUTED: "#5b6470", GRID: "#e1e5ea", CODED: "#0072b2", LATENT: "#5aa9d6", ROPE: "#d55e00",
              RIVAL: "#8a939e", OTHER: "#007a5a", THIRD: "#a0529c", FOURTH: "#96690a"},
    "dark": {INK: "#e4e7eb", MUTED: "#9aa4b0", GRID: "#2d333b", CODED: "#56b4e9", LATENT: "#3d84ad", ROPE: "#f0954a",
             RIVAL: "#8b95a1", OTHER: "#3cc49a", THIRD: "#cf8fca", FOURTH: "#d6b04c"},
}  # fmt: skip
# Line -> colour, marker, label, and the label's position in the first panel (share of bytes, ratio).
LINES = {
    "coded": (CODED, "o", "mlaforge, coded:\n4, 3, 2 bits", (0.117, 1.0033)),
    "blocks": (RIVAL, "s", "int8, int4,\nint2* (KIVI)", (0.262, 1.0018)),
    "rotated": (THIRD, "v", "Hadamard, Lloyd-Max*\n(TurboQuant)", (0.2, 1.65)),
    "pair widths": (FOURTH, "X", "Block-GTQ*", (0.29, 1.046)),
    "plain code": (OTHER, "D", "plain PCA*\n(KVTC)", (0.117, 1.07)),
    "latent": (LATENT, "o", "latent by rank\n○ bf16   ● int8", (0.62, 1.012)),
    "latent_rope": (ROPE, "^", "latent_rope by rank\n△ bf16   ▲ int8", (0.56, 1.2)),
}
NOTE = "* simulated rounding\n↓ healed (WikiText alone)\nat × 1.001: that or less"
# Form of benchmarks/forms.py, with its rows -> colour, marker, label, and the label's offset from the point.
SPEEDS = {
    "original": (RIVAL, "s", "bf16", (0, 9, "center")),
    "original, int8 rows": (RIVAL, "s", "int8", (9, 4, "left")),
    "original, int4 rows": (RIVAL, "s", "int4", (-9, 4, "right")),
    "latent": (LATENT, "o", "latent", (0, -17, "center")),
    "latent_rope": (ROPE, "^", "latent_rope", (9, -13, "left")),
    "latent, 4 bits": (CODED, "o", "coded, 4 bits", (0, -17, "center")),
    "latent, 3 bits": (CODED, "o", "3 bits", (0, 9, "center")),
    "latent, 2 bits": (CODED, "o", "2 bits", (0, 9, "center")),
}
# Ending of the peers that read a selection of tokens.
SPARSE = ", sparse"
SPEED_NOTE = "○ all tokens are read   ● a selection"


def rows_of(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = read_table(*TABLES[name])["rows"]
    return rows


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
    for row in rows_of("healing"):
        layout, budget = row["name"].split("-")
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


def speeds(machine: str) -> dict[str, tuple[float, float]]:
    """Peer -> bytes relative to bf16, and tokens per second. Bytes are those of the run, or of kv_cache.json for runs
    that did not count them; a peer without bytes is left out."""
    rows = {row["peer"]: row for row in rows_of(machine) if row["case"] == CASE}
    stored = {(row["layout"], row["stored"]): row["bytes_ratio"] for row in rows_of("kv_cache")}

    def size(peer: str) -> float | None:
        if counted := rows[peer].get("cache_bytes"):
            return float(counted / rows["original"]["cache_bytes"])
        layout, _, kind = peer.partition(", ")
        if layout == "original":
            return stored.get(("gqa", kind.removesuffix(" rows") or "bf16"))
        return stored.get((layout, kind), None if kind else 0.5)

    sizes = {peer: size(peer) for peer in rows if peer.removesuffix(SPARSE) in SPEEDS}
    return {peer: (x, rows[peer]["tokens_per_second"]) for peer, x in sizes.items() if x is not None}


def draw_speed(ax: Any, points: dict[str, tuple[float, float]]) -> None:
    for peer, at in points.items():
        color, marker, name, (x, y, side) = SPEEDS[peer.removesuffix(SPARSE)]
        filled = peer.endswith(SPARSE)
        ax.plot(*at, color=color, marker=marker, ms=7, ls="", mfc=color if filled else "none", zorder=3, clip_on=False)
        if filled:
            x, y, side = 0, 9, "center"
        ax.annotate(name, at, (x, y), textcoords="offset points", ha=side, color=color)
    ax.axhline(points["original"][1], color=RIVAL, lw=1, ls=(0, (4, 2)), zorder=1)


def bytes_axes(axes: Any) -> None:
    """The common axis of bytes, of axes that share it."""
    for ax in axes:
        ax.set_xlabel("bytes of the cache, of bf16's")
    ticks = (0.125, 0.25, 0.5, 1)
    axes[0].set_xscale("log", base=2)
    axes[0].set_xlim(0.11, 1.12)
    axes[0].set_xticks(ticks, [f"{100 * t:g} %" for t in ticks])
    axes[0].set_xticks([], minor=True)


def draw_front(figure: Any) -> None:
    axes = figure.subplots(1, 2, sharex=True, sharey=True)
    figure.subplots_adjust(left=0.085, right=0.985, top=0.93, bottom=0.11, wspace=0.06)
    lines = points()
    for ax, text in zip(axes, TEXTS, strict=True):
        draw_quality(ax, text, lines)
        ax.set_title(TEXTS[text], loc="left", fontsize=10, color=INK)
    axes[1].text(0.117, height(1.0025), NOTE, color=MUTED, va="center")
    axes[0].set_ylabel("perplexity, times the original's")
    bytes_axes(axes)


def draw_speeds(figure: Any) -> None:
    axes = figure.subplots(1, 2, sharex=True, sharey=True)
    figure.subplots_adjust(left=0.085, right=0.985, top=0.91, bottom=0.14, wspace=0.06)
    runs = {machine: speeds(machine) for machine in MACHINES}
    for ax, (machine, run) in zip(axes, runs.items(), strict=True):
        draw_speed(ax, run)
        ax.set_title(MACHINES[machine], loc="left", fontsize=10, color=INK)
    axes[0].set_ylim(0, 1.12 * max(speed for run in runs.values() for _, speed in run.values()))
    if any(peer.endswith(SPARSE) for run in runs.values() for peer in run):
        axes[0].text(0.117, 1.5, SPEED_NOTE, color=MUTED)
    axes[0].set_ylabel("tokens per second after 8,000")
    bytes_axes(axes)
    # The original with an index takes more than its cache.
    axes[0].set_xlim(0.11, 1.3)


# Name -> drawing, and its size in inches.
PICTURES = {"front": (draw_front, (10.5, 4.7)), "speed": (draw_speeds, (10.5, 3.8))}


def main() -> None:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--folder", type=Path, default=HERE.parent / "docs")
    folder = arguments.parse_args().folder
    for name, (draw, size) in PICTURES.items():
        with rc_context({**PLOT_STYLE, "svg.fonttype": "path"}):
            figure = Figure(figsize=size)
            draw(figure)
            path = folder / f"{name}.svg"
            figure.savefig(path, transparent=True, metadata={"Date": None})
        svg = path.read_text(encoding="utf-8")
        path.unlink()
        for theme, colors in THEMES.items():
            painted = svg
            for role, color in colors.items():
                painted = painted.replace(role, color)
            (folder / f"{name}-{theme}.svg").write_text(painted, encoding="utf-8")


if __name__ == "__main__":
    main()
