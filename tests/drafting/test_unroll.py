"""The training-time test compared with drafting: whole passes of the plain head, one drafted token at a time."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from mlaforge.data.packing import Feed, Phase, first_fit
from mlaforge.drafting.objective import States, Validation, _decoding_steps, columns
from mlaforge.drafting.unroll import DECAY, UnrolledHead
from mlaforge.training.optimizer import Hyperparameters, Optimizer
from support.draft_texts import DOCUMENTS, documents, inputs
from support.eagle3_heads import HEADS, make

SHAPES = {name: fields for name, fields in HEADS.items() if not fields.get("has_embed_tokens")}


def objective(fields=None, unrolls=4, seed=0):
    """An UnrolledHead of a random head, its rows, and random states."""
    head = make(seed=seed, **(fields or {}))
    rows, states, embedding, expected = inputs(head.config.draft_vocab_size, 192, seed)
    per_row = float((columns(rows)[1] > 0).sum()) / len(rows)
    return UnrolledHead(head, None, embedding, expected, unrolls, per_row), rows, states


@torch.no_grad()
def draft_by_passes(head, embedding, ids, states, column, unrolls):
    """Return the head's outputs for drafting from `column` of a text, if all drafts are the text's tokens, with a whole
    pass for each. ids [T], states [T, S]."""
    hidden, outs = head.fuse(states[None, : column + 1]), []
    for j in range(unrolls):
        n = column + 1 + j
        distance = torch.arange(n)[:, None] - torch.arange(n)
        mask = (distance >= 0) & (distance < (head.config.sliding_window or 10**6))
        out = head(hidden, F.embedding(ids[None, 1 : n + 1], embedding), torch.arange(n)[None], mask)
        outs.append(out[0, -1])
        if head.config.mask_token_id is None:
            hidden = torch.cat((hidden, head.fed_back(out[:, -1:])), dim=1)
        else:
            hidden = torch.cat((hidden, head.mask_state[None, None]), dim=1)
            ids = ids.clone()
            ids[column + 2 :] = head.config.mask_token_id
        if column + 2 + j >= len(ids):
            break
    return torch.stack(outs)


@pytest.mark.parametrize("name", SHAPES)
def test_unrolls_match_step_by_step_drafting(name):
    model, rows, states = objective(SHAPES[name])
    at, remaining = columns(rows)
    with torch.no_grad():
        outs = torch.stack(model.outputs(rows, states, at), dim=2)
    checked = 0
    for row in range(len(rows)):
        for n, column in enumerate(at[row].tolist()):
            document_start = column - int(rows.positions[row, column])
            if not remaining[row, n]:
                continue
            ids = rows.ids[row, document_start : column + 2 + int(remaining[row, n])]
            document_states = states.captured.view(*rows.ids.shape, -1)[row, document_start : document_start + len(ids)]
            expected = draft_by_passes(
                model.student,
                model.embedding,
                ids,
                document_states,
                column - document_start,
                min(4, int(remaining[row, n])),
            )
            torch.testing.assert_close(outs[row, n, : len(expected)], expected, rtol=1e-3, atol=1e-3)
            checked += len(expected)
    assert checked > 60


def test_columns_match_the_engines_draft_positions():
    """From the prompt's last token on, as long as two tokens follow; none in padding."""
    rows = first_fit(documents(), 40)
    at, remaining = columns(rows)
    assert int((remaining > 0).sum()) == sum(n - prompt_length - 1 for n, prompt_length in DOCUMENTS)
    assert rows.ids.shape == (2, 40)
    # The first row begins with the first document: 17 tokens, of which 6 are the prompt.
    assert at[0, :10].tolist() == list(range(5, 15)) and remaining[0, :10].tolist() == list(range(10, 0, -1))
    flat = [ids[prompt_length:] for ids, prompt_length in documents()]
    cached = rows.ids[rows.answer].tolist()
    assert sorted(cached) == sorted(token for ids in flat for token in ids)


@settings(max_examples=15)
@given(st.sampled_from(sorted(SHAPES)), st.integers(0, 79), st.integers(0, 3), st.booleans())
def test_outputs_depend_on_visible_positions_only(name, place_, unroll, token):
    """Changing a state or token changes exactly the outputs that depend on it: in the same text, not after the column
    (for a token: not after the drafts), and within the window."""
    model, rows, states = objective(SHAPES[name])
    at, remaining = columns(rows)
    row, column_of = place_ // 40, place_ % 40
    with torch.no_grad():
        before = model.outputs(rows, states, at)[unroll]
        if token:
            ids = rows.ids.clone()
            ids[row, column_of] = (ids[row, column_of] + 7) % 260
            after = model.outputs(dataclasses.replace(rows, ids=ids), states, at)[unroll]
        else:
            captured = states.captured.clone()
            captured[place_] += torch.randn(192, generator=torch.Generator().manual_seed(5))
            after = model.outputs(rows, dataclasses.replace(states, captured=captured), at)[unroll]
    moved = (before != after).any(-1)
    window = model.student.config.sliding_window or 10**6
    assert not moved[1 - row].any()
    for n, column in enumerate(at[row].tolist()):
        if remaining[row, n] <= unroll:
            continue
        document_start = column - int(rows.positions[row, column])
        # The position of the head that reads it. A token is an input of the position before its own.
        reads = column_of - token
        if reads <= column:
            # Outputs are inputs of the next unroll, so the window of unroll 0 reaches back farthest.
            # The first token of a text is not an input of any position.
            expected = document_start <= reads and column - reads < window
        else:
            masked = model.student.config.mask_token_id is not None
            expected = bool(token) and reads <= column + unroll and not masked
        assert bool(moved[row, n]) == expected, (column, document_start, reads)


def plain_loss(model, rows, states):
    """Reference in fp64 on full logits."""
    head, (at, remaining) = model.student, columns(rows)
    total = torch.zeros((), dtype=torch.float64)
    for j, out in enumerate(model.outputs(rows, states, at)):
        for row in range(len(rows)):
            for n, column in enumerate(at[row].tolist()):
                token = int(rows.ids[row, min(column + 2 + j, 39)])
                if remaining[row, n] <= j or token not in head.target_ids.tolist():
                    continue
                p = (states.final.view(*rows.ids.shape, -1)[row, column + 1 + j] @ model.target_head.T).double()
                q = head.logits(out[row, n][None, None])[0, 0].double()
                before = int(rows.ids[row, column + 1 + j])
                if head.config.markov_rank and j and before in head.target_ids.tolist():
                    q = q + head.markov_head(head.markov_embed.weight[head.target_ids.tolist().index(before)])
                q = q.log_softmax(-1)
                total = total + DECAY**j * (p.softmax(-1) * (p.log_softmax(-1) - q)).sum()
    return total / (len(rows) * model.per_row)


@pytest.mark.parametrize("name", ["plain", "all norms", "Markov"])
def test_loss_matches_the_formula(name):
    model, rows, states = objective(SHAPES[name])
    names = dict(model.student.named_parameters())
    for parameter in names.values():
        parameter.requires_grad_(True)
    expected = plain_loss(model, rows, states)
    value = float(expected.detach())
    expected = torch.autograd.grad(expected, list(names.values()))
    result = model(rows, states)
    assert float(result[0].detach()) == pytest.approx(value, rel=1e-5)
    for name, ours, theirs in zip(names, torch.autograd.grad(result[0], list(names.values())), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5, msg=name)


def test_gradient_accumulation_is_independent_of_micro_batch_size():
    results = []
    for micro in (80, 40):
        model, rows, states = objective()
        cached = {0: states.captured.view(2, 40, -1), 1: states.final.view(2, 40, -1)}

        def targets(_, part, cached=cached):
            return States(*(cached[n][part.number].flatten(0, 1) for n in cached))

        names = [name for name, _ in model.student.named_parameters()]
        optimizer = Optimizer(
            model, Feed((Phase(rows, 3),), 80, 0), Hyperparameters(micro_tokens=micro, warm_up=0), names,
            targets=targets,
        )  # fmt: skip
        results.append([list(optimizer.training_step().values()) for _ in range(3)])
    torch.testing.assert_close(torch.tensor(results[0]), torch.tensor(results[1]), rtol=1e-4, atol=1e-5)


def test_decoding_steps():
    # Two answers with 5 and 2 tokens after their first, and padding: steps of 4, 1, 1 and 1 token.
    assert _decoding_steps([3, 0, 3, 1, 0, 0, 1, 3], [5, 4, 3, 2, 1, 2, 1, 0]) == (4, 7)
    assert _decoding_steps([0, 0, 0], [3, 2, 1]) == (3, 3)


def test_validation_counts_accepted_drafts():
    """A model with predetermined correct drafts."""
    model, rows, states = objective()
    at, remaining = columns(rows)
    generator = torch.rand((*at.shape, 4), generator=torch.Generator().manual_seed(3)) < 0.6
    correct = generator & (remaining[..., None] > torch.arange(4))
    model.validate = lambda rows, states: correct
    result = Validation(rows, lambda rows: states, 2, 3).measure(model)
    expected = [[0, 0] for _ in range(4)]
    for row in range(2):
        for n in range(at.shape[1]):
            for j in range(4):
                if remaining[row, n] > j and all(correct[row, n, :j]):
                    expected[j][0] += int(correct[row, n, j])
                    expected[j][1] += 1
    assert result["acceptance"] == pytest.approx([a / n for a, n in expected])
    assert 1 < result["acceptance_length"] <= 4 and result["steps_per_token"] == 1 / result["acceptance_length"]
