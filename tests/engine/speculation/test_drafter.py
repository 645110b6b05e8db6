"""Drafts as chains and trees, and the measured acceptance of a drafter's tokens."""

import itertools

import pytest
import torch
from hypothesis import given

from mlaforge.engine.speculation.drafter import PRIOR, Acceptance, Draft, ancestry
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
