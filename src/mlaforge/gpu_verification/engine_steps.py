"""Stage engine: the engine with 4 layers of 20B's sizes: graphs, host waits, step time, the longest kernels."""

from __future__ import annotations

import contextlib
import functools
import gzip
import shutil
import time
from collections.abc import Iterator

import torch

from mlaforge.bench.host_waits import HostWaits, count_host_waits
from mlaforge.engine.engine import Engine
from mlaforge.gpu_verification import drawn_engine
from mlaforge.gpu_verification.case import AT_MOST, EXACTLY, Case, Outcome, Prediction, Unsupported, WrongResult
from mlaforge.gpu_verification.context import Context

LAYERS = 4
CONTEXTS, TWIN_CONTEXTS = (512, 8192, 32768), (96,)
BATCHES, TWIN_BATCHES = (1, 8), (1,)
# Steps whose host waits are counted, and profiled steps.
COUNTED, PROFILED = 20, 5
# Maximum kernel launches per layer and step.
KERNELS = 60


def cases(context: Context) -> Iterator[Case]:
    """The stage's cases."""
    yield Case("load", Prediction(40, "s", AT_MOST), lambda: load(context))
    yield Case("graph tokens differ from eager ones", Prediction(0, "tokens", EXACTLY), lambda: tokens(context))
    waits = Prediction(1, "waits a step", AT_MOST if context.twin else EXACTLY)
    yield Case("host waits", waits, lambda: host_waits(context))
    yield Case("capture", Prediction(3, "s", AT_MOST), lambda: capture(context))
    config = drawn_engine.config_of(context, LAYERS)
    for length in TWIN_CONTEXTS if context.twin else CONTEXTS:
        for batch in TWIN_BATCHES if context.twin else BATCHES:
            roof, predicted = drawn_engine.predicted_seconds(context, config, length, batch)
            yield Case(
                f"step, {batch} x {length}", Prediction(predicted * 1e3, "ms", share=roof / predicted),
                functools.partial(step, context, batch, length, roof),
            )  # fmt: skip
    yield Case("kernels a layer", Prediction(KERNELS, "launches", AT_MOST), lambda: profile(context))


def stage_engine(context: Context) -> Engine:
    """The stage's engine."""
    config = drawn_engine.config_of(context, LAYERS)
    return context.shared("engine", lambda: drawn_engine.with_graphs(drawn_engine.build(context, config)))


def load(context: Context) -> Outcome:
    """Seconds to build the engine, including random weights on the device."""
    start = time.perf_counter()
    engine = stage_engine(context)
    context.synchronize()
    blocks = engine.tables.num_blocks
    return Outcome(time.perf_counter() - start, detail=f"{blocks} cache blocks, {engine.cache.bytes / 2**30:.2f} GiB")


def generate(engine: Engine, prompts: list[list[int]], count: int) -> dict[str, list[int]]:
    """Greedy continuations by request id."""
    continuations: dict[str, list[int]] = {}
    for number, prompt in enumerate(prompts):
        engine.add(f"prompt-{number}", prompt, drawn_engine.greedy(count))
    while engine.has_work:
        for output in drawn_engine.step(engine):
            continuations.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)
    return continuations


def tokens(context: Context) -> Outcome:
    """Number of tokens that differ between runs with and without graphs."""
    engine, count = stage_engine(context), 4 if context.twin else 32
    drawn_engine.stop(engine)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 256, (length,), generator=generator).tolist() for length in (5, 40, 17)]
    with_graphs = generate(engine, prompts, count)
    graphs = engine.runner.graphs
    if graphs is None or not graphs.captured:
        raise WrongResult("no step was captured")
    engine.runner.graphs = None
    try:
        eager = generate(engine, prompts, count)
    finally:
        engine.runner.graphs = graphs
    differing = sum(a != b for name in eager for a, b in zip(eager[name], with_graphs[name], strict=True))
    return Outcome(differing, detail=f"{count} tokens of {len(prompts)} prompts, {len(graphs.captured)} graphs")


def host_waits(context: Context) -> Outcome:
    """Host waits per decode step; expected: one, for the tokens."""
    engine = stage_engine(context)
    drawn_engine.stop(engine)
    count = 4 if context.twin else COUNTED
    drawn_engine.decode(engine, [96, 200, 150], count + 16)
    for _ in range(6):
        # Steps with the prompts' last tokens, and captures.
        drawn_engine.step(engine)
    # There are no host waits on a CPU.
    with contextlib.nullcontext(HostWaits()) if context.twin else count_host_waits(context.device) as waits:
        for _ in range(count):
            drawn_engine.step(engine)
    drawn_engine.stop(engine)
    return Outcome(waits.count / count, detail="; ".join(sorted(set(waits.lines))[:5]))


def capture(context: Context) -> Outcome:
    """Seconds and memory of the first step of a bucket, which captures a graph; its kernels are already compiled."""
    engine = stage_engine(context)
    batch = drawn_engine.make_step(engine, [64] * 3, [2] * 3)
    cuda = context.device.type == "cuda"
    before = torch.cuda.memory_reserved(context.device) if cuda else 0
    start = time.perf_counter()
    with torch.inference_mode():
        engine.runner(batch)
    context.synchronize()
    seconds = time.perf_counter() - start
    memory = torch.cuda.memory_reserved(context.device) - before if cuda else 0
    drawn_engine.stop(engine)
    return Outcome(seconds, detail=f"{memory / 2**20:.0f} MiB", more={"bytes": memory})


def step(context: Context, batch: int, length: int, roof: float) -> Outcome:
    """Time of a decode step of `batch` sequences with `length` cached tokens. roof: roofline seconds."""
    engine = stage_engine(context)
    seconds = drawn_engine.step_seconds(context, engine, drawn_engine.make_step(engine, [length] * batch, [1] * batch))
    drawn_engine.stop(engine)
    return Outcome(seconds * 1e3, roof / seconds)


def profile(context: Context) -> Outcome:
    """Kernel launches per layer and the 20 longest kernels of a step; the trace is written to profile.json.gz."""
    from torch.profiler import ProfilerActivity

    engine = stage_engine(context)
    batch = drawn_engine.make_step(engine, [2048 if not context.twin else 96], [1])
    cuda = context.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with torch.inference_mode(), torch.profiler.profile(activities=activities) as profiler:
        for _ in range(PROFILED):
            # Eager, as some drivers report no kernel names for a replayed graph.
            engine.runner.eager(batch)
        context.synchronize()
    drawn_engine.stop(engine)
    trace = context.folder / "trace.json"
    profiler.export_chrome_trace(str(trace))
    with trace.open("rb") as plain, gzip.open(context.folder / "profile.json.gz", "wb") as packed:
        shutil.copyfileobj(plain, packed)
    trace.unlink()
    if not cuda:
        raise_unless_traced(profiler)
        return Outcome(0.0, detail="no kernels on a CPU")
    kernels = [e for e in profiler.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    longest = sorted(kernels, key=lambda event: -event.self_device_time_total)[:20]
    count = sum(event.count for event in kernels) / PROFILED / engine.model.spec.num_layers
    rows = [[event.key[:120], event.count // PROFILED, event.self_device_time_total / PROFILED] for event in longest]
    detail = ", ".join(f"{name[:40]} {us:.0f} us" for name, _, us in rows[:3])
    if not rows:
        raise Unsupported("the profiler records no kernels on this machine")
    return Outcome(count, detail=detail, more={"longest": rows})


def raise_unless_traced(profiler: torch.profiler.profile) -> None:
    """Raise WrongResult if the profiler recorded nothing."""
    if not profiler.key_averages():
        raise WrongResult("the profiler recorded nothing")
