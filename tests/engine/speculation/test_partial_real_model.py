"""Partial verification on SmolLM2-135M-Instruct: what is retrieved matters."""

import heapq
import inspect
import statistics

import pytest
import torch

from mlaforge.engine.speculation import partial
from support.drafters import Knowing
from support.engine_driver import greedy, idle, watched
from support.speculating import partly

VIEW = {"specpv_sink": 4, "specpv_retrieval": 256, "specpv_window": 16, "specpv_full_every": 4, "specpv_max_pending": 8}


def anywhere(masses, sink, tail, count):
    """As many tokens as ops/attended.heaviest finds, whichever."""
    generator = torch.Generator().manual_seed(0)
    return torch.stack([sink + torch.randperm(tail - sink, generator=generator)[:count].sort().values for _ in masses])


@pytest.mark.slow
def test_random_tokens_serve_worse_than_the_heaviest(smollm2, monkeypatch):
    """Fewer of the tokens that a view agrees to are kept; the tokens that come out are plain decoding's either way.
    The drafter is always right, so that the view alone decides."""
    llm = watched(smollm2, dtype="bfloat16", cache_bytes=256 << 20)
    prompts = []
    for module in (heapq, statistics):
        ids = llm.tokenizer(inspect.getsource(module))["input_ids"][:2000]
        text = "Summarize this text in your own words:\n\n" + llm.tokenizer.decode(ids)
        prompts.append(llm.chat_prompt([{"role": "user", "content": text}]))
    plain = llm.generate(prompts, greedy(64))
    texts = [prompt + output.outputs[0].token_ids for prompt, output in zip(prompts, plain, strict=True)]
    kept = []
    for chooses in (partial.heaviest, anywhere):
        monkeypatch.setattr(partial, "heaviest", chooses)
        stats = partly(llm.engine, Knowing(texts), specpv_dtype="model", **VIEW).stats
        outputs = llm.generate(prompts, greedy(64))
        assert [p + o.outputs[0].token_ids for p, o in zip(prompts, outputs, strict=True)] == texts
        assert stats.pending > 64
        kept.append(stats.kept / stats.pending)
    print(f"kept: heaviest {kept[0]:.2f}, random {kept[1]:.2f}")
    assert kept[1] < kept[0] - 0.1, kept
    idle(llm.engine)
