"""How far ahead the compiled products of int8 and int4 weights prefetch: the default in cpu/linear/byte_weights.h.

    python -m benchmarks.prefetch [--repetitions 24] [--summarize FILE]

Least microseconds of interleaved calls on weights that are read from memory, for 1 and 4 rows at the layers of
SmolLM2-135M and of GPT-OSS. The least is what other processes disturb least. About a minute on one thread
(OMP_NUM_THREADS=1).
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
from typing import Any

import torch

from benchmarks.script import parser, run
from mlaforge.bench.gemm_shapes import Shape
from mlaforge.bench.results import Results
from mlaforge.rendering.table import markdown_table
from mlaforge.runtime import processor_name
from mlaforge.tuning.cases import ProductCase

# Bytes ahead (2 KiB before this measurement); outputs and inputs of products; rows.
AHEAD = (1024, 2048, 4096, 8192, 16384)
LAYERS = ((5120, 2880), (2880, 4096), (3072, 576), (576, 1536))
ROWS = (1, 4)


def measure(options: argparse.Namespace) -> Results:
    machine = {"processor": processor_name(), "threads": torch.get_num_threads()}
    results = Results(options.raw, [], repetitions=options.repetitions, **machine)
    results.once("load", lambda: os.getloadavg()[0])
    for format, (N, K), M in itertools.product(("int8", "int4"), LAYERS, ROWS):
        if not next(results.missing([{"format": format, "outputs": N, "inputs": K, "rows": M}]), None):
            continue
        case = ProductCase(Shape("layer", M, N, K, format, "cpu"))
        times: dict[int, list[float]] = {ahead: [] for ahead in AHEAD}
        for repetition in range(options.repetitions):
            for ahead in AHEAD if repetition % 2 else reversed(AHEAD):
                times[ahead].append(case.seconds({"ahead": ahead}))
        least = {str(ahead): min(values) * 1e6 for ahead, values in times.items()}
        results.add({"format": format, "outputs": N, "inputs": K, "rows": M, "us": least})
    return results


def short(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows, with times to a tenth of a microsecond."""
    return [{**row, "us": {ahead: round(us, 1) for ahead, us in row["us"].items()}} for row in body["rows"]]


def mean_us(rows: list[dict[str, Any]], format: str) -> dict[int, float]:
    """Geometric mean over the shapes of a format's times, by the bytes ahead."""
    of_format = [row["us"] for row in rows if row["format"] == format]
    logs = {ahead: sum(math.log(us[str(ahead)]) for us in of_format) / len(of_format) for ahead in AHEAD}
    return {ahead: math.exp(log) for ahead, log in logs.items()}


def table(rows: list[dict[str, Any]]) -> str:
    """Times of all shapes together, relative to 2 KiB."""
    lines = [("weights", *(f"{ahead // 1024} KiB" for ahead in AHEAD))]
    for format in dict.fromkeys(row["format"] for row in rows):
        means = mean_us(rows, format)
        lines.append((format, *(f"{means[ahead] / means[2048]:.3f}" for ahead in AHEAD)))
    return markdown_table(lines)


if __name__ == "__main__":
    arguments = parser(__doc__, "benchmarks/kernels.json", "prefetch", data=False)
    arguments.add_argument("--repetitions", type=int, default=24)
    run(arguments, measure, short, table)
