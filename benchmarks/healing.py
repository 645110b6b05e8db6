"""Recovery by healing on real weights, by training time: the healing tables of docs/results.md.

    python -m benchmarks.healing --data ../shared/data [--folder runs/healing] [--only latent-0.25 ...]

SmolLM2-135M-Instruct in fp32, converted with 65,536 tokens of wiki.valid.tokens and healed by recipes/smollm2-heal.yaml
on the rest of that text; evaluated on the first 32,768 tokens of wiki.test.raw in windows of 2048 (the protocol of
benchmarks/conversion.py), which neither has seen. At most an hour of one core each; an interrupted run resumes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from benchmarks.script import ROOT, parser, run, wikitext
from mlaforge.bench.results import Results
from mlaforge.checkpoint import source_model
from mlaforge.checkpoint.layerwise import LayerStream
from mlaforge.checkpoint.token_losses import perplexity, window_losses
from mlaforge.config import resolve
from mlaforge.conversion import convert
from mlaforge.conversion.config import ConvertConfig
from mlaforge.data import corpus, overlap
from mlaforge.demo import model as demo_model
from mlaforge.healing import heal
from mlaforge.healing.config import HealConfig
from mlaforge.rendering.table import markdown_table
from mlaforge.runtime import log

# Layout and budget -> maximum perplexity ratio healed / original, and changes to the recipe. The smaller the loss, the
# smaller the learning rate must be: at 1e-3 the validation KL of latent-0.5 more than doubled in 5 steps, and
# both refits raised it.
RUNS: dict[str, tuple[float, dict[str, Any]]] = {
    "latent-0.5": (1.02, {"steps": 8, "learning_rate": 2e-4, "refit": "off"}),
    "latent-0.25": (1.20, {}),
    "latent_rope-0.5": (1.10, {"steps": 16}),
}
WINDOWS, SEQLEN = 16, 2048
RECIPE = ROOT / "recipes" / "smollm2-heal.yaml"


def evaluate(directory: Path, text: corpus.Windows, label: str) -> float:
    """Perplexity on the test text. Raise UserError if the model was tuned on it."""
    passages_file = directory / overlap.PASSAGES
    if passages_file.is_file():
        overlap.refuse_overlap(text, overlap.read_passages(passages_file), label)
    with LayerStream(directory, torch.float32, torch.device("cpu")) as stream:
        return perplexity(window_losses(stream, text.ids, label))


def measure(options: argparse.Namespace) -> Results:
    directory = demo_model.fetch()
    valid, test = wikitext(options.data)
    text = corpus.windows(source_model.load_tokenizer(directory), test, WINDOWS, SEQLEN)
    results = Results(options.raw, {}, resume=True)
    original = results.once("original", lambda: evaluate(directory, text, "original"))
    for name in options.only:
        layout, budget = name.split("-")
        bar, changes = RUNS[name]
        config = ConvertConfig(
            layout=layout, budget=float(budget), calibration=valid, nsamples=32, seqlen=SEQLEN, eval_windows=0,
            device="cpu", dense=True,
        )  # fmt: skip
        student, healed = options.folder / name, options.folder / f"{name}-healed"
        convert.run(str(directory), student, config, calibrated=options.folder / "calibration")
        manifest = heal.run(
            str(directory), str(student), healed, resolve(HealConfig, RECIPE, text=valid, device="cpu", **changes)
        )
        before, after = (evaluate(path, text, path.name) for path in (student, healed))
        row = {"bar": bar, "ppl": [before, after], "ratio": [p / original for p in (before, after)]}
        keys = ("refit", "best", "tokens", "tokens_per_second", "curve")
        row |= {"seconds": manifest.seconds, "config": manifest.config, **{key: manifest.metrics[key] for key in keys}}
        results.rows[name] = row
        results.save()
        log(f"{name}: {row['ratio'][0]:.4f} -> {row['ratio'][1]:.4f} (bar {bar})")
    return results


def short(body: dict[str, Any]) -> list[dict[str, Any]]:
    """A row per conversion with the changes to the recipe and about six points of the curve: tokens, seconds,
    validation perplexity over the teacher's, KL."""
    rows = []
    for name, row in body["rows"].items():
        points = row["curve"][:: max(1, len(row["curve"]) // 6)]
        rows.append({
            "name": name, **{key: row[key] for key in ("bar", "ppl", "ratio", "tokens", "tokens_per_second", "refit")},
            "seconds": sum(row["seconds"].values()),
            "recipe": {key: row["config"][key] for key in ("steps", "learning_rate", "refit")},
            "curve": [[p["tokens"], p["seconds"], p["ppl"] / p["teacher_ppl"], p["kl"]] for p in points],
        })  # fmt: skip
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Tables of docs/results.md: test perplexity before and after, and validation perplexity by tokens."""
    result_rows, curves = [], []
    for row in rows:
        hours, (before, after) = row["seconds"] / 3600, row["ratio"]
        bar, tokens = f"<= {row['bar']}", f"{row['tokens']:,}"
        result_rows.append((row["name"], f"{before:.4f}", f"{after:.4f}", bar, tokens, f"{hours:.2f}"))
        for trained, seconds, ratio, kl in row["curve"]:
            curves.append((row["name"], f"{trained:,}", f"{seconds / 3600:.2f}", f"{ratio:.4f}", f"{kl:.5f}"))
    before_and_after = markdown_table([("cache", "converted", "healed", "bar", "tokens seen", "hours"), *result_rows])
    heads = ("cache", "tokens seen", "hours of training", "validation ppl / teacher's", "KL")
    return f"{before_and_after}\n\n{markdown_table([heads, *curves])}"


if __name__ == "__main__":
    arguments = parser(__doc__, "benchmarks/healing.json", "healing")
    arguments.add_argument("--folder", type=Path, default=Path("runs/healing"))
    arguments.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS))
    run(arguments, measure, short, table)
