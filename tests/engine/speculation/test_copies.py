"""Copied drafts: what followed the newest tokens before, ahead of what a drafter proposes; tokens stay the same."""

import dataclasses
import itertools

import pytest

from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.engine.speculation.copies import Copies
from mlaforge.engine.speculation.drafter import LONGEST_MATCH, PromptLookupDrafter
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

    judged = None

    def __init__(self, token_ids):
        self.token_ids = token_ids


def test_only_as_many_newest_tokens_as_are_looked_for_are_sure():
    run = list(range(10, 10 + LONGEST_MATCH))
    copies = Copies(8, PromptLookupDrafter())
    assert copies.propose(Text([*run, 1, 2, 3, 4, *run]), 3, 0.0).token_ids == [1, 2, 3]
    assert copies.propose(Text([*run[1:], 1, 2, 3, 4, 5, *run[1:]]), 3, 0.0) is None
    assert copies.propose(Text([*run, 1, 2, 3]), 3, 0.0) is None and copies.propose(Text([*run, *run]), 0, 0.0) is None


def test_a_copy_ends_where_it_no_longer_pays():
    """By what became of earlier ones: places that were refused so far are not copied again."""
    copies, text = Copies(8, PromptLookupDrafter()), Text([*range(20), *range(4)])
    assert copies.propose(text, 8, 0.0).copied == 8
    lengths = []
    for accepted in (8, 2):
        for _ in range(60):
            copies.acceptance.record(8, accepted)
        lengths.append(copies.propose(text, 8, 0.3).copied)
    assert lengths == [8, 2] and copies.propose(text, 8, 0.999) is None


@pytest.fixture(scope="module")
def llm(tiny_models):
    return watched(tiny_models["llama"], dtype="bfloat16", cache_bytes=64 << 20, max_num_seqs=8)


@pytest.mark.parametrize("way", ["chain", "lossless", "lossy"])
def test_copies_come_first_and_tokens_stay(way, llm):
    """Of texts of four tokens, where much was said before; under partial views copies stand behind what is pending,
    and are judged by a full step, in the lossy form too."""
    prompts = [[20 + token % 4 for token in prompt] for prompt in random_prompts(150, 140, 160)]
    how = greedy(30, logit_bias=dict.fromkeys(range(20, 24), 100.0), repetition_penalty=1.1, frequency_penalty=0.5)
    wanted = [tokens(output) for output in llm.generate(prompts, dataclasses.replace(how, speculate=False))]
    knowing = Knowing([prompt + own[0] for prompt, own in zip(prompts, wanted, strict=True)], 0.7)
    if way == "chain":
        speculate(llm.engine, knowing, 4, copying=True)
    else:
        partly(llm.engine, knowing, 4, copying=True, specpv=way)
    speculation, behind = llm.engine.speculation, []
    propose = speculation.propose

    def watching(decision, chunks):
        proposal = propose(decision, chunks)
        behind.extend(d for d in proposal.drafts.values() if d.copied and d.partial_steps)
        # What an earlier step's partial ones have read is not read again.
        assert (proposal.read.weights > 0) == any(d.partial_steps for d in proposal.drafts.values())
        return proposal

    speculation.propose = watching
    got = [tokens(output) for output in llm.generate(prompts, how)]
    assert way == "lossy" or got == wanted
    stats = speculation.stats
    assert 0 < stats.copied < stats.drafted and stats.copied == stats.block()["copied_tokens"]
    assert bool(behind) == (way == "lossless") and all(len(d.token_ids) > d.copied <= 4 for d in behind)
    assert all(not d.final for d in behind) and stats.kept <= stats.pending <= stats.drafted
    check_identities(stats)
    idle(llm.engine)


@pytest.mark.parametrize("name", HOW)
def test_whatever_is_asked_for_is_heeded(name, llm):
    """Copies are not drawn: seeded tokens are those of plain decoding."""
    if name in ("json", "regex"):
        pytest.importorskip("llguidance")
    prompts = [prompt * 3 for prompt in random_prompts(30, 20)]
    params = SamplingParams(**{"temperature": 1.0, "seed": 7, "max_tokens": 40, "logprobs": 1, **HOW[name]})
    llm.engine.speculation = None
    wanted = [output.outputs for output in llm.generate(prompts, params)]
    speculate(llm.engine, PromptLookupDrafter(), 5, adaptive=True, copying=True)
    assert [output.outputs for output in llm.generate(prompts, params)] == wanted
    idle(llm.engine)


@pytest.mark.parametrize("right", [True, False])
def test_the_distribution_is_the_targets(right, tiny_models):
    """Draws under partial views with copies behind them, against their exact probabilities; a wrong copy's q shows."""
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
    partial = partly(llm.engine, Drawing(vocabulary, 260), 2, copying=True, specpv_dtype="model", **narrow).partial
    propose, behind = partial.propose, []

    def watching(*asked):
        drafts = propose(*asked)
        for draft in drafts.values():
            if draft.copied and draft.q_KV is not None:
                behind.append(draft.q_KV[-draft.copied :].amax(-1))
                # As if a copy had been a draw that might have been another.
                draft.q_KV[-draft.copied :] *= 1.0 if right else 0.5
        return drafts

    partial.propose = watching
    counts = drawn(llm, prompt, vocabulary, 6)
    assert len(behind) > 100 and all((own == 1).all() for own in behind)
    far = deviations(*chi_square(counts, exact))
    assert far < 3.5 if right else far > 5


def test_a_head_copies_by_default_and_a_number_that_was_asked_for_bounds_it(tiny_models, tmp_path):
    head = str(saved(tmp_path / "head"))
    for options, copied in (
        ({}, 8), ({"num_speculative_tokens": 2}, 2), ({"adaptive_speculation": False}, None),
        ({"speculative": "ngram"}, 8),
    ):  # fmt: skip
        engine = watched(tiny_models["llama"], cache_bytes=4 << 20, **{"speculative": head, **options}).engine
        copies, controller = engine.speculation.copies, engine.speculation.controller
        assert (copies and copies.most) == copied and controller.copied == (copied or 0)
        assert controller.most == options.get("num_speculative_tokens", 3)
    with pytest.raises(UserError, match="num_speculative_tokens"):
        watched(tiny_models["llama"], speculative="ngram", num_speculative_tokens=9)
