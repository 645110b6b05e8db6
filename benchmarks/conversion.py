"""Table of plain rows in docs/results.md: perplexity cost of conversion on real weights and text.

    python -m benchmarks.conversion --data ../shared/data [--windows 16] [--scratch FOLDER] [--summarize FILE]

SmolLM2-135M-Instruct, fp32, calibrated on at most 65,536 tokens of wiki.valid.tokens (or on the embedded mixture),
evaluated on the first 32,768 tokens of wiki.test.raw in non-overlapping windows of 2048 without BOS, and on two other
kinds of text: Python source of the standard library and grade-school mathematics questions.
About 35 minutes on two cores.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.script import evaluation_texts, parser, run, scratch, wikitext, without_repeats
from mlaforge.bench.conversion import perplexities
from mlaforge.bench.results import Results
from mlaforge.checkpoint import source_model
from mlaforge.conversion import convert
from mlaforge.conversion.config import ConvertConfig
from mlaforge.data import corpus, overlap
from mlaforge.demo import model as demo_model
from mlaforge.rendering.table import markdown_table

SEQLEN = 2048
# Targets: perplexity ratio converted / original on wiki.test.raw.
BARS = {("latent", 0.75): 1.01, ("latent", 0.5): 1.05, ("latent", 0.375): 1.18,
        ("latent_rope", 0.75): 1.08, ("latent_rope", 0.5): 1.22}  # fmt: skip
# Fewer configurations with the default calibration, to measure the effect of the calibration text.
DEFAULT_CALIBRATION = [("latent", 0.5), ("latent_rope", 0.5)]


def row_keys() -> Iterator[dict[str, Any]]:
    """Keys of each row."""
    for name, cases in (("wiki", BARS), ("embedded", DEFAULT_CALIBRATION)):
        for layout, budget in cases:
            yield {"calibration": name, "layout": layout, "budget": budget, "bar": BARS[layout, budget]}


def measure(options: argparse.Namespace) -> Results:
    directory = demo_model.fetch()
    tokenizer = source_model.load_tokenizer(directory)
    sources = {"wiki": wikitext(options.data)[0], "embedded": corpus.EMBEDDED}
    count = {"wiki": options.calibration_windows, "embedded": options.calibration_windows // 2}
    results = Results(options.raw, [], resume=True)
    with scratch(options) as folder:
        window_counts = {"wiki": options.windows, "code": 4, "maths": 4}
        eval_windows = evaluation_texts(tokenizer, options.data, window_counts, SEQLEN, folder)
        tuned = [corpus.windows(tokenizer, source, count[name], SEQLEN, seed=0) for name, source in sources.items()]
        eval_windows = without_repeats(
            eval_windows, [passage for windows in tuned for passage in overlap.passages(windows)]
        )
        results.body["tokens"] = {name: w.ids.numel() for name, w in eval_windows.items()}
        original = results.once(
            "original", lambda: perplexities(directory, eval_windows, "original", torch.device("cpu"))
        )
        for row in results.missing(row_keys()):
            name, layout, budget = (row[key] for key in ("calibration", "layout", "budget"))
            config = ConvertConfig(
                layout=layout, budget=budget, calibration=sources[name], nsamples=count[name], seqlen=SEQLEN,
                eval_windows=0, device="cpu", dense=True,
            )  # fmt: skip
            out = folder / f"{name}-{layout}-{budget:g}"
            manifest = convert.run(str(directory), out, config, calibrated=folder / "calibration")
            ppl = perplexities(out, eval_windows, f"{layout} {budget:g}", torch.device("cpu"))
            shutil.rmtree(out)
            ratio = {key: ppl[key] / original[key] for key in eval_windows}
            results.add({**row, "seconds": manifest.seconds, "ppl": ppl, "ratio": ratio})
    return results


def short(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows with the time of all stages together."""
    names = ("calibration", "layout", "budget", "bar", "ratio")
    return [{**{name: row[name] for name in names}, "seconds": sum(row["seconds"].values())} for row in body["rows"]]


def table(rows: list[dict[str, Any]]) -> str:
    """The Markdown table of docs/results.md."""
    heads = ("calibrated on", "layout", "cache", "wiki.test ppl ratio", "bar", "Python source", "maths questions")
    lines = []
    for row in rows:
        ratio = row["ratio"]
        bar = f"<= {row['bar']}" if row["calibration"] == "wiki" else "–"
        cells = (f"{ratio['wiki']:.4f}", bar, f"{ratio['code']:.3f}", f"{ratio['maths']:.3f}")
        lines.append((row["calibration"], f"`{row['layout']}`", f"{100 * row['budget']:g} %", *cells))
    return markdown_table([heads, *lines])


if __name__ == "__main__":
    arguments = parser(__doc__, "benchmarks/conversion.json", "conversion")
    arguments.add_argument("--windows", type=int, default=16, help="windows of wiki.test.raw")
    arguments.add_argument("--calibration-windows", type=int, default=32)
    arguments.add_argument("--scratch", type=Path, help="folder of the conversions")
    run(arguments, measure, short, table)
