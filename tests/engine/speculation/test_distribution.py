"""Sampled tokens follow the target's distribution, whatever drafted them; a wrong q shows."""

import dataclasses
import functools
import itertools

import pytest

from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.engine.speculation.drafter import Draft
from mlaforge.engine.speculation.lookup import PromptLookupDrafter
from support import block_heads, eagle3_heads
from support.drafters import Drawing
from support.eagle3_heads import recorded
from support.engine_driver import Oracle, idle, random_prompts, renew, watched
from support.speculating import NARROW, check_identities, deviations, drawn, outcomes, partly, speculate, tokens


class Chosen(Drawing):
    """Its tokens count as chosen deterministically."""

    def _draft(self, count):
        return Draft(super()._draft(count).token_ids)


def lie(drafter):
    """Give its drafts a q from which they were not sampled."""
    propose = drafter.propose

    def lying(*inputs):
        drafts = propose(*inputs)
        return [draft and dataclasses.replace(draft, q_KV=draft.q_KV.flip(0).roll(1, -1) + 0.2) for draft in drafts]

    drafter.propose = lying


# What prompt lookup copies: whichever of two tokens is sampled twice, each pair occurred before.
RUNS = [[6, 9, *pair, 21, 20, 20, 21, before] for before, pair in enumerate(itertools.product((20, 21), repeat=2))]
# Kind of head; probability below which a path is not drafted; lengths of drafts where there is room for two.
HEADS = {
    "head": (eagle3_heads.saved, 0.0, {2}),
    "likely": (eagle3_heads.saved, 0.5, {0, 1, 2}),
    "likely, cut afterwards": (eagle3_heads.saved, 0.5, {0, 1, 2}),
    "parallel": (functools.partial(eagle3_heads.saved, mask_token_id=5), 0.0, {2}),
    "block, Markov": (functools.partial(block_heads.saved, markov_rank=8), 0.0, {2}),
    "likely block": (block_heads.saved, 0.7, {0, 1}),
}


@pytest.mark.parametrize(
    ("mode", "kind"),
    [*(("chain", kind) for kind in ("sampled", "chosen", "lying", *HEADS)),
     *(("sparse view", kind) for kind in ("sampled", "chosen", "lying", "copied"))],
)  # fmt: skip
def test_sampled_tokens_follow_the_targets_distribution(mode, kind, tiny_models, tmp_path):
    """600 samples of a few tokens of a small vocabulary against their exact probabilities. A head's q covers the few
    tokens of its vocabulary, and it drafts all or likely ones."""
    directory, copied = tiny_models["llama"], kind == "copied"
    vocabulary, length = ([20, 21], 6) if copied else ([20, 21, 22], 4)
    prompt = random_prompts(80)[0] if mode == "sparse view" else random_prompts(40, 40, seed=4)[1][:9]
    prompt += [*itertools.chain(*RUNS), 6, 9] * copied
    exact = outcomes(Oracle(directory), prompt, length, vocabulary, 2.0)
    saved, least, lengths = HEADS.get(kind, (None, 0.0, set()))
    head = {"speculative": str(saved(tmp_path / "head", tokens=[7, *vocabulary]))} if saved else {}
    llm = watched(directory, cache_bytes=16 << 20, **head)
    renew(llm.engine, 4000, 140, block_size=4, max_step=4096, max_num_seqs=300)
    drafter = llm.engine.speculation.drafter if head else (Chosen if kind == "chosen" else Drawing)(vocabulary, 260)
    if mode == "chain":
        speculate(llm.engine, drafter, 2)
    else:
        drafter = partly(llm.engine, drafter, 2, copied, dtype="model", base=NARROW).sparse_view
    drafter.stops_early = kind != "likely, cut afterwards"
    seen = recorded(drafter, least) if head else []
    if kind == "lying":
        lie(drafter)
    counts = drawn(llm, prompt, vocabulary, length)
    stats = llm.engine.stats().speculation
    assert 0.1 < stats.accepted / stats.drafted < 0.97
    # The view leaves out enough to be wrong at times.
    assert (stats.sparse_steps > 600) == (mode == "sparse view")
    assert {len(draft.token_ids) for _, count, draft in seen if draft and count == 2} == lengths
    check_identities(stats)
    assert deviations(counts, exact) > 5 if kind == "lying" else deviations(counts, exact) < 3.5


@pytest.mark.parametrize("head", [None, eagle3_heads, block_heads], ids=["ngram", "eagle3", "block"])
def test_seed_reproduces_tokens_under_sparse_views(head, tiny_models, tmp_path):
    """With nothing cached and everything, beside others and alone."""
    drafter = str(head.saved(tmp_path / "head")) if head else "ngram"
    llm = watched(tiny_models["llama"], dtype="bfloat16", cache_bytes=64 << 20, max_num_seqs=8, speculative=drafter)
    prompts = [prompt * 3 for prompt in random_prompts(80, 100)]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=30, ignore_eos=True, n=2)
    stats = partly(llm.engine, llm.engine.speculation.drafter).stats
    first = [tokens(output) for output in llm.generate(prompts, params)]
    assert 0 < stats.confirmed < stats.provisional and first[0][0] != first[0][1]
    assert [tokens(output) for output in llm.generate(prompts, params)] == first
    assert [tokens(llm.generate([prompt], params)[0]) for prompt in prompts] == first
    idle(llm.engine)


def test_each_random_number_is_used_once(tiny_models):
    """What a request samples ahead of its text it does not sample again: after a rejection its tokens are those of
    other random numbers, not the same ones over and over."""
    llm = watched(tiny_models["llama"], dtype="bfloat16", cache_bytes=64 << 20)
    engine, (prompt,) = llm.engine, random_prompts(300)
    view = partly(engine, PromptLookupDrafter()).sparse_view
    engine.add("text", prompt, SamplingParams(temperature=1.0, seed=5, max_tokens=20, ignore_eos=True))
    while not (engine.scheduler.running and engine.scheduler.running[0].decoding):
        engine.step()
    (sequence,) = engine.scheduler.running
    engine.tables.reserve(sequence.number, len(sequence.token_ids) + 4)
    before = sequence.state.generator.get_state()
    (draft,) = view.propose([(sequence, 4)], 0.0)
    assert draft.q_KV.shape == (len(draft.token_ids), engine.vocab_size)
    assert (draft.q_KV[range(len(draft.token_ids)), draft.token_ids] > 0).all()
    assert not sequence.state.generator.get_state().equal(before) and sequence.state.generated == 1
    engine.abort("text")
    idle(engine)
