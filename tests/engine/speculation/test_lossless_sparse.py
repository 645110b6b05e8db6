"""Speculation on sparse models at contexts past topk: every query token of a step has the selection that it has when it
is decoded alone. In bf16 tokens and log probabilities are equal to the bit (fp32: tests/engine/test_sparse.py)."""

import pytest

from mlaforge import SamplingParams
from mlaforge.engine.speculation.lookup import PromptLookupDrafter
from mlaforge.ops import native
from support.drafters import Branching, Knowing
from support.engine_driver import idle, random_prompts, watched
from support.speculating import branch, check_identities, partly, speculate

# Layers read 40 tokens, of which the newest 12 always (tests/engine/conftest.py).
LAYOUTS = [("llama", "gqa"), ("llama", "latent"), ("llama", "latent_rope"), ("llama", "coded"), ("gpt_oss", "gqa"),
           ("gpt_oss", "latent"), ("qwen3", "latent"), ("llama", "latent", 2)]  # fmt: skip
NEW = 24
# One grows past topk while its answer is generated.
PROMPTS = random_prompts(150, 33, 230)


def answers(llm, prompts, **options):
    """Token ids, and the log probabilities of each with those of the likeliest tokens."""
    how = SamplingParams(**{"temperature": 0.0, "max_tokens": NEW, "ignore_eos": True, "logprobs": 2, **options})
    completions = [output.outputs[0] for output in llm.generate(prompts, how)]
    return [c.token_ids for c in completions], [[(x.logprob, x.top) for x in c.logprobs] for c in completions]


@pytest.mark.skipif(not native.is_available(), reason="torch's products depend on the number of rows")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_equals_plain_decoding_to_the_bit(layout, sparse):
    """Alone and in batches, with drafts of which a part is rejected, greedy and seeded."""
    family, kind, *share = layout
    model = sparse(family, kind, **({"share": share[0]} if share else {}))
    llm = watched(model, dtype="bfloat16", cache_bytes=16 << 20, max_num_batched_tokens=64, max_num_seqs=8)
    for how in ({}, {"temperature": 0.9, "seed": 3, "top_k": 50}):
        plain = answers(llm, PROMPTS, speculate=False, **how)
        texts = [prompt + text for prompt, text in zip(PROMPTS, plain[0], strict=True)]
        for count in (1, 3, 8):
            speculate(llm.engine, Knowing(texts, 0.8, seed=count), count)
            assert answers(llm, PROMPTS, **how) == plain, count
            assert llm.engine.stats().speculation.accepted > 4
        for depth, nodes in ((3, 12), (8, 24)):
            branch(llm.engine, Branching(texts, 0.8, seed=nodes), depth, nodes)
            for prompt, *expected in zip(PROMPTS, *plain, strict=True):
                assert answers(llm, [prompt], **how) == tuple([own] for own in expected), (depth, nodes)
            assert 0 < llm.engine.stats().speculation.accepted < llm.engine.stats().speculation.tree_tokens
        check_identities(llm.engine.stats().speculation)
    # In texts of four tokens much occurred before.
    few = {"logit_bias": dict.fromkeys(range(20, 24), 100.0)}
    plain = answers(llm, PROMPTS, speculate=False, **few)
    speculate(llm.engine, PromptLookupDrafter(), 8, prompt_lookup=True)
    assert answers(llm, PROMPTS, **few) == plain
    assert llm.engine.stats().speculation.drafted > 8
    plain = answers(llm, PROMPTS, speculate=False)
    stats = partly(llm.engine, Knowing([p + t for p, t in zip(PROMPTS, plain[0], strict=True)], 0.8), dtype="model",
                   sink=1, window=16, max_provisional=8).stats  # fmt: skip
    assert answers(llm, PROMPTS) == plain
    assert stats.sparse_steps > 4 and stats.provisional > 8
    idle(llm.engine)
