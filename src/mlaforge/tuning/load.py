"""A short load of a model: prompts and decoding in every bucket of rows, from which `tune` takes shapes."""

from __future__ import annotations

import torch

from mlaforge.bench.gemm_shapes import Recorder, Shapes
from mlaforge.engine.config import EngineConfig
from mlaforge.engine.llm import LLM
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.tuning.config import TuneConfig

# Requests and prompt tokens of the batches; tokens that each request decodes.
BATCHES, TOKENS = ((1, 512), (1, 32), (2, 32), (4, 32), (8, 32), (16, 32)), 3


def shapes_of_load(model: str, config: TuneConfig) -> Shapes:
    """Run MODEL and return the products that it computed. Prompts are random tokens: products do not depend on them,
    but the experts that a prompt is routed to do."""
    longest = max(length for _, length in BATCHES) + TOKENS
    engine_config = EngineConfig(
        dtype=config.dtype, device=config.device, kv_cache_dtype=config.kv_cache_dtype, speculative=config.speculative,
        max_model_len=longest, prefix_caching=False, tuned="none", adaptive_speculation=False,
    )  # fmt: skip
    llm = LLM(model, engine_config)
    draw = torch.Generator().manual_seed(0)
    limit = llm.engine.max_model_len - TOKENS
    recorder = Recorder(llm.engine)
    with recorder.active() as shapes:
        for requests, length in BATCHES:
            prompts = torch.randint(3, llm.engine.vocab_size, (requests, min(length, limit)), generator=draw).tolist()
            llm.generate(prompts, SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True))
    return shapes
