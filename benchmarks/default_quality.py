"""Quality of `convert`'s default output against the dense original: perplexity, copying, needles, for several seeds.

    python benchmarks/default_quality.py --data ../shared/data [--seeds 0 1 2] [--scratch FOLDER]

SmolLM2-135M-Instruct, converted with no option but the seed: coded rows at 4 bits, an index that reads 1,024 tokens,
no calibration text given. fp32 in transformers. At 2,048 tokens (`mlaforge eval --teacher`: 8 windows of WikiText-2's
test text, 4 of held-out Python) every token reads a selection. At 8,192 tokens the documents, prompts and key tokens
are those of benchmarks/sparsity.py. One text per document ends with copies of four segments, another with four
questions for numbers, both inserted 1K to 7K tokens before (benchmarks/sparsity_probes.py): the loss in nats per copied
token, and how many numbers are the most likely continuation, digit by digit, as in greedy decoding. --scratch keeps the
conversions for another run.
"""

from __future__ import annotations

import contextlib
import math
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from rows import Results, command, evaluation_texts, parser, wikitext
from sparsity import PROMPT, key_tokens, read, select, windows
from sparsity_probes import needles, segments
from torch import Tensor

from mlaforge.checkpoint.loading import load_model
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.conversion import convert
from mlaforge.conversion.config import ConvertConfig
from mlaforge.demo import model as demo_model
from mlaforge.evaluation import perplexity
from mlaforge.evaluation.config import EvalConfig
from mlaforge.rendering.table import markdown_table

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


def measure(
    model: Any, tokenizer: Any, name: str, ids: Tensor, other: Tensor, sparse: bool
) -> tuple[Tensor, dict[str, Any]]:
    """Losses of the evaluated tokens of one document, and the results of both probes."""
    past = read(model, ids[: PROMPT + 1], None, sparse=False)[1]
    losses = read(model, ids, past, sparse=sparse)[0]
    text, copied, prompt = segments(tokenizer, ids, other, random.Random(name))
    past = read(model, text[: prompt + 1], None, sparse=False)[1]
    copy_losses = read(model, text, past, sparse=sparse)[0]
    text, digits, prompt = needles(tokenizer, ids, other, random.Random(name), QUESTIONS)
    past = read(model, text[: prompt + 1], None, sparse=False)[1]
    answers = runs(digits)
    assert len(answers) == QUESTIONS
    return losses, {
        "copy": float(copy_losses[torch.tensor(copied) - prompt - 1].mean()),
        "retrieved": retrieved(model, text, past, answers, sparse),
    }


def main() -> None:
    arguments = parser(__doc__, "benchmarks/default_quality.json")
    arguments.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    arguments.add_argument("--scratch", type=Path, help="folder of the conversions")
    options = arguments.parse_args()
    original = demo_model.fetch()
    results = Results(options.out, [], resume=True, command=command())
    with contextlib.ExitStack() as stack:
        scratch = options.scratch or Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.out.parent)))
        scratch.mkdir(parents=True, exist_ok=True)
        models = {"original": original}
        for seed in options.seeds:
            models[f"seed {seed}"] = scratch / f"default-seed-{seed}"
            convert.run(str(original), models[f"seed {seed}"], ConvertConfig(seed=seed, eval_windows=0))
        tokenizer = SourceModel.open(original).tokenizer
        evaluation_texts(tokenizer, options.data, SHORT_TEXTS, 2048, scratch)
        texts = {"wiki": wikitext(options.data)[1], "code": str(scratch / "code.txt")}
        short = [{"model": name, "text": text} for name in models if name != "original" for text in texts]
        for row in results.missing(short):
            config = EvalConfig(
                text=texts[row["text"]], windows=SHORT_TEXTS[row["text"]], dtype="float32", teacher=str(original)
            )
            metrics = perplexity.run(str(models[row["model"]]), None, config).metrics
            names = ("ratio", "log_ratio_stderr", "kl", "kl_p99", "top1")
            results.add({**row, **{name: metrics[name] for name in names}})
        # `windows` refuses a document that shares text with a conversion's calibration.
        conversions = [path for path in models.values() if path != original]
        documents = [windows(SourceModel.open(path), options.data) for path in conversions][-1]
        others = [*documents.values()][1:] + [*documents.values()][:1]
        for model_name, path in models.items():
            model = None
            for (name, ids), other in zip(documents.items(), others, strict=True):
                for row in results.missing([{"model": model_name, "text": name}]):
                    model = model or load_model(SourceModel.open(path), "float32")
                    losses, probes = measure(model, tokenizer, name, ids, other, sparse=model_name != "original")
                    if model_name == "original":
                        row["key"] = key = key_tokens(model, ids, losses)
                    else:
                        key = document(results.rows, "original", name)["key"]
                    means = [float(part.mean()) for part in losses.split(1024)]
                    results.add({**row, "losses": means, "key_loss": float(losses[key].mean()), **probes})
    print(table(results.rows))


def document(rows: list[dict[str, Any]], model: str, text: str) -> dict[str, Any]:
    return next(row for row in rows if (row["model"], row["text"]) == (model, text))


def figures(rows: list[dict[str, Any]], model: str) -> dict[str, float]:
    """Figures of one conversion, perplexities over the original's."""
    exact = [row for row in rows if row["model"] == "original"]
    pairs = [(document(rows, model, row["text"]), row) for row in exact]
    differences = [statistics.fmean(row["losses"]) - statistics.fmean(dense["losses"]) for row, dense in pairs]
    # All key tokens have equal weights.
    lost = [(len(dense["key"]), row["key_loss"] - dense["key_loss"]) for row, dense in pairs if dense["key"]]
    return {
        "wiki 2K": document(rows, model, "wiki")["ratio"],
        "code 2K": document(rows, model, "code")["ratio"],
        "8K": math.exp(statistics.fmean(differences)),
        "8K, worst": math.exp(max(differences)),
        "key tokens": math.exp(sum(n * x for n, x in lost) / sum(n for n, _ in lost)),
        "copy, nats": statistics.fmean(row["copy"] - dense["copy"] for row, dense in pairs),
        "needles lost": sum(dense["retrieved"] - row["retrieved"] for row, dense in pairs),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown table of docs/results.md: every conversion, their mean, and the bars."""
    names = dict.fromkeys(row["model"] for row in rows if row["model"] != "original")
    by_model = {name: figures(rows, name) for name in names}
    by_model["mean"] = {name: statistics.fmean(f[name] for f in by_model.values()) for name in BARS}
    by_model["bar"] = BARS
    lines = [["", *BARS], *([name, *(f"{f[k]:.4g}" for k in BARS)] for name, f in by_model.items())]
    return markdown_table(lines)


if __name__ == "__main__":
    main()
