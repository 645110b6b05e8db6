"""Speculation on sparse models is lossless at contexts past topk: every query token of a step has the selection that it
has when it is decoded alone. In bf16 tokens and log probabilities are equal to the bit; in fp32 torch's products differ
by rounding, which may also exchange tokens of a selection whose scores are nearly equal."""

import dataclasses

import pytest

from mlaforge import LLM, SamplingParams
from mlaforge.engine.speculation.lookup import PromptLookupDrafter
from mlaforge.ops import native
from support.drafters import Branching, Knowing
from support.engine_driver import idle, random_prompts
from support.speculating import branch, check_identities, partly, speculate

# Layers read 40 tokens, of which the newest 12 always (tests/engine/conftest.py).
LAYOUTS = [("llama", "gqa"), ("llama", "latent"), ("llama", "latent_rope"), ("llama", "coded"), ("gpt_oss", "gqa")]
LAYOUTS += [("gpt_oss", "latent"), ("qwen3", "latent"), ("llama", "latent", 2)]
NEW = 24
# One prompt grows past topk while its answer is generated.
LENGTHS = (150, 33, 230)
compiled = pytest.mark.skipif(not native.is_available(), reason="torch's products depend on the number of rows")


@pytest.fixture(params=LAYOUTS, ids=str)
def model(request, sparse):
    family, layout, *share = request.param
    return sparse(family, layout, **({"share": share[0]} if share else {}))


def engine(model, dtype="bfloat16", **options):
    return LLM(model, device="cpu", dtype=dtype, **{"cache_bytes": 16 << 20, **options})


def answers(llm, prompts, **options):
    """Token ids, and the log probabilities of each with those of the likeliest tokens."""
    options = {"temperature": 0.0, "max_tokens": NEW, "ignore_eos": True, "logprobs": 2} | options
    params = SamplingParams(**options)
    completions = [output.outputs[0] for output in llm.generate(prompts, params)]
    return [c.token_ids for c in completions], [[(x.logprob, x.top) for x in c.logprobs] for c in completions]


def looping_prompts():
    """Prompts in which prompt lookup finds drafts, longer than topk."""
    return [(random_prompts(9, seed=seed)[0] * 12) for seed in (1, 2)]


@compiled
def test_chains_and_trees(model):
    """Alone and in batches, with drafts of which a part is refused."""
    llm, prompts = engine(model), random_prompts(*LENGTHS)
    plain = answers(llm, prompts)
    texts = [prompt + text for prompt, text in zip(prompts, plain[0], strict=True)]
    for count in (1, 3, 8):
        speculate(llm.engine, Knowing(texts, 0.8, seed=count), count)
        assert answers(llm, prompts) == plain, count
        check_identities(llm.engine.stats().speculation)
        assert llm.engine.stats().speculation.accepted > 4
    for depth, nodes in ((3, 12), (8, 24)):
        branch(llm.engine, Branching(texts, 0.8, seed=nodes), depth, nodes)
        for prompt, *expected in zip(prompts, *plain, strict=True):
            assert answers(llm, [prompt]) == tuple([each] for each in expected), (depth, nodes)
        stats = llm.engine.stats().speculation
        assert stats.tree_tokens > 0 < stats.accepted
    idle(llm.engine)


@compiled
def test_prompt_lookup(model):
    """Drafts of 8 tokens, as on dense models, beside a prompt that is computed in chunks."""
    llm = engine(model, max_num_batched_tokens=32, max_num_seqs=8)
    prompts = looping_prompts() + random_prompts(120)
    plain = answers(llm, prompts, max_tokens=80)
    llm.engine.config = dataclasses.replace(llm.engine.config, adaptive_speculation=False)
    llm.engine.speculate(llm.engine._lookup_drafter(), prompt_lookup=True)
    assert llm.engine.speculation.lookup.max_tokens == 8
    assert answers(llm, prompts, max_tokens=80) == plain
    speculate(llm.engine, PromptLookupDrafter(), 8)
    assert answers(llm, prompts, max_tokens=80) == plain
    assert llm.engine.stats().speculation.drafted > 8
    idle(llm.engine)


@compiled
@pytest.mark.parametrize("layout", ["gqa", "latent", "coded"])
def test_sparse_views(layout, sparse):
    """What sparse-view steps accepted is verified like any draft."""
    llm, prompts = engine(sparse("llama", layout)), random_prompts(300, 250)
    plain = answers(llm, prompts)
    texts = [prompt + text for prompt, text in zip(prompts, plain[0], strict=True)]
    options = {"specpv_sink": 1, "specpv_window": 32, "specpv_max_pending": 8, "specpv_dtype": "model"}
    stats = partly(llm.engine, Knowing(texts, 0.8), **options).stats
    assert answers(llm, prompts) == plain
    assert stats.sparse_steps > 4 and stats.provisional > 8
    idle(llm.engine)


@pytest.mark.parametrize("layout", ["gqa", "latent", "latent_rope", "coded"])
def test_float32(layout, sparse):
    """Log probabilities as of decoding the same text, up to the first token that another may replace."""
    llm, (prompt,) = engine(sparse("llama", layout), "float32"), random_prompts(100)
    (ids,), (logprobs,) = answers(llm, [prompt])
    margins = [top[0][1] - top[1][1] for _, top in logprobs]
    sure = next((i for i, margin in enumerate(margins) if margin < 2e-3), NEW)
    assert sure > 4
    for tree in (0, 12):
        branch(llm.engine, Branching([prompt + ids], 0.8), 4, tree)
        (drafted,), (drafted_logprobs,) = answers(llm, [prompt])
        assert drafted[:sure] == ids[:sure]
        values, expected = ([x for x, _ in each[:sure]] for each in (drafted_logprobs, logprobs))
        assert values == pytest.approx(expected, abs=2e-3)
        assert llm.engine.stats().speculation.accepted > 4


@compiled
@pytest.mark.parametrize("layout", ["gqa", "latent", "latent_rope", "coded"])
def test_sampled_tokens(layout, sparse):
    """A seeded request draws each token with the same number and from the same distribution, drafted or not."""
    llm, prompts = engine(sparse("llama", layout)), random_prompts(*LENGTHS)
    how = {"temperature": 0.9, "seed": 3, "top_k": 50}
    plain = answers(llm, prompts, **how)
    texts = [prompt + text for prompt, text in zip(prompts, plain[0], strict=True)]
    speculate(llm.engine, Knowing(texts, 0.8), 5)
    assert answers(llm, prompts, **how) == plain
    assert llm.engine.stats().speculation.accepted > 4
    branch(llm.engine, Branching(texts, 0.8), 4, 12)
    for prompt, *expected in zip(prompts, *plain, strict=True):
        assert answers(llm, [prompt], **how) == tuple([each] for each in expected)
    assert llm.engine.stats().speculation.tree_tokens
    idle(llm.engine)
