"""Lookup heads: their training targets, and that an initialised head copies."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F
from transformers import LlamaConfig

from mlaforge.data.packing import Rows, first_fit
from mlaforge.drafting import initialize
from mlaforge.drafting.lookup_init import identity_size, matching_positions, num_lookup_heads
from mlaforge.drafting.objective import States
from mlaforge.drafting.unroll import UnrolledHead
from mlaforge.modeling.eagle3 import Eagle3Config, Eagle3Head

VOCABULARY, WIDTH, PHRASE = 64, 96, 10


def shape(kv_heads):
    layer = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=1, intermediate_size=32, num_attention_heads=6,
        num_key_value_heads=kv_heads, head_dim=16, rms_norm_eps=1e-6, mlp_bias=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    return Eagle3Config(layer, WIDTH, VOCABULARY, (0, 1, 2), fc_norm=True)


@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=12), min_size=1, max_size=4))
def test_matching_positions_follow_the_longest_match(texts):
    """Reference by a loop over every text: matches of the last two tokens, else of the last one."""
    rows = first_fit([(text, 0) for text in texts], 16)
    matches = matching_positions(rows)
    for row, last in enumerate(rows.last):
        document_start = 0
        for end in last.nonzero().flatten().tolist():
            ids = rows.ids[row, document_start : end + 1].tolist()
            for position in range(len(ids) - 1):
                unigram = {i for i in range(position + 1) if ids[i] == ids[position + 1]}
                bigram = {i for i in unigram if i and ids[i - 1] == ids[position]}
                assert set(matches[row, document_start + position].nonzero().flatten().tolist()) == {
                    document_start + i for i in bigram or unigram
                }
            document_start = end + 1


def repeating(count):
    """Rows that repeat a random phrase four times, and states of a target that knows each next token."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (count, PHRASE), generator=generator).repeat(1, 4)
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    rows = Rows(ids, positions, torch.arange(count), torch.ones_like(ids, dtype=torch.bool))
    embedding = torch.randn(VOCABULARY, WIDTH, generator=generator)
    shown = [torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5 for _ in range(3)]

    def states(part):
        first = F.embedding(part.ids.flatten(), embedding)
        final = F.embedding(part.ids.roll(-1, dims=1).flatten(), embedding)
        return States(torch.cat([first @ mixed for mixed in shown], dim=-1), final)

    return rows, states, embedding


@pytest.mark.parametrize(("kv_heads", "copies"), [(6, True), (3, True), (1, False)])
def test_new_heads_copy_repeated_text(kv_heads, copies):
    """On unseen text that is predictable only by its repetition, the head proposes what followed before; a head with
    one key-value head has no lookup."""
    rows, states, embedding = repeating(160)
    train_rows, other = rows.take(torch.arange(128)), rows.take(torch.arange(128, 160))
    head = Eagle3Head(shape(kv_heads)).requires_grad_(False)
    assert bool(num_lookup_heads(head.config)) == bool(identity_size(head.config)) == copies
    initialize.initialize_head(head, initialize.Text(train_rows, states, embedding, 1e-6), embedding, 0)
    right = UnrolledHead(head, None, embedding, embedding, 1, 1.0).validate(other, states(other))[..., 0].float()
    known = right[:, PHRASE : 4 * PHRASE - 2].mean()
    assert known > 0.8 if copies else known < 0.2, known
    assert right[:, : PHRASE - 2].mean() < 0.2


def test_initialisation_is_deterministic():
    rows, states, embedding = repeating(16)
    heads = [Eagle3Head(shape(3)).requires_grad_(False) for _ in range(2)]
    for head in heads:
        initialize.initialize_head(head, initialize.Text(rows, states, embedding, 1e-6), embedding, 7)
    first, other = (dict(head.named_parameters()) for head in heads)
    assert all(torch.equal(first[name], other[name]) for name in first)
    assert all(bool(tensor.isfinite().all()) for tensor in first.values())


def test_coordinates_explain_the_logits():
    """All coordinates explain the logits exactly, half of them better than a random half; each has unit mean square."""
    generator = torch.Generator().manual_seed(0)
    finals = torch.randn(500, 12, generator=generator).double() * torch.logspace(-0.5, 0.5, 12).double()
    head = torch.randn(40, 12, generator=generator)
    moments, logits = finals.mT @ finals / 500, finals @ head.mT.double()

    def error(size):
        read, logit_weights = initialize.coordinates(moments, head, size)
        sizes = (finals @ read).square().mean(0)
        torch.testing.assert_close(sizes, torch.ones_like(sizes), rtol=0.2, atol=0)
        return float((finals @ read @ logit_weights.mT - logits).square().mean())

    assert error(12) < 1e-6 * float(logits.square().mean())
    drawn = torch.linalg.qr(torch.randn(12, 6, generator=generator).double())[0]
    assert error(6) < float((finals @ drawn @ drawn.mT @ head.mT.double() - logits).square().mean())
