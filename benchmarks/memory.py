"""Peak memory of converting a model of GPT-OSS-20B's geometry, by its number of layers.

    python -m benchmarks.memory [--layers 2 4] [--windows 2] [--summarize FILE]

The checkpoint has random weights (`make-gptoss --geometry`), 2.2 GiB of embeddings and 0.44 GiB per layer, in a
temporary folder next to the results. Each conversion runs in a separate process, in fp32 on the CPU, with windows of
2048 tokens, the default of `convert`; memory does not depend on their number, as they are processed one at a time.
Memory is anonymous (RssAnon), without pages of the weight files that the kernel may drop. Seconds per layer are the
difference of two runs, half of the layers sliding.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.script import parser, run
from mlaforge.bench.results import Results
from mlaforge.rendering.table import text_table


def write_source(directory: Path, layers: int) -> int:
    """Write the first layers of the geometry with random weights. Return the bytes of its tensors."""
    from mlaforge.demo import geometry

    random = geometry.Random(geometry.settings("20b", layers), seed=0)
    random.write(directory)
    return random.bytes


def convert_and_watch(source: Path, out: Path, layout: str, windows: int) -> dict[str, Any]:
    """Convert in this process. Return peak RssAnon in GiB, and seconds."""
    from mlaforge.conversion import convert
    from mlaforge.conversion.config import ConvertConfig

    peak, finished, process = 0, threading.Event(), psutil.Process()

    def sample_memory() -> None:
        nonlocal peak
        while not finished.wait(0.02):
            resident = process.memory_info()
            peak = max(peak, resident.rss - resident.shared)

    watcher = threading.Thread(target=sample_memory)
    watcher.start()
    start = time.perf_counter()
    config = ConvertConfig(
        layout=layout, budget=0.5, calibration="embedded", nsamples=windows, eval_windows=0, device="cpu", dense=True
    )  # fmt: skip
    try:
        stages = convert.run(str(source), out, config).seconds
    finally:
        finished.set()
        watcher.join()
    return {"peak_gib": peak / 2**30, "seconds": time.perf_counter() - start, "stages": stages}


def measure(options: argparse.Namespace) -> Results:
    results = Results(options.raw, [])
    options.raw.parent.mkdir(parents=True, exist_ok=True)
    for layers in options.layers:
        with tempfile.TemporaryDirectory(dir=options.raw.parent) as folder:
            source = Path(folder) / "source"
            source.mkdir()
            size = write_source(source, layers)
            command = [sys.executable, "-m", "benchmarks.memory", "--layout", options.layout, "--windows",
                       str(options.windows), "--worker", source, Path(folder) / "out"]  # fmt: skip
            printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        measured = {"checkpoint_gib": size / 2**30, **json.loads(printed)}
        results.add({"layers": layers, "windows": options.windows, **measured})
    first, last = results.rows[0], results.rows[-1]
    for name, unit in (("peak_gib", "gib_per_layer"), ("seconds", "seconds_per_layer")):
        results.body[unit] = (last[name] - first[name]) / max(1, last["layers"] - first["layers"])
    return results


def short(body: dict[str, Any]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = body["rows"]
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = [("layers", "checkpoint, GiB", "peak, GiB", "s")]
    lines += [(str(row["layers"]), *(f"{row[key]:.2f}" for key in ("checkpoint_gib", "peak_gib", "seconds")))
              for row in rows]  # fmt: skip
    return text_table(lines)


if __name__ == "__main__":
    arguments = parser(__doc__, "benchmarks/gpt_oss.json", "memory", data=False)
    arguments.add_argument("--layers", type=int, nargs="+", default=[2, 4])
    arguments.add_argument("--layout", default="latent_rope")
    arguments.add_argument("--windows", type=int, default=2)
    arguments.add_argument("--worker", nargs=2, type=Path, help=argparse.SUPPRESS)
    if worker := (options := arguments.parse_args()).worker:
        print(json.dumps(convert_and_watch(*worker, options.layout, options.windows)))
    else:
        run(arguments, measure, short, table)
