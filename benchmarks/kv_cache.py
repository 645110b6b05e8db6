"""Cost of smaller caches: perplexity of SmolLM2-135M-Instruct by storage of the rows, and of its conversions.

    python -m benchmarks.kv_cache --data ../shared/data [--windows 16] [--scratch FOLDER] [--summarize FILE]

bf16 engine on a CPU; windows of 2048 tokens of wiki.test.raw and of three other kinds of text, each token read once,
through the cache, as in a request. Coded conversions are calibrated on WikiText's validation text. Divergence is
KL(original with a bf16 cache | form) in nats per token: its mean, its 99th percentile, and the share of equal top
tokens. Bytes are the cache of 2048 tokens, including scales and full blocks.

Long contexts are windows of 8192 tokens of wiki.test.raw, with the first 2K and the last 4K positions separate; and
copying, in later text of it: passages of 256 tokens that repeat 2K to 7K tokens later, and the loss per repeated token
in nats relative to the original model. --scratch keeps conversions for another run.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.script import evaluation_texts, parser, run, scratch, wikitext, without_repeats
from mlaforge import LLM, SamplingParams
from mlaforge.bench.results import Results
from mlaforge.checkpoint import source_model
from mlaforge.conversion import convert
from mlaforge.conversion.config import ConvertConfig
from mlaforge.data import corpus, overlap
from mlaforge.demo import model as demo_model
from mlaforge.evaluation.divergence import comparisons, summary
from mlaforge.rendering.table import markdown_table

LENGTH, LONG = 2048, 8192
LONG_WINDOWS, COPY_WINDOWS = 4, 2
# Position ranges of long windows that are evaluated separately.
SPANS = {"first 2K": [0, 2048], "4K to 8K": [4096, LONG]}
# Length of a passage, distances of its repetition, and position of the first passage in a window.
PASSAGE, DISTANCES, FIRST_PASSAGE = 256, [7168, 6144, 5120, 4096, 3072, 2048], 256
CALIBRATION_WINDOWS = 32
STORED = {"bf16": "bf16", "int8": "int8", "fp8": "fp8", "int4": "int4"}
# Layout and bits of the conversions.
CODED = [("latent", 4.0), ("latent", 3.0), ("latent", 2.0), ("latent_rope", 4.0)]


def losses(llm: LLM, windows: Tensor) -> Tensor:
    """[N, T - 1] nats: of every token of windows [N, T] but the first."""
    outputs = llm.generate(windows.tolist(), SamplingParams(max_tokens=0, prompt_logprobs=0))
    return torch.tensor([[-entry.logprob for entry in out.prompt_logprobs or [] if entry] for out in outputs])


def engine_states(llm: LLM, texts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Final states [N, T - 1, C] of the windows [N, T] of every text, in fp32, without their last tokens."""
    model, parts, states = llm.engine.model, [], {}
    logits = model.logits

    def capture(hidden: Tensor) -> Tensor:
        parts.append(model.norm(hidden).float())
        return logits(hidden)

    model.logits = capture
    for name, windows in texts.items():
        # One window at a time, so that its rows come in order.
        for window in windows:
            losses(llm, window[None])
        states[name] = torch.cat(parts).view(len(windows), windows.shape[1] - 1, -1)
        parts.clear()
    model.logits = logits
    return states


class Reference:
    """What other forms are compared with: the original with an unrounded cache.

    texts: windows of token ids [N, T]. states: its final states [N, T or T - 1, C] on every text, in fp32.
    """

    def __init__(self, original: Path, texts: dict[str, Tensor], states: dict[str, Tensor]):
        self.texts, self.states = texts, states
        with source_model.SourceModel.open(original).weights() as reader:
            name = "lm_head.weight" if "lm_head.weight" in reader else "model.embed_tokens.weight"
            # Logits in half precision would differ by rounding alone.
            self.head_VC = reader[name].float()

    def compare(self, states: dict[str, Tensor]) -> dict[str, Any]:
        """Perplexity of every text, and divergence, of a form with these final states."""
        ppl, divergence = {}, {}
        for name, ids in self.texts.items():
            form, exact = ((list(side[name]), self.head_VC) for side in (states, self.states))
            nats, _, kl, agrees = torch.stack(comparisons(form, exact, ids), dim=1)
            ppl[name], divergence[name] = math.exp(nats.mean()), summary(kl, agrees)
        return {"ppl": ppl, "divergence": divergence}


def copies(text: Tensor) -> Tensor:
    """[COPY_WINDOWS, LONG] of running text [T], with passages from its end inserted twice."""
    running = text[: COPY_WINDOWS * LONG].view(-1, LONG).clone()
    passages = text[COPY_WINDOWS * LONG :].view(COPY_WINDOWS, len(DISTANCES), PASSAGE)
    for i, distance in enumerate(DISTANCES):
        for at in (passage_at(i), passage_at(i) + distance):
            running[:, at : at + PASSAGE] = passages[:, i]
    return running


def passage_at(i: int) -> int:
    return FIRST_PASSAGE + i * (PASSAGE + 64)


def long_contexts(llm: LLM, running: Tensor, copied: Tensor) -> dict[str, Any]:
    """Perplexity of SPANS, and nats per token of a passage, first and repeated by distance."""
    # Entry i is the loss of token i + 1.
    nats = losses(llm, running)
    ppl = {name: math.exp(nats[:, begin:end].mean()) for name, (begin, end) in SPANS.items()}
    nats = losses(llm, copied)
    starts = [passage_at(i) - 1 for i in range(len(DISTANCES))]
    first = [nats[:, at : at + PASSAGE].mean() for at in starts]
    repeated = [nats[:, at + far : at + far + PASSAGE].mean() for at, far in zip(starts, DISTANCES, strict=True)]
    copy = {"first": float(sum(first) / len(first)), "again": float(sum(repeated) / len(repeated))}
    return {"ppl": ppl, "copy": copy | {str(far): float(nll) for far, nll in zip(DISTANCES, repeated, strict=True)}}


def open_llm(directory: Path, stored: str) -> LLM:
    return LLM(directory, dtype="bfloat16", device="cpu", kv_cache_dtype=stored, cache_bytes=256 << 20, max_num_seqs=4)


def cache_bytes(llm: LLM) -> int:
    """Cache bytes of one sequence of LENGTH tokens."""
    tables, ids = llm.engine.tables, [0] * LENGTH
    tables.start(-1, ids, reuse=False)
    for length in range(256, LENGTH + 1, 256):
        tables.reserve(-1, length)
        tables.commit(-1, ids, length)
    used = llm.engine.stats().cache_bytes_used
    tables.free(-1)
    tables.reset_prefix_cache()
    return used


def row_keys() -> Iterator[dict[str, Any]]:
    """Keys of each row."""
    for name in STORED:
        yield {"layout": "gqa", "stored": name}
    for layout, bits in CODED:
        yield {"layout": layout, "stored": f"{bits:g} bits"}


def measure(options: argparse.Namespace) -> Results:
    original = demo_model.fetch()
    tokenizer = source_model.load_tokenizer(original)
    results = Results(options.raw, [], resume=True, spans=SPANS, distances=DISTANCES, divergences=DIVERGENCES)
    with scratch(options) as folder:
        tuned = corpus.windows(tokenizer, wikitext(options.data)[0], CALIBRATION_WINDOWS, LENGTH, seed=0)
        window_counts = {"wiki": options.windows, "code": 4, "maths": 4, "chat": 4}
        eval_windows = evaluation_texts(tokenizer, options.data, window_counts, LENGTH, folder)
        eval_windows = without_repeats(eval_windows, overlap.passages(tuned))
        texts = {name: windows.ids for name, windows in eval_windows.items()}
        used = LONG_WINDOWS * LONG
        text = corpus.tokens(
            tokenizer, corpus.read_text(wikitext(options.data)[1]),
            used + COPY_WINDOWS * (LONG + len(DISTANCES) * PASSAGE),
        )  # fmt: skip
        running, copied = text[:used].view(-1, LONG), copies(text[used:])
        results.body["tokens"] = {name: ids.numel() for name, ids in texts.items()}
        reference = Reference(original, texts, engine_states(open_llm(original, "bf16"), texts))
        for row in results.missing(row_keys()):
            directory, stored = original, STORED.get(row["stored"], "coded")
            if stored == "coded":
                directory = folder / f"{row['layout']} {row['stored']}"
                config = ConvertConfig(
                    layout=row["layout"], bits=float(row["stored"].split()[0]), calibration=wikitext(options.data)[0],
                    nsamples=CALIBRATION_WINDOWS, seqlen=LENGTH, eval_windows=0, device="cpu", dense=True,
                )  # fmt: skip
                convert.run(str(original), directory, config, calibrated=folder / "calibration")
            llm = open_llm(directory, stored)
            measurement = reference.compare(engine_states(llm, texts))
            long = long_contexts(llm, running, copied)
            measurement |= {"ppl": measurement["ppl"] | long["ppl"], "copy": long["copy"], "bytes": cache_bytes(llm)}
            exact = (results.rows or [measurement])[0]
            ratio = {name: measurement["ppl"][name] / exact["ppl"][name] for name in measurement["ppl"]}
            results.add({
                **row, **measurement, "ratio": ratio,
                "copy_difference": measurement["copy"]["again"] - exact["copy"]["again"],
                "bytes_ratio": measurement["bytes"] / exact["bytes"],
            })  # fmt: skip
    return results


def short(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows without the losses of single passages and perplexities."""
    names = ("layout", "stored", "bytes", "bytes_ratio", "ratio", "copy_difference", "divergence")
    return [{name: row[name] for name in names if name in row} for row in body["rows"]]


# Heads of `divergence_cells`.
DIVERGENCES = ["KL", "its 99 %", "equal top tokens"]


def divergence_cells(row: dict[str, Any], text: str) -> tuple[str, ...]:
    """Mean and 99th percentile of KL(original | form) in nats per token, and the share of equal top tokens; dashes if
    they were not measured."""
    if "divergence" not in row:
        return ("–",) * len(DIVERGENCES)
    part = row["divergence"][text]
    return f"{part['kl']:.4f}", f"{part['kl_p99']:.3f}", f"{part['top1']:.1%}"


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown table of docs/engine.md."""
    heads = ("layout", "rows", "bytes of bf16's", "wiki.test ppl ratio", "Python source", "maths questions", "dialogue",
             *SPANS, "copy, nats", *DIVERGENCES)  # fmt: skip
    cells = [
        (row["layout"], row["stored"], f"{row['bytes_ratio']:.1%}",
         *(f"{row['ratio'][name]:.4f}" for name in ("wiki", "code", "maths", "chat", *SPANS)),
         f"{row['copy_difference']:+.3f}", *divergence_cells(row, "wiki")) for row in rows
    ]  # fmt: skip
    return markdown_table([heads, *cells])


if __name__ == "__main__":
    arguments = parser(__doc__, "benchmarks/kv_cache.json", "kv cache")
    arguments.add_argument("--windows", type=int, default=16, help="windows of wiki.test.raw")
    arguments.add_argument("--scratch", type=Path, help="folder of the conversions")
    run(arguments, measure, short, table)
