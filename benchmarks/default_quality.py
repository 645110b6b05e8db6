"""Quality of `convert`'s default output against the dense original: perplexity and retrieval, for several seeds.

    python -m benchmarks.default_quality --data ../shared/data [--seeds 0 1 2] [--probes] [--scratch FOLDER]

SmolLM2-135M-Instruct, converted with no option but the seed: coded rows at 4 bits, an index that reads 1,024 tokens,
no calibration text given. fp32 in transformers. At 2,048 tokens (`mlaforge eval --teacher`: 8 windows of WikiText-2's
test text, 4 of held-out Python) every token reads a selection. At 8,192 tokens documents, prompts and key tokens are
those of benchmarks/sparsity.py. --probes adds two texts per document: one ends with copies of four segments, the other
with four questions for numbers, both inserted 1K to 7K tokens before (research/probes.py): the loss in nats per copied
token, and how many numbers are the most likely continuation, digit by digit, as in greedy decoding. --scratch keeps the
conversions for another run.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.script import evaluation_texts, parser, run, scratch, wikitext
from benchmarks.sparsity import PROMPT, key_tokens, read, select, windows
from mlaforge.bench.results import Results
from mlaforge.checkpoint.loading import load_model
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.conversion import convert
from mlaforge.conversion.config import ConvertConfig
from mlaforge.demo import model as demo_model
from mlaforge.evaluation import perplexity
from mlaforge.evaluation.config import EvalConfig
from mlaforge.rendering.table import markdown_table
from research.probes import needles, segments

SHORT_TEXTS = {"wiki": 8, "code": 4}
QUESTIONS = 4
# Largest allowed mean over the seeds of every figure in `figures`.
BARS = {
    "wiki 2K": 1.008, "code 2K": 1.007, "8K": 1.012, "8K, worst": 1.02, "key tokens": 1.05, "copy, nats": 0.1,
    "needles lost": 2,
}  # fmt: skip


def runs(positions: list[int]) -> list[list[int]]:
    """Split positions into runs of successive numbers."""
    parts: list[list[int]] = []
    for at in positions:
        if parts and at == parts[-1][-1] + 1:
            parts[-1].append(at)
        else:
            parts.append([at])
    return parts


@torch.no_grad()
def retrieved(model: Any, text: Tensor, past: Any, answers: list[list[int]], sparse: bool) -> int:
    """Return how many answers (positions in the text) are the most likely tokens."""
    select(model, sparse)
    logits = model(text[past.get_seq_length() : -1][None], past_key_values=past).logits[0]
    best = logits.argmax(-1)
    first = len(text) - len(best)
    return sum(all(best[at - first] == text[at] for at in answer) for answer in answers)


def probe(model: Any, tokenizer: Any, name: str, ids: Tensor, other: Tensor, sparse: bool) -> dict[str, Any]:
    """Results of both probes in one document."""
    text, copied, prompt = segments(tokenizer, ids, other, random.Random(name))
    past = read(model, text[: prompt + 1], None, sparse=False)[1]
    losses = read(model, text, past, sparse=sparse)[0]
    text, digits, prompt = needles(tokenizer, ids, other, random.Random(name), QUESTIONS)
    past = read(model, text[: prompt + 1], None, sparse=False)[1]
    answers = runs(digits)
    assert len(answers) == QUESTIONS
    return {
        "copy": float(losses[torch.tensor(copied) - prompt - 1].mean()),
        "retrieved": retrieved(model, text, past, answers, sparse),
    }


def measure(options: argparse.Namespace) -> Results:
    original = demo_model.fetch()
    results = Results(options.raw, [], resume=True)
    with scratch(options) as folder:
        models = {"original": original}
        for seed in options.seeds:
            models[f"seed {seed}"] = folder / f"default-seed-{seed}"
            convert.run(str(original), models[f"seed {seed}"], ConvertConfig(seed=seed, eval_windows=0))
        tokenizer = SourceModel.open(original).tokenizer
        evaluation_texts(tokenizer, options.data, SHORT_TEXTS, 2048, folder)
        texts = {"wiki": wikitext(options.data)[1], "code": str(folder / "code.txt")}
        shorts = [
            {"model": name, "text": text, "kind": "2K"} for name in models if name != "original" for text in texts
        ]
        for row in results.missing(shorts):
            config = EvalConfig(
                text=texts[row["text"]], windows=SHORT_TEXTS[row["text"]], dtype="float32", teacher=str(original)
            )
            metrics = perplexity.run(str(models[row["model"]]), None, config).metrics
            names = ("ratio", "log_ratio_stderr", "kl", "kl_p99", "top1")
            results.add({**row, **{name: metrics[name] for name in names}})
        # `windows` refuses a document that shares text with a conversion's calibration.
        conversions = {name: path for name, path in models.items() if name != "original"}
        documents = [windows(SourceModel.open(path), options.data) for path in conversions.values()][-1]
        others = [*documents.values()][1:] + [*documents.values()][:1]
        for model_name, path in models.items():
            model, sparse = None, model_name != "original"
            kinds = ["losses"] + ["probes"] * options.probes
            keys = ({"model": model_name, "text": name, "kind": kind} for kind in kinds for name in documents)
            for row in results.missing(keys):
                name, ids = row["text"], documents[row["text"]]
                model = model or load_model(SourceModel.open(path), "float32")
                if row["kind"] == "losses":
                    past = read(model, ids[: PROMPT + 1], None, sparse=False)[1]
                    losses = read(model, ids, past, sparse=sparse)[0]
                    key = exact_rows(results.rows)[name]["key"] if sparse else key_tokens(model, ids, losses)
                    means = [float(part.mean()) for part in losses.split(1024)]
                    key_loss = float(losses[key].mean()) if key else None
                    results.add({**row, "losses": means, "key_loss": key_loss, **({} if sparse else {"key": key})})
                else:
                    other = others[[*documents].index(name)]
                    results.add({**row, **probe(model, tokenizer, name, ids, other, sparse)})
    return results


def exact_rows(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The dense original's losses of every document."""
    return {row["text"]: row for row in rows if (row["model"], row["kind"]) == ("original", "losses")}


def figures(rows: list[dict[str, Any]], model: str) -> dict[str, float]:
    """Figures of one conversion, perplexities over the original's."""

    def by_text(kind: str, of: str = model) -> dict[str, dict[str, Any]]:
        return {row["text"]: row for row in rows if (row["model"], row["kind"]) == (of, kind)}

    short, long, exact = by_text("2K"), by_text("losses"), exact_rows(rows)
    differences = [
        statistics.fmean(row["losses"]) - statistics.fmean(exact[text]["losses"]) for text, row in long.items()
    ]
    # All key tokens have equal weights.
    lost = [
        (len(exact[text]["key"]), row["key_loss"] - exact[text]["key_loss"])
        for text, row in long.items() if exact[text]["key"]
    ]  # fmt: skip
    values = {
        "wiki 2K": short["wiki"]["ratio"],
        "code 2K": short["code"]["ratio"],
        "8K": math.exp(statistics.fmean(differences)),
        "8K, worst": math.exp(max(differences)),
        "key tokens": math.exp(sum(n * x for n, x in lost) / sum(n for n, _ in lost)),
    }
    ours, theirs = by_text("probes"), by_text("probes", "original")
    if ours:
        values["copy, nats"] = statistics.fmean(row["copy"] - theirs[text]["copy"] for text, row in ours.items())
        values["needles lost"] = sum(theirs[text]["retrieved"] - row["retrieved"] for text, row in ours.items())
    return values


def short(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Figures of every conversion, their mean, and the bars."""
    rows = body["rows"]
    names = dict.fromkeys(row["model"] for row in rows if row["model"] != "original")
    by_model = {name: figures(rows, name) for name in names}
    heads = [name for name in BARS if all(name in values for values in by_model.values())]
    by_model["mean"] = {name: statistics.fmean(values[name] for values in by_model.values()) for name in heads}
    return [{"model": name, **values} for name, values in by_model.items()] + [{"model": "bar", **BARS}]


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown table of the rows."""
    heads = [name for name in BARS if all(name in row for row in rows)]
    return markdown_table([["", *heads], *([row["model"], *(f"{row[name]:.4f}" for name in heads)] for row in rows)])


if __name__ == "__main__":
    arguments = parser(__doc__, "benchmarks/sparsity.json", "default output")
    arguments.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    arguments.add_argument("--probes", action="store_true", help="copies and needles too, which take longest")
    arguments.add_argument("--scratch", type=Path, help="folder of the conversions")
    run(arguments, measure, short, table)
