"""Retrieval by a selection in 8192 tokens: copied text, needles, and the recall of attention mass.

    python -m research.probes --data ../shared/data --model DIR [--topk 1024 512] [--selectors pairs ...]

DIR is an output of `mlaforge sparsify`. Segments of another document, or sentences that name a number, are inserted
into the documents of benchmarks/sparsity.py, 1K to 7K tokens before the end; the end repeats the segments, or the
sentences up to the number. The text before the end is read densely, the end with a selection. Measured are nats per
token of a segment's second copy (without its first tokens, which are unpredictable) and of a number's digits, with one
or four sentences.

Recall is the share of attention (mean of the heads' exact softmax in the dense model) that falls on the selection;
`contested` excludes the tokens that are always read. Over the last queries of each document and all layers.
"""

from __future__ import annotations

import argparse
import copy
import functools
import random
import statistics
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.script import run
from benchmarks.sparsity import LENGTH, mean, read, sparse_parser, windows
from mlaforge.bench.results import Results
from mlaforge.checkpoint.loading import load_model
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.modeling.token_index_mla import scores
from mlaforge.rendering.table import markdown_table
from research.selectors import SELECTORS, ExactIndex, select_by

DISTANCES = (7000, 5000, 3000, 1000)
# Tokens of a segment, its unpredictable first tokens, and query tokens whose recall is measured.
SEGMENT, FIRST, QUERIES = 48, 8, 128
NAMES = ("Lisbon", "Oslo", "Cairo", "Lima")
DOCUMENTS = 4


def segments(tokenizer: Any, ids: Tensor, other: Tensor, rng: random.Random) -> tuple[Tensor, list[int], int]:
    """Return the document with segments of another at DISTANCES from its end and again at its end, the positions of the
    measured tokens, and the length of the prompt."""
    chosen_segments = [
        other[at : at + SEGMENT] for at in rng.sample(range(0, LENGTH - SEGMENT, SEGMENT), len(DISTANCES))
    ]
    text, positions = ids[: LENGTH - len(DISTANCES) * SEGMENT], []
    for distance, segment in zip(DISTANCES, chosen_segments, strict=True):
        at = len(text) - distance
        text = torch.cat((text[:at], segment, text[at + SEGMENT :]))
    prompt = len(text)
    for segment in chosen_segments:
        positions += range(len(text) + FIRST, len(text) + SEGMENT)
        text = torch.cat((text, segment))
    return text, positions, prompt


def needles(
    tokenizer: Any, ids: Tensor, other: Tensor, rng: random.Random, count: int
) -> tuple[Tensor, list[int], int]:
    """The document with sentences that name a number; see segments."""

    def tokens(text: str) -> Tensor:
        return torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])

    digits = [f" {rng.randrange(10**5, 10**6)}" for _ in range(count)]
    questions = [tokens(f"\nThe secret number of {name} is") for name in NAMES[:count]]
    answers, end = [tokens(number) for number in digits], tokens(".\n")
    text, positions = ids[: LENGTH - sum(map(len, (*questions, *answers)))], []
    for distance, question, answer in zip(DISTANCES[:count][::-1], questions, answers, strict=True):
        sentence = torch.cat((question, answer, end))
        at = len(text) - distance
        text = torch.cat((text[:at], sentence, text[at + len(sentence) :]))
    prompt = len(text)
    for question, answer in zip(questions, answers, strict=True):
        text = torch.cat((text, question))
        positions += range(len(text), len(text) + len(answer))
        text = torch.cat((text, answer))
    return text, positions, prompt


PROBES = {
    "copy": segments,
    "one needle": functools.partial(needles, count=1),
    "four needles": functools.partial(needles, count=4),
}


class CombinedIndex(nn.Module):
    """An exact index concatenated with the layer's trained index."""

    def __init__(self, exact: ExactIndex, trained: Any):
        super().__init__()
        self.exact, self.trained = exact, trained

    def keys(self, *arguments: Tensor) -> Tensor:
        return torch.cat((self.exact.keys(*arguments), self.trained.keys(*arguments)), dim=-1)

    def queries(self, *arguments: Tensor) -> Tensor:
        return torch.cat((self.exact.queries(*arguments), self.trained.queries(*arguments)), dim=-1)


class Recall:
    """Score function that records the recall of every selector and selects all tokens."""

    def __init__(self, model: Any, selectors: list[str], topk: list[int]):
        self.sparsity, self.variants = model.model.sparsity, [(name, k) for k in topk for name in selectors]
        # For every layer and chunk: recalled shares of all and of contested attention, by query.
        self.shares_by_variant: dict[tuple[str, int], list[tuple[Tensor, Tensor]]] = {
            variant: [] for variant in self.variants
        }
        width = model.config.index_head_dim
        self.split = lambda x: x.split([x.shape[-1] - width, width], dim=-1)

    def __call__(self, queries: Tensor, keys: Tensor, visible: Tensor, sinks: Tensor | None) -> Tensor:
        by = [*zip(self.split(queries), self.split(keys), strict=True)]
        mass = scores(*by[0], visible, sinks)
        contested = mass.masked_fill(self.sparsity.forced(visible), 0.0)
        for name, k in self.variants:
            exact, score = SELECTORS[name]
            chosen = self.sparsity.top(score(*by[0 if exact else 1], visible, sinks), visible, k)
            shares = (m.gather(-1, chosen).sum(-1) / m.sum(-1) for m in (mass, contested))
            self.shares_by_variant[name, k].append(tuple(share.flatten() for share in shares))
        return mass

    def rows(self) -> list[dict[str, Any]]:
        rows = []
        for (name, k), shares in self.shares_by_variant.items():
            overall, contested = (torch.stack(parts) for parts in zip(*shares, strict=True))
            rows.append({
                "selector": name, "topk": k, "recall": float(overall.mean()), "contested": float(contested.mean()),
                "5 %": float(contested.flatten().quantile(0.05)), "worst layer": float(contested.mean(1).min()),
            })  # fmt: skip
        return rows


def recall(model: Any, ids: Tensor, selectors: list[str], topk: list[int]) -> list[dict[str, Any]]:
    """Recall over the last queries of a document."""
    select_by(model, "pairs", LENGTH)
    for layer in model.model.layers:
        sparse = getattr(layer.self_attn, "sparse", None)
        if sparse is not None and sparse.index is not None:
            sparse.index = layer.self_attn.index = CombinedIndex(ExactIndex(layer.self_attn), sparse.trained_index)
    past = read(model, ids[: LENGTH - QUERIES + 1], None, sparse=False)[1]
    recorder = model.model.sparsity.score = Recall(model, selectors, topk)
    model.model.sparsity.shortcut = False
    read(model, torch.cat((ids, ids[-1:])), past, sparse=True)
    model.model.sparsity.shortcut = True
    return recorder.rows()


def measure(options: argparse.Namespace) -> Results:
    source = SourceModel.open(options.model)
    documents = list(windows(source, options.data).items())
    results = Results(options.raw, [], resume=True)
    model = load_model(source, "float32")
    variants = [("dense", LENGTH), *((selector, k) for k in options.topk for selector in options.selectors)]
    for (name, ids), (_, other) in zip(documents[:: 8 // DOCUMENTS], documents[1 :: 8 // DOCUMENTS], strict=True):
        if not any(
            {"form": options.form, "text": name, "probe": "recall"}.items() <= row.items() for row in results.rows
        ):
            for row in recall(model, ids, options.selectors, options.topk):
                results.add({"form": options.form, "text": name, "probe": "recall", **row})
        for probe, build_probe in PROBES.items():
            text, positions, prompt = build_probe(source.tokenizer, ids, other, random.Random(name))
            row_keys = [
                {"form": options.form, "text": name, "probe": probe, "selector": s, "topk": k} for s, k in variants
            ]
            prompts: dict[bool, Any] = {}
            for row in results.missing(row_keys):
                exact = SELECTORS.get(row["selector"], (False, None))[0]
                select_by(model, "pairs" if row["selector"] == "dense" else row["selector"], row["topk"])
                if exact not in prompts:
                    prompts[exact] = read(model, text[: prompt + 1], None, sparse=False)[1]
                losses, _ = read(model, text, copy.deepcopy(prompts[exact]), sparse=row["selector"] != "dense")
                # The first loss is of the token behind the prompt's last but one.
                results.add({**row, "nats": float(losses[torch.tensor(positions) - prompt - 1].mean())})
    return results


KINDS = ("recall", "contested", "5 %", "worst layer")


def short(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Means over the documents: recall, and nats per token of every probe; None where it was not measured."""
    rows, lines = body["rows"], []
    for key in dict.fromkeys((r["form"], r["selector"], r["topk"]) for r in rows):
        group = [r for r in rows if (r["form"], r["selector"], r["topk"]) == key]
        recalled = [r for r in group if r["probe"] == "recall"]
        line = {"form": key[0], "selector": key[1], "topk": key[2]}
        line |= {kind: statistics.fmean(r[kind] for r in recalled) if recalled else None for kind in KINDS}
        line |= {probe: mean([r["nats"] for r in group if r["probe"] == probe]) for probe in PROBES}
        lines.append(line)
    return lines


def table(rows: list[dict[str, Any]]) -> str:
    heads = ("form", "selector", "topk", *KINDS, *PROBES)
    cells = [[f"{x:.3f}" if isinstance(x := row[h], float) else "–" if x is None else str(x) for h in heads]
             for row in rows]  # fmt: skip
    return markdown_table([list(heads), *cells])


if __name__ == "__main__":
    arguments = sparse_parser(__doc__, "research/sparsity.json", "probes")
    arguments.add_argument("--selectors", nargs="*", choices=[*SELECTORS], default=[*SELECTORS][:-2])
    run(arguments, measure, short, table)
