"""Prompt lookup: what followed the newest tokens before, alone and ahead of what another drafter proposes."""

import dataclasses
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mlaforge.engine.speculation.drafter import Acceptance, Draft
from mlaforge.engine.speculation.lookup import MAX_NGRAM, MIN_NGRAM, PromptLookupDrafter, _NgramIndex, proposals
from support.drafters import Knowing
from support.engine_driver import greedy, idle, random_prompts, watched
from support.speculating import SMALL, check_identities, partly, speculate, tokens


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


@given(
    text=st.lists(few, min_size=1, max_size=30), head=st.lists(few, min_size=1, max_size=4), count=st.integers(1, 6),
    parallel_drafting=st.booleans(),
)  # fmt: skip
def test_replaces_what_one_pass_drafts_after_its_first_token(text, head, count, parallel_drafting):
    """By what followed the newest tokens, where they occurred before, also after the head's last token. Chains whose
    head knows its drafts stay."""
    sequence, drafter = Text(text), Knowing([text + head])
    drafter.parallel_drafting = parallel_drafting
    lookup = PromptLookupDrafter()
    drafts = proposals(drafter, lookup, [(sequence, count, count)], 0, 0.0)
    head = head[:count]
    chain = head[:1]
    while parallel_drafting and len(chain) < count:
        continuation = looked_up(text + chain, 1) or head[len(chain) : len(chain) + 1]
        if not continuation:
            break
        chain += continuation
    assert drafts[sequence].token_ids == (chain if parallel_drafting else head)


def test_leaves_sampled_drafts_and_trees_as_they_are():
    sequence, lookup = Text([1, 2, 3, 1]), PromptLookupDrafter()
    assert lookup.replace_after_first(sequence, Draft([2, 9]), 2).token_ids == [2, 3]
    for draft in (Draft([]), Draft([2, 9], torch.ones(2, 10) / 10), Draft([2, 9], parents=[-1, -1])):
        assert lookup.replace_after_first(sequence, draft, 2) is draft


@pytest.fixture(scope="module")
def llm(tiny_models):
    return watched(tiny_models["llama"], dtype="bfloat16", cache_bytes=64 << 20, max_num_seqs=8)


@pytest.mark.parametrize("sparse_view", [False, True])
def test_copies_and_drafts_are_counted_apart(sparse_view, llm, monkeypatch):
    """In texts of four tokens much occurred before. Under a sparse view copies are provisional like any draft."""
    prompts = [[20 + token % 4 for token in prompt] for prompt in random_prompts(150, 140, 160)]
    how = greedy(30, logit_bias=dict.fromkeys(range(20, 24), 100.0), repetition_penalty=1.1, frequency_penalty=0.5)
    want = [tokens(output) for output in llm.generate(prompts, dataclasses.replace(how, speculate=False))]
    knowing = Knowing([prompt + own[0] for prompt, own in zip(prompts, want, strict=True)], 0.7)
    view = dataclasses.replace(SMALL, window=8) if sparse_view else None
    recorded, policy = Counter(), speculate(llm.engine, knowing, 4, prompt_lookup=True, view=view).policy
    monkeypatch.setattr(Acceptance, "record", lambda self, budget, _: recorded.update({self: budget}))
    assert [tokens(output) for output in llm.generate(prompts, how)] == want
    # The ends of texts are not recorded. Under a sparse view its own limit follows.
    copied, own = recorded[policy.lookup.confident_acceptance], recorded[knowing.acceptance]
    stats = llm.engine.stats().speculation
    assert (stats.sparse_steps > 0) == sparse_view
    if not sparse_view:
        assert 0 < copied <= stats.lookup_tokens < stats.drafted and 0 < own <= 4 * stats.steps
        assert stats.block()["copied_tokens"] == stats.lookup_tokens
    check_identities(stats)
    idle(llm.engine)


def test_indexes_a_token_once(llm, monkeypatch):
    """However many full and sparse-view steps run, and no provisional token."""
    indexed, extend = [], _NgramIndex.extend

    def counted(self, token_ids):
        indexed.append(len(token_ids) - self._length)
        extend(self, token_ids)

    monkeypatch.setattr(_NgramIndex, "extend", counted)
    prompts = random_prompts(300, 380)
    stats = partly(llm.engine, PromptLookupDrafter()).stats
    outputs = llm.generate(prompts, greedy(24))
    assert stats.sparse_steps >= stats.full_steps >= 8
    assert 0 < sum(indexed) <= sum(len(o.prompt_token_ids) + len(tokens(o)[0]) for o in outputs)
