"""The training-time test against drafting itself: whole passes of the plain head, one drafted token after another."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from mlaforge.data.packing import Feed, Phase, first_fit
from mlaforge.drafting.unroll import DECAY, States, Unrolled, Validation, _decoded, columns
from mlaforge.training.optimizer import Hyperparameters, Optimizer
from support.eagle3_heads import HEADS, make

# Token ids and how many of them are the prompt; packed into two rows of 40, the second with room left.
DOCUMENTS = [(17, 6), (20, 11), (14, 2), (3, 1), (12, 9)]
SHAPES = {name: fields for name, fields in HEADS.items() if not fields.get("own_embedding")}


def documents(seed=0, vocabulary=260):
    draw = torch.Generator().manual_seed(seed)
    return [(torch.randint(0, vocabulary, (n,), generator=draw).tolist(), asked) for n, asked in DOCUMENTS]


def objective(fields=None, unrolls=4, seed=0):
    """An Unrolled of a random head, its rows, and states of no model at all."""
    head, rows = make(seed=seed, **(fields or {})), first_fit(documents(), 40)
    draw = torch.Generator().manual_seed(seed + 1)
    states = States(
        torch.randn(rows.ids.numel(), 192, generator=draw), torch.randn(rows.ids.numel(), 64, generator=draw)
    )
    embedding, wanted = (
        torch.randn(260, 64, generator=draw),
        torch.randn(head.config.draft_vocab_size, 64, generator=draw),
    )
    per_row = float((columns(rows)[1] > 0).sum()) / len(rows)
    return Unrolled(head, None, embedding, wanted, unrolls, per_row), rows, states


@torch.no_grad()
def drafted(head, embedding, ids, states, column, unrolls):
    """The head's outputs where drafting begins at `column` of a text, given that its drafts are the text's tokens: a
    whole pass for each. ids [T], states [T, S]."""
    hidden, outs = head.fuse(states[None, : column + 1]), []
    for j in range(unrolls):
        n = column + 1 + j
        distance = torch.arange(n)[:, None] - torch.arange(n)
        mask = (distance >= 0) & (distance < (head.config.sliding_window or 10**6))
        out = head(hidden, F.embedding(ids[None, 1 : n + 1], embedding), torch.arange(n)[None], mask)
        outs.append(out[0, -1])
        hidden = torch.cat((hidden, head.fed_back(out[:, -1:])), dim=1)
        if column + 2 + j >= len(ids):
            break
    return torch.stack(outs)


@pytest.mark.parametrize("name", SHAPES)
def test_every_unroll_is_what_drafting_gives(name):
    model, rows, states = objective(SHAPES[name])
    at, left = columns(rows)
    with torch.no_grad():
        outs = torch.stack(model._outs(rows, states, at), dim=2)
    seen = 0
    for row in range(len(rows)):
        for n, column in enumerate(at[row].tolist()):
            begun = column - int(rows.positions[row, column])
            if not left[row, n]:
                continue
            ids = rows.ids[row, begun : column + 2 + int(left[row, n])]
            own = states.captured.view(*rows.ids.shape, -1)[row, begun : begun + len(ids)]
            wanted = drafted(model.student, model.embedding, ids, own, column - begun, min(4, int(left[row, n])))
            torch.testing.assert_close(outs[row, n, : len(wanted)], wanted, rtol=1e-3, atol=1e-3)
            seen += len(wanted)
    assert seen > 60


def test_columns_are_where_the_engine_drafts():
    """From the prompt's last token on, as long as two tokens follow; nothing in what fills up a row."""
    rows = first_fit(documents(), 40)
    at, left = columns(rows)
    assert int((left > 0).sum()) == sum(n - asked - 1 for n, asked in DOCUMENTS)
    assert rows.ids.shape == (2, 40)
    # The first document lies at the beginning of the first row: 17 tokens, of which 6 ask.
    assert at[0, :10].tolist() == list(range(5, 15)) and left[0, :10].tolist() == list(range(10, 0, -1))
    flat = [ids[asked:] for ids, asked in documents()]
    kept = rows.ids[rows.answer].tolist()
    assert sorted(kept) == sorted(token for ids in flat for token in ids)


@settings(max_examples=15)
@given(st.sampled_from(sorted(SHAPES)), st.integers(0, 79), st.integers(0, 3), st.booleans())
def test_what_a_column_sees(name, place_, unroll, token):
    """A state, or token, that changes moves exactly the outputs that may depend on it: of its own text, not later than
    the column (a token: than what was drafted), and inside the window."""
    model, rows, states = objective(SHAPES[name])
    at, left = columns(rows)
    row, column_of = place_ // 40, place_ % 40
    with torch.no_grad():
        before = model._outs(rows, states, at)[unroll]
        if token:
            ids = rows.ids.clone()
            ids[row, column_of] = (ids[row, column_of] + 7) % 260
            after = model._outs(dataclasses.replace(rows, ids=ids), states, at)[unroll]
        else:
            captured = states.captured.clone()
            captured[place_] += torch.randn(192, generator=torch.Generator().manual_seed(5))
            after = model._outs(rows, dataclasses.replace(states, captured=captured), at)[unroll]
    moved = (before != after).any(-1)
    window = model.student.config.sliding_window or 10**6
    assert not moved[1 - row].any()
    for n, column in enumerate(at[row].tolist()):
        if left[row, n] <= unroll:
            continue
        begun = column - int(rows.positions[row, column])
        # The row of the head that reads it. A token is read in the row before its own.
        reads = column_of - token
        if reads <= column:
            # An output feeds the next unroll's, so it is unroll 0 whose window reaches back farthest.
            # The first token of a text is read by no row.
            expected = begun <= reads and column - reads < window
        else:
            expected = bool(token) and reads <= column + unroll
        assert bool(moved[row, n]) == expected, (column, begun, reads)


def plain_loss(model, rows, states):
    """The formula, over whole logits in fp64."""
    head, (at, left) = model.student, columns(rows)
    total = torch.zeros((), dtype=torch.float64)
    for j, out in enumerate(model._outs(rows, states, at)):
        for row in range(len(rows)):
            for n, column in enumerate(at[row].tolist()):
                token = int(rows.ids[row, min(column + 2 + j, 39)])
                if left[row, n] <= j or token not in head.target_ids.tolist():
                    continue
                p = (states.final.view(*rows.ids.shape, -1)[row, column + 1 + j] @ model.wanted_head.T).double()
                q = head.logits(out[row, n][None, None])[0, 0].double().log_softmax(-1)
                total = total + DECAY**j * (p.softmax(-1) * (p.log_softmax(-1) - q)).sum()
    return total / (len(rows) * model.per_row)


@pytest.mark.parametrize("name", ["plain", "all norms"])
def test_the_loss_is_its_formula(name):
    model, rows, states = objective(SHAPES[name])
    names = dict(model.student.named_parameters())
    for parameter in names.values():
        parameter.requires_grad_(True)
    wanted = plain_loss(model, rows, states)
    value = float(wanted.detach())
    expected = torch.autograd.grad(wanted, list(names.values()))
    found = model(rows, states)
    assert float(found[0].detach()) == pytest.approx(value, rel=1e-5)
    for name, ours, theirs in zip(names, torch.autograd.grad(found[0], list(names.values())), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5, msg=name)


def test_a_step_does_not_depend_on_its_parts():
    results = []
    for micro in (80, 40):
        model, rows, states = objective()
        kept = {0: states.captured.view(2, 40, -1), 1: states.final.view(2, 40, -1)}

        def targets(_, part, kept=kept):
            return States(*(kept[n][part.number].flatten(0, 1) for n in kept))

        names = [name for name, _ in model.student.named_parameters()]
        optimizer = Optimizer(
            model, Feed((Phase(rows, 3),), 80, 0), Hyperparameters(micro_tokens=micro, warm_up=0), names,
            targets=targets,
        )  # fmt: skip
        results.append([list(optimizer.training_step().values()) for _ in range(3)])
    torch.testing.assert_close(torch.tensor(results[0]), torch.tensor(results[1]), rtol=1e-4, atol=1e-5)


def test_steps_of_decoding():
    # Two answers of 5 and 2 tokens after their first, and what fills up the row: 4, 1, 1 and 1 token.
    assert _decoded([3, 0, 3, 1, 0, 0, 1, 3], [5, 4, 3, 2, 1, 2, 1, 0]) == (4, 7)
    assert _decoded([0, 0, 0], [3, 2, 1]) == (3, 3)


def test_validation_counts_what_was_accepted():
    """A model that says beforehand what is right."""
    model, rows, states = objective()
    at, left = columns(rows)
    draw = torch.rand((*at.shape, 4), generator=torch.Generator().manual_seed(3)) < 0.6
    right = draw & (left[..., None] > torch.arange(4))
    model.validate = lambda rows, states: right
    found = Validation(rows, lambda rows: states, 2).measure(model)
    wanted = [[0, 0] for _ in range(4)]
    for row in range(2):
        for n in range(at.shape[1]):
            for j in range(4):
                if left[row, n] > j and all(right[row, n, :j]):
                    wanted[j][0] += int(right[row, n, j])
                    wanted[j][1] += 1
    assert found["acceptance"] == pytest.approx([a / n for a, n in wanted])
    assert 1 < found["acceptance_length"] <= 4 and found["steps_per_token"] == 1 / found["acceptance_length"]
