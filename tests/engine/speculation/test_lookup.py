"""Prompt lookup: what followed the newest tokens before, alone and ahead of what another drafter proposes."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlaforge.engine.speculation.lookup import MAX_NGRAM, MIN_NGRAM, PromptLookupDrafter, _NgramIndex, proposals
from mlaforge.runtime import UserError
from support.drafters import Knowing
from support.eagle3_heads import saved
from support.engine_driver import greedy, idle, random_prompts, watched
from support.speculating import check_identities, partly, speculate, tokens


class Text:
    """What of a sequence prompt lookup reads."""

    def __init__(self, token_ids, original=None):
        self.token_ids, self.original = list(token_ids), original


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


def proposed(drafter, text, count):
    (draft,) = drafter.propose([(text, count)], 0.0)
    return draft and draft.token_ids


few = st.integers(0, 3)


@given(
    start=st.lists(few, min_size=1, max_size=30),
    turns=st.lists(st.tuples(
        st.lists(st.lists(few, min_size=1, max_size=4), max_size=4), st.lists(few, min_size=1, max_size=5),
        st.booleans(),
    ), max_size=6),
)  # fmt: skip
def test_equals_a_linear_search(start, turns):
    """Also of copies that run ahead of a text step by step by tokens that it then gets or does not, whether the text is
    looked up itself in between or not."""
    drafter, text = PromptLookupDrafter(), Text(start)
    for steps, accepted, alone in turns:
        assert not alone or proposed(drafter, text, 3) == looked_up(text.token_ids, 3)
        copy = Text(text.token_ids, text)
        for provisional in steps:
            assert proposed(drafter, copy, 5) == looked_up(copy.token_ids, 5)
            copy.token_ids += provisional
        text.token_ids += accepted
    assert proposed(drafter, text, 4) == looked_up(text.token_ids, 4)
    # A confident draft is the same after the longest match, and none after a shorter one.
    draft = drafter.propose_confident(text, 4)
    suffix, earlier = text.token_ids[-MAX_NGRAM:], range(len(text.token_ids) - MAX_NGRAM)
    if any(text.token_ids[at : at + MAX_NGRAM] == suffix for at in earlier):
        assert draft.copied and draft.token_ids == looked_up(text.token_ids, 4)
    else:
        assert draft is None
    assert drafter.propose_confident(text, 0) is None


def test_prefers_the_latest_occurrence_of_the_longest_match():
    for token_ids, draft in (
        ([1, 2, 3, 9, 1, 2], [3, 9, 1]),
        ([1, 2, 3, 1, 2, 4, 0, 1, 2], [4, 0, 1]),
        ([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], [3, 8, 1]),
        # Beyond the end it repeats itself.
        ([5, 6, 5, 6, 5], [6, 5, 6]),
        ([1, 2, 3, 4], None),
    ):
        assert proposed(PromptLookupDrafter(), Text(token_ids), 3) == draft


def test_goes_before_another_drafter_where_it_is_confident():
    class Asked(Knowing):
        def propose(self, budgets, min_probability):
            asked.extend((text, count, min_probability) for text, count in budgets)
            return super().propose(budgets, min_probability)

    run, asked = [10, 11, 12, 13], []
    repeated, short, unknown = Text([*run, 1, 2, 3, 4, *run]), Text([11, 12, 13, 1, 2, 11, 12, 13]), Text([5])
    drafter = Asked([[*short.token_ids, 7, 8, 9]])
    rooms = [(repeated, 3, 8), (short, 2, 8), (unknown, 5, 1), (Text([6]), 4, 0)]
    drafts = proposals(drafter, PromptLookupDrafter(), rooms, 8, 0.25)
    assert {text: (draft.token_ids, draft.copied) for text, draft in drafts.items()} == {
        repeated: ([1, 2, 3], True), short: ([7, 8], False),
    }  # fmt: skip
    assert asked == [(short, 2, 0.25), (unknown, 1, 0.25)]
    # As long as its acceptance pays, and not at all without a lookup.
    assert proposals(drafter, PromptLookupDrafter(), rooms[:1], 2, 0.0)[repeated].token_ids == [1, 2]
    for lookup, longest in ((PromptLookupDrafter(), 0), (None, 8)):
        assert proposals(drafter, lookup, rooms[:1], longest, 0.0) == {}


@pytest.fixture(scope="module")
def llm(tiny_models):
    return watched(tiny_models["llama"], dtype="bfloat16", cache_bytes=64 << 20, max_num_seqs=8)


@pytest.mark.parametrize("sparse_view", [False, True])
def test_copies_and_drafts_are_counted_apart(sparse_view, llm):
    """In texts of four tokens much occurred before. Under a sparse view copies are provisional like any draft."""
    prompts = [[20 + token % 4 for token in prompt] for prompt in random_prompts(150, 140, 160)]
    how = greedy(30, logit_bias=dict.fromkeys(range(20, 24), 100.0), repetition_penalty=1.1, frequency_penalty=0.5)
    want = [tokens(output) for output in llm.generate(prompts, dataclasses.replace(how, speculate=False))]
    knowing = Knowing([prompt + own[0] for prompt, own in zip(prompts, want, strict=True)], 0.7)
    if sparse_view:
        partly(llm.engine, knowing, 4, prompt_lookup=True, window=8)
    else:
        speculate(llm.engine, knowing, 4, prompt_lookup=True)
    assert [tokens(output) for output in llm.generate(prompts, how)] == want
    stats = llm.engine.stats().speculation
    assert (stats.sparse_steps > 0) == sparse_view
    if not sparse_view:
        assert 0 < stats.lookup_tokens < stats.drafted and stats.block()["copied_tokens"] == stats.lookup_tokens
    check_identities(stats)
    idle(llm.engine)


def test_indexes_a_token_once(llm, monkeypatch):
    """However many full and sparse-view steps run: the index of provisional tokens extends the sequence's own."""
    seen, extend = {True: 0, False: 0}, _NgramIndex.extend

    def counted(self, token_ids):
        seen[self._prefix is not None] += len(token_ids) - self._length
        extend(self, token_ids)

    monkeypatch.setattr(_NgramIndex, "extend", counted)
    prompts = random_prompts(300, 380)
    stats = partly(llm.engine, PromptLookupDrafter()).stats
    outputs = llm.generate(prompts, greedy(24))
    assert stats.sparse_steps >= stats.full_steps >= 8
    assert 0 < seen[False] <= sum(len(prompt) + len(tokens(o)[0]) for prompt, o in zip(prompts, outputs, strict=True))
    assert 0 < seen[True] <= stats.provisional


def test_options(tiny_models, tmp_path, refused):
    """Lookup goes before a head where speculation is adaptive."""
    head, llama = str(saved(tmp_path / "head")), tiny_models["llama"]
    two, fixed = {"num_speculative_tokens": 2}, {"adaptive_speculation": False}
    for options, copied in (({}, 8), (two, 2), (fixed, 0), ({"speculative": "ngram"}, 8)):
        engine = watched(llama, cache_bytes=4 << 20, **{"speculative": head, **options}).engine
        policy = engine.speculation.policy
        assert (policy.lookup is not None, policy.lookup_tokens) == (copied > 0, copied)
        assert policy.max_tokens == options.get("num_speculative_tokens", 3)
        assert policy.adaptive == options.get("adaptive_speculation", True)
    assert engine.speculation.drafter is policy.lookup and isinstance(policy.lookup, PromptLookupDrafter)
    assert watched(llama).engine.stats().speculation is None
    refused(("num_speculative_tokens = 9", "at most 8"), "generate", llama, "--num-speculative-tokens", 9)
    with pytest.raises(UserError, match="num_speculative_tokens"):
        watched(llama, speculative="ngram", num_speculative_tokens=9)
