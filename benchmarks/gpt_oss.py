"""Targets of GPT-OSS's conversion on real text: half of the full layers' cache in both layouts, a quarter coded.

    python -m benchmarks.gpt_oss --data ../shared/data [--folder runs/gpt-oss] [--summarize FILE]

The original is SmolLM2 rewritten as GPT-OSS (docs/gpt-oss.md) with windows, YaRN, sinks, experts that differ, and
healing; it is created in FOLDER once. Protocol of benchmarks/conversion.py: at most 65,536 calibration tokens of
wiki.valid.tokens, evaluated on the first 32,768 tokens of wiki.test.raw. About 15 minutes to create it and 30 to
convert it on two cores.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.script import parser, run, wikitext
from mlaforge.bench.results import Results
from mlaforge.conversion import convert
from mlaforge.conversion.config import ConvertConfig
from mlaforge.demo import gpt_oss
from mlaforge.demo.config import MakeGptOssConfig
from mlaforge.rendering.table import markdown_table

# Layout, size, and maximum perplexity ratio converted / original of each conversion.
CONVERSIONS: list[tuple[str, dict[str, float], float]] = [
    ("latent", {"budget": 0.5}, 1.03),
    ("latent_rope", {"budget": 0.5}, 1.15),
    ("latent", {"bits": 4.0}, 1.01),
]


def measure(options: argparse.Namespace) -> Results:
    valid, test = wikitext(options.data)
    original = options.original or options.folder / "original"
    if not options.original:
        config = MakeGptOssConfig(windows=True, yarn=32.0, sinks=True, differ=0.02, heal=options.heal, text=valid)
        gpt_oss.run(original, config)
    results = Results(options.raw, [], calibration_windows=options.calibration_windows)
    for layout, size, bar in CONVERSIONS:
        convert_config = ConvertConfig(
            layout=layout, calibration=valid, nsamples=options.calibration_windows, evaluation=test,
            eval_windows=options.windows, device="cpu", dense=True, **size,
        )  # fmt: skip
        folder = options.folder / " ".join([layout, *(f"{name} {value:g}" for name, value in size.items())])
        manifest = convert.run(str(original), folder, convert_config, calibrated=options.folder / "calibration")
        metrics = {key: value for key, value in manifest.metrics.items() if key != "layers"}
        results.add({"layout": layout, **size, "bar": bar, **metrics, "stages": manifest.seconds})
    return results


def short(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of numbers, with the time of all stages together."""
    return [
        {name: sum(value.values()) if name == "stages" else value for name, value in row.items()
         if name == "stages" or not isinstance(value, dict | list)} for row in body["rows"]
    ]  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """Table of docs/gpt-oss.md."""
    lines = []
    for row in rows:
        cut = f"{row['partial_rope_ppl']:.3f}" if "partial_rope_ppl" in row else "–"
        ratio = (f"{row['mla_ppl']:.3f}", f"{row['ratio']:.4f}", f"<= {row['bar']}")
        size = f"{row['bits'] / 16:.0%}, coded" if "bits" in row else f"{row['budget']:.0%}"
        lines.append((f"`{row['layout']}`", size, f"{row['original_ppl']:.3f}", cut, *ratio))
    return markdown_table([("layout", "full layers", "original ppl", "RoPE cut", "MLA ppl", "ratio", "bar"), *lines])


if __name__ == "__main__":
    arguments = parser(__doc__, "benchmarks/gpt_oss.json", "quality")
    arguments.add_argument("--folder", type=Path, default=Path("runs/gpt-oss"))
    arguments.add_argument("--original", type=Path, help="a GPT-OSS checkpoint, instead of making one")
    arguments.add_argument("--heal", type=int, default=56, help="steps")
    arguments.add_argument("--calibration-windows", type=int, default=32)
    arguments.add_argument("--windows", type=int, default=16, help="windows of wiki.test.raw")
    run(arguments, measure, short, table)
