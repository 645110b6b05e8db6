"""The objective of block heads compared with drafting: a whole pass of the plain head for every column. The mistakes of
other implementations, one by one: what a block sees, its positions, its first place, and the tied head."""

import dataclasses

import pytest
import torch
from torch.nn import functional as F

from mlaforge.drafting.block import BlockObjective, decay
from mlaforge.drafting.objective import columns
from support.block_heads import HEADS, make
from support.draft_texts import inputs


def objective(fields=None, seed=0):
    """A BlockObjective of a random head, its rows, and random states."""
    head = make(seed=seed, **(fields or {}))
    rows, states, embedding, expected = inputs(head.config.draft_vocab_size, head.fc.in_features, seed)
    per_row = float((columns(rows)[1] > 0).sum()) / len(rows)
    return BlockObjective(head, None, embedding, expected, per_row), rows, states


def text_before(rows, states, row, column):
    """Where the document of a column begins in its row, and its states up to the column, [1, tokens, S]."""
    start = column - int(rows.positions[row, column])
    return start, states.captured.view(*rows.ids.shape, -1)[row, start : column + 1][None]


@pytest.mark.parametrize("name", HEADS)
def test_blocks_match_drafting(name):
    """Also the positions, which a whole pass of one text counts from 0."""
    model, rows, states = objective(HEADS[name])
    at, remaining = columns(rows)
    with torch.no_grad():
        outs = torch.stack(model.outputs(rows, states, at), dim=2)
        for row in range(len(rows)):
            for n, column in enumerate(at[row].tolist()):
                if remaining[row, n]:
                    newest = F.embedding(rows.ids[row, column + 1], model.embedding)[None]
                    expected = model.student(text_before(rows, states, row, column)[1], newest, model.drafted)[0]
                    torch.testing.assert_close(outs[row, n], expected, rtol=1e-3, atol=1e-3)
    assert outs.shape[2] == model.student.config.block_size - 1 and int((remaining > 0).sum()) > 30


@pytest.mark.parametrize("name", ["two layers", "window"])
def test_a_block_sees_its_text_up_to_the_column_and_itself(name):
    """Neither the states after the column, which know the answer, nor other blocks, nor other texts; but all earlier
    states within the window, and its own later places."""
    model, rows, states = objective(HEADS[name])
    at, remaining = columns(rows)
    window, places = model.student.config.sliding_window or 10**6, model.drafted
    with torch.no_grad():
        before = torch.stack(model.outputs(rows, states, at))
        for moved in range(0, 40, 3):
            captured = states.captured.clone()
            captured[moved] += 1
            after = torch.stack(model.outputs(rows, dataclasses.replace(states, captured=captured), at))
            changed = (before != after).any(-1)
            assert not changed[:, 1].any()
            for n, column in enumerate(at[0].tolist()):
                start, _ = text_before(rows, states, 0, column)
                seen = start <= moved <= column and column + 1 + places - moved < window
                assert not remaining[0, n] or changed[:, 0, n].tolist() == [seen] * places
        # A token changes the block that begins with it, as far as its last place, and no other.
        ids = rows.ids.clone()
        ids[0, 12] = (ids[0, 12] + 7) % 260
        after = torch.stack(model.outputs(dataclasses.replace(rows, ids=ids), states, at))
        changed = (before != after).any(-1)[:, 0]
        assert changed.all(0).tolist() == (at[0] == 11).tolist() == changed.any(0).tolist()
        # The first place reads the last one.
        model.student.mask_embedding[-1] += 1
        after = torch.stack(model.outputs(rows, states, at))
        assert (before != after).any(-1)[:, remaining > 0].all()


def plain_loss(model, rows, states):
    """The formula, place by place: place j of the block after column a predicts the token at a + 1 + j, of which the
    target's state at a + j decides."""
    total = 0.0
    at, remaining = columns(rows)
    target_ids = model.student.target_ids.tolist()
    for row in range(len(rows)):
        for n, column in enumerate(at[row].tolist()):
            if not remaining[row, n]:
                continue
            newest = F.embedding(rows.ids[row, column + 1], model.embedding)[None]
            _, known = text_before(rows, states, row, column)
            logits = model.student.logits(model.student(known, newest, model.drafted))[0]
            for place in range(1, min(model.drafted, int(remaining[row, n])) + 1):
                if int(rows.ids[row, column + 1 + place]) not in target_ids:
                    continue
                p = (states.final.view(2, 40, -1)[row, column + place] @ model.target_head.T).softmax(-1)
                q, before = logits[place - 1], int(rows.ids[row, column + place])
                if place > 1 and before in target_ids:
                    q = q + model.student.markov_head(model.student.markov_embed.weight[target_ids.index(before)])
                kl = (p * (p.log() - q.log_softmax(-1))).sum()
                total = total + decay(model.drafted + 1) ** (place - 1) * kl
    return total / (len(rows) * model.per_row)


def test_loss_matches_the_formula_from_the_first_place_on():
    """With gradients. The first drafted place counts, and most of all."""
    model, rows, states = objective({"layers": 2, "fc_norm": True, "markov_rank": 5})
    for parameter in model.student.parameters():
        parameter.requires_grad_(True)
    names = dict(model.student.named_parameters())
    expected, (loss,) = plain_loss(model, rows, states), model(rows, states)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    grads = [torch.autograd.grad(value, list(names.values())) for value in (expected, loss)]
    for name, theirs, ours in zip(names, *grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5, msg=name)
    rows_of = grads[1][list(names).index("mask_embedding")].norm(dim=1)
    assert float(rows_of.min()) > 0
    assert 1 == decay(4) ** 0 > decay(4) > decay(4) ** 2 and decay(8) > decay(4)
