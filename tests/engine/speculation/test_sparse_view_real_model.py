"""Sparse-view verification on SmolLM2-135M-Instruct: what is retrieved matters, and long texts are plain decoding's."""

import heapq
import inspect
import statistics
from pathlib import Path

import pytest
import torch

import mlaforge
from mlaforge.engine.llm import LLM
from mlaforge.engine.speculation import sparse_view
from support.drafters import Knowing
from support.engine_driver import greedy, idle, watched
from support.speculating import partly

VIEW = {"specpv_sink": 4, "specpv_retrieval": 256, "specpv_window": 16, "specpv_full_every": 4, "specpv_max_pending": 8}


def anywhere(masses, sink, tail, count):
    """As many tokens as ops/attention_mass.top_tokens finds, whichever."""
    generator = torch.Generator().manual_seed(0)
    return torch.stack([sink + torch.randperm(tail - sink, generator=generator)[:count].sort().values for _ in masses])


@pytest.mark.slow
def test_top_tokens_confirm_more_than_random_ones(smollm2, monkeypatch):
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
    for chooses in (sparse_view.top_tokens, anywhere):
        monkeypatch.setattr(sparse_view, "top_tokens", chooses)
        stats = partly(llm.engine, Knowing(texts), specpv_dtype="model", **VIEW).stats
        outputs = llm.generate(prompts, greedy(64))
        assert [p + o.outputs[0].token_ids for p, o in zip(prompts, outputs, strict=True)] == texts
        assert stats.provisional > 64
        kept.append(stats.confirmed / stats.provisional)
    print(f"kept: top_tokens {kept[0]:.2f}, random {kept[1]:.2f}")
    assert kept[1] < kept[0] - 0.1, kept
    idle(llm.engine)


@pytest.mark.slow
def test_long_texts_equal_plain_decoding(smollm2):
    """32 prompts of 4,096 to 8,000 tokens of source text, four together, with the head that comes with the package."""
    head = Path(mlaforge.__file__).parent / "demo" / "heads" / "smollm2-135m-instruct-original"
    llm = LLM(
        smollm2, device="cpu", dtype="bfloat16", cache_bytes=2 << 30, max_num_seqs=4, speculative=str(head),
        specpv="lossless", adaptive_speculation=False,
    )  # fmt: skip
    sources = sorted(Path(inspect.getfile(statistics)).parent.glob("*.py"))[:40]
    ids = llm.tokenizer("".join(source.read_text(encoding="utf-8") for source in sources))["input_ids"]
    prompts = [
        [ids[start : start + length] for length in (4096, 5400, 6700, 8000)]
        for start in range(0, len(ids) - 8000, (len(ids) - 8000) // 8 + 1)
    ]
    assert sum(map(len, prompts)) == 32
    for four in prompts:
        for prompt in four:
            # Each finds what the shorter one has computed.
            llm.generate([prompt], greedy(1, speculate=False))
        plain, partly_read = (
            [output.outputs[0].token_ids for output in llm.generate(four, greedy(32, speculate=speculate))]
            for speculate in (False, True)
        )
        assert partly_read == plain
    stats = llm.engine.stats().speculation
    assert stats.sparse_steps > 32 and stats.confirmed / stats.provisional > 0.5
