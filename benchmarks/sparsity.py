"""Perplexity at long context of models that read a selection of tokens, over the same model read densely.

    python -m benchmarks.sparsity --data ../shared/data --model DIR [--form NAME] [--topk 1024 512] [--placed]

DIR is an output of `mlaforge sparsify`. One-document windows of 8192 tokens of three kinds: WikiText-2's test articles,
modules of installed packages, and docstrings of others. The first 4096 tokens are read densely, like a prompt; every
later token reads a selection and is evaluated. Key tokens are those that the dense model predicts by at least one nat
better than with a context of 1024 to 1536 tokens (LongPPL, arXiv 2410.23771). fp32 in transformers. --placed: with the
budgets of layers that the model has. An interrupted run resumes; research/selectors.py compares other selectors.
"""

from __future__ import annotations

import argparse
import ast
import copy
import math
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.script import parser, run, wikitext
from mlaforge.bench.results import Results
from mlaforge.checkpoint.loading import load_model
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.data import corpus, overlap
from mlaforge.rendering.table import markdown_table
from mlaforge.runtime import UserError

LENGTH, PROMPT, CHUNK, SHORT = 8192, 4096, 512, 1024
ARTICLES = ("Brock Lesnar", "Ironclad warship", "Temnospondyli", "Manila")
MODULES = ("transformers/generation/utils.py", "numpy/lib/_npyio_impl.py")
REFERENCE = ("scipy/signal/_filter_design.py", "scipy/optimize/_optimize.py")


def documents(data: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of every document."""
    articles = re.split(r"\n (?== [^=])", Path(wikitext(data)[1]).read_text("utf-8"))
    for title in ARTICLES:
        yield title, next(article for article in articles if article.startswith(f"= {title} ="))
    site = Path(sysconfig.get_paths()["purelib"])
    for name in MODULES:
        yield name, (site / name).read_text("utf-8")
    for name in REFERENCE:
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        nodes = (node for node in ast.walk(ast.parse((site / name).read_text("utf-8"))) if isinstance(node, kinds))
        yield f"docstrings of {name}", "\n\n".join(filter(None, map(ast.get_docstring, nodes)))


def windows(source: SourceModel, data: Path) -> dict[str, Tensor]:
    """Token ids [LENGTH] of the documents; raise UserError if one overlaps text that the model was tuned on."""
    tuned = overlap.read_passages(source.path / overlap.PASSAGES)
    windows_by_document = {}
    for name, text in documents(data):
        ids = corpus.tokens(source.tokenizer, text, LENGTH)[:LENGTH]
        assert len(ids) == LENGTH, f"{name} has {len(ids)} tokens"
        if overlap.sharing([ids], tuned):
            raise UserError(f"{name} shares text with what the model was tuned on")
        windows_by_document[name] = ids
    return windows_by_document


def select(model: Any, sparse: bool) -> None:
    """Make prompt tokens read selections, or all tokens. An original model, which has no index, reads all."""
    if sparse or hasattr(model.model, "sparsity"):
        model.model.sparsity.prompts = sparse


@torch.no_grad()
def read(model: Any, ids: Tensor, past: Any, sparse: bool) -> tuple[Tensor, Any]:
    """Return losses in nats of the tokens after the first of `ids`, and the cache. past: cache of earlier tokens."""
    select(model, sparse)
    start = past.get_seq_length() if past is not None else 0
    losses = []
    for begin in range(start, len(ids) - 1, CHUNK):
        part = ids[begin : min(begin + CHUNK, len(ids) - 1)]
        out = model(part[None], past_key_values=past, use_cache=True)
        past = out.past_key_values
        logits = out.logits[0].float()
        losses.append(
            torch.nn.functional.cross_entropy(logits, ids[begin + 1 : begin + 1 + len(part)], reduction="none")
        )
    return torch.cat(losses), past


@torch.no_grad()
def key_tokens(model: Any, ids: Tensor, losses: Tensor) -> list[int]:
    """Evaluated tokens whose loss is at least one nat higher with a short context. losses: of the dense model."""
    short = []
    for start in range(PROMPT, len(ids) - 1, CHUNK):
        short_losses = read(model, ids[start - SHORT : start + CHUNK + 1], None, sparse=False)[0]
        short.append(short_losses[SHORT:])
    return (torch.cat(short) - losses >= 1).nonzero().flatten().tolist()


def choose(model: Any, selector: str, topk: int) -> None:
    """Make every sparse layer read `topk` tokens, or with `placed` the number of its own budget."""
    for layer in model.model.layers:
        sparse = getattr(layer.self_attn, "sparse", None)
        if sparse is not None and selector != "placed":
            sparse.topk = topk


def measure(
    options: argparse.Namespace, selectors: Sequence[str], choose: Callable[[Any, str, int], None] = choose,
    exact: Sequence[str] = (),
) -> Results:  # fmt: skip
    """Losses of every document by selector and number of tokens. choose: makes a model use a selector; exact: selectors
    with other index keys, which the cache of the model's own index lacks."""
    source = SourceModel.open(options.model)
    texts = windows(source, options.data)
    results = Results(options.raw, [], resume=True)
    model = load_model(source, "float32")
    variants = [("dense", LENGTH), *((selector, k) for k in options.topk for selector in selectors)]
    for name, ids in texts.items():
        row_keys = [{"form": options.form, "text": name, "selector": selector, "topk": k} for selector, k in variants]
        prompts: dict[bool, Any] = {}
        key: list[int] = next((r["key"] for r in results.rows if r.items() >= row_keys[0].items()), [])
        for row in results.missing(row_keys):
            is_exact = row["selector"] in exact
            choose(model, "pairs" if row["selector"] == "dense" else row["selector"], row["topk"])
            if is_exact not in prompts:
                prompts[is_exact] = read(model, ids[: PROMPT + 1], None, sparse=False)[1]
            losses, _ = read(model, ids, copy.deepcopy(prompts[is_exact]), sparse=row["selector"] != "dense")
            measurement = {"losses": [float(part.mean()) for part in losses.split(1024)]}
            if row["selector"] == "dense":
                key = measurement["key"] = key_tokens(model, ids, losses)
            results.add({**row, **measurement, "key_loss": float(losses[key].mean())})
    return results


def mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else math.nan


def short(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Perplexity over the dense model's by kind of text and position, with the additional loss in nats of every 1,024
    tokens."""
    rows = body["rows"]
    dense = {(r["form"], r["text"]): r for r in rows if r["selector"] == "dense"}
    kinds = {"articles": set(ARTICLES), "modules": set(MODULES), "reference": {f"docstrings of {n}" for n in REFERENCE}}
    lines = []
    for key in dict.fromkeys((r["form"], r["selector"], r["topk"]) for r in rows if r["selector"] != "dense"):
        group = [r for r in rows if (r["form"], r["selector"], r["topk"]) == key]
        # Additional loss in nats of every 1024 tokens, by document.
        loss_by_document = {
            r["text"]: [a - b for a, b in zip(r["losses"], dense[r["form"], r["text"]]["losses"], strict=True)]
            for r in group
        }
        windows = {text: mean(parts) for text, parts in loss_by_document.items()}
        nats = {kind: mean([x for text, x in windows.items() if text in names]) for kind, names in kinds.items()}
        nats |= {"all": mean([*windows.values()]), "worst document": max(windows.values())}
        for place, half in (("4K to 6K", slice(0, 2)), ("6K to 8K", slice(2, 4))):
            nats[place] = mean([x for parts in loss_by_document.values() for x in parts[half]])
        # All key tokens have equal weights.
        tokens = [
            (len(d["key"]), r["key_loss"] - d["key_loss"]) for r in group if (d := dense[r["form"], r["text"]])["key"]
        ]
        nats["key tokens"] = sum(n * x for n, x in tokens) / max(1, sum(n for n, _ in tokens))
        lines.append({
            "form": key[0], "selector": key[1], "topk": key[2], "documents": len(group),
            **{name: math.exp(loss) for name, loss in nats.items()},
            "nats by 1K": [mean([parts[at] for parts in loss_by_document.values()]) for at in range(4)],
        })  # fmt: skip
    return lines


def table(rows: list[dict[str, Any]]) -> str:
    """Perplexity over the dense model's."""
    heads = ("form", "selector", "topk", "articles", "modules", "reference", "all", "worst document", "4K to 6K",
             "6K to 8K", "key tokens")  # fmt: skip
    cells = [[f"{row[h]:.4f}" if isinstance(row[h], float) else str(row[h]) for h in heads] for row in rows]
    return markdown_table([list(heads), *cells])


def sparse_parser(doc: str | None, out: str, name: str) -> argparse.ArgumentParser:
    """Parser with the options of all measurements of a sparse model."""
    arguments = parser(doc, out, name)
    arguments.add_argument("--model", help="output of `mlaforge sparsify`")
    arguments.add_argument("--form", default="latent 50 %", help="its name in the table")
    arguments.add_argument("--topk", type=int, nargs="*", default=[1024, 512])
    return arguments


if __name__ == "__main__":
    arguments = sparse_parser(__doc__, "benchmarks/sparsity.json", "selections")
    arguments.add_argument("--placed", action="store_true", help="with the model's budgets of layers")
    run(arguments, lambda options: measure(options, ["placed" if options.placed else "pairs"]), short, table)
