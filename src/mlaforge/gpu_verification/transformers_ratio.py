"""Stage transformers: decoding speed of the engine over transformers, with the same random weights and 4 layers."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from typing import Any

import torch
from transformers import DynamicCache

from mlaforge.checkpoint import loading, mxfp4
from mlaforge.demo.drawn_model import DrawnModel
from mlaforge.gpu_verification import drawn_engine
from mlaforge.gpu_verification.case import AT_LEAST, Case, Outcome, Prediction
from mlaforge.gpu_verification.context import Context
from mlaforge.ops.mxfp4 import dequantize

LAYERS = 4
PROMPTS, TWIN_PROMPTS = ((1, 512), (8, 512)), ((1, 24),)
TOKENS, TWIN_TOKENS = 32, 3
# Expected minimum: the engine reads 4-bit experts and replays a graph; transformers reads bf16 in eager kernels.
RATIO = 1.5


def cases(context: Context) -> Iterator[Case]:
    """The stage's cases."""
    for batch, length in TWIN_PROMPTS if context.twin else PROMPTS:
        bound = Prediction(0.0 if context.twin else RATIO, "times transformers' tokens/s", AT_LEAST)
        yield Case(
            f"decode, {batch} x {length}", bound, functools.partial(measure, context, batch, length), limit=80.0
        )  # fmt: skip


def drawn_transformers(context: Context) -> Any:
    """transformers' model with the weights of the stage's random model; experts are unpacked to the context's dtype."""
    config = drawn_engine.config_of(context, LAYERS)
    source = DrawnModel.of(config, context.device)
    dtype = context.dtype
    plain = {name: value for name, value in source.config.items() if name != "quantization_config"}
    causal_lm = loading.skeleton(plain)
    weights, state = source.weights(), {}
    for name in causal_lm.state_dict():
        if name in weights:
            state[name] = weights[name].to(dtype)
        else:
            packed = (weights[f"{name}{mxfp4.BLOCKS}"], weights[f"{name}{mxfp4.SCALES}"])
            state[name] = dequantize(*packed, dtype)
    causal_lm.load_state_dict(state, assign=True)
    loading.compute_frequencies(causal_lm, context.device)
    return causal_lm.eval()


def measure(context: Context, batch: int, length: int) -> Outcome:
    """Ratio of greedy tokens per second, engine over transformers; `detail` reports how many tokens agree."""
    count = TWIN_TOKENS if context.twin else TOKENS
    generator = torch.Generator().manual_seed(batch)
    vocabulary = drawn_engine.config_of(context, LAYERS)["vocab_size"]
    prompts = torch.randint(0, vocabulary, (batch, length), generator=generator)
    peer_seconds, peer_tokens = decode_transformers(context, prompts, count)
    seconds, tokens = decode_engine(context, prompts, count)
    equal = sum(a == b for x, y in zip(tokens, peer_tokens, strict=True) for a, b in zip(x, y, strict=True))
    detail = f"{seconds * 1e3:.2f} ms a step, transformers {peer_seconds * 1e3:.2f}"
    return Outcome(peer_seconds / seconds, detail=f"{detail}; {equal} of {batch * count} tokens equal")


@torch.inference_mode()
def decode_transformers(context: Context, prompts: torch.Tensor, count: int) -> tuple[float, list[list[int]]]:
    """Median seconds of a decode step, and the tokens per prompt."""
    model = context.shared("transformers", lambda: drawn_transformers(context))
    ids, cache, tokens, times = prompts.to(context.device), DynamicCache(config=model.config), [], []
    for _ in range(count):
        context.synchronize()
        start = time.perf_counter()
        # Positional: transformers 5.24 renamed the cache's keyword.
        hidden = model.model(ids, None, None, cache, use_cache=True).last_hidden_state
        ids = model.lm_head(hidden[:, -1]).argmax(-1, keepdim=True)
        tokens.append(ids[:, 0].tolist())
        times.append(time.perf_counter() - start)
    # The first step is the prompt's, and the second may include initialisation.
    rest = sorted(times[2:])
    return rest[len(rest) // 2], [list(column) for column in zip(*tokens, strict=True)]


def decode_engine(context: Context, prompts: torch.Tensor, count: int) -> tuple[float, list[list[int]]]:
    """decode_transformers with the engine."""
    config = drawn_engine.config_of(context, LAYERS)
    options = {} if context.twin else {"cache_bytes": 4 << 30}
    engine = context.shared("engine", lambda: drawn_engine.with_graphs(drawn_engine.build(context, config, **options)))
    tokens: list[list[int]] = [[] for _ in prompts]
    times = []
    for number, prompt in enumerate(prompts.tolist()):
        engine.add(str(number), prompt, drawn_engine.greedy(count))
    while engine.has_work:
        context.synchronize()
        start = time.perf_counter()
        outputs = drawn_engine.step(engine)
        if len(outputs) == len(tokens) and all(tokens):
            times.append(time.perf_counter() - start)
        for output in outputs:
            tokens[int(output.request_id)] += output.outputs[0].token_ids
    rest = sorted(times[1:])
    return rest[len(rest) // 2], tokens
