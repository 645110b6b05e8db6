"""What a selection finds again in 8192 tokens: text that is copied, needles, and the mass of attention.

    python benchmarks/sparsity_probes.py --data ../shared/data --model DIR [--topk 1024 512] [--selectors pairs ...]

DIR is what `mlaforge sparsify` wrote. Into the documents of benchmarks/sparsity.py go, at 1K to 7K before the end,
segments of another document, and sentences that name a number; at the end stand the segments again, or the sentences up
to the number. Read densely up to there, then by a selection, and judged: nats of a token of a segment's second copy
(but for the first ones, which nothing announces), and of a number's digits, where one sentence or four were to be
found.

Recall is the share of attention (mean of the heads' softmax, exact, of the dense model) that falls on the selection; of
what is contested, without the tokens that are read in any case. Over the last queries of each document and all layers.
"""

from __future__ import annotations

import copy
import functools
import random
import statistics
from typing import Any

import torch
from rows import Results, parser
from sparsity import LENGTH, mean, read, windows
from token_selectors import SELECTORS, ExactIndex, select_by
from torch import Tensor, nn

from mlaforge.checkpoint.loading import load_model
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.modeling.token_index_mla import scores
from mlaforge.rendering.table import markdown_table

DISTANCES = (7000, 5000, 3000, 1000)
# Tokens of a segment, and those that nothing announces; query tokens whose recall is measured.
SEGMENT, FIRST, QUERIES = 48, 8, 128
NAMES = ("Lisbon", "Oslo", "Cairo", "Lima")
DOCUMENTS = 4


def segments(tokenizer: Any, ids: Tensor, other: Tensor, rng: random.Random) -> tuple[Tensor, list[int], int]:
    """The document with segments of another at DISTANCES from its end and again there; which tokens are judged, and how
    long the prompt is."""
    drawn = [other[at : at + SEGMENT] for at in rng.sample(range(0, LENGTH - SEGMENT, SEGMENT), len(DISTANCES))]
    text, judged = ids[: LENGTH - len(DISTANCES) * SEGMENT], []
    for distance, segment in zip(DISTANCES, drawn, strict=True):
        at = len(text) - distance
        text = torch.cat((text[:at], segment, text[at + SEGMENT :]))
    prompt = len(text)
    for segment in drawn:
        judged += range(len(text) + FIRST, len(text) + SEGMENT)
        text = torch.cat((text, segment))
    return text, judged, prompt


def needles(
    tokenizer: Any, ids: Tensor, other: Tensor, rng: random.Random, count: int
) -> tuple[Tensor, list[int], int]:
    """The same with sentences that name a number."""

    def tokens(text: str) -> Tensor:
        return torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])

    digits = [f" {rng.randrange(10**5, 10**6)}" for _ in range(count)]
    asked = [tokens(f"\nThe secret number of {name} is") for name in NAMES[:count]]
    answers, end = [tokens(number) for number in digits], tokens(".\n")
    text, judged = ids[: LENGTH - sum(map(len, (*asked, *answers)))], []
    for distance, question, answer in zip(DISTANCES[:count][::-1], asked, answers, strict=True):
        told = torch.cat((question, answer, end))
        at = len(text) - distance
        text = torch.cat((text[:at], told, text[at + len(told) :]))
    prompt = len(text)
    for question, answer in zip(asked, answers, strict=True):
        text = torch.cat((text, question))
        judged += range(len(text), len(text) + len(answer))
        text = torch.cat((text, answer))
    return text, judged, prompt


PROBES = {
    "copy": segments,
    "one needle": functools.partial(needles, count=1),
    "four needles": functools.partial(needles, count=4),
}


class Both(nn.Module):
    """An exact index and the layer's own side by side."""

    def __init__(self, exact: ExactIndex, own: Any):
        super().__init__()
        self.exact, self.own = exact, own

    def keys(self, *given: Tensor) -> Tensor:
        return torch.cat((self.exact.keys(*given), self.own.keys(*given)), dim=-1)

    def queries(self, *given: Tensor) -> Tensor:
        return torch.cat((self.exact.queries(*given), self.own.queries(*given)), dim=-1)


class Recall:
    """Stands for a model's score: notes what every selector would have recalled, and has everything read."""

    def __init__(self, model: Any, selectors: list[str], topk: list[int]):
        self.sparsity, self.wanted = model.model.sparsity, [(name, k) for k in topk for name in selectors]
        # Of every layer and chunk: shares of all and of what is contested, by query.
        self.seen: dict[tuple[str, int], list[tuple[Tensor, Tensor]]] = {wanted: [] for wanted in self.wanted}
        width = model.config.index_head_dim
        self.split = lambda x: x.split([x.shape[-1] - width, width], dim=-1)

    def __call__(self, queries: Tensor, keys: Tensor, visible: Tensor, sinks: Tensor | None) -> Tensor:
        by = [*zip(self.split(queries), self.split(keys), strict=True)]
        mass = scores(*by[0], visible, sinks)
        contested = mass.masked_fill(self.sparsity.forced(visible), 0.0)
        for name, k in self.wanted:
            exact, score = SELECTORS[name]
            chosen = self.sparsity.top(score(*by[0 if exact else 1], visible, sinks), visible, k)
            shares = (m.gather(-1, chosen).sum(-1) / m.sum(-1) for m in (mass, contested))
            self.seen[name, k].append(tuple(share.flatten() for share in shares))
        return mass

    def rows(self) -> list[dict[str, Any]]:
        found = []
        for (name, k), seen in self.seen.items():
            every, contested = (torch.stack(parts) for parts in zip(*seen, strict=True))
            found.append({
                "selector": name, "topk": k, "recall": float(every.mean()), "contested": float(contested.mean()),
                "5 %": float(contested.flatten().quantile(0.05)), "worst layer": float(contested.mean(1).min()),
            })  # fmt: skip
        return found


def recall(model: Any, ids: Tensor, selectors: list[str], topk: list[int]) -> list[dict[str, Any]]:
    """Of the last queries of a document."""
    select_by(model, "pairs", LENGTH)
    for layer in model.model.layers:
        sparse = getattr(layer.self_attn, "sparse", None)
        if sparse is not None and sparse.index is not None:
            sparse.index = layer.self_attn.index = Both(ExactIndex(layer.self_attn), sparse.own)
    past = read(model, ids[: LENGTH - QUERIES + 1], None, sparse=False)[1]
    noted = model.model.sparsity.score = Recall(model, selectors, topk)
    model.model.sparsity.shortcut = False
    read(model, torch.cat((ids, ids[-1:])), past, sparse=True)
    model.model.sparsity.shortcut = True
    return noted.rows()


def main() -> None:
    arguments = parser(__doc__, "benchmarks/sparsity_probes.json")
    arguments.add_argument("--model", required=True)
    arguments.add_argument("--form", default="latent 50 %", help="what the table calls it")
    arguments.add_argument("--topk", type=int, nargs="*", default=[1024, 512])
    arguments.add_argument("--selectors", nargs="*", choices=[*SELECTORS], default=[*SELECTORS][:-2])
    options = arguments.parse_args()
    source = SourceModel.open(options.model)
    every = list(windows(source, options.data).items())
    results = Results(options.out, [], resume=True)
    model = load_model(source, "float32")
    wanted = [("dense", LENGTH), *((selector, k) for k in options.topk for selector in options.selectors)]
    for (name, ids), (_, other) in zip(every[:: 8 // DOCUMENTS], every[1 :: 8 // DOCUMENTS], strict=True):
        if not any(
            {"form": options.form, "text": name, "probe": "recall"}.items() <= row.items() for row in results.rows
        ):
            for row in recall(model, ids, options.selectors, options.topk):
                results.add({"form": options.form, "text": name, "probe": "recall", **row})
        for probe, made in PROBES.items():
            text, judged, prompt = made(source.tokenizer, ids, other, random.Random(name))
            asked = [{"form": options.form, "text": name, "probe": probe, "selector": s, "topk": k} for s, k in wanted]
            prompts: dict[bool, Any] = {}
            for row in results.missing(asked):
                exact = SELECTORS.get(row["selector"], (False, None))[0]
                select_by(model, "pairs" if row["selector"] == "dense" else row["selector"], row["topk"])
                if exact not in prompts:
                    prompts[exact] = read(model, text[: prompt + 1], None, sparse=False)[1]
                losses, _ = read(model, text, copy.deepcopy(prompts[exact]), sparse=row["selector"] != "dense")
                # The first loss is of the token behind the prompt's last but one.
                results.add({**row, "nats": float(losses[torch.tensor(judged) - prompt - 1].mean())})
    print(table(results.rows))


def table(rows: list[dict[str, Any]]) -> str:
    """Means over the documents."""
    kinds = ("recall", "contested", "5 %", "worst layer")
    lines: list[list[str]] = [["form", "selector", "k", *kinds, *(f"{probe}, nats" for probe in PROBES)]]
    for key in dict.fromkeys((r["form"], r["selector"], r["topk"]) for r in rows):
        own = [r for r in rows if (r["form"], r["selector"], r["topk"]) == key]
        recalled = [r for r in own if r["probe"] == "recall"]
        found = [statistics.fmean(r[kind] for r in recalled) if recalled else None for kind in kinds]
        found += [mean([r["nats"] for r in own if r["probe"] == probe]) for probe in PROBES]
        lines.append([key[0], key[1], str(key[2]), *("–" if x is None else f"{x:.3f}" for x in found)])
    return markdown_table(lines)


if __name__ == "__main__":
    main()
