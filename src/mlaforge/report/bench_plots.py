"""Plots of `bench` results: throughput, acceptance, memory, and rooflines."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable
from typing import Any

from mlaforge.rendering.page import INK, MARKERS, MUTED, PAINT, at, drawing, logarithmic, number
from mlaforge.report.bench_results import SERIES, groups, label, measured, partial, spread

LINES = ("-", (0, (6, 2)), (0, (3, 2)), (0, (5, 1.5, 1, 1.5)))
ROOF = (0, (1, 2))
KINDS = {"weights": "gqa", "cache": "latent", "activations": "mixed"}


def scenario(body: dict[str, Any], key: str) -> list[dict[str, str]]:
    """Plots of one results file, each with title, caption and svg. key: prefix of the ids in the svg."""
    ok = measured(body["cases"])
    drawings: list[dict[str, str]] = []

    def draw(title: str, caption: str, plot: Callable[[Any, Any], None], data: Any, names: Iterable[str]) -> None:
        # Space for the legend's lines above the axes.
        lines = sum(1 + wrapped(name).count("\n") for name in names)
        svg = drawing(f"{key}-{len(drawings)}", plot, data, 2.9 + 0.17 * lines)
        drawings.append({"title": title, "caption": caption, "svg": svg})

    rooflines = "Bars span the repetitions; dotted lines are the rooflines at the measured acceptance."
    selection = "Drafting is shown with each model's fastest number of tokens; every case is in the table."
    for x, other, axis in (("context", "batch", "tokens of context"), ("batch", "context", "requests at once")):
        for (fixed,), cases in groups(ok, other).items():
            series = _series(cases, x)
            if series:
                title = f"Throughput against {x}, {other} {fixed:,}"
                draw(title, f"{rooflines} {selection}", _draw_speed, (series, x, axis), series)
    for (batch,), cases in groups(ok, "batch").items():
        longest = max(case["context"] for case in cases)
        series = _by_drafts([case for case in cases if case["context"] == longest])
        if series:
            title = f"Throughput against drafted tokens, {longest:,} tokens × {batch:,}"
            draw(title, f"0 is plain decoding. {rooflines}", _draw_speed,
                 (series, "num_speculative_tokens", "drafted tokens"), series)  # fmt: skip
    if accepted := _accepted(ok):
        draw("Acceptance by position", "Share of the drafts with a token at a position that were accepted up to it; "
             "each model's longest draft at its longest context.", _draw_acceptance,
             accepted, accepted)  # fmt: skip
    if with_memory := [case for case in _largest_plain(ok) if number(case, "peak_memory", "total")]:
        draw("Peak memory", "By kind, plain decoding at each model's longest context and largest batch.", _draw_memory,
             with_memory, [case["id"] for case in with_memory])  # fmt: skip
    return drawings


def _series(cases: list[dict[str, Any]], x: str) -> dict[str, list[dict[str, Any]]]:
    """Label -> cases by x, for lines with several x: plain decoding, and each model's number of drafted tokens that is
    fastest at the largest x."""
    lines: dict[str, list[dict[str, Any]]] = {}
    for series in _by_series(cases):
        drafts = groups(series, "draft", "num_speculative_tokens", "specpv").items()
        plain = [line for (_, k, _), line in drafts if not k]
        others = [line for (_, k, _), line in drafts if k]
        best = [max(others, key=lambda line: max((case[x], spread(case)[1]) for case in line))] if others else []
        for line in plain + best:
            lines[label(line[0], cases)] = sorted(line, key=lambda case: case[x])
    return {name: line for name, line in lines.items() if len({case[x] for case in line}) > 1}


def _by_series(cases: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Cases grouped by series; imported cases form separate series by device."""
    located = [{**case, "where": str(at(case, "imported", "device"))} for case in cases]
    return list(groups(located, *SERIES, "where").values())


def _by_drafts(cases: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Label -> cases by number of drafted tokens, including plain decoding, if several were measured."""
    lines = {}
    for series in _by_series(cases):
        plain = [case for case in series if not case["num_speculative_tokens"]]
        for (draft, _), line in groups([c for c in series if c["num_speculative_tokens"]], "draft", "specpv").items():
            name = f"{label({**line[0], 'num_speculative_tokens': 0}, cases)}, {draft}"
            name += ", specpv" if partial(line[0]) else ""
            lines[name] = sorted(plain + line, key=lambda case: case["num_speculative_tokens"])
    return {name: line for name, line in lines.items() if len(line) > 1}


def _accepted(cases: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Label -> acceptance by position of each series' longest draft at its longest context."""
    acceptances = {}
    for series in _by_series(cases):
        for line in groups([c for c in series if c["num_speculative_tokens"]], "draft", "specpv").values():
            best = max(line, key=lambda case: (case["num_speculative_tokens"], case["context"]))
            rates = at(best, "eagle_speculation", "acceptance_per_position")
            shares = [rate for rate in rates if number(rate) is not None] if isinstance(rates, list) else []
            if shares:
                acceptances[label(best, cases)] = shares
    return acceptances


def _largest_plain(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of every series the plain case with the longest context and largest batch."""
    plain = [case for case in cases if not case["num_speculative_tokens"]]
    return [max(series, key=lambda case: (case["context"], case["batch"])) for series in _by_series(plain)]


def wrapped(name: str) -> str:
    """Wrap a legend's text to the width of a plot."""
    return textwrap.fill(name, 46)


def _legend(ax: Any) -> None:
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=1, borderaxespad=0.2, handlelength=2.6)


def short(tokens: float) -> str:
    """Short name of a context: 512, 2K, 1.5K."""
    return f"{tokens / 1024:g}K" if tokens >= 1024 and tokens % 256 == 0 else f"{tokens:g}"


def _draw_speed(ax: Any, data: tuple[dict[str, list[dict[str, Any]]], str, str]) -> None:
    series, x, axis = data
    lines_by_layout: dict[str, int] = {}
    rooflines = []
    for name, line in series.items():
        layout = str(line[0]["layout"])
        color, marker = PAINT.get(layout, MUTED), MARKERS.get(layout, "v")
        style = LINES[lines_by_layout.setdefault(layout, 0) % len(LINES)]
        lines_by_layout[layout] += 1
        xs, speeds = [case[x] for case in line], [spread(case) for case in line]
        ax.plot(xs, [s[1] for s in speeds], color=color, marker=marker, ms=5, lw=1.3, ls=style, label=wrapped(name))
        for at_x, (minimum, _, maximum) in zip(xs, speeds, strict=True):
            ax.plot([at_x, at_x], [minimum, maximum], color=color, lw=2.5, alpha=0.5)
        roofline = [(case[x], r) for case in line if (r := number(case, "roofline", "tokens_per_second")) is not None]
        if roofline:
            ax.plot(*zip(*roofline, strict=True), color=color, lw=1.3, ls=ROOF, marker=marker, ms=2)
            rooflines += [r for _, r in roofline]
    if rooflines:
        ax.plot([], [], color=MUTED, lw=1.3, ls=ROOF, label="rooflines")
    ticks = sorted({case[x] for line in series.values() for case in line})
    if x != "num_speculative_tokens":
        ax.set_xscale("log", base=2)
    ax.set_xticks(ticks, [short(tick) for tick in ticks])
    ax.set_xticks([], minor=True)
    slowest = min(spread(case)[1] for line in series.values() for case in line)
    if slowest > 0 and max([*rooflines, slowest]) > 20 * slowest:
        logarithmic(ax.yaxis)
    else:
        ax.set_ylim(bottom=0)
    ax.set(xlabel=axis, ylabel="tokens/s")
    _legend(ax)


def _draw_acceptance(ax: Any, series: dict[str, list[float]]) -> None:
    for n, (name, shares) in enumerate(series.items()):
        color = list(PAINT.values())[n % len(PAINT)]
        ax.plot(range(1, len(shares) + 1), shares, color=color, marker="oDs^"[n % 4], ms=5, lw=1.3,
                ls=LINES[n // 4 % len(LINES)], label=wrapped(name))  # fmt: skip
    ax.set(ylim=(0, 1.05), xlabel="position in the draft", ylabel="accepted")
    ax.set_xticks(range(1, max(map(len, series.values())) + 1))
    _legend(ax)


def _draw_memory(ax: Any, cases: list[dict[str, Any]]) -> None:
    names = [f"{label(case, cases)}, {short(case['context'])} × {case['batch']}" for case in cases]
    left = [0.0] * len(cases)
    for kind, role in KINDS.items():
        sizes = [(number(case, "peak_memory", kind) or 0.0) / 2**30 for case in cases]
        ax.barh(range(len(cases)), sizes, left=left, height=0.42, color=PAINT[role], label=kind)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    for y, name in enumerate(names):
        ax.text(0, y - 0.27, name, va="bottom", color=INK)
    ax.set(ylim=(len(cases) - 0.5, -0.9), yticks=[], xlabel="GiB")
    ax.grid(axis="y", visible=False)
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0.2)


def kernels(body: dict[str, Any], key: str) -> str:
    """Kernels under their roofline: FLOP per byte against TFLOP/s; "" if nothing was measured."""
    points = [row for row in body["rows"] if (number(row, "gbs") or 0) > 0 and (number(row, "tflops") or 0) > 0]
    peaks = [number(body, "roof", name) for name in ("bandwidth", "flops")]
    return drawing(key, _draw_roofline, (points, peaks)) if points and all(peaks) else ""


def _draw_roofline(ax: Any, data: tuple[list[dict[str, Any]], list[float]]) -> None:
    points, (bandwidth, flops) = data
    labelled = [{**point, "label": f"{point.get('op')} by {point.get('by')}"} for point in points]
    for n, (name, group) in enumerate(groups(labelled, "label").items()):
        color = list(PAINT.values())[n % len(PAINT)]
        xs = [1e3 * p["tflops"] / p["gbs"] for p in group]
        ax.plot(xs, [p["tflops"] for p in group], color=color, marker="oDs^"[n % 4], ms=4, ls="", label=name[0])
    intensities = [1e3 * p["tflops"] / p["gbs"] for p in points]
    ridge = flops / bandwidth
    line = sorted({min(*intensities, ridge) / 2, ridge, max(*intensities, ridge) * 2})
    ax.plot(line, [min(x * bandwidth, flops) / 1e12 for x in line], color=INK, lw=1.2, label="roofline")
    ax.set(xlabel="FLOP per byte", ylabel="TFLOP/s")
    logarithmic(ax.xaxis)
    logarithmic(ax.yaxis)
    _legend(ax)
