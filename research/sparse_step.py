"""What a decoding step over a selection costs on a CPU, by operation.

    python benchmarks/sparse_step.py --data ../shared/data [--forms original latent coded] [--context 8000]
        [--topk 1024] [--tokens 32] [--threads 2] [--models FORM=DIR ...] [--out FILE.json]

SmolLM2-135M-Instruct and conversions of it, each with an index, as in benchmarks/sparse_speed.py, or the sparse models
of --models. torch's profiler runs over --tokens generated tokens after a prompt of --context; times are those of the
operations alone, in ms per token, and `calls` is per token. The profiler itself adds to a step what `step` exceeds
benchmarks/sparse_speed.py's by. --topk: tokens that a step reads.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from engine import SCRATCH
from rows import Results, command, parser, wikitext
from sparse_speed import FORMS, sparse
from torch.profiler import ProfilerActivity, profile

from mlaforge import LLM, SamplingParams
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.data import corpus
from mlaforge.demo import model as demo_model
from mlaforge.ops import native
from mlaforge.runtime import log

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


def main() -> None:
    arguments = parser(__doc__, "benchmarks/sparse_step.json")
    arguments.add_argument("--forms", nargs="*", choices=[*FORMS], default=["original", "latent", "coded"])
    arguments.add_argument("--context", type=int, default=8000)
    arguments.add_argument("--topk", type=int, default=1024)
    arguments.add_argument("--tokens", type=int, default=32)
    arguments.add_argument("--threads", type=int, default=2)
    arguments.add_argument("--models", nargs="*", default=[], metavar="FORM=DIR", help="sparse models, by form")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    model = demo_model.fetch()
    SCRATCH.mkdir(exist_ok=True)
    ids = corpus.windows(SourceModel.open(model).tokenizer, wikitext(options.data)[1], 4, 2048).ids.flatten()
    models = dict(entry.split("=", 1) for entry in options.models)
    results = Results(
        options.out, {}, command=command(), kernels=native.form(), threads=options.threads, context=options.context
    )
    for form in options.forms:
        directory = models.get(form) or sparse(model, form, options.topk, options.context + 192)
        row = profiled(Path(directory), ids[: options.context].tolist(), options.topk, options.tokens)
        results.rows[form] = row
        results.save()
        log(json.dumps({"form": form, **row}))
        print(f"{form}, kernels {native.form()}, {options.threads} threads: a step takes {row['step_ms']:.1f} ms")
        for name, (ms, calls) in row["operations"].items():
            print(f"  {name:40} {ms:7.2f} ms {calls:7.1f} calls")


if __name__ == "__main__":
    main()
