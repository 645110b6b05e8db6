"""Drafts as chains and trees, the measured acceptance of a drafter's tokens, and the options of drafters."""

import itertools
import re

import pytest
import torch
from hypothesis import given

from mlaforge.engine.llm import LLM
from mlaforge.engine.speculation.drafter import PRIOR, Acceptance, Draft, ancestry
from mlaforge.runtime import UserError
from support import block_heads, eagle3_heads
from support.engine_driver import watched
from support.forests import forests, path


@given(forests)
def test_tree_mask_counts_edges_to_ancestors(parents):
    rows, draft = ancestry(parents), Draft(list(range(len(parents))), parents=parents)
    for node, row in enumerate(rows):
        ancestors = path(parents, node)[::-1]
        assert row == [ancestors.index(at) if at in ancestors else -1 for at in range(len(parents))]
        # The sequence's newest token is the root of all.
        assert draft.tree[node + 1] == [len(ancestors), *row]
        assert draft.child(parents[node], node) == node
        assert draft.child(node, node) is None
    assert draft.depth == max(len(path(parents, node)) for node in range(len(parents)))


def test_chain():
    q_KV = torch.eye(8)[[5, 6, 6]]
    draft = Draft([5, 6, 6], q_KV)
    assert [draft.child(-1, 5), draft.child(0, 6), draft.child(1, 6), draft.child(2, 6)] == [0, 1, 2, None]
    assert draft.child(-1, 6) is None and draft.tree is None and (draft.depth, Draft([]).depth) == (3, 0)
    token, q_V = draft.sampled(2)
    assert token == 6 and q_V.equal(q_KV[2]) and draft.sampled(3) is None and Draft([5]).sampled(0) is None


def test_acceptance_is_the_share_by_position_after_an_accepted_one():
    acceptance = Acceptance()
    assert acceptance.paths(3) == pytest.approx([PRIOR, PRIOR**2, PRIOR**3])
    for accepted in itertools.islice(itertools.cycle((0, 1, 1, 3)), 4000):
        acceptance.record(3, accepted)
    # Of four drafts three get past the first token, of these one past the second, and that one past the third.
    assert acceptance.paths(4) == pytest.approx([3 / 4, 1 / 4, 1 / 4, PRIOR / 4], abs=0.03)
    acceptance.discount()
    (first, *_), (again, *_) = acceptance.paths(3), Acceptance().paths(3)
    assert first == pytest.approx((3 / 4 + again) / 2, abs=0.02)
    # A few drafts of another text count for more than all before them.
    for _ in range(8):
        acceptance.record(3, 0)
    assert acceptance.paths(1)[0] < 0.3


EAGLE3, BLOCK = eagle3_heads.saved, block_heads.saved


@pytest.mark.parametrize(
    ("drafter", "options", "words"),
    [
        ("none", {"specpv": True}, "specpv verifies drafted tokens; speculative must be ngram or a head"),
        ("ngram", {"specpv": True, "specpv_dtype": "int8"},
         "specpv_dtype = int8 is for bfloat16 models on a CPU; this one is"),
        ("ngram", {"specpv": True, "kv_cache_dtype": "int4"},
         "specpv reads tokens one by one, and kv_cache_dtype int4 packs"),
        (EAGLE3, {"speculative_tree_tokens": 2},
         "speculative_tree_tokens = 2 must be 0 (no trees) or at least num_speculative_tokens = 3"),
        (EAGLE3, {"speculative_tree_tokens": 65}, "= 65"),
        (BLOCK, {"speculative_tree_tokens": 8}, "drafts in one pass, and no trees"),
        ("ngram", {"speculative_tree_tokens": 8}, "drafts no trees"),
        ("none", {"speculative_tree_tokens": 8}, "needs a head"),
        ("none", {"num_speculative_tokens": 9}, "num_speculative_tokens = 9 must be at least 1 and at most 8"),
    ],
)  # fmt: skip
def test_refuses_contradicting_options(drafter, options, words, tiny_models, tmp_path):
    drafter = str(drafter(tmp_path / "head")) if callable(drafter) else drafter
    with pytest.raises(UserError, match=re.escape(words)):
        LLM(tiny_models["llama"], device="cpu", speculative=drafter, **{"dtype": "float32", **options})


@pytest.mark.parametrize(
    ("drafter", "options", "longest", "copied"),
    [(EAGLE3, {}, 3, 8), (EAGLE3, {"num_speculative_tokens": 2}, 2, 2), (EAGLE3, {"adaptive_speculation": False}, 3, 0),
     (BLOCK, {}, 4, 8), ("ngram", {}, 3, 8)],
)  # fmt: skip
def test_longest_drafts(drafter, options, longest, copied, tiny_models, tmp_path):
    """Lookup goes before a head where speculation is adaptive."""
    name = str(drafter(tmp_path / "head")) if callable(drafter) else drafter
    speculation = watched(tiny_models["llama"], cache_bytes=4 << 20, speculative=name, **options).engine.speculation
    policy = speculation.policy
    assert (policy.max_tokens, policy.lookup is not None, policy.lookup_tokens) == (longest, copied > 0, copied)
    assert policy.adaptive == (copied > 0) and (policy.lookup is speculation.drafter) == (name == "ngram")
