"""Engines of models with 20B's sizes and random weights, and steps at any context without prefill.

The cache is filled with random rows once; a sequence then gets blocks for the tokens that a case needs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mlaforge.demo.drawn_model import DrawnModel, Latent, converted
from mlaforge.demo.geometry import settings
from mlaforge.engine.cache.kv_cache import CacheTooSmall
from mlaforge.engine.config import EngineConfig
from mlaforge.engine.engine import Engine
from mlaforge.engine.execution.batch import Batch, Chunk, make_batch
from mlaforge.engine.execution.graphs import Graphs
from mlaforge.engine.request.output import RequestOutput
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.gpu_verification.case import Unsupported
from mlaforge.gpu_verification.context import Context
from mlaforge.planning.plan import plan_of
from mlaforge.planning.roofline import decode_step

GEOMETRY = "20b"
# Sizes of the model of a twin.
TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 300, "num_local_experts": 4, "max_position_embeddings": 4096,
}  # fmt: skip
# Expected share of a step's roofline at small batches: half of a step is small kernels (DESIGN: about 45 per layer).
SHARE = 0.4
# Microseconds of a decoder layer that the roofline does not count.
LAYER_US = 90.0
# Number of the sequence that owns the scratch blocks of a twin.
SCRATCH = -(10**9)


def config_of(context: Context, layers: int, latent: Latent | None = None) -> dict[str, Any]:
    """config.json of a model with `layers` layers, converted as `latent` if given."""
    config = settings(GEOMETRY, min(layers, 2) if context.twin else layers) | (TINY if context.twin else {})
    return config if latent is None else converted(config, latent)


def build(context: Context, config: dict[str, Any], **options: Any) -> Engine:
    """Engine of a random model with random rows in all of its cache. Raise Unsupported if memory is too small."""
    chosen: dict[str, Any] = {
        "device": str(context.device), "dtype": "float32" if context.twin else "bfloat16", "prefix_caching": False,
        "cache_fraction": 0.8, **({"cache_bytes": 8 << 20} if context.twin else {}), **options,
    }  # fmt: skip
    try:
        engine = Engine(DrawnModel.of(config, context.device), EngineConfig(**chosen))
    except CacheTooSmall as reason:
        raise Unsupported(str(reason)) from reason
    for tensor in engine.cache.tensors:
        fill(tensor)
    return engine


def fill(tensor: Tensor) -> None:
    """Fill with random rows, finite in every format."""
    if tensor.dtype == torch.float8_e4m3fn:
        tensor.view(torch.uint8).random_(0, 0x78)
    elif tensor.is_floating_point():
        tensor.normal_()
    elif tensor.dtype in (torch.uint8, torch.int8):
        tensor.random_(0, 127)


class Rerun:
    """CudaCapture without a GPU: a replay runs the function again."""

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        out = run().clone()

        def replay() -> None:
            out.copy_(run())

        return replay, out


def with_graphs(engine: Engine) -> Engine:
    """Give an engine on a CPU graphs that rerun their function, so that a twin takes the same code path."""
    runner, tables = engine.runner, engine.tables
    if runner.graphs is None:
        # A CPU's cache has no scratch blocks, so one block of each group is reserved.
        occupy(engine, SCRATCH, 1, 0)
        scratch = [tables.table(SCRATCH, group)[1][0] for group in range(len(tables.groups))]
        runner.graphs = Graphs(runner.eager, lambda batch: True, scratch, engine.config.max_num_seqs, Rerun())
    return engine


def occupy(engine: Engine, number: int, length: int, computed: int) -> list[int]:
    """Allocate blocks for `length` tokens of a new sequence and mark the first `computed` as computed. Return its token
    ids. Raise Unsupported if the cache has too few blocks."""
    tables, ids = engine.tables, [1] * length
    tables.start(number, ids, False)
    chunk = engine.scheduler.max_num_batched_tokens
    for upto in (*range(chunk, computed, chunk), computed, length):
        # In chunks, as window groups release blocks while the text grows and never hold all of it.
        if tables.reserve(number, upto) is None:
            tables.free(number)
            raise Unsupported(f"the cache has no room for {length} more tokens")
        if upto <= computed:
            tables.commit(number, ids, upto)
    return ids


def make_step(engine: Engine, lengths: Sequence[int], queries: Sequence[int], tree: Any = None) -> Batch:
    """Batch of one step. lengths, queries: cached and query tokens per sequence. Ends all other sequences."""
    stop(engine)
    chunks = []
    for index, (length, T) in enumerate(zip(lengths, queries, strict=True)):
        # Negative, as requests are numbered from 0.
        number = -1 - index
        ids = occupy(engine, number, length, length - T)
        chunks.append(Chunk(number, ids, length - T, length, tree, generating=True))
    return make_batch(chunks, engine.tables, engine.device)


def step_seconds(context: Context, engine: Engine, batch: Batch) -> float:
    """Seconds of the model's step without the LM head, from a graph where possible."""

    @torch.inference_mode()
    def run() -> None:
        engine.runner(batch)

    return context.seconds(run, graph=False)


def predicted_seconds(
    context: Context, config: dict[str, Any], length: int, batch: int, queries: int = 1, head: bool = False
) -> tuple[float, float]:
    """Return (roofline, prediction) in seconds of a step: the prediction is the roofline over its expected share, plus
    the small kernels of each layer. head: include the LM head."""
    source = DrawnModel.of(config, context.device)
    seconds = decode_step(plan_of(source.config, source.spec), context.roof, length, batch, queries).seconds
    roof = sum(value for part, value in seconds.items() if head or part != "lm_head")
    return roof, roof / SHARE + LAYER_US * 1e-6 * source.spec.num_layers


def greedy(tokens: int) -> SamplingParams:
    """Parameters of greedy decoding of `tokens` tokens, ignoring EOS."""
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


_names = itertools.count()


def decode(engine: Engine, lengths: Sequence[int], tokens: int) -> None:
    """Add greedy requests with prompts of `lengths` tokens, all but the last of which are marked as computed."""
    for length in lengths:
        name = f"request-{next(_names)}"
        engine.add(name, [1] * length, greedy(tokens))
        (sequence,) = (s for s in engine.scheduler.waiting if s.request.id == name)
        try:
            occupy(engine, sequence.number, length, length - 1)
        except Unsupported:
            engine.abort(name)
            raise
        engine.scheduler.waiting.remove(sequence)
        engine.scheduler.running.append(sequence)
        sequence.computed = length - 1


def step(engine: Engine) -> list[RequestOutput]:
    """Run one step. Raise UserError if a request failed, as the measurement would continue with fewer requests."""
    outputs = engine.step()
    for output in outputs:
        output.raise_for_error()
    return outputs


def stop(engine: Engine) -> None:
    """End all requests, and sequences of steps without requests."""
    for sequence in [*engine.scheduler.running, *engine.scheduler.waiting]:
        engine.abort(sequence.request.id)
    for number in engine.tables.sequences - {SCRATCH}:
        engine.tables.free(number)
