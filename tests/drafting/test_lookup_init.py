"""Where a draft head begins to copy: what its attention is taught, and that the head made of it copies."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F
from transformers import LlamaConfig

from mlaforge.data.packing import Rows, first_fit
from mlaforge.drafting import initialize
from mlaforge.drafting.lookup_init import identity_size, places_before, taught_heads
from mlaforge.drafting.unroll import States, Unrolled
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
def test_places_before_are_those_where_the_newest_tokens_stood(texts):
    """By going through every text: the last two tokens where they stood, else the last one."""
    rows = first_fit([(text, 0) for text in texts], 16)
    found = places_before(rows)
    for row, last in enumerate(rows.last):
        begin = 0
        for end in last.nonzero().flatten().tolist():
            ids = rows.ids[row, begin : end + 1].tolist()
            for at in range(len(ids) - 1):
                one = {i for i in range(at + 1) if ids[i] == ids[at + 1]}
                two = {i for i in one if i and ids[i - 1] == ids[at]}
                assert set(found[row, begin + at].nonzero().flatten().tolist()) == {begin + i for i in two or one}
            begin = end + 1


def repeating(count):
    """Rows of a drawn phrase that comes four times, and the states of a target that knows each next token."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (count, PHRASE), generator=draw).repeat(1, 4)
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    rows = Rows(ids, positions, torch.arange(count), torch.ones_like(ids, dtype=torch.bool))
    embedding = torch.randn(VOCABULARY, WIDTH, generator=draw)
    shown = [torch.randn(WIDTH, WIDTH, generator=draw) / WIDTH**0.5 for _ in range(3)]

    def states(part):
        own = F.embedding(part.ids.flatten(), embedding)
        final = F.embedding(part.ids.roll(-1, dims=1).flatten(), embedding)
        return States(torch.cat([own @ mixed for mixed in shown], dim=-1), final)

    return rows, states, embedding


@pytest.mark.parametrize(("kv_heads", "copies"), [(6, True), (3, True), (1, False)])
def test_a_new_head_copies(kv_heads, copies):
    """Of text that nothing but its own repetition tells, it proposes what followed before, at places that it has not
    been taught on; a head of one key-value head looks nothing up."""
    rows, states, embedding = repeating(160)
    learnt, other = rows.take(torch.arange(128)), rows.take(torch.arange(128, 160))
    head = Eagle3Head(shape(kv_heads)).requires_grad_(False)
    assert bool(taught_heads(head.config)) == bool(identity_size(head.config)) == copies
    initialize.start(head, initialize.Text(learnt, states, embedding, 1e-6), embedding, 0)
    right = Unrolled(head, None, embedding, embedding, 1, 1.0).validate(other, states(other))[..., 0].float()
    known = right[:, PHRASE : 4 * PHRASE - 2].mean()
    assert known > 0.8 if copies else known < 0.2, known
    assert right[:, : PHRASE - 2].mean() < 0.2


def test_the_same_seed_gives_the_same_start():
    rows, states, embedding = repeating(16)
    heads = [Eagle3Head(shape(3)).requires_grad_(False) for _ in range(2)]
    for head in heads:
        initialize.start(head, initialize.Text(rows, states, embedding, 1e-6), embedding, 7)
    own, other = (dict(head.named_parameters()) for head in heads)
    assert all(torch.equal(own[name], other[name]) for name in own)
    assert all(bool(tensor.isfinite().all()) for tensor in own.values())


def test_coordinates_say_the_logits():
    """All of them, exactly; half of them, better than any other half that is drawn, and each of size 1."""
    draw = torch.Generator().manual_seed(0)
    finals = torch.randn(500, 12, generator=draw).double() * torch.logspace(-0.5, 0.5, 12).double()
    head = torch.randn(40, 12, generator=draw)
    moments, logits = finals.mT @ finals / 500, finals @ head.mT.double()

    def error(size):
        read, said = initialize.coordinates(moments, head, size)
        sizes = (finals @ read).square().mean(0)
        torch.testing.assert_close(sizes, torch.ones_like(sizes), rtol=0.2, atol=0)
        return float((finals @ read @ said.mT - logits).square().mean())

    assert error(12) < 1e-6 * float(logits.square().mean())
    drawn = torch.linalg.qr(torch.randn(12, 6, generator=draw).double())[0]
    assert error(6) < float((finals @ drawn @ drawn.mT @ head.mT.double() - logits).square().mean())
