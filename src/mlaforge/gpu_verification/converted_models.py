"""Stage converted: converted models with 4 layers of 20B's sizes: step time, and peak memory of a prompt."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from mlaforge.demo.drawn_model import Latent
from mlaforge.engine.engine import Engine
from mlaforge.gpu_verification import drawn_engine
from mlaforge.gpu_verification.case import AT_MOST, Case, Outcome, Prediction
from mlaforge.gpu_verification.context import Context

LAYERS = 4
FORMS = {
    "latent_rope 512+64": Latent("latent_rope", 512, 64),
    "latent 512": Latent("latent", 512),
    "latent 1024, 4 bits": Latent("latent", 1024, bits=4),
    "latent 1024, 4 bits, 1024 read": Latent("latent", 1024, bits=4, topk=1024),
}
TWIN_FORMS = {
    "latent_rope 32+8": Latent("latent_rope", 32, 8),
    "latent 48": Latent("latent", 48),
    "latent 48, 4 bits": Latent("latent", 48, bits=4),
    "latent 48, 4 bits, 96 read": Latent("latent", 48, bits=4, topk=96),
}
CONTEXTS, TWIN_CONTEXTS = (8192, 32768), (160,)
# Tokens of the measured prompt, and its maximum memory besides weights and cache, in bytes.
PROMPT, TWIN_PROMPT, PEAK = 8192, 160, 4 << 30


def cases(context: Context) -> Iterator[Case]:
    """The stage's cases."""
    for name, latent in (TWIN_FORMS if context.twin else FORMS).items():
        config = drawn_engine.config_of(context, LAYERS, latent)
        for length in TWIN_CONTEXTS if context.twin else CONTEXTS:
            roof, predicted = drawn_engine.predicted_seconds(context, config, length, 1)
            yield Case(
                f"{name}, 1 x {length}", Prediction(predicted * 1e3, "ms", share=roof / predicted),
                functools.partial(step, context, latent, length, roof),
            )  # fmt: skip
        yield Case(
            f"{name}, peak memory of a prompt", Prediction(PEAK / 2**20, "MiB", AT_MOST),
            functools.partial(prompt, context, latent),
        )  # fmt: skip


def stage_engine(context: Context, latent: Latent) -> Engine:
    """Engine of a converted model."""
    config = drawn_engine.config_of(context, LAYERS, latent)
    # A fixed cache size leaves memory for the prompt.
    options = {} if context.twin else {"cache_bytes": 2 << 30}
    return context.shared(repr(latent), lambda: drawn_engine.build(context, config, **options))


def step(context: Context, latent: Latent, length: int, roof: float) -> Outcome:
    """Time of a decode step."""
    engine = stage_engine(context, latent)
    batch = drawn_engine.make_step(engine, [length], [1])
    seconds = drawn_engine.step_seconds(context, engine, batch)
    drawn_engine.stop(engine)
    graphs = engine.runner.graphs
    launch_mode = "graph replay" if graphs is not None and graphs.captured else "eager kernels"
    return Outcome(seconds * 1e3, roof / seconds, launch_mode)


def prompt(context: Context, latent: Latent) -> Outcome:
    """Peak memory of a prompt's computation, without weights and cache."""
    engine, cuda = stage_engine(context, latent), context.device.type == "cuda"
    drawn_engine.stop(engine)
    if cuda:
        torch.cuda.reset_peak_memory_stats(context.device)
    before = torch.cuda.memory_allocated(context.device) if cuda else 0
    length = TWIN_PROMPT if context.twin else PROMPT
    engine.add("prompt", [1] * length, drawn_engine.greedy(1))
    while engine.has_work:
        drawn_engine.step(engine)
    context.synchronize()
    peak = torch.cuda.max_memory_allocated(context.device) - before if cuda else 0
    chunk = engine.scheduler.max_num_batched_tokens
    return Outcome(peak / 2**20, detail=f"{length} tokens in chunks of {chunk}")
