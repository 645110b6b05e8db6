"""Benefit of the calibration sets of `calibrate`: SmolLM2 converted with golden, random and first-N text of one pool.

    python -m research.calibration --data ../shared/data [--windows 8] [--seqlen 1024] [--folder runs/calibration]

The pool is the embedded text (without its held-out part) and WikiText-2's validation text, in that order. Each way
takes the same number of tokens from it: `golden` the full set of `mlaforge calibrate` (SmolLM2 has no sliding windows),
`random` random windows, `first` the first ones. Three seeds: of the clusters, of the windows, and of the labels that
calibration samples, so that `first` varies too. Evaluated on other kinds of text than the pool's (grade-school
mathematics, questions to an assistant) and on the same kinds (WikiText-2 test, held-out Python source).
SmolLM2-135M-Instruct, fp32, `latent` at 50 %. Less than an hour on two cores; an interrupted run resumes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.script import evaluation_texts, parser, run, wikitext, without_repeats
from mlaforge.bench.conversion import perplexities
from mlaforge.bench.results import Results
from mlaforge.calibration import calibrate
from mlaforge.calibration.config import CalibrateConfig
from mlaforge.calibration.sources import Notes, Source
from mlaforge.checkpoint import source_model
from mlaforge.conversion import convert
from mlaforge.conversion.config import ConvertConfig
from mlaforge.data import corpus, overlap
from mlaforge.demo import model as demo_model
from mlaforge.rendering.table import markdown_table

SEEDS = (0, 1, 2)
WAYS = ("golden", "random", "first")
# Evaluation text -> whether the pool contains text of its kind.
EVAL_TEXTS = {"maths": False, "chat": False, "wiki": True, "code": True}


def pool(data: Path) -> tuple[str, ...]:
    return corpus.EMBEDDED, wikitext(data)[0]


def convert_one(way: str, seed: int, options: argparse.Namespace, model: Path) -> Path:
    """Convert SmolLM2 with one way of calibration; the windows of `first` are passed as a text of their length."""
    scratch, seqlen = options.folder, options.seqlen
    text = scratch / "pool.txt"
    if way == "golden":
        text = scratch / f"golden-{seed}"
        calibrate_config = CalibrateConfig(source=pool(options.data), seed=seed, tokenizer=str(model), device="cpu")
        calibrate.run(text, calibrate_config, embedded=scratch / "embedded")
    elif way == "first":
        # `convert` samples windows at random from longer text, so the text has exactly this length.
        tokenizer = source_model.load_tokenizer(model)
        first = corpus.windows(tokenizer, str(text), options.windows, seqlen)
        text = scratch / "first.txt"
        # A few more tokens, as the last window could be dropped otherwise.
        text.write_text(tokenizer.decode(first.ids.flatten().tolist()) + " the" * 64, encoding="utf-8")
    out = scratch / f"converted-{way}-{seed}"
    config = ConvertConfig(
        layout="latent", budget=0.5, calibration=str(text), nsamples=options.windows, seqlen=seqlen, eval_windows=0,
        seed=seed, device="cpu", dense=True,
    )  # fmt: skip
    convert.run(str(model), out, config)
    return out


def measure(options: argparse.Namespace) -> Results:
    model = demo_model.fetch()
    tokenizer = source_model.load_tokenizer(model)
    settings = {"windows": options.windows, "seqlen": options.seqlen, "judged_windows": options.judged_windows}
    results = Results(options.raw, [], resume=True, settings=settings)
    results.body["calibration_tokens"] = options.windows * options.seqlen
    (scratch := options.folder).mkdir(parents=True, exist_ok=True)
    documents = [d for s in pool(options.data) for d in Source.parse(s).documents(Notes())]
    (scratch / "pool.txt").write_text("\n\n".join("\n".join(d.parts) for d in documents), encoding="utf-8")
    # Evaluate on no text that any way could be tuned on.
    pool_passages = overlap.passages(corpus.windows(tokenizer, str(scratch / "pool.txt"), 10**6, options.seqlen))
    window_counts = dict.fromkeys(EVAL_TEXTS, options.judged_windows)
    texts = evaluation_texts(tokenizer, options.data, window_counts, options.seqlen, scratch)
    eval_windows = without_repeats(texts, pool_passages)
    results.body["tokens"] = {name: w.ids.numel() for name, w in eval_windows.items()}
    original = results.once("original", lambda: perplexities(model, eval_windows, "original", torch.device("cpu")))
    for row in results.missing({"way": way, "seed": seed} for seed in SEEDS for way in WAYS):
        out = convert_one(row["way"], row["seed"], options, model)
        tokens = json.loads((out / "manifest.json").read_text())["inputs"]["calibration"]["tokens"]
        assert tokens == results.body["calibration_tokens"], (row, tokens)
        ppl = perplexities(out, eval_windows, f"{row['way']} {row['seed']}", torch.device("cpu"))
        shutil.rmtree(out)
        results.add({**row, "ppl": ppl, "ratio": {name: ppl[name] / original[name] for name in eval_windows}})
    return results


def spread_rows(rows: list[dict[str, Any]], *keys: str) -> list[dict[str, Any]]:
    """Perplexity ratio converted / original by text and by the values of `keys`: mean over the seeds, minimum and
    maximum."""
    lines = []
    for group in dict.fromkeys(tuple(row[key] for key in keys) for row in rows):
        ratios = [row["ratio"] for row in rows if tuple(row[key] for key in keys) == group]
        by_text = {text: [ratio[text] for ratio in ratios] for text in ratios[0]}
        line = {text: [statistics.mean(r), min(r), max(r)] for text, r in by_text.items()}
        lines.append({**dict(zip(keys, group, strict=True)), "seeds": len(ratios), **line})
    return lines


def short(body: dict[str, Any]) -> list[dict[str, Any]]:
    return spread_rows(body["rows"], "way")


def cells(row: dict[str, Any], texts: Iterable[str]) -> list[str]:
    """Mean, with minimum and maximum in brackets, of every text."""
    return ["{:.4f} ({:.4f} – {:.4f})".format(*row[text]) for text in texts]


def table(rows: list[dict[str, Any]]) -> str:
    names = [f"{name} ({'of the pool’s kind' if kin else 'another kind'})" for name, kin in EVAL_TEXTS.items()]
    return markdown_table([["calibrated on", *names], *([row["way"], *cells(row, EVAL_TEXTS)] for row in rows)])


if __name__ == "__main__":
    arguments = parser(__doc__, "research/calibration.json", "golden sets")
    arguments.add_argument("--windows", type=int, default=8, help="calibration windows")
    arguments.add_argument("--seqlen", type=int, default=1024, help="tokens of a window")
    arguments.add_argument("--judged-windows", type=int, default=4, help="windows of each evaluation text")
    arguments.add_argument("--folder", type=Path, default=Path("runs/calibration"), help="folder of intermediate files")
    run(arguments, measure, short, table)
