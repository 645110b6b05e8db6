"""Speculation changes how fast tokens come, never which: against transformers, against plain decoding, and in
distribution. Every engine here is watched (engine_driver.py)."""

import dataclasses
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.engine.speculation.drafter import Draft
from mlaforge.engine.speculation.lookup import MAX_NGRAM, MIN_NGRAM, PromptLookupDrafter
from mlaforge.engine.speculation.policy import DraftPolicy
from mlaforge.runtime import UserError
from support.drafters import Drawing, Knowing
from support.engine_driver import Oracle, greedy, idle, random_prompts, renew, watched
from support.speculating import CASES, HOW, check_identities, chi_square, deviations, outcomes, speculate, tokens

BASES = random_prompts(40, 40, 40, seed=11)
LONGEST = 40 + 1 + 12
# A text in which prompt lookup finds something.
LOOP = random_prompts(7, seed=2)[0] * 4


@pytest.fixture(scope="module")
def llama(tiny_models):
    return tiny_models["llama"]


@pytest.fixture(scope="module")
def plain(llama):
    return watched(llama)


@pytest.fixture(scope="module")
def fast(llama):
    """Its drafter is each test's own."""
    return watched(llama, cache_bytes=8 << 20)


@pytest.fixture(scope="module", params=CASES, ids=str)
def loaded(request, tiny_models, converted):
    family, layout = request.param
    directory = converted(family, layout, budget=0.75, layers="all") if layout else tiny_models[family]
    return watched(directory).engine, Oracle(directory)


# Greedy


asked = st.tuples(st.integers(0, 2), st.integers(1, 40), st.none() | st.integers(0, 3), st.integers(1, 12),
                  st.integers(1, 2), st.integers(0, 15), st.booleans())  # fmt: skip


@settings(max_examples=8)
@given(
    requests=st.lists(asked, min_size=1, max_size=5),
    count=st.integers(1, 8),
    right=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    block_size=st.sampled_from([1, 3, 4, 8]),
    max_step=st.integers(4, 40),
    spare=st.integers(0, 8),
    caching=st.booleans(),
)
def test_any_schedule_with_any_drafts_gives_the_same_tokens(
    loaded, requests, count, right, block_size, max_step, spare, caching
):
    """Windows, latents, chunks, preemption, prefixes, continuations, requests that are not drafted for."""
    engine, oracle = loaded
    renew(engine, spare, LONGEST, block_size=block_size, caching=caching, max_step=max_step)
    prompts = [BASES[base][:length] + ([] if own is None else [own]) for base, length, own, *_ in requests]
    speculate(engine, Knowing([p + oracle.continuation(p, 12) for p in prompts], right), count)
    got: dict = {}
    step = 0
    while step <= 15 or engine.has_work:
        for number, (_, _, _, most, n, arrives, drafted) in enumerate(requests):
            if arrives == step:
                engine.add(str(number), prompts[number], greedy(most, n=n, speculate=drafted))
        for output in engine.step():
            for completion in output.outputs:
                got.setdefault((int(output.request_id), completion.index), []).extend(completion.token_ids)
        step += 1
        assert step < 1000
    for number, (_, _, _, most, n, _, _) in enumerate(requests):
        for index in range(n):
            oracle.check(prompts[number], got[number, index], most)
    idle(engine)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("count", range(1, 9))
def test_every_number_of_drafted_tokens_with_a_perfect_drafter(count, batch, loaded):
    """All is accepted, in as few steps as there can be."""
    engine, oracle = loaded
    renew(engine, 40, LONGEST, block_size=4, max_step=128)
    prompts = [base[:20] for base in (*BASES, BASES[0][5:])][:batch]
    speculate(engine, Knowing([p + oracle.continuation(p, 20) for p in prompts]), count)
    for number, prompt in enumerate(prompts):
        engine.add(str(number), prompt, greedy(20))
    got = {str(number): [] for number in range(batch)}
    while engine.has_work:
        for output in engine.step():
            got[output.request_id] += output.outputs[0].token_ids
    for number, prompt in enumerate(prompts):
        oracle.check(prompt, got[str(number)], 20)
    stats = engine.stats().speculation
    if all(got[str(number)] == oracle.continuation(p, 20) for number, p in enumerate(prompts)):
        assert stats.accepted == stats.drafted
        assert stats.engine_steps == -(-19 // (count + 1))
    check_identities(stats)
    idle(engine)


def test_prompt_lookup_finds_loops_and_is_lossless(llama, fast):
    oracle = Oracle(llama)
    renew(fast.engine, 200, 300, block_size=16, max_step=64)
    for count in (1, 3, 8):
        speculate(fast.engine, PromptLookupDrafter(), count)
        for output in fast.generate([LOOP, LOOP[3:], BASES[0], BASES[1][:1]], greedy(90)):
            oracle.check(output.prompt_token_ids, output.outputs[0].token_ids, 90)
        stats = fast.engine.stats().speculation
        assert stats.drafted > 0
        check_identities(stats)
    idle(fast.engine)


class Text:
    """What of a sequence prompt lookup reads."""

    def __init__(self, token_ids, original=None):
        self.token_ids, self.original = token_ids, original


def looked_up(token_ids, count):
    """What prompt lookup means, by search."""
    for length in range(MAX_NGRAM, MIN_NGRAM - 1, -1):
        for end in range(len(token_ids) - 1, length - 1, -1):
            if token_ids[end - length : end] == token_ids[-length:]:
                copied = token_ids[end:]
                while len(copied) < count:
                    copied = copied + copied
                return copied[:count]
    return None


@given(
    start=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    turns=st.lists(st.tuples(
        st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=4),
        st.lists(st.integers(0, 3), min_size=1, max_size=5), st.booleans(),
    ), max_size=6),
)  # fmt: skip
def test_prompt_lookup_equals_a_linear_search(start, turns):
    """Also of copies that run ahead of a text step by step by tokens that it then gets or does not, whether it is asked
    itself in between or not."""
    drafter, text = PromptLookupDrafter(), Text(list(start))

    def right(asked, count):
        (draft,) = drafter.propose([(asked, count)], 0.0)
        return (draft and draft.token_ids) == looked_up(asked.token_ids, count)

    for steps, kept, alone in turns:
        assert not alone or right(text, 3)
        copy = Text(list(text.token_ids), text)
        for agreed in steps:
            assert right(copy, 5)
            copy.token_ids += agreed
        text.token_ids += kept
    assert right(text, 4)


def test_prompt_lookup_prefers_the_latest_occurrence():
    drafter = PromptLookupDrafter()

    def proposed(token_ids, count):
        (draft,) = drafter.propose([(Text(token_ids), count)], 0.0)
        return draft and draft.token_ids

    assert proposed([1, 2, 3, 9, 1, 2], 3) == [3, 9, 1]
    # The later of two, the longer before the later.
    assert proposed([1, 2, 3, 1, 2, 4, 0, 1, 2], 2) == [4, 0]
    assert proposed([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], 2) == [3, 8]
    # Beyond the end it goes round.
    assert proposed([5, 6, 5, 6, 5], 6) == [6, 5, 6, 5, 6, 5]
    assert proposed([1, 2, 3, 4], 3) is None
    assert proposed([1], 3) is None
    growing = Text([1, 2, 3])
    assert drafter.propose([(growing, 2)], 0.0) == [None]
    growing.token_ids += [4, 2, 3]
    assert drafter.propose([(growing, 2)], 0.0)[0].token_ids == [4, 2]


def test_drafts_do_not_preempt_sequences(llama, fast):
    """Room for one sequence to its end, and for the other's tokens, but not for many drafted ones besides."""
    oracle = Oracle(llama)
    renew(fast.engine, 7, 28, block_size=4, max_step=64, caching=False)
    prompts = [BASES[0][:12], BASES[1][:12]]
    for drafter, preempted in ((Knowing([]), 0), (Knowing([p + oracle.continuation(p, 16) for p in prompts]), 0)):
        before = fast.engine.stats().preemptions
        speculate(fast.engine, drafter, 8)
        for output in fast.generate(prompts, greedy(16)):
            oracle.check(output.prompt_token_ids, output.outputs[0].token_ids, 16)
        assert fast.engine.stats().preemptions - before == preempted
    idle(fast.engine)


def test_drafts_do_not_delay_other_sequences(llama, fast):
    """Four sequences and six rows a step: each gets its row, two are left for drafts."""
    renew(fast.engine, 60, 60, block_size=4, max_step=6)
    oracle = Oracle(llama)
    prompts = [base[:6] for base in (*BASES, BASES[0][9:])]
    speculate(fast.engine, Knowing([p + oracle.continuation(p, 12) for p in prompts]), 8)
    for number, prompt in enumerate(prompts):
        fast.engine.add(str(number), prompt, greedy(12))
    while any(not sequence.decoding for sequence in [*fast.engine.scheduler.running, *fast.engine.scheduler.waiting]):
        fast.engine.step()
    while len(fast.engine.scheduler.running) == 4:
        assert len(fast.engine.step()) == 4
    while fast.engine.has_work:
        fast.engine.step()


# Draws


@pytest.mark.parametrize("name", HOW)
@pytest.mark.parametrize("right", [0.5, 1.0])
def test_seeded_tokens_equal_plain_decoding(name, right, llama, plain, fast):
    """Token by token, text, end, and log probabilities, with drafts that nobody drew."""
    if name in ("json", "regex"):
        pytest.importorskip("llguidance")
    options = {"temperature": 1.0, "seed": 3, "max_tokens": 20, "ignore_eos": True, "logprobs": 2, "n": 2, **HOW[name]}
    params = SamplingParams(**options)
    prompts = [LOOP, BASES[1][:9]]
    wanted = plain.generate(prompts, params)
    renew(fast.engine, 200, 300, block_size=16, max_step=64, max_num_seqs=8)
    known = [o.prompt_token_ids + c.token_ids for o in wanted for c in o.outputs]
    for count in (1, 3, 8):
        speculate(fast.engine, Knowing(known, right, seed=count), count)
        for want, got in zip(wanted, fast.generate(prompts, params), strict=True):
            for a, b in zip(want.outputs, got.outputs, strict=True):
                assert (b.token_ids, b.text) == (a.token_ids, a.text)
                assert (b.finish_reason, b.stop_reason) == (a.finish_reason, a.stop_reason)
                for x, y in zip(a.logprobs, b.logprobs, strict=True):
                    assert (y.token_id, y.logprob) == (x.token_id, pytest.approx(x.logprob, abs=1e-4))
                    assert [p for _, p in y.top] == pytest.approx([p for _, p in x.top], abs=1e-4)
        stats = fast.engine.stats().speculation
        assert stats.accepted > 0
        check_identities(stats)
    idle(fast.engine)


def test_text_ends_within_an_accepted_draft(plain, fast):
    """At each place of a run: by stop id, stop string, length, and the end of the context."""
    (whole,) = plain.generate([LOOP], greedy(24))
    text = whole.outputs[0].token_ids
    renew(fast.engine, 200, 300, block_size=4, max_step=64)
    for at in range(1, 12):
        speculate(fast.engine, Knowing([LOOP + text]), 8)
        for params in (greedy(at), greedy(24, stop_token_ids=(text[at],)),
                       greedy(24, stop=(plain.tokenizer.decode(text[at - 1 : at + 1]),))):  # fmt: skip
            (want,), (got,) = plain.generate([LOOP], params), fast.generate([LOOP], params)
            assert dataclasses.replace(got.outputs[0]) == want.outputs[0]
            idle(fast.engine)


class Undrawn(Drawing):
    def _draft(self, count):
        return Draft(super()._draft(count).token_ids)


class Lying(Drawing):
    """Its q is not what it drew from."""

    def _draft(self, count):
        draft = super()._draft(count)
        return Draft(draft.token_ids, draft.q_KV.flip(0).roll(1, -1) + 0.2)


@pytest.mark.parametrize(("drafter", "right"), [(Undrawn, True), (Drawing, True), (Lying, False)])
def test_sampled_tokens_follow_the_targets_distribution(drafter, right, llama, fast):
    """600 draws of four tokens of a vocabulary of three against their exact probabilities; a wrong q shows."""
    vocabulary, prompt = [20, 21, 22], BASES[2][:9]
    exact = outcomes(Oracle(llama), prompt, 4, vocabulary, 2.0)
    renew(fast.engine, 2000, 40, block_size=4, max_step=2048, max_num_seqs=300)
    speculate(fast.engine, drafter(vocabulary, 260), 2)
    counts: dict = {}
    for seed in range(2):
        how = SamplingParams(
            n=300,
            temperature=2.0,
            max_tokens=4,
            ignore_eos=True,
            seed=seed,
            logit_bias=dict.fromkeys(vocabulary, 100.0),
        )
        for completion in fast.generate([prompt], how)[0].outputs:
            key = tuple(completion.token_ids)
            counts[key] = counts.get(key, 0) + 1
    stats = fast.engine.stats().speculation
    assert 0.2 < stats.accepted / stats.drafted < 0.9
    check_identities(stats)
    statistic, freedom = chi_square(counts, exact)
    assert freedom > 10
    far = deviations(statistic, freedom)
    assert far < 3.5 if right else far > 5


# What is drafted, and when


def test_request_can_disable_speculation(plain, fast):
    renew(fast.engine, 200, 300, block_size=16, max_step=64)
    speculate(fast.engine, PromptLookupDrafter())
    params = greedy(30, speculate=False)
    assert tokens(fast.generate([LOOP], params)[0]) == tokens(plain.generate([LOOP], params)[0])
    stats = fast.engine.stats().speculation
    assert (stats.steps, stats.drafted, stats.engine_steps) == (0, 0, 0)
    with pytest.raises(UserError, match="speculate"):
        SamplingParams(speculate=1)


def test_engine_options(llama, refused):
    engine = watched(llama, speculative="ngram", num_speculative_tokens=5).engine
    assert isinstance(engine.speculation.drafter, PromptLookupDrafter) and engine.speculation.controller.max_tokens == 5
    assert engine.speculation.controller.policy is not None
    assert watched(llama).engine.stats().speculation is None
    refused(("num_speculative_tokens = 9", "at most 8"), "generate", llama, "--num-speculative-tokens", 9)


# The length of drafts


@pytest.mark.parametrize("accepts", [0.0, 0.2, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("dear", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("active", [1, 4])
def test_the_draft_policy_is_never_slower_than_plain_decoding(accepts, dear, active):
    """In a simulation where a row more costs `dear` of a step, and each drafted token is accepted by chance."""
    torch.manual_seed(0)
    policy, generated, seconds, constant = DraftPolicy(4), 0, 0.0, {}
    for count in range(5):
        expected = sum(accepts**j for j in range(count + 1))
        constant[count] = expected / (1 + dear * (active * (1 + count) - 1))
    for step in range(3000):
        count = policy.choose(active)
        took = 1 + dear * (active * (1 + count) - 1)
        draws = [*torch.rand(count).lt(accepts).tolist(), False]
        accepted = draws.index(False)
        policy.acceptance.record(count, accepted)
        policy.record_time(active * (1 + count), took * float(1 + 0.1 * torch.rand(())))
        if step >= 100:
            generated, seconds = generated + 1 + accepted, seconds + took
    assert generated / seconds >= 0.95 * constant[0]
    # And not far from the best that a constant count would do.
    assert generated / seconds >= 0.85 * max(constant.values())


def test_slow_first_step_does_not_favour_drafts():
    """Plain decoding is measured twice, and again now and then."""
    policy, taken = DraftPolicy(3), []
    for step in range(300):
        taken.append(policy.choose(1))
        # A draft costs half of a step more and is never accepted.
        policy.acceptance.record(taken[-1], 0)
        policy.record_time(1 + taken[-1], 9.0 if step == 0 else 1.5 if taken[-1] else 1.0)
    assert taken[:2] == [0, 0] and taken[20:].count(0) > 270
    # Where plain decoding becomes fast long after drafts have paid, that is noticed.
    policy, taken = DraftPolicy(1), []
    for step in range(8000):
        taken.append(policy.choose(1))
        policy.acceptance.record(taken[-1], taken[-1])
        policy.record_time(1 + taken[-1], 1.1 if taken[-1] else 1.0 if step < 300 else 0.4)
    assert taken[100:300].count(1) > 190 and taken[-1000:].count(0) > 900


def test_policy_measures_anew_for_another_text_or_length():
    policy = DraftPolicy(3)

    def decode(steps, cached, alone, accepts, dear):
        taken = []
        for _ in range(steps):
            taken.append(policy.choose(1, cached, alone))
            policy.acceptance.record(taken[-1], taken[-1] if accepts else 0)
            policy.record_time(1 + taken[-1], (1 + dear * taken[-1]) * cached)
        return taken

    # Nothing of the first text is accepted, all of the second: it does not suffer for the first.
    assert decode(60, 1000, 1, False, 0.3)[30:].count(0) > 25
    assert decode(60, 1000, 2, True, 0.3)[10:].count(3) > 45
    # At another length a row costs another time: plain decoding first, and what was known of the shorter stays.
    assert decode(60, 9000, 3, True, 3.0)[:2] == [0, 0] and policy.choose(1, 9000, 3) == 0
    assert policy.step_seconds(1) == 9000 and policy.choose(1, 1000, 3) == 3 and policy.step_seconds(1) == 1000


def test_unlikely_drafts_are_not_verified():
    """In a simulation where it knows which of its tokens are likely: faster than any count that is always drafted, and
    hardly slower than plain decoding where all are unlikely."""
    draw = random.Random(0)

    def tokens_a_second(likely, policy, count=0):
        generated, seconds = 0, 0.0
        for step in range(4000):
            asked, least = count, 0.0
            if policy is not None:
                asked = policy.choose(1)
                least = policy.min_probability(1, asked) if asked else 0.0
            path, drafted, tried, accepted = 1.0, 0, 0, 0
            for _ in range(asked):
                tried, chance = tried + 1, draw.choice(likely)
                path *= chance
                if path < least:
                    break
                accepted += accepted == drafted and draw.random() < chance
                drafted += 1
            took = 1 + 0.08 * tried + 0.05 * drafted
            if policy is not None:
                policy.acceptance.record(asked, accepted)
                policy.record_time(1 + asked, took)
            if step >= 100:
                generated, seconds = generated + 1 + accepted, seconds + took
        return generated / seconds

    always = max(tokens_a_second([0.02, 0.1, 0.9], None, count) for count in range(5))
    assert tokens_a_second([0.02, 0.1, 0.9], DraftPolicy(4)) > always
    assert tokens_a_second([0.02, 0.1], DraftPolicy(4)) > 0.98
