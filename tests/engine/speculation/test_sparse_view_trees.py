"""Trees under sparse views: a text that runs alone has its provisional tokens from trees, a path of each."""

import dataclasses
from collections import Counter

import pytest

from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.engine.speculation import sparse_view
from support.drafters import Branching
from support.eagle3_heads import saved
from support.engine_driver import Oracle, greedy, idle, random_prompts, renew, watched
from support.speculating import CASES, check_identities, chi_square, deviations, outcomes, partly, tokens

NEW, TREE = 24, {"speculative_tree_tokens": 8, "specpv_dtype": "model"}
KINDS = [case for case in CASES if case[0] != "mistral"]


@pytest.fixture(params=[*KINDS, ("llama", "latent_rope"), ("llama", "coded")], ids=str)
def model(request, tiny_models, converted):
    family, layout = request.param
    if layout == "coded":
        return converted(family, "latent", bits=6)
    return converted(family, layout, budget=0.75, layers="all") if layout else tiny_models[family]


def grown(llm, prompts, **more):
    """Each text alone, with what follows it."""
    return [prompt + tokens(llm.generate([prompt], greedy(NEW, **more))[0])[0] for prompt in prompts]


@pytest.mark.parametrize("window", [32, 400])
def test_tokens_are_those_of_plain_decoding(window, model):
    """Where a view holds the whole text it agrees to the right path of a tree and no other, so that all is kept: each
    token sees its own path, and later ones find its rows where they belong."""
    llm = watched(model, dtype="bfloat16", cache_bytes=64 << 20)
    prompts = random_prompts(300, 250)
    texts = grown(llm, prompts, speculate=False)
    speculation = partly(llm.engine, Branching(texts, 0.8), 3, specpv_window=window, **TREE)
    # Of short texts too.
    speculation.sparse_view.applies = lambda sequence, computed=None: True
    trees = watching(llm.engine)
    assert grown(llm, prompts) == texts
    stats = speculation.stats
    check_identities(stats)
    assert stats.sparse_steps >= len(trees) > 4
    if window == 400:
        assert stats.provisional == stats.confirmed > NEW
        # Paths that are not the first tokens of their tree have been moved.
        assert any(path != list(range(len(path))) for path in trees)
    idle(llm.engine)


def watching(engine):
    """The rows that stay of each tree under a sparse view."""
    paths, move = [], engine.cache.move

    def moving(views, kept):
        paths.append(list(kept))
        move(views, kept)

    engine.speculation.sparse_view.cache = type("Cache", (), {"move": staticmethod(moving)})
    return paths


@pytest.mark.parametrize("kind", ["plain", "sparse"])
def test_provisional_tokens_do_not_depend_on_the_draft(kind, tiny_models, sparse, monkeypatch):
    """From one view the target goes on in one way, whether chains or trees are judged, right ones or wrong."""
    monkeypatch.setattr(sparse_view, "FIRST_PROVISIONAL", 16)
    llm = watched(sparse("llama", "gqa") if kind == "sparse" else tiny_models["llama"], dtype="bfloat16",
                  cache_bytes=64 << 20)  # fmt: skip
    (prompt,) = random_prompts(300)
    (text,), pending, firsts = grown(llm, [prompt], speculate=False), [], []
    options = {"specpv_full_every": 16, "specpv_max_pending": 16, **TREE}

    def proposing(self, *asked, propose=sparse_view.SparseViewDrafter.propose):
        made = propose(self, *asked)
        pending.extend(draft.token_ids for draft in made.values())
        return made

    monkeypatch.setattr(sparse_view.SparseViewDrafter, "propose", proposing)
    for right, tree in ((1.0, 0), (0.0, 0), (0.9, 8)):
        speculation = partly(llm.engine, Branching([text], right), 3, **options | {"speculative_tree_tokens": tree})
        if tree:
            # Trees that hold what the view goes on with.
            speculation.drafter.texts = [text[: len(prompt) + 1] + firsts[0]]
        trees = watching(llm.engine)
        before = len(pending)
        grown(llm, [prompt])
        assert bool(trees) == bool(tree)
        firsts.append(pending[before])
    assert all(len(first) > 8 for first in firsts)
    for first in firsts:
        assert all(a == b for a, b in zip(first, firsts[0], strict=False))
    assert any(len(path) > 2 for path in trees)
    idle(llm.engine)


def test_batched_sequences_get_chains(tiny_models):
    llm = watched(tiny_models["llama"], dtype="bfloat16", cache_bytes=64 << 20)
    prompts = random_prompts(300, 250)
    texts = grown(llm, prompts, speculate=False)
    speculation = partly(llm.engine, Branching(texts, 0.8), 3, **TREE)
    trees = watching(llm.engine)
    outputs = llm.generate(prompts, greedy(NEW))
    assert [p + tokens(output)[0] for p, output in zip(prompts, outputs, strict=True)] == texts
    assert speculation.stats.sparse_steps > 2 and not trees


def test_eagle_head_follows_the_accepted_path(tiny_models, tmp_path):
    """It observes the states of the path: its next trees are those of a head that has seen the text alone."""
    folder = saved(tmp_path / "head")
    llm = watched(tiny_models["llama"], dtype="bfloat16", cache_bytes=64 << 20, speculative=str(folder))
    engine, (prompt,) = llm.engine, random_prompts(300)
    texts = grown(llm, [prompt], speculate=False)
    drafter = engine.speculation.drafter
    # Trees that hold the right tokens, so that paths of some length are agreed to.
    known = Branching(texts, 0.8)
    propose, own = drafter.propose_tree, {}

    def proposing(sequence, count, depth):
        own[len(sequence.token_ids)] = propose(sequence, 6, 3)
        return known.propose_tree(sequence, count, depth)

    drafter.propose_tree = proposing
    speculation = partly(engine, drafter, 3, specpv_window=400, **TREE)
    speculation.sparse_view.applies = lambda sequence, computed=None: True
    assert grown(llm, [prompt]) == texts
    assert speculation.stats.provisional == speculation.stats.confirmed > NEW / 2
    ahead, own = own, {}
    # Without sparse-view steps.
    engine.config = dataclasses.replace(engine.config, specpv="off")
    engine.speculate(drafter)
    assert grown(llm, [prompt]) == texts
    both = ahead.keys() & own.keys()
    assert len(both) > 2
    for length in both:
        assert ahead[length].token_ids == own[length].token_ids and ahead[length].parents == own[length].parents
    idle(engine)


def test_sampled_tokens_follow_the_targets_distribution(tiny_models):
    """400 draws of five tokens of a vocabulary of two, each alone."""
    directory, vocabulary, (prompt,) = tiny_models["llama"], [20, 21], random_prompts(80)
    exact = outcomes(Oracle(directory), prompt, 5, vocabulary, 2.0)
    llm = watched(directory, cache_bytes=16 << 20)
    renew(llm.engine, 100, 100, block_size=4, max_step=2048)
    texts = [[*prompt, *tail] for tail in exact]
    options = {"specpv_sink": 1, "specpv_retrieval": 0, "specpv_window": 16, "specpv_full_every": 2}
    speculation = partly(llm.engine, Branching(texts, 0.8), 2, specpv_max_pending=3, **options, **TREE)
    trees = watching(llm.engine)
    how = SamplingParams(temperature=2.0, max_tokens=5, ignore_eos=True, logit_bias=dict.fromkeys(vocabulary, 100.0))
    outputs = (llm.generate([prompt], dataclasses.replace(how, seed=seed))[0] for seed in range(400))
    counts = Counter(tuple(output.outputs[0].token_ids) for output in outputs)
    assert len(trees) > 300 and any(len(path) > 1 for path in trees)
    assert 0.2 < speculation.stats.confirmed / speculation.stats.provisional < 1.0
    assert deviations(*chi_square(counts, exact)) < 3.5
