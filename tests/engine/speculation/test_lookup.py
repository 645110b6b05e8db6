"""Copied drafts: what followed the newest tokens before, ahead of what a drafter proposes; tokens stay the same."""

import dataclasses
import itertools

import pytest

from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.engine.speculation.lookup import MAX_NGRAM, PromptLookupDrafter
from mlaforge.runtime import UserError
from support.drafters import Drawing, Knowing
from support.eagle3_heads import saved
from support.engine_driver import Oracle, greedy, idle, random_prompts, renew, watched
from support.speculating import (
    HOW,
    check_identities,
    chi_square,
    deviations,
    drawn,
    outcomes,
    partly,
    speculate,
    tokens,
)


class Text:
    """What of a sequence prompt lookup reads."""

    original = None

    def __init__(self, token_ids):
        self.token_ids = token_ids


def test_confident_drafts_need_the_longest_match():
    run = list(range(10, 10 + MAX_NGRAM))
    lookup = PromptLookupDrafter(8)
    assert lookup.propose_confident(Text([*run, 1, 2, 3, 4, *run]), 3, 0.0).token_ids == [1, 2, 3]
    assert lookup.propose_confident(Text([*run[1:], 1, 2, 3, 4, 5, *run[1:]]), 3, 0.0) is None
    assert (
        lookup.propose_confident(Text([*run, 1, 2, 3]), 3, 0.0) is None
        and lookup.propose_confident(Text([*run, *run]), 0, 0.0) is None
    )


def test_draft_ends_where_acceptance_is_too_low():
    """By what became of earlier ones: places that were refused so far are not copied again."""
    lookup, text = PromptLookupDrafter(8), Text([*range(20), *range(4)])
    assert lookup.propose_confident(text, 8, 0.0).lookup_tokens == 8
    lengths = []
    for accepted in (8, 2):
        for _ in range(60):
            lookup.acceptance.record(8, accepted)
        lengths.append(lookup.propose_confident(text, 8, 0.3).lookup_tokens)
    assert lengths == [8, 2] and lookup.propose_confident(text, 8, 0.999) is None


@pytest.fixture(scope="module")
def llm(tiny_models):
    return watched(tiny_models["llama"], dtype="bfloat16", cache_bytes=64 << 20, max_num_seqs=8)


@pytest.mark.parametrize("way", ["chain", "lossless", "lossy"])
def test_lookup_goes_first_and_tokens_do_not_change(way, llm):
    """Of texts of four tokens, where much was said before; under sparse views copies stand behind provisional tokens,
    and are judged by a full step, in the lossy form too."""
    prompts = [[20 + token % 4 for token in prompt] for prompt in random_prompts(150, 140, 160)]
    how = greedy(30, logit_bias=dict.fromkeys(range(20, 24), 100.0), repetition_penalty=1.1, frequency_penalty=0.5)
    wanted = [tokens(output) for output in llm.generate(prompts, dataclasses.replace(how, speculate=False))]
    knowing = Knowing([prompt + own[0] for prompt, own in zip(prompts, wanted, strict=True)], 0.7)
    if way == "chain":
        speculate(llm.engine, knowing, 4, prompt_lookup=True)
    else:
        partly(llm.engine, knowing, 4, prompt_lookup=True, specpv=way)
    speculation, behind = llm.engine.speculation, []
    propose = speculation.propose

    def watching(decision, chunks):
        proposal = propose(decision, chunks)
        behind.extend(d for d in proposal.drafts.values() if d.lookup_tokens and d.sparse_steps)
        # What an earlier step's sparse-view ones have read is not read again.
        assert (proposal.sparse_bytes.weights > 0) == any(d.sparse_steps for d in proposal.drafts.values())
        return proposal

    speculation.propose = watching
    got = [tokens(output) for output in llm.generate(prompts, how)]
    assert way == "lossy" or got == wanted
    stats = speculation.stats
    assert 0 < stats.lookup_tokens < stats.drafted and stats.lookup_tokens == stats.block()["copied_tokens"]
    assert bool(behind) == (way == "lossless") and all(len(d.token_ids) > d.lookup_tokens <= 4 for d in behind)
    assert all(not d.lossy for d in behind) and stats.confirmed <= stats.provisional <= stats.drafted
    check_identities(stats)
    idle(llm.engine)


@pytest.mark.parametrize("name", HOW)
def test_sampling_parameters_apply(name, llm):
    """Lookup drafts are not sampled: seeded tokens are those of plain decoding."""
    if name in ("json", "regex"):
        pytest.importorskip("llguidance")
    prompts = [prompt * 3 for prompt in random_prompts(30, 20)]
    params = SamplingParams(**{"temperature": 1.0, "seed": 7, "max_tokens": 40, "logprobs": 1, **HOW[name]})
    llm.engine.speculation = None
    wanted = [output.outputs for output in llm.generate(prompts, params)]
    speculate(llm.engine, PromptLookupDrafter(), 5, adaptive=True, prompt_lookup=True)
    assert [output.outputs for output in llm.generate(prompts, params)] == wanted
    idle(llm.engine)


@pytest.mark.parametrize("right", [True, False])
def test_sampled_tokens_follow_the_targets_distribution(right, tiny_models):
    """Draws under sparse views with copies behind them, against their exact probabilities; a wrong copy's q shows."""
    directory, vocabulary = tiny_models["llama"], [20, 21]
    # The first drawn token is new behind the three before it; the second then stood there, whichever it is.
    runs = [[6, 9, *pair, 21, 20, 20, 21, before] for before, pair in enumerate(itertools.product((20, 21), repeat=2))]
    prompt = [*random_prompts(60)[0], *itertools.chain(*runs), 6, 9]
    exact = outcomes(Oracle(directory), prompt, 6, vocabulary, 2.0)
    llm = watched(directory, cache_bytes=16 << 20)
    renew(llm.engine, 3000, 120, block_size=4, max_step=4096, max_num_seqs=300)
    narrow = {
        "specpv_sink": 1, "specpv_retrieval": 0, "specpv_window": 16, "specpv_full_every": 2, "specpv_max_pending": 3,
    }  # fmt: skip
    partial = partly(
        llm.engine, Drawing(vocabulary, 260), 2, prompt_lookup=True, specpv_dtype="model", **narrow
    ).sparse_view
    propose, behind = partial.propose, []

    def watching(*asked):
        drafts = propose(*asked)
        for draft in drafts.values():
            if draft.lookup_tokens and draft.q_KV is not None:
                behind.append(draft.q_KV[-draft.lookup_tokens :].amax(-1))
                # As if a copy had been a draw that might have been another.
                draft.q_KV[-draft.lookup_tokens :] *= 1.0 if right else 0.5
        return drafts

    partial.propose = watching
    counts = drawn(llm, prompt, vocabulary, 6)
    assert len(behind) > 100 and all((own == 1).all() for own in behind)
    far = deviations(*chi_square(counts, exact))
    assert far < 3.5 if right else far > 5


def test_lookup_is_on_with_a_head_and_limited_by_num_speculative_tokens(tiny_models, tmp_path):
    head = str(saved(tmp_path / "head"))
    for options, copied in (
        ({}, 8), ({"num_speculative_tokens": 2}, 2), ({"adaptive_speculation": False}, None),
        ({"speculative": "ngram"}, 8),
    ):  # fmt: skip
        engine = watched(tiny_models["llama"], cache_bytes=4 << 20, **{"speculative": head, **options}).engine
        lookup, controller = engine.speculation.lookup, engine.speculation.controller
        assert (lookup and lookup.max_tokens) == copied and controller.lookup_tokens == (copied or 0)
        assert controller.max_tokens == options.get("num_speculative_tokens", 3)
    with pytest.raises(UserError, match="num_speculative_tokens"):
        watched(tiny_models["llama"], speculative="ngram", num_speculative_tokens=9)
