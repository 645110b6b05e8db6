"""Perplexity at long context with a selection of tokens: an index compared with upper bounds.

    python benchmarks/sparsity.py --data ../shared/data --model DIR [--topk 1024 512] [--selectors pairs oracle ...]

DIR is an output of `mlaforge sparsify`. One-document windows of 8192 tokens of three kinds: WikiText-2's test articles,
modules of installed packages, and docstrings of others. The first 4096 tokens are read densely, like a prompt; every
later token reads a selection and is evaluated. Key tokens are those that the dense model predicts by at least one nat
better than with a context of 1024 to 1536 tokens (LongPPL, arXiv 2410.23771). fp32 in transformers. An interrupted run
resumes.
"""

from __future__ import annotations

import ast
import copy
import math
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rows import Results, parser, wikitext
from token_selectors import SELECTORS, select_by
from torch import Tensor

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


def main() -> None:
    arguments = parser(__doc__, "benchmarks/sparsity.json")
    arguments.add_argument("--model", required=True)
    arguments.add_argument("--form", default="latent 50 %", help="what the table calls it")
    arguments.add_argument("--topk", type=int, nargs="*", default=[1024, 512])
    arguments.add_argument("--selectors", nargs="*", choices=[*SELECTORS], default=["pairs", "oracle"])
    options = arguments.parse_args()
    source = SourceModel.open(options.model)
    texts = windows(source, options.data)
    results = Results(options.out, [], resume=True)
    model = load_model(source, "float32")
    variants = [("dense", LENGTH), *((selector, k) for k in options.topk for selector in options.selectors)]
    for name, ids in texts.items():
        row_keys = [{"form": options.form, "text": name, "selector": selector, "topk": k} for selector, k in variants]
        # An exact index has different keys, which the cache of another index lacks.
        prompts: dict[bool, Any] = {}
        key: list[int] = next((r["key"] for r in results.rows if r.items() >= row_keys[0].items()), [])
        for row in results.missing(row_keys):
            exact = SELECTORS.get(row["selector"], (False, None))[0]
            select_by(model, "pairs" if row["selector"] == "dense" else row["selector"], row["topk"])
            if exact not in prompts:
                prompts[exact] = read(model, ids[: PROMPT + 1], None, sparse=False)[1]
            losses, _ = read(model, ids, copy.deepcopy(prompts[exact]), sparse=row["selector"] != "dense")
            measurement = {"losses": [float(part.mean()) for part in losses.split(1024)]}
            if row["selector"] == "dense":
                key = measurement["key"] = key_tokens(model, ids, losses)
            results.add({**row, **measurement, "key_loss": float(losses[key].mean())})
    print(table(results.rows))


def mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else math.nan


def table(rows: list[dict[str, Any]]) -> str:
    """Perplexity over the dense model's by kind of text."""
    dense = {(r["form"], r["text"]): r for r in rows if r["selector"] == "dense"}
    kinds = {"articles": set(ARTICLES), "modules": set(MODULES), "reference": {f"docstrings of {n}" for n in REFERENCE}}
    lines: list[list[str]] = [
        ["form", "selector", "k", *kinds, "all", "worst window", "4K to 6K", "6K to 8K", "key tokens"]
    ]
    for key in dict.fromkeys((r["form"], r["selector"], r["topk"]) for r in rows if r["selector"] != "dense"):
        group = [r for r in rows if (r["form"], r["selector"], r["topk"]) == key]
        # Additional loss in nats of every 1024 tokens, by document.
        loss_by_document = {
            r["text"]: [a - b for a, b in zip(r["losses"], dense[r["form"], r["text"]]["losses"], strict=True)]
            for r in group
        }
        windows = {text: mean(parts) for text, parts in loss_by_document.items()}
        groups = [[x for text, x in windows.items() if text in names] for names in kinds.values()]
        places = (
            [x for parts in loss_by_document.values() for x in parts[half]] for half in (slice(0, 2), slice(2, 4))
        )
        # All key tokens have equal weights.
        tokens = [
            (len(d["key"]), r["key_loss"] - d["key_loss"]) for r in group if (d := dense[r["form"], r["text"]])["key"]
        ]
        helped_by = sum(n * x for n, x in tokens) / max(1, sum(n for n, _ in tokens))
        means = (*map(mean, groups), mean([*windows.values()]), max(windows.values()), *map(mean, places), helped_by)
        lines.append([key[0], key[1], str(key[2]), *(f"{math.exp(x):.4f}" for x in means)])
    return markdown_table(lines)


if __name__ == "__main__":
    main()
