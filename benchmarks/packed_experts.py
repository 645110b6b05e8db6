"""GPT-OSS from packed experts on a CPU: time to the first token, decoding at one and at eight requests, memory.

Beside it llama.cpp on a GGUF file of the same tensors, and what the memory's speed allows.

    mlaforge make-gptoss runs/gptoss-20b --geometry 20b
    python -m benchmarks.packed_experts --model runs/gptoss-20b --llama ENV/bin/python [--formats bfloat16 int8]
        [--table NAME]

ENV is an environment of its own with xllamacpp, which carries llama.cpp built for AVX2. Each measurement is a process
of its own, one after the other, its file read once before; rounds alternate. Prompts are random token ids, distinct.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

PROMPT, TOKENS, BATCH = 128, 32, 8


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    chance = Random(seed)
    return [[chance.randrange(1000, 40000) for _ in range(length)] for _ in range(count)]


def ours(model: Path, format: str, threads: int) -> dict[str, Any]:
    """In this process."""
    import psutil
    import torch

    from mlaforge.engine.config import EngineConfig
    from mlaforge.engine.llm import LLM
    from mlaforge.engine.sampling.params import SamplingParams
    from mlaforge.ops.dispatch import Op, hooked

    torch.set_num_threads(threads)
    began = time.perf_counter()
    llm = LLM(model, EngineConfig(dtype=format, max_model_len=2048, cache_bytes=1 << 29, max_num_seqs=BATCH))
    measured: dict[str, Any] = {"load_s": time.perf_counter() - began}
    touched: list[int] = []

    def count_experts(op: Op, _: str, inputs: Sequence[Any]) -> None:
        if op.name == "mxfp4_experts":
            touched.append(len(inputs[1].unique()))

    def seconds(texts: list[list[int]], tokens: int) -> float:
        began = time.perf_counter()
        llm.generate(texts, SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True))
        return time.perf_counter() - began

    with hooked(count_experts):
        # The first text brings the experts' pages into the process.
        measured["cold_first_token_s"] = seconds(prompts(1, PROMPT, 1), 1)
        measured["first_token_s"] = seconds(prompts(1, PROMPT, 2), 1)
        for count in (1, BATCH):
            texts = prompts(count, 16, 10 + count)
            seconds(texts, 2)
            one = seconds(texts, 1)
            touched.clear()
            measured[f"step_s_{count}"] = (seconds(texts, 1 + TOKENS) - one) / TOKENS
            measured[f"experts_touched_{count}"] = sum(touched) / len(touched)
    memory = psutil.Process().memory_info()
    return measured | {"resident_gib": memory.rss / 2**30, "anonymous_gib": (memory.rss - memory.shared) / 2**30}


def llama(file: Path, threads: int) -> dict[str, Any]:
    """In this process, whose environment has xllamacpp and need not have mlaforge."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = str(file), 2048, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.warmup = False
    began = time.perf_counter()
    server = xllamacpp.Server(params)
    measured: dict[str, Any] = {"load_s": time.perf_counter() - began, "system": xllamacpp.get_system_info()}

    def answer(text: list[int], tokens: int) -> dict[str, Any]:
        asked = {"prompt": text, "n_predict": tokens, "temperature": 0.0, "ignore_eos": True, "cache_prompt": False}
        result = server.handle_completions(asked)
        assert "timings" in result, str(result)[:300]
        return result["timings"]

    began = time.perf_counter()
    answer(prompts(1, PROMPT, 1)[0], 1)
    measured["cold_first_token_s"] = time.perf_counter() - began
    (text,) = prompts(1, 16, 11)
    answer(text, 2)
    timings = answer(text, 1 + TOKENS)
    # The first token comes with the prompt.
    return measured | {"step_s_1": timings["predicted_ms"] / (timings["predicted_n"] - 1) / 1e3}


def read_speed(threads: int) -> float:
    """Bytes a second of reading memory that no cache holds: the best of some passes over a gigabyte."""
    import torch

    torch.set_num_threads(threads)
    numbers = torch.ones(1 << 27, dtype=torch.int64)
    best = float("inf")
    for _ in range(7):
        began = time.perf_counter()
        numbers.sum()
        best = min(best, time.perf_counter() - began)
    return numbers.numel() * 8 / best


def token_bytes(model: Path, format: str) -> dict[str, float]:
    """What one token reads of the weights, in bytes, by part."""
    from mlaforge.checkpoint.source_model import SourceModel

    spec = SourceModel.open(model).spec
    width = {"bfloat16": 2, "float32": 4, "int8": 1}[format]
    experts = sum(layer.mlp_params * layer.mlp_bits / 8 * layer.moe.top_k for layer in spec.layers if layer.moe)
    attention = sum(map(spec.layer_params, spec.layers)) * width
    return {"experts": experts, "attention": attention, "head": spec.vocab_size * spec.hidden_size * width}


def warmed(paths: list[Path]) -> None:
    """Reads files once, so that they are where a mapping finds them."""
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 24):
                pass


def worker(command: list[Any]) -> dict[str, Any]:
    """A measurement in a process of its own: its last line, and its peak of resident memory."""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=errors, text=True)
        peak, done = 0, threading.Event()

        def watch() -> None:
            nonlocal peak
            while not done.wait(0.1):
                try:
                    status = Path(f"/proc/{process.pid}/status").read_text()
                except OSError:
                    return
                peak = max(peak, *(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")), 0)

        watcher = threading.Thread(target=watch)
        watcher.start()
        printed = process.communicate()[0]
        done.set()
        watcher.join()
        errors.seek(0)
        assert process.returncode == 0, errors.read()[-2000:]
    return json.loads(printed.splitlines()[-1]) | {"peak_resident_gib": peak / 2**20}


def measure(options: argparse.Namespace) -> Any:
    from mlaforge.bench.results import Results
    from mlaforge.ops import native

    results = Results(options.raw, [], kernels=native.form())
    weight_files = sorted(options.model.glob("*.safetensors"))
    file = options.model.with_suffix(".gguf")
    if options.llama and not file.exists():
        from benchmarks import gguf_file

        gguf_file.write(options.model, file)
    results.body["token_bytes"] = {format: token_bytes(options.model, format) for format in options.formats}
    for round in range(options.rounds):
        for kind in (*options.formats, *(["llama"] if options.llama else [])):
            path, python = (file, options.llama) if kind == "llama" else (options.model, sys.executable)
            warmed([file] if kind == "llama" else weight_files)
            read = read_speed(options.threads)
            command = [python, __file__, "--threads", options.threads, "--worker", kind, path]
            results.add({"round": round, "kind": kind, "read_bytes_s": read, **worker(command)})
    return results


def short(body: dict[str, Any]) -> list[dict[str, Any]]:
    """All rows, without llama.cpp's description of the processor."""
    return [{name: value for name, value in row.items() if name != "system"} for row in body["rows"]]


def table(rows: list[dict[str, Any]]) -> str:
    """Rows by kind: values of all rounds."""
    from mlaforge.rendering.table import markdown_table

    kinds = dict.fromkeys(row["kind"] for row in rows)
    names = dict.fromkeys(name for row in rows for name in row if name not in ("round", "kind"))

    def cell(name: str, kind: str) -> str:
        return "; ".join(f"{row[name]:.4g}" for row in rows if row["kind"] == kind and name in row)

    return markdown_table([["", *kinds], *([name, *(cell(name, kind) for kind in kinds)] for name in names)])


def main() -> None:
    # The process of a measurement may be another environment's, without mlaforge.
    if "--worker" in sys.argv:
        options = argparse.ArgumentParser()
        options.add_argument("--threads", type=int)
        options.add_argument("--worker", nargs=2)
        chosen = options.parse_args()
        kind, path = chosen.worker[0], Path(chosen.worker[1])
        print(json.dumps(llama(path, chosen.threads) if kind == "llama" else ours(path, kind, chosen.threads)))
        return
    from benchmarks.script import parser, run

    arguments = parser(__doc__, "benchmarks/gpt_oss.json", "packed experts", data=False)
    arguments.add_argument("--model", type=Path, default=Path("runs/gptoss-20b"))
    arguments.add_argument("--formats", nargs="+", default=["bfloat16"])
    arguments.add_argument("--llama", type=Path, help="Python of an environment with xllamacpp")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--threads", type=int, default=2)
    run(arguments, measure, short, table)


if __name__ == "__main__":
    main()
