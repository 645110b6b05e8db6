"""Common parts of mlaforge's pages: number formats, plots as inline SVG in the page's colours, and templates. A page is
one self-contained HTML file that loads no other resource and needs no script.
"""

from __future__ import annotations

import importlib.util
import io
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlaforge.runtime import install, log

NOT_MEASURED, NOT_FINITE = "not measured", "not finite"

# matplotlib does not support CSS: every role has a placeholder colour, which is replaced by the page's variable.
INK, MUTED, GRID = "#000001", "#000002", "#000003"
PAINT = {"latent": "#000011", "latent_rope": "#000012", "mixed": "#000013", "gqa": "#000014"}
MARKERS = {"latent": "o", "latent_rope": "D", "mixed": "s", "gqa": "^"}
VARIABLES = {INK: "ink", MUTED: "muted", GRID: "grid", **{c: n for n, c in PAINT.items()}}
# Text stays text (in the page's font, selectable), and is not parsed as mathematics: a folder may be called a$b$c.
PLOT_STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "mlaforge", "text.parse_math": False, "font.size": 9,
    "text.color": INK, "axes.labelcolor": MUTED, "axes.edgecolor": MUTED, "xtick.color": MUTED,
    "ytick.color": MUTED, "axes.linewidth": 0.6, "xtick.major.width": 0.6, "ytick.major.width": 0.6,
    "axes.grid": True, "axes.axisbelow": True, "grid.color": GRID, "grid.linewidth": 0.6,
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "legend.fontsize": 9,
}  # fmt: skip


def _bytes(value: float) -> str:
    power = min(4, int(math.log2(value) // 10)) if value >= 1 else 0
    scaled, unit = value / 1024**power, ("B", "KiB", "MiB", "GiB", "TiB")[power]
    return f"{scaled:.0f} {unit}" if scaled >= 999.5 else f"{scaled:.3g} {unit}"


FORMATS: dict[str, Callable[[float], str]] = {
    "percent": lambda v: f"{100 * v:.3g} %",
    "times": lambda v: f"×{v:.3f}",
    "decimal": lambda v: f"{v:,.3f}",
    "small": lambda v: f"{v:.3g}",
    "rate": lambda v: f"{v:,.1f}",
    "whole": lambda v: f"{v:,.0f}",
    "bytes": _bytes,
    "bandwidth": lambda v: f"{v / 1e9:,.3g} GB/s" if v < 1e12 else f"{v / 1e12:,.3g} TB/s",
    "flops": lambda v: f"{v / 1e9:,.3g} GFLOP/s" if v < 1e12 else f"{v / 1e12:,.4g} TFLOP/s",
    "seconds": lambda v: f"{v:.2f} s" if v < 10 else f"{v:.0f} s" if v < 600 else f"{v / 60:.0f} min",
}


def shown(value: Any, form: str) -> str:
    """Format a number for the page. form: key of FORMATS; bytes are in units of 1024."""
    finite = number(value)
    if finite is None:
        return NOT_FINITE if value == NOT_FINITE else NOT_MEASURED
    return FORMATS[form](finite)


def model_name(place: Any) -> str:
    """Short name of a model from a path, a hub id, a .gguf file, or a dequantised .gguf in the cache."""
    name = str(place).rstrip("/").rpartition("/")[2].removesuffix(".gguf")
    return re.sub(r"-[0-9a-f]{12}$", "", name)


def at(record: Any, *keys: str) -> Any:
    """Value at `keys` in nested dictionaries, None if a key is missing or a parent is not a dictionary."""
    for key in keys:
        record = record.get(key) if isinstance(record, dict) else None
    return record


def number(record: Any, *keys: str) -> float | None:
    """Finite number at `keys` in nested dictionaries (`record` itself without keys), else None."""
    value = at(record, *keys)
    usable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if usable else None


def interval(mean: float, stderr: float, n: int) -> tuple[float, float] | None:
    """95 % confidence interval of a mean of n values by Student's t; None for n < 4.

    The quantile is its expansion around the normal one (Abramowitz and Stegun 26.7.5), accurate to 1 % from n = 4 on.
    """
    # Not from scipy, which would add 110 MB for this alone; not resampled, as manifests have no values by window.
    if n < 4:
        return None
    z, v = 1.959964, n - 1
    t = z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    return mean - t * stderr, mean + t * stderr


def can_draw(pictures: str) -> bool:
    """Whether matplotlib is installed; otherwise log which `pictures` are left out, and how to get them."""
    if importlib.util.find_spec("matplotlib") is not None:
        return True
    log(f"matplotlib is missing, so {pictures} are left out: {install('report')}")
    return False


def drawing(key: str, draw: Callable[[Any, Any], None], data: Any, height: float = 2.9) -> str:
    """Inline SVG of `draw(axes, data)` with the page's variables as colours. key: prefix of its ids; height: inches."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    buffer = io.StringIO()
    with rc_context(PLOT_STYLE):
        # 5 inches are 360 units, which a phone shows 1:1, so 9 pt text stays readable.
        figure = Figure(figsize=(5.0, height), dpi=144, layout="constrained")
        axes = figure.add_subplot()
        draw(axes, data)
        if axes.get_xlabel() == "layer":
            axes.locator_params(axis="x", integer=True)
        figure.savefig(buffer, format="svg", transparent=True)
    svg = re.sub(r"(?s)^.*?(?=<svg)|<metadata>.*?</metadata>|<style.*?</style>", "", buffer.getvalue())
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"| (width|height)="[\d.]+pt"', "", svg).replace("xlink:href", "href")
    svg = re.sub(r'(?<= id=")|(?<=href="#)|(?<=url\(#)', f"{key}-", svg)
    for colour, name in VARIABLES.items():
        svg = svg.replace(colour, f"var(--{name})")
    return svg


def heat(ax: Any, data: dict[str, Any]) -> None:
    """Draw a heat map. data: `columns` [layers][rows], `rows` (their name), `label` of the colours; optionally `low`
    and `high`, the ends of the colour scale, and `ticks`, names of the rows."""
    columns = data["columns"]
    depth = max(map(len, columns))
    grid = [[column[r] if r < len(column) else math.nan for column in columns] for r in range(depth)]
    image = ax.imshow(grid, cmap="cividis", aspect="auto", origin="lower", interpolation="none", vmin=data.get("low"),
                      vmax=data.get("high"))  # fmt: skip
    ax.figure.colorbar(image, ax=ax, label=data["label"], pad=0.02)
    ax.set(xlabel="layer", ylabel=data["rows"])
    if "ticks" in data:
        ax.set_yticks(range(depth), data["ticks"])
    else:
        ax.locator_params(axis="y", integer=True)
    ax.grid(visible=False)


def bits_of(code: list[int]) -> list[float]:
    """Bits of every coordinate of a coded row, from the counts with at least 1, 2, ... bits."""
    return [float(sum(count > at for count in code)) for at in range(code[0] if code else 0)]


def logarithmic(axis: Any) -> None:
    """Make an axis logarithmic with ticks at 1, 2 and 5 times powers of ten, as plain numbers (mathtext is off)."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda v, _: f"{v:g}")


def plain(value: Any) -> str:
    """Escape text for one line of Markdown: no HTML, links or table cells."""
    return re.sub(r"([\\`*|\[\]])", r"\\\1", re.sub(r"\s+", " ", str(value))).replace("<", "&lt;")


def jinja_page(name: str) -> Any:
    """Load a template of `templates/`. Its output is escaped for HTML, or for Markdown if it is named *.md.jinja."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    markdown = name.endswith(".md.jinja")
    jinja = Environment(autoescape=not markdown, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    if markdown:
        jinja.finalize = plain
    jinja.loader = FileSystemLoader(Path(__file__).with_name("templates"))
    jinja.filters |= {"shown": shown, "model_name": model_name}
    return jinja.get_template(name)
