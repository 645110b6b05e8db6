"""Greedy decoding with speculation is greedy decoding without it, token by token: contexts to 8K, every number of
drafted tokens, alone and beside others, with found prefixes and preemption, in fp32 and bf16.

In bf16 the compiled kernels give a row one result, whatever else is computed with it, so tokens are equal. torch's own
fp32 products do not: where another token comes out, both must be as likely as rounding can tell. The difference of
their logits is then below twice what rounding was measured to move a logit of that text (`margins` prints both).
"""

import itertools
import json
import shutil

import pytest
import torch

from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.engine.speculation.lookup import PromptLookupDrafter
from support.drafters import Branching, Knowing
from support.eagle3_heads import saved
from support.engine_driver import Oracle, greedy, idle, random_prompts, renew, watched
from support.speculating import branch, check_identities, speculate

LONGEST, NEW = 8192, 16
CASES = [("llama", None), ("gpt_oss", None), ("mistral", "latent_rope"), ("qwen3", "latent")]


@pytest.fixture(scope="module")
def lengthened(tiny_models, converted, tmp_path_factory):
    """(family, layout) -> a tiny model whose context is as long as it takes."""
    made = {}

    def get(family, layout):
        if (family, layout) not in made:
            source = converted(family, layout, budget=0.75, layers="all") if layout else tiny_models[family]
            directory = shutil.copytree(source, tmp_path_factory.mktemp("long") / "model")
            config = json.loads((directory / "config.json").read_text())
            (directory / "config.json").write_text(json.dumps({**config, "max_position_embeddings": LONGEST + 64}))
            made[family, layout] = directory
        return made[family, layout]

    return get


@pytest.fixture(scope="module", params=CASES, ids=str)
def long(request, lengthened):
    return lengthened(*request.param)


def margins(oracle, llm, prompt, got):
    """Asserts that every token of `got` is the likeliest after those before it, or a tie to rounding."""
    logits = oracle.logits([*prompt, *got])[len(prompt) - 1 : -1]
    gaps = logits.max(-1).values - logits[range(len(got)), got]
    if not bool((gaps > 0).any()):
        return
    asks = SamplingParams(max_tokens=0, prompt_logprobs=oracle.model.config.vocab_size)
    own = llm.generate([[*prompt, *got]], asks)[0].prompt_logprobs[len(prompt) :]
    rounded = torch.tensor([[value for _, value in sorted(found.top)] for found in own])
    exact = logits.log_softmax(-1)
    noise = (rounded - exact).abs().amax(-1)
    for at in (gaps > 0).nonzero()[:, 0].tolist():
        print(f"token {at} after {len(prompt)}: margin {gaps[at]:.2e}, rounding {noise[at]:.2e}")
        assert gaps[at] < 2 * noise[at], (at, float(gaps[at]), float(noise[at]))


def check(oracle, llm, prompts, wanted, outputs):
    """The tokens of plain decoding; otherwise, in fp32, ties."""
    for prompt, want, output in zip(prompts, wanted, outputs, strict=True):
        got = output.outputs[0].token_ids
        assert len(got) == len(want)
        if got != want:
            assert llm.engine.model.dtype == torch.float32, (want, got)
            margins(oracle, llm, prompt, got)


def plain(llm, prompts, count):
    return [output.outputs[0].token_ids for output in llm.generate(prompts, greedy(count, speculate=False))]


def lossless(directory, oracle, dtype, lengths, counts, tree=0, **options):
    """All of it on one engine; the first runs compute the prompts, the others find them. `tree`: one prompt alone, with
    trees of so many tokens."""
    prompts = random_prompts(*lengths, seed=len(lengths))
    llm = watched(directory, dtype=dtype, cache_bytes=64 << 20, max_num_seqs=4, **options)
    engine = llm.engine
    own = engine.speculation and engine.speculation.drafter
    wanted = plain(llm, prompts, NEW)
    texts = [prompt + text for prompt, text in zip(prompts, wanted, strict=True)]
    for count in counts:
        knowing = Branching(texts, 0.8, seed=count)
        for drafter in [own] if own else [knowing] if tree else [knowing, PromptLookupDrafter()]:
            branch(engine, drafter, count, tree)
            check(oracle, llm, prompts, wanted, llm.generate(prompts, greedy(NEW)))
            stats = engine.stats().speculation
            assert stats.drafted or isinstance(drafter, PromptLookupDrafter)
            assert (stats.tree_tokens > 0) == (tree > 0)
            check_identities(stats)
    idle(engine)
    return llm, prompts, wanted


def test_a_context_of_8k(lengthened):
    """Its prompt is found when it comes again."""
    directory = lengthened("llama", None)
    llm, prompts, _ = lossless(directory, Oracle(directory), "float32", (LONGEST - NEW,), (1, 3, 8))
    (again,) = llm.generate(prompts, greedy(1))
    assert again.num_cached_tokens > LONGEST - NEW - 32


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_bf16(family, layout, lengthened):
    directory = lengthened(family, layout)
    lossless(directory, Oracle(directory), "bfloat16", (100, 40, 7, 230), (2, 5, 8))


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_trees_in_bf16(family, layout, lengthened):
    """Of up to 15 tokens through the compiled kernel, where there is one."""
    directory = lengthened(family, layout)
    lossless(directory, Oracle(directory), "bfloat16", (150,), (2, 6), tree=15)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lengths", [(LONGEST - NEW,), (5000, 9, 1000, 2500)], ids=["alone", "four"])
def test_long_contexts(lengths, dtype, long):
    lossless(long, Oracle(long), dtype, lengths, (1, 2, 4, 8))
    if len(lengths) == 1:
        lossless(long, Oracle(long), dtype, lengths, (3, 8), tree=24)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_number_of_drafted_tokens(dtype, batch, long):
    lossless(long, Oracle(long), dtype, (100, 40, 7, 230)[:batch], range(1, 9))


@pytest.mark.slow
def test_preemption_in_long_contexts(long):
    """Room for two prompts and one text: the second is preempted, and computed again."""
    oracle, count = Oracle(long), 40
    llm = watched(long, cache_bytes=16 << 20)
    prompts = random_prompts(1000, 200, seed=7)
    wanted = plain(llm, prompts, count)
    engine = llm.engine
    for caching, drafted in itertools.product((True, False), (3, 8)):
        renew(engine, 12, 1000 + count, block_size=16, max_step=256, caching=caching)
        before = engine.stats().preemptions
        speculate(engine, Knowing([p + text for p, text in zip(prompts, wanted, strict=True)], 0.8), drafted)
        check(oracle, llm, prompts, wanted, llm.generate(prompts, greedy(count)))
        # Windows hold so little that there is room for both.
        assert engine.stats().preemptions > before or all(group.window for group in engine.tables.groups)
    idle(engine)


@pytest.mark.slow
def test_a_head_in_long_contexts(long, tmp_path):
    """An EAGLE-3 head with a window, whose rows are found with the prompt's."""
    oracle = Oracle(long)
    folder = saved(tmp_path / "head", sliding_window=64, layer={"max_position_embeddings": LONGEST + 64})
    options = {"speculative": str(folder), "adaptive_speculation": False}
    for dtype in ("float32", "bfloat16"):
        lossless(long, oracle, dtype, (4000, 130), (3, 8), **options)
        lossless(long, oracle, dtype, (4000,), (3, 6), tree=12, **options)
