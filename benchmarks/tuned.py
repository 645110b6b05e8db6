"""What a tuned table is worth to decoding: an engine with the table and without it, in turns.

    mlaforge tune MODEL [--dtype int8]          (for each form and dtype; --folder has the forms)
    python -m benchmarks.tuned [--tuned FILE] [--rounds 12] [--summarize FILE]

SmolLM2-135M in bf16, in int8, and converted (4 bits a coordinate, a sparse index), each at five context lengths and
batch sizes. Prompts are computed once and then found in the prefix cache. Each process loads one engine, and both
sides of a ratio are in it: only the table changes, which for the CPU's kernels changes no result.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
from pathlib import Path
from typing import Any

import torch

from benchmarks.forms import make
from benchmarks.script import parser, run
from mlaforge.bench.decode import decode
from mlaforge.bench.prompts import Prompts
from mlaforge.bench.results import Results
from mlaforge.demo import model as demo_model
from mlaforge.engine.config import EngineConfig
from mlaforge.engine.llm import LLM
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.ops import tuned
from mlaforge.rendering.page import interval
from mlaforge.rendering.table import markdown_table
from mlaforge.runtime import processor_name

# Form and format of its weights; context and requests.
MODELS = (("original", "bfloat16"), ("original", "int8"), ("latent, 4 bits, sparse", "bfloat16"))
SHAPES = ((128, 1), (2048, 1), (8000, 1), (128, 8), (2048, 8))
TOKENS = 32


def measure(options: argparse.Namespace) -> Results:
    cpu = torch.device("cpu")
    tuned.load(cpu, options.tuned)
    machine = {"processor": processor_name(), "threads": torch.get_num_threads(), "tuned": tuned.identity()}
    results = Results(options.raw, [], resume=True, rounds=options.rounds, tokens=TOKENS, **machine)
    results.once("load", lambda: os.getloadavg()[0])
    original = demo_model.fetch()
    for form, dtype in MODELS:
        cells = [{"form": form, "dtype": dtype, "context": P, "batch": B} for P, B in SHAPES]
        if not (missing := list(results.missing(cells))):
            continue
        directory = make(form, original, options.folder)
        llm = LLM(directory, EngineConfig(dtype=dtype, device="cpu", max_num_seqs=8, cache_bytes=4 << 30))
        prompts = Prompts(("embedded",), llm.tokenizer)
        gc.collect()
        gc.freeze()
        for cell in missing:
            (batch,) = prompts(cell["context"], cell["batch"], 1)
            results.add({**cell, **_cell(llm, batch, options)})
        gc.unfreeze()
        del llm
    return results


def _cell(llm: LLM, prompts: list[list[int]], options: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of all requests together, by table, and the ratio of each round."""
    speeds: dict[str, list[float]] = {"none": [], "tuned": []}
    texts = set()
    for number in range(options.rounds + 1):
        for name in ("none", "tuned") if number % 2 else ("tuned", "none"):
            tuned.load(torch.device("cpu"), "none" if name == "none" else options.tuned)
            decoded = decode(llm.engine, SamplingParams, prompts, TOKENS)
            texts.add(str(decoded["token_ids"]))
            if number:
                speeds[name].append(decoded["tokens"] / decoded["seconds"])
    assert len(texts) == 1, "the table changed the tokens"
    return {"tokens_per_second": speeds}


def short(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Medians of speeds, and the mean ratio with its 95 % interval."""
    rows = []
    for row in body["rows"]:
        speeds = row["tokens_per_second"]
        ratios = [a / b for a, b in zip(speeds["tuned"], speeds["none"], strict=True)]
        mean, count = statistics.fmean(ratios), len(ratios)
        ends = interval(mean, statistics.stdev(ratios) / count**0.5, count)
        medians = {name: round(statistics.median(values), 2) for name, values in speeds.items()}
        rows.append(
            {**row, "tokens_per_second": medians, "ratio": round(mean, 4), "interval": [round(end, 4) for end in ends]}
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Speeds and ratios, a line for each model."""
    lines = [("model", *(f"{P:,} x {B}" for P, B in SHAPES))]
    for form, dtype in MODELS:
        cells = {(row["context"], row["batch"]): row for row in rows if (row["form"], row["dtype"]) == (form, dtype)}
        ratios = (cells.get(shape) for shape in SHAPES)
        lines.append((f"{form}, {dtype}", *(_ratio(cell) if cell else "" for cell in ratios)))
    return markdown_table(lines)


def _ratio(cell: dict[str, Any]) -> str:
    return f"{cell['ratio']:.3f} [{cell['interval'][0]:.3f}, {cell['interval'][1]:.3f}]"


if __name__ == "__main__":
    arguments = parser(__doc__, "benchmarks/kernels.json", "tuned", data=False)
    arguments.add_argument("--tuned", help="table (default: the cache's, then the package's)")
    arguments.add_argument("--rounds", type=int, default=12)
    arguments.add_argument("--folder", type=Path, default=Path("runs/forms"))
    run(arguments, measure, short, table)
