"""Attention against a textbook softmax, and the sink from (out, lse)."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlaforge.modeling import attention_mla
from mlaforge.modeling.attention_mla import attend, attend_fused, sink_share
from mlaforge.modeling.rope_mla import RotationTable
from support.tiny_models import load_original


def textbook(q, k, v, visible, scale, sinks=None):
    """Softmax attention in fp64 with repeated KV heads and the sink as one more column."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(group, dim=1) for t in (k, v))
    scores = (q.double() @ k.transpose(-1, -2) * scale).masked_fill(~visible, -torch.inf)
    if sinks is not None:
        column = sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)
        return (torch.cat((scores, column), -1).softmax(-1)[..., :-1] @ v), torch.logsumexp(scores, -1)
    return torch.nan_to_num(scores.softmax(-1)) @ v, torch.logsumexp(scores, -1)


def problem(seed, batch, groups, group, queries, keys, key_dim, value_dim):
    g = torch.Generator().manual_seed(seed)
    heads = groups * group
    q = torch.randn(batch, heads, queries, key_dim, generator=g)
    k = torch.randn(batch, groups, keys, key_dim, generator=g)
    v = torch.randn(batch, groups, keys, value_dim, generator=g)
    visible = torch.rand(batch, 1, queries, keys, generator=g) < 0.6
    return q, k, v, visible, torch.randn(heads, generator=g)


shapes = st.tuples(
    st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 7),
    st.integers(1, 9), st.sampled_from([2, 8]), st.sampled_from([3, 8]),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(shapes, st.booleans())
def test_attend_is_softmax_attention_and_lse_its_denominator(shape, additive):
    q, k, v, visible, _ = problem(*shape)
    mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min) if additive else visible
    out, lse = attend(q, k, v, mask, 0.3)
    expected, expected_lse = textbook(q, k, v, visible, 0.3)
    seen = visible.any(-1).expand(lse.shape)
    assert (lse[~seen] == -torch.inf).all()
    assert (out[~seen] == 0).all()
    torch.testing.assert_close(lse[seen], expected_lse[seen].float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out, expected.float(), rtol=1e-5, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(shapes)
def test_sink_from_lse_is_a_softmax_with_one_more_column(shape):
    q, k, v, visible, sinks = problem(*shape)
    out, lse = attend(q, k, v, visible, 0.5)
    expected, _ = textbook(q, k, v, visible, 0.5, sinks)
    torch.testing.assert_close(out * sink_share(lse, sinks)[..., None], expected.float(), rtol=1e-5, atol=1e-5)


def test_no_mask_means_causal_for_several_queries_and_everything_for_one():
    q, k, v, _, _ = problem(0, 2, 2, 2, 5, 5, 8, 8)
    causal = torch.ones(5, 5, dtype=torch.bool).tril()[None, None].expand(2, 1, 5, 5)
    torch.testing.assert_close(attend(q, k, v, None, 0.3)[0], attend(q, k, v, causal, 0.3)[0])
    last = attend(q[:, :, -1:], k, v, None, 0.3)[0]
    torch.testing.assert_close(last, attend(q, k, v, causal, 0.3)[0][:, :, -1:])


def test_chunks_of_queries_do_not_change_the_result(monkeypatch):
    q, k, v, visible, _ = problem(1, 2, 2, 3, 11, 13, 8, 8)
    whole = attend(q, k, v, visible, 0.3)
    monkeypatch.setattr(attention_mla, "MAX_SCORES", 2 * 6 * 13 * 2)
    for a, b in zip(whole, attend(q, k, v, visible, 0.3), strict=True):
        torch.testing.assert_close(a, b)


@settings(max_examples=40, deadline=None)
@given(shapes, st.booleans())
def test_fused_attention_matches_the_reference(shape, with_sinks):
    """The sink as one more key, for every width and mask; rows that see only the sink give 0."""
    q, k, v, visible, sinks = problem(*shape)
    out, lse = attend(q, k, v, visible, 0.3)
    expected = out * sink_share(lse, sinks)[..., None] if with_sinks else out
    got = attend_fused(q, k, v, visible, 0.3, sinks if with_sinks else None)
    seen = visible.any(-1).expand(lse.shape) | with_sinks
    torch.testing.assert_close(got[seen], expected[seen], rtol=1e-4, atol=1e-5)


def test_fused_attention_without_a_mask_is_causal():
    q, k, v, _, sinks = problem(0, 2, 2, 2, 9, 9, 8, 6)
    out, lse = attend(q, k, v, None, 0.3)
    torch.testing.assert_close(attend_fused(q, k, v, None, 0.3), out, rtol=1e-4, atol=1e-5)
    shared = out * sink_share(lse, sinks)[..., None]
    torch.testing.assert_close(attend_fused(q, k, v, None, 0.3, sinks), shared, rtol=1e-4, atol=1e-5)


def test_minus_infinity_sink_gives_no_nan_in_half_precision():
    """-1e4 over the scale exceeds fp16; infinity times the other keys' zero would be NaN."""
    q, k, v, visible, sinks = problem(1, 1, 2, 2, 5, 5, 8, 8)
    visible[..., 0] = True
    q, k, v = (t.half() for t in (q, k, v))
    got = attend_fused(q, k, v, visible, 0.125, torch.full_like(sinks, -1e4))
    torch.testing.assert_close(got, attend_fused(q, k, v, visible, 0.125), rtol=1e-2, atol=1e-3)


def test_a_rotation_table_has_no_gaps(tiny_models):
    """Some families pass the same columns twice; compiled kernels read a contiguous table."""
    model = load_original(tiny_models["llama"]).model
    for table in RotationTable(model.rotary_emb, 8)(40, torch.zeros(1, 1)):
        assert table.shape == (1, 40, 8) and table[0].is_contiguous()


def test_causal_attention_with_sinks_has_no_mask(monkeypatch):
    """Flash attention takes none."""
    q, k, v = torch.randn(1, 4, 7, 16), torch.randn(1, 2, 7, 16), torch.randn(1, 2, 7, 8)
    sinks, calls = torch.randn(4), []
    attention = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda *x, **kw: calls.append(kw) or attention(*x, **kw)
    )
    out, lse = attend(q, k, v, None, 0.3)
    expected = out * sink_share(lse, sinks)[..., None]
    torch.testing.assert_close(attend_fused(q, k, v, None, 0.3, sinks), expected, rtol=1e-4, atol=1e-5)
    assert calls[0]["attn_mask"] is None and calls[0]["is_causal"]
