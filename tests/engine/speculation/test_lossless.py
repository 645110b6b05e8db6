"""Decoding with speculation gives the tokens of decoding without it: in any schedule and mode, with every number of
drafted tokens, for every sampling parameter, in contexts to 8K.

In bf16 the compiled kernels give a row one result, whatever else is computed with it, so tokens are equal to the bit of
their log probabilities. torch's fp32 products do not: where another token comes out, it must be as likely as rounding
can tell.
"""

import dataclasses
import functools
import itertools
import json
import re
import shutil

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlaforge.engine.execution.attention import PagedGroupedQueryAttention
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.engine.speculation.lookup import PromptLookupDrafter
from mlaforge.engine.speculation.sparse_view import SparseViewConfig
from mlaforge.ops import native
from mlaforge.runtime import UserError
from support import block_heads, eagle3_heads
from support.drafters import Branching, Knowing
from support.engine_driver import Oracle, greedy, idle, random_prompts, renew, watched
from support.plain_decoding import Plain, published, rows_in
from support.speculating import CASES, HOW, NARROW, AnyLength, check_identities, speculate, tokens

# In any schedule

NEW, SHORTEST, LONGEST = 20, 20, 90
# Texts that begin alike, and part.
BASE = random_prompts(LONGEST, seed=4)[0]
BASES = [BASE, BASE[:64] + random_prompts(LONGEST - 64, seed=5)[0]]
MODES = ["chain", "tree", "sparse view", "adaptive"]
KINDS = [*((*case, "bfloat16") for case in CASES), ("llama", None, "float32"), ("gpt_oss", "latent", "float32"),
         ("llama", "sparse", "bfloat16"), ("gpt_oss", "sparse", "bfloat16")]  # fmt: skip


@pytest.fixture(scope="module", params=KINDS, ids=str)
def loaded(request, tiny_models, converted, sparse):
    family, kind, dtype = request.param
    if kind == "sparse":
        directory = sparse(family, "gqa")
    else:
        directory = converted(family, kind, budget=0.75, layers="all") if kind else tiny_models[family]
    llms = [watched(directory, dtype=dtype, cache_bytes=4 << 20, max_num_seqs=8) for _ in range(2)]
    return llms[0], Plain(llms[1], Oracle(directory) if dtype == "float32" else None, LONGEST + NEW, NEW)


arrivals = st.tuples(
    st.integers(0, 1), st.integers(SHORTEST, LONGEST), st.sampled_from([0, 0, 0, 5, 12]), st.integers(1, NEW),
    st.sampled_from([1, 1, 2, 3]), st.integers(0, 9), st.sampled_from([0.0, 0.0, 0.0, 1.0]),
    st.none() | st.integers(1, 20), st.sampled_from([True, True, True, False]),
)  # fmt: skip


# A long running prompt is left out for a waiting one, which lacks blocks: it may not take those of the step's others.
@example(
    requests=[
        (0, 20, 0, 1, 1, 0, 0.0, None, True), (0, 20, 12, 3, 2, 1, 0.0, None, True),
        (0, 31, 0, 1, 1, 3, 0.0, None, True), (0, 39, 0, 1, 1, 2, 0.0, None, True),
        (0, 69, 0, 1, 1, 0, 0.0, None, True),
    ],
    mode="chain", count=1, nodes=0, right=0.0, prompt_lookup=False, parallel=False, view=(0, 8, 1, 1), block_size=1,
    max_step=34, spare=0, caching=True,
)  # fmt: skip
@settings(max_examples=12)
@given(
    requests=st.lists(arrivals, min_size=1, max_size=5),
    mode=st.sampled_from(MODES),
    count=st.integers(1, 8),
    nodes=st.integers(0, 12),
    right=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    prompt_lookup=st.booleans(),
    parallel=st.booleans(),
    view=st.tuples(st.sampled_from([0, 8]), st.sampled_from([8, 200]), st.integers(1, 4), st.integers(1, 12)),
    block_size=st.sampled_from([1, 3, 4, 16]),
    max_step=st.integers(4, 80),
    spare=st.sampled_from([0, 0, 1, 4, 30]),
    caching=st.sampled_from([True, True, False]),
)
def test_any_schedule_gives_the_tokens_of_plain_decoding(
    loaded, requests, mode, count, nodes, right, prompt_lookup, parallel, view, block_size, max_step, spare, caching
):
    """Windows, latents, sparse layers, chunks, preemption, shared prefixes, continuations, sampled requests beside
    greedy ones, requests without drafts, aborts, and any number of rejected tokens. What is published as a prefix was
    output or stood in a prompt, and its rows are those of a step without drafts."""
    llm, plain = loaded
    engine = llm.engine
    sparse = any(layer.attention.sparse is not None for layer in engine.model.layers)
    one_form = not sparse and all(
        isinstance(layer.attention, PagedGroupedQueryAttention) for layer in engine.model.layers
    )
    for left in list(engine._requests):
        # Of an example that failed.
        engine.abort(left)
    # Index keys lie sixteen tokens together.
    block_size = 16 if sparse else block_size
    renew(engine, spare, LONGEST + NEW + 1, block_size=block_size, caching=caching, max_step=max_step)
    # Some go on where another one's answer does.
    prompts = [BASES[base][:length] for base, length, *_ in requests]
    prompts = [p + plain.continuation(p)[: r[2]] if len(p) + r[2] <= LONGEST else p
               for p, r in zip(prompts, requests, strict=True)]  # fmt: skip
    if prompt_lookup:
        prompts = [p[: len(p) // 2] * 2 for p in prompts]
    # Sparse and latent layers compute prompts in another form than answers.
    exact = one_form or not caching or not any(follow for _, _, follow, *_ in requests)
    sizes = dict(zip(("retrieval", "window", "full_every", "max_provisional"), view, strict=True))
    drafter = Branching([p + plain.continuation(p) for p in prompts], right)
    drafter.parallel_drafting = parallel
    engine.set_drafter(
        drafter, count, prompt_lookup,
        AnyLength(sink=1, **sizes), specpv=mode in ("sparse view", "adaptive"), specpv_dtype="model",
        speculative_tree_tokens=(count + nodes) * (mode in ("tree", "adaptive")),
        adaptive_speculation=mode == "adaptive",
    )  # fmt: skip
    got, gone, step = {}, set(), 0
    while step <= 9 or engine.has_work:
        for number, (*_, most, n, arrives, temperature, _, drafted) in enumerate(requests):
            if arrives == step:
                how = greedy(most, n=n, temperature=temperature, seed=number, speculate=drafted)
                engine.add(str(number), prompts[number], how)
        for number, (*_, arrives, _, ends, _) in enumerate(requests):
            if ends is not None and arrives + ends == step and str(number) in engine._requests:
                engine.abort(str(number))
                gone.add(number)
        for output in engine.step():
            for completion in output.outputs:
                got.setdefault((int(output.request_id), completion.index), []).extend(completion.token_ids)
        step += 1
        assert step < 1000
        found = published(engine, [prompts[number] + made for (number, _), made in got.items()] + prompts)
    for number, (*_, most, n, _, temperature, _, _) in enumerate(requests):
        for index in range(n):
            made = got.get((number, index), [])
            assert len(made) == most or number in gone
            if exact and not temperature:
                plain.check(prompts[number], made)
    for block, text, at in found if one_form and plain.oracle is None else []:
        assert torch.equal(rows_in(engine, block), plain.rows_of(text)[at * block_size :][:block_size])
    stats = engine.stats().speculation
    if stats.steps:
        check_identities(stats)
    idle(engine)


# What is drafted, and when


def llm_of(model):
    return watched(model, dtype="bfloat16", cache_bytes=16 << 20, max_num_seqs=8, max_model_len=400)


@pytest.fixture(scope="module")
def llama(tiny_models):
    return llm_of(tiny_models["llama"])


def test_drafts_preempt_and_delay_no_other_sequence(llama):
    """There is room for one sequence to its end and for the other's tokens, but not for many drafted ones besides; then
    for four sequences and six rows a step: each gets its row, two are left for drafts."""
    engine, prompts = llama.engine, [base[:12] for base in random_prompts(40, 40, 40, 40, seed=11)]
    renew(engine, 60, 60, block_size=4, max_step=64)
    texts = [tokens(output)[0] for output in llama.generate(prompts, greedy(16, speculate=False))]
    known = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
    for drafter in (Knowing([]), Knowing(known)):
        for view in (None, NARROW):
            renew(engine, 7, 28, block_size=4, max_step=64, caching=False)
            before = engine.stats().preemptions
            engine.set_drafter(drafter, 8, False, view, specpv=view is not None, adaptive_speculation=False)
            assert [tokens(output)[0] for output in llama.generate(prompts[:2], greedy(16))] == texts[:2]
            assert engine.stats().preemptions == before
    renew(engine, 60, 60, block_size=4, max_step=6)
    engine.set_drafter(Knowing(known), 8, False, specpv=False)
    for number, prompt in enumerate(prompts):
        engine.add(str(number), prompt, greedy(16))
    while any(not sequence.decoding for sequence in [*engine.scheduler.running, *engine.scheduler.waiting]):
        engine.step()
    while len(engine.scheduler.running) == 4:
        assert len(engine.step()) == 4
    while engine.has_work:
        engine.step()
    idle(engine)


def test_request_can_disable_speculation(llama):
    renew(llama.engine, 20, 400, block_size=16, max_step=64)
    llama.engine.set_drafter(None)
    (text,) = tokens(llama.generate([BASE], greedy(20))[0])
    for drafted in (False, True):
        speculate(llama.engine, Knowing([BASE + text]))
        assert tokens(llama.generate([BASE], greedy(20, speculate=drafted))[0]) == [text]
        stats = llama.engine.stats().speculation
        assert (stats.steps > 0, stats.drafted > 0, stats.engine_steps > 0) == (drafted,) * 3
    with pytest.raises(UserError, match="speculate"):
        SamplingParams(speculate=1)
    idle(llama.engine)


# Sampling parameters, and the ends of texts

WHOLE = AnyLength(retrieval=0, window=400, full_every=2, max_provisional=9)
# A view that leaves out most of a text; sparse layers, which read 40 tokens (tests/engine/conftest.py), select it.
PART = AnyLength(sink=1, retrieval=8, window=16, full_every=3, max_provisional=8)
SPARSE = [("llama", "gqa"), ("llama", "latent"), ("llama", "latent_rope"), ("llama", "coded"), ("gpt_oss", "gqa"),
          ("gpt_oss", "latent"), ("qwen3", "latent"), ("llama", "latent", 2)]  # fmt: skip
rows_alike = pytest.mark.skipif(not native.is_available(), reason="torch's products depend on the number of rows")


def drafts_by(engine, mode, texts, right=1.0, count=8, seed=0, view=WHOLE):
    drafter = PromptLookupDrafter() if mode == "lookup" else Branching(texts, right, seed=seed)
    return speculate(
        engine, drafter, count, tree=16 if mode == "tree" else 0, prompt_lookup=mode == "lookup",
        view=view if mode == "sparse view" else None,
    ).stats  # fmt: skip


@pytest.mark.parametrize(
    ("name", "layout"),
    [*((name, None) for name in HOW),
     # Each layout greedy, and sampled in one of two ways.
     *(pytest.param(name, layout, marks=rows_alike)
       for at, layout in enumerate(SPARSE) for name in ("greedy", ("filters", "bias")[at % 2]))],
    ids=str,
)  # fmt: skip
def test_seeded_tokens_equal_plain_decoding(name, layout, llama, sparse):
    """Text, end and log probabilities too, in each mode, with drafts that were not sampled, alone and in batches. Under
    sparse views sampled tokens take other random numbers, of which each is among those that the request allows. Every
    query token of a sparse model has the selection that it has when it is decoded alone."""
    if name in ("json", "regex"):
        pytest.importorskip("llguidance")
    if layout:
        family, kind, *share = layout
        llama = llm_of(sparse(family, kind, **({"share": share[0]} if share else {})))
    options = {"temperature": 1.0, "seed": 3, "max_tokens": 20, "ignore_eos": True, "logprobs": 2, "n": 2, **HOW[name]}
    # One grows past the tokens that sparse layers read while its answer is generated.
    params, prompts = SamplingParams(**options), [prompt * 3 for prompt in random_prompts(11, 20, 60)]
    renew(llama.engine, 60, 400, block_size=16, max_step=64, max_num_seqs=8)
    plain = {n: llama.generate(prompts, dataclasses.replace(params, n=n, speculate=False)) for n in (1, 2)}
    texts = [o.prompt_token_ids + own for o in plain[2] for own in tokens(o)]
    cover = (("chain", 1, 0.5), ("chain", 3, 1.0), ("chain", 8, 0.5), ("lookup", 5, 1.0), ("tree", 4, 0.8),
             ("tree", 8, 0.8), ("sparse view", 3, 0.5))  # fmt: skip
    for mode, count, right in cover:
        stats = drafts_by(llama.engine, mode, texts, right, count, count, PART)
        n = 1 if mode == "tree" else 2
        how = dataclasses.replace(params, n=n)
        # A tree is for a sequence that runs alone.
        groups = [[prompt] for prompt in prompts] if mode == "tree" else [prompts]
        made = [output for group in groups for output in llama.generate(group, how)]
        if mode != "sparse view" or params.greedy:
            assert [output.outputs for output in made] == [output.outputs for output in plain[n]], mode
        assert stats.accepted > 0 or (mode in ("lookup", "sparse view") and name != "bias")
        assert (stats.tree_tokens > 0, stats.sparse_steps > 0) == (mode == "tree", mode == "sparse view")
        check_identities(stats)
        for completion in (completion for output in made for completion in output.outputs):
            assert len(completion.logprobs) == len(completion.token_ids) >= params.min_tokens
            assert completion.finish_reason == "stop" or len(completion.token_ids) == params.max_tokens
            if params.regex and completion.finish_reason == "stop":
                assert re.fullmatch(params.regex, completion.text)
            if params.top_k:
                # All but 40 tokens are filtered out; the logprobs are of the distribution before.
                assert all(entry.logprob > -6 for entry in completion.logprobs)
    idle(llama.engine)


@pytest.mark.parametrize("mode", ["chain", "tree", "sparse view"])
def test_text_ends_within_an_accepted_draft(mode, llama):
    """At each place: by stop id, stop string, length, and the end of the context."""
    engine, (prompt,) = llama.engine, random_prompts(380, seed=12)
    renew(engine, 60, 400, block_size=16, max_step=64)
    text = tokens(llama.generate([prompt], greedy(20, speculate=False))[0])[0]
    for at in range(1, 12, 1 if mode == "chain" else 3):
        stats = drafts_by(engine, mode, [prompt + text], seed=at)
        stop = llama.tokenizer.decode(text[at - 1 : at + 1])
        for params in (greedy(at), greedy(20, stop_token_ids=(text[at],)), greedy(20, stop=(stop,)), greedy(30)):
            (want,) = llama.generate([prompt], dataclasses.replace(params, speculate=False))
            (got,) = llama.generate([prompt], params)
            assert got.outputs == want.outputs
            if mode == "chain" and params.max_tokens == at:
                # As few steps as there can be, and no token is drafted that cannot be used.
                assert (stats.engine_steps, stats.accepted) == (-(-(at - 1) // 9), stats.drafted)
            idle(engine)
        assert stats.accepted > 0


# Contexts of 8K

LONG, SOME = 8192, 16
FAMILIES = [("llama", None), ("gpt_oss", None), ("mistral", "latent_rope"), ("qwen3", "latent")]
HEADS = {
    "eagle3": eagle3_heads.saved,
    "parallel": functools.partial(eagle3_heads.saved, mask_token_id=5, markov_rank=8),
    "block": functools.partial(block_heads.saved, markov_rank=8),
}
# Drafter, lengths of prompts, drafted tokens; `tree`: one prompt alone, with trees of so many tokens; `spare`: blocks
# besides those of the longest text, so that some prompts are preempted and computed again.
CONTEXTS = {
    "8K": ("known text", (LONG - SOME,), (1, 2, 4, 8), {}),
    "8K, trees": ("known text", (LONG - SOME,), (3, 8), {"tree": 24}),
    "8K, sparse view": ("known text", (LONG - SOME,), (3,), {"view": SparseViewConfig(retrieval=256)}),
    "four": ("known text", (5000, 9, 1000, 2500), (2, 8), {"spare": 12}),
    **{kind: (kind, (130, 9, 60, 90), (1, 3), {"spare": 12}) for kind in HEADS},
    **{f"4K, {kind}": (kind, (4000, 130), (3, 8), {}) for kind in HEADS},
    "4K, eagle3, trees": ("eagle3", (4000,), (3, 6), {"tree": 12}),
}


@pytest.fixture(scope="module")
def lengthened(tiny_models, converted, tmp_path_factory):
    """(family, layout) -> a tiny model whose context is as long as it takes, and transformers as its oracle."""

    @functools.cache
    def get(family, layout):
        source = converted(family, layout, budget=0.75, layers="all") if layout else tiny_models[family]
        directory = shutil.copytree(source, tmp_path_factory.mktemp("long") / "model")
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**config, "max_position_embeddings": LONG + 64}))
        return directory, Oracle(directory)

    return get


def check(oracle, llm, prompts, expected, outputs):
    """Assert plain decoding's tokens; in fp32 each token must otherwise be the likeliest after those before it, or a
    tie: the difference of the logits below twice what rounding was measured to move a logit of that text."""
    for prompt, want, output in zip(prompts, expected, outputs, strict=True):
        got = output.outputs[0].token_ids
        assert len(got) == len(want)
        if got == want:
            continue
        assert llm.engine.model.dtype == torch.float32, (want, got)
        logits = oracle.logits([*prompt, *got])[len(prompt) - 1 : -1]
        gaps = logits.max(-1).values - logits[range(len(got)), got]
        all_of_it = SamplingParams(max_tokens=0, prompt_logprobs=oracle.model.config.vocab_size)
        rounded = llm.generate([[*prompt, *got]], all_of_it)[0].prompt_logprobs[len(prompt) :]
        rounded = torch.tensor([[value for _, value in sorted(entry.top)] for entry in rounded])
        noise = (rounded - logits.log_softmax(-1)).abs().amax(-1)
        assert bool((gaps <= 2 * noise).all()), (gaps, noise)


@pytest.mark.parametrize(
    ("context", "family", "dtype"),
    [
        pytest.param(
            *case, marks=() if case[0] in HEADS or case == ("8K", FAMILIES[0], "float32") else pytest.mark.slow
        )
        for case in itertools.product(CONTEXTS, FAMILIES, ("float32", "bfloat16"))
    ],
    ids=str,
)
def test_long_contexts(context, family, dtype, lengthened, tmp_path):
    """All drafted tokens on one engine; the first run computes the prompts, the others find them, and the head's rows
    with them."""
    kind, lengths, counts, how = CONTEXTS[context]
    tree, view, spare, options = how.get("tree", 0), how.get("view"), how.get("spare"), {}
    if kind in HEADS:
        head = HEADS[kind](tmp_path / "head", sliding_window=9, layer={"max_position_embeddings": LONG + 64})
        options = {"speculative": str(head)}
    (directory, oracle), prompts = lengthened(*family), random_prompts(*lengths, seed=len(lengths))
    llm = watched(directory, dtype=dtype, cache_bytes=64 << 20, max_num_seqs=4, **options)
    engine, head = llm.engine, llm.engine.speculation and llm.engine.speculation.drafter
    expected = [tokens(output)[0] for output in llm.generate(prompts, greedy(SOME, speculate=False))]
    if spare is not None:
        renew(engine, spare, max(lengths) + SOME, block_size=16, max_step=256)
    texts = [prompt + text for prompt, text in zip(prompts, expected, strict=True)]
    # Windows hold so little that there is room for all, and leave nothing out.
    full = any(group.window is None for group in engine.tables.groups)
    for count in counts:
        knowing = Branching(texts, 0.8, seed=count)
        for drafter in [head] if head else [knowing] if tree or view else [knowing, PromptLookupDrafter()]:
            speculate(engine, drafter, count, tree, prompt_lookup=drafter.parallel_drafting, view=view)
            outputs = llm.generate(prompts, greedy(SOME))
            check(oracle, llm, prompts, expected, outputs)
            stats = engine.stats().speculation
            assert stats.drafted or isinstance(drafter, PromptLookupDrafter)
            assert (stats.tree_tokens > 0, stats.sparse_steps > 0) == (tree > 0, view is not None and full)
            check_identities(stats)
    if spare is None:
        assert all(o.num_cached_tokens > len(prompt) - 32 for o, prompt in zip(outputs, prompts, strict=True))
    else:
        assert engine.stats().preemptions > 0 or not full
    idle(engine)
