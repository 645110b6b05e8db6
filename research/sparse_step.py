"""What a decoding step over a selection costs on a CPU, by operation.

    python -m research.sparse_step --data ../shared/data [--forms "original, sparse" "latent, 4 bits, sparse"]
        [--context 8000] [--topk 1024] [--tokens 32] [--threads 2]

Forms are those of benchmarks/forms.py, or directories of sparse models. torch's profiler runs over --tokens generated
tokens after a prompt of --context; times are those of the operations alone, in ms per token, and `calls` is per token.
The profiler itself adds to the step. --topk: tokens that a step reads.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.forms import make
from benchmarks.script import parser, run, wikitext
from mlaforge import LLM, SamplingParams
from mlaforge.bench.results import Results
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.data import corpus
from mlaforge.demo import model as demo_model
from mlaforge.ops import native

# Operations of less than this share of the time are summed up, except these.
SMALLEST, ALWAYS = 0.01, ("aten::empty", "write_index")


def profiled(directory: Path, prompt: list[int], topk: int, tokens: int) -> dict[str, Any]:
    """The median time of a step, and per operation its ms and calls per token."""
    llm = LLM(str(directory), dtype="bfloat16", device="cpu", cache_bytes=1 << 30, max_num_seqs=4, topk=topk)
    llm.engine.add("text", prompt, SamplingParams(temperature=0.0, max_tokens=2 * tokens + 2, ignore_eos=True))
    times: list[float] = []

    def generate(count: int) -> None:
        """Run steps until `count` more tokens are generated; append the time of each such step."""
        end = len(times) + count
        while len(times) < end:
            start = time.perf_counter()
            if llm.engine.step():
                times.append(time.perf_counter() - start)

    generate(2)
    plain_begin = len(times)
    generate(tokens)
    step_ms = 1e3 * sorted(times[plain_begin:])[tokens // 2]
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        generate(tokens)
    operations = {
        event.key: (event.self_cpu_time_total / 1e3 / tokens, event.count / tokens) for event in profiler.key_averages()
    }
    total = sum(ms for ms, _ in operations.values())
    shown = {name: cost for name, cost in operations.items() if cost[0] >= SMALLEST * total or name.endswith(ALWAYS)}
    rest = [cost for name, cost in operations.items() if name not in shown]
    shown["others"] = (sum(ms for ms, _ in rest), sum(calls for _, calls in rest))
    return {"step_ms": step_ms, "operations": dict(sorted(shown.items(), key=lambda item: -item[1][0]))}


def measure(options: argparse.Namespace) -> Results:
    torch.set_num_threads(options.threads)
    model = demo_model.fetch()
    ids = corpus.windows(SourceModel.open(model).tokenizer, wikitext(options.data)[1], 4, 2048).ids.flatten()
    results = Results(options.raw, {}, kernels=native.form(), threads=options.threads, context=options.context)
    for form in options.forms:
        directory = Path(form) if Path(form).is_dir() else make(form, model, Path("runs/forms"))
        prompt = ids[: options.context].tolist()
        results.rows[form] = profiled(directory, prompt, options.topk, options.tokens)
        results.save()
    return results


def short(body: dict[str, Any]) -> list[dict[str, Any]]:
    """A row per form; operations: ms and calls per token."""
    return [{"form": form, **row} for form, row in body["rows"].items()]


def table(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        lines.append(f"{row['form']}: a step takes {row['step_ms']:.1f} ms")
        lines += [f"  {name:40} {ms:7.2f} ms {calls:7.1f} calls" for name, (ms, calls) in row["operations"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    arguments = parser(__doc__, "research/sparsity.json", "step")
    forms = ["original, sparse", "latent, sparse", "latent, 4 bits, sparse"]
    arguments.add_argument("--forms", nargs="*", default=forms)
    arguments.add_argument("--context", type=int, default=8000)
    arguments.add_argument("--topk", type=int, default=1024)
    arguments.add_argument("--tokens", type=int, default=32)
    arguments.add_argument("--threads", type=int, default=2)
    run(arguments, measure, short, table)
