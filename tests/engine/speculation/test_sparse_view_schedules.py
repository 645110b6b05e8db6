"""Sparse-view verification in any schedule: what waits to be judged is nobody's prefix, and what comes out is plain
decoding's. Every engine here is watched (engine_driver.py)."""

import dataclasses
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlaforge.engine.cache.block_pool import block_digests
from mlaforge.engine.execution.attention import PagedGroupedQueryAttention
from mlaforge.engine.speculation.sparse_view import SparseViewDrafter
from support.drafters import Branching
from support.engine_driver import greedy, idle, random_prompts, renew, watched
from support.speculating import partly

# Views of few tokens, or with another window of all.
NARROW = {"specpv_sink": 1, "specpv_retrieval": 8, "specpv_dtype": "model"}
NEW, SHORTEST, LONGEST = 20, 30, 90
# Texts that begin alike, and part.
BASE = random_prompts(LONGEST, seed=4)[0]
BASES = [BASE, BASE[:64] + random_prompts(LONGEST - 64, seed=5)[0]]


KINDS = [("llama", None), ("gpt_oss", None), ("qwen3", "latent"), ("llama", "sparse"), ("gpt_oss", "sparse")]


@pytest.fixture(scope="module", params=KINDS, ids=str)
def loaded(request, tiny_models, converted, sparse):
    """The engine, and plain decoding on another one."""
    family, kind = request.param
    if kind == "sparse":
        directory = sparse(family, "gqa")
    else:
        directory = converted(family, kind, budget=0.75, layers="all") if kind else tiny_models[family]
    options = {"dtype": "bfloat16", "cache_bytes": 4 << 20, "num_speculative_tokens": 3}
    return watched(directory, **options).engine, Plain(watched(directory, **options))


class Plain:
    """What plain decoding makes of a prompt, and the cache's rows of a text, each computed once."""

    def __init__(self, llm):
        self.llm, self.known, self.rows = llm, {}, {}
        renew(llm.engine, 10, LONGEST + NEW, block_size=16, max_step=64, caching=False)

    def continuation(self, prompt):
        key = tuple(prompt)
        if key not in self.known:
            self.known[key] = self.llm.generate([prompt], greedy(NEW))[0].outputs[0].token_ids
        return self.known[key]

    def rows_of(self, text):
        """[tokens, numbers of all layers that see everything]"""
        key = tuple(text)
        if key not in self.rows:
            engine = self.llm.engine
            engine.add("text", text, greedy(2))
            while not (engine.scheduler.running and engine.scheduler.running[0].decoding):
                engine.step()
            blocks = engine.tables.table(engine.scheduler.running[0].number, 0)[1]
            self.rows[key] = torch.cat([rows_in(engine, block) for block in blocks])[: len(text)]
            engine.abort("text")
        return self.rows[key]


def rows_in(engine, block):
    """[block size, numbers of all layers that see everything]"""
    size = engine.tables.block_size
    assert engine.tables.groups[0].window is None
    both = zip(engine.cache.rows, engine.cache.layers, strict=True)
    return torch.cat([rows.packed[block * size :][:size] for rows, layer in both if layer.group == 0], dim=1)


class Meddled(SparseViewDrafter):
    """Whose provisional tokens are at times others, so that full steps keep any number of them."""

    random, wrong = Random(0), 0.0

    def applies(self, sequence, computed=None):
        return True

    def propose(self, *asked):
        return {sequence: draft and self._meddled(draft) for sequence, draft in super().propose(*asked).items()}

    def _meddled(self, draft):
        if not draft.sparse_steps or draft.q_KV is not None or self.random.random() >= self.wrong:
            return draft
        tokens = list(draft.token_ids)
        tokens[self.random.randrange(len(tokens))] = self.random.randrange(256)
        return dataclasses.replace(draft, token_ids=tokens)


asked = st.tuples(
    st.integers(0, 1), st.integers(SHORTEST, LONGEST), st.integers(0, 12), st.integers(1, NEW),
    st.sampled_from([1, 1, 2, 3]), st.integers(0, 9), st.sampled_from([0.0, 0.0, 1.0]), st.none() | st.integers(1, 20),
)  # fmt: skip


@settings(max_examples=8)
@given(
    requests=st.lists(asked, min_size=2, max_size=5),
    right=st.sampled_from([0.0, 0.7, 1.0]),
    wrong=st.sampled_from([0.0, 0.5]),
    window=st.sampled_from([16, 200]),
    full_every=st.integers(1, 4),
    max_pending=st.integers(1, 12),
    block_size=st.sampled_from([4, 16]),
    max_step=st.integers(12, 80),
    spare=st.sampled_from([0, 0, 1, 4, 12]),
    caching=st.sampled_from([True, True, False]),
    prompt_lookup=st.booleans(),
    tree=st.sampled_from([0, 6]),
)
def test_any_schedule_gives_the_tokens_of_plain_decoding(
    loaded, requests, right, wrong, window, full_every, max_pending, block_size, max_step, spare, caching,
    prompt_lookup, tree,
):  # fmt: skip
    """Chunks, preemption, shared prefixes, continuations, sampled requests beside greedy ones, aborts, any number of
    rejected provisional tokens, trees, and prompt lookup. Sparse and latent layers compute prompts in another form than
    answers, so a prompt that goes on where an answer does may get other rows from the prefix cache."""
    engine, plain = loaded
    sparse = any(layer.attention.sparse is not None for layer in engine.model.layers)
    one_form = not sparse and all(
        isinstance(layer.attention, PagedGroupedQueryAttention) for layer in engine.model.layers
    )
    exact = one_form or not caching
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
    options = {
        **NARROW,
        "prompt_lookup": prompt_lookup,
        "specpv_window": window,
        "specpv_full_every": full_every,
        "specpv_max_pending": max_pending,
        "speculative_tree_tokens": tree,
    }
    partial = partly(engine, Branching([p + plain.continuation(p) for p in prompts], right), **options).sparse_view
    partial.__class__, partial.random, partial.wrong = Meddled, Random(0), wrong
    got, gone, step = {}, set(), 0
    while step <= 15 or engine.has_work:
        for number, (*_, most, n, arrives, temperature, _) in enumerate(requests):
            if arrives == step:
                engine.add(str(number), prompts[number], greedy(most, n=n, temperature=temperature, seed=number))
        for number, request in enumerate(requests):
            if request[-1] is not None and request[-3] + request[-1] == step and str(number) in engine._requests:
                engine.abort(str(number))
                gone.add(number)
        for output in engine.step():
            for completion in output.outputs:
                got.setdefault((int(output.request_id), completion.index), []).extend(completion.token_ids)
        step += 1
        assert step < 1000
        texts = [prompts[number] + made for (number, _), made in got.items()] + prompts
        found = known(engine, texts)
    for number, (*_, most, n, _, temperature, _) in enumerate(requests):
        for index in range(n):
            made = got.get((number, index), [])
            assert len(made) == most or number in gone
            if exact and not temperature:
                assert made == plain.continuation(prompts[number])[: len(made)]
    # And its rows are those that a step makes which reads everything.
    for block, text, at in found if one_form else []:
        assert torch.equal(rows_in(engine, block), plain.rows_of(text)[at * block_size :][:block_size])
    idle(engine)


def known(engine, texts):
    """Where whatever may be found as a prefix of the group that sees everything stands in these texts: (block, text,
    number of the block in it). All of it was given out already, or stood in a prompt."""
    size = engine.tables.block_size
    places = {digest: (text, at) for text in texts for at, digest in enumerate(block_digests(text, size))}
    for pool in engine.tables._pools:
        assert set(pool._block_of) <= set(places)
    return [(block, *places[digest]) for digest, block in engine.tables._pools[0]._block_of.items()]
