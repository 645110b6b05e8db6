"""Drawn tokens under sparse views: the target's distribution, whatever a view leaves out, and greedy ones that heed
what their request asked for."""

import dataclasses
import re

import pytest

from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.engine.speculation.drafter import Draft
from mlaforge.engine.speculation.lookup import PromptLookupDrafter
from mlaforge.engine.speculation.sparse_view import SparseViewDrafter
from support.drafters import Drawing, Knowing
from support.eagle3_heads import saved
from support.engine_driver import Oracle, idle, random_prompts, renew, watched
from support.speculating import HOW, check_identities, chi_square, deviations, drawn, outcomes, partly, tokens

# Views that hold few tokens of short texts.
NARROW = {
    "specpv_sink": 1,
    "specpv_retrieval": 0,
    "specpv_window": 16,
    "specpv_full_every": 2,
    "specpv_max_pending": 3,
    "specpv_dtype": "model",
}


class Undrawn(Drawing):
    def _draft(self, count):
        return Draft(super()._draft(count).token_ids)


def lying(self, *asked):
    """As SparseViewDrafter.propose, with a q that is not what was drawn from."""
    drafts = SparseViewDrafter.propose(self, *asked)
    return {s: dataclasses.replace(d, q_KV=d.q_KV.flip(0).roll(1, -1) + 0.2) for s, d in drafts.items()}


@pytest.mark.parametrize(("drafter", "right"), [(Drawing, True), (Undrawn, True), (Drawing, False)])
def test_sampled_tokens_follow_the_targets_distribution(drafter, right, tiny_models):
    """600 draws of four tokens of a vocabulary of three against their exact probabilities; a wrong q shows."""
    directory, vocabulary, (prompt,) = tiny_models["llama"], [20, 21, 22], random_prompts(80)
    exact = outcomes(Oracle(directory), prompt, 4, vocabulary, 2.0)
    llm = watched(directory, cache_bytes=16 << 20)
    renew(llm.engine, 3000, 100, block_size=4, max_step=2048, max_num_seqs=300)
    partial = partly(llm.engine, drafter(vocabulary, 260), 2, **NARROW).sparse_view
    if not right:
        partial.propose = lying.__get__(partial)
    counts = drawn(llm, prompt, vocabulary, 4)
    stats = llm.engine.stats().speculation
    # The view leaves out enough to be wrong at times.
    assert stats.sparse_steps > 600 and 0.2 < stats.confirmed / stats.provisional < 0.97
    check_identities(stats)
    far = deviations(*chi_square(counts, exact))
    assert far < 3.5 if right else far > 5


@pytest.fixture(scope="module")
def llm(tiny_models):
    return watched(tiny_models["llama"], dtype="bfloat16", cache_bytes=64 << 20, max_num_seqs=8)


@pytest.mark.parametrize("name", HOW)
def test_sampling_parameters_apply(name, llm):
    """Greedy tokens are plain decoding's; of drawn ones each is among those that the request allows."""
    if name in ("json", "regex"):
        pytest.importorskip("llguidance")
    prompts = random_prompts(300, 250, 40)
    for temperature in (0.0, 1.0):
        options = {"temperature": temperature, "seed": 3, "max_tokens": 20, "ignore_eos": True, "logprobs": 1}
        params = SamplingParams(**{**options, **HOW[name]})
        plain = llm.generate(prompts, dataclasses.replace(params, speculate=False))
        stats = partly(llm.engine, Knowing([o.prompt_token_ids + o.outputs[0].token_ids for o in plain], 0.5)).stats
        made = llm.generate(prompts, params)
        assert stats.sparse_steps > 2
        check_identities(stats)
        if params.greedy:
            assert [tokens(output) for output in made] == [tokens(output) for output in plain]
        for (completion,) in (output.outputs for output in made):
            assert len(completion.logprobs) == len(completion.token_ids) >= params.min_tokens
            assert completion.finish_reason == "stop" or len(completion.token_ids) == params.max_tokens
            if params.regex and completion.finish_reason == "stop":
                assert re.fullmatch(params.regex, completion.text)
            if params.top_k:
                # All have been filtered out but one of 40; the token's own place among all is not told.
                assert all(each.logprob > -6 for each in completion.logprobs)
    idle(llm.engine)


@pytest.mark.parametrize("head", [False, True])
def test_seed_reproduces_tokens(head, tiny_models, tmp_path):
    """With nothing cached and everything, beside others and alone."""
    named = str(saved(tmp_path / "head")) if head else "ngram"
    llm = watched(tiny_models["llama"], dtype="bfloat16", cache_bytes=64 << 20, max_num_seqs=8, speculative=named)
    prompts = [prompt * 3 for prompt in random_prompts(80, 100)]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=30, ignore_eos=True, n=2)
    stats = partly(llm.engine, llm.engine.speculation.drafter).stats
    first = [tokens(output) for output in llm.generate(prompts, params)]
    assert 0 < stats.confirmed < stats.provisional and first[0][0] != first[0][1]
    assert [tokens(output) for output in llm.generate(prompts, params)] == first
    assert [tokens(llm.generate([prompt], params)[0]) for prompt in prompts] == first
    idle(llm.engine)


def test_each_random_number_is_used_once(llm):
    """What a request draws ahead of its text it does not draw again: with all that is pending refused, the tokens are
    those of other random numbers, not the same ones over and over."""
    (prompt,) = random_prompts(300)
    partial = partly(llm.engine, PromptLookupDrafter()).sparse_view
    llm.engine.add("text", prompt, SamplingParams(temperature=1.0, seed=5, max_tokens=20, ignore_eos=True))
    while not (llm.engine.scheduler.running and llm.engine.scheduler.running[0].decoding):
        llm.engine.step()
    (sequence,) = llm.engine.scheduler.running
    llm.engine.tables.reserve(sequence.number, len(sequence.token_ids) + 4)
    before = sequence.state.generator.get_state()
    (draft,) = partial.propose([(sequence, 4)], 0.0, lambda *_: None).values()
    assert draft.q_KV.shape == (len(draft.token_ids), llm.engine.vocab_size)
    assert (draft.q_KV[range(len(draft.token_ids)), draft.token_ids] > 0).all()
    assert not sequence.state.generator.get_state().equal(before) and sequence.state.generated == 1
    llm.engine.abort("text")
    idle(llm.engine)


def test_lossy_keeps_sampled_provisional_tokens(llm):
    """What a full step would have refused is counted, and kept; requests that sparse views cannot heed are drafted
    for plainly."""
    prompts = random_prompts(300, 250)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True, repetition_penalty=1.2)
    stats = partly(llm.engine, PromptLookupDrafter(), specpv="lossy", specpv_dtype="model").stats
    made = [tokens(output) for output in llm.generate(prompts, params)]
    assert 0 < stats.confirmed < stats.provisional == stats.accepted and [len(own[0]) for own in made] == [24, 24]
    assert [tokens(output) for output in llm.generate(prompts, params)] == made
    stats = partly(llm.engine, PromptLookupDrafter(), specpv="lossy").stats
    llm.generate(prompts, dataclasses.replace(params, logprobs=1))
    assert stats.sparse_steps == 0
    idle(llm.engine)
