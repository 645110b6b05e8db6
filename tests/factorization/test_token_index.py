"""The pairs index: exact with all pairs, and better with more pairs."""

import pytest
import torch

from mlaforge.factorization.token_index import Candidates, PairMoments
from mlaforge.modeling.token_index_mla import PairsIndex
from mlaforge.runtime import UserError

H, G, P, R, T = 4, 2, 6, 10, 200


def text(seed=0):
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(G * 2 * P, G * 2 * P, generator=generator)
    keys = torch.randn(T, G * 2 * P, generator=generator) @ mix * torch.linspace(1, 0.01, G * 2 * P)
    queries = torch.randn(H, T, 2 * P, generator=generator) * torch.linspace(0.1, 2, 2 * P)
    angles = torch.outer(torch.arange(float(T)), 0.5 ** torch.arange(float(P)))
    return keys, queries, angles.cos(), angles.sin()


def as_complex(x):
    return torch.complex(*x.chunk(2, dim=-1))


def rotated(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def exact(keys, queries, cos, sin):
    """Return the exact logits [H, T, T]."""
    k = rotated(keys.view(T, G, -1).transpose(0, 1), cos, sin).repeat_interleave(H // G, dim=0)
    return rotated(queries, cos, sin) @ k.mT


def observed(keys, queries, cos, sin):
    moments = PairMoments(G, P)
    moments.add(as_complex(keys.view(T, G, -1)), as_complex(queries.transpose(0, 1)), [torch.complex(cos, sin)])
    return Candidates.rotary(moments)


def logits(tensors, features, queries, cos, sin):
    """Return the logits [H, T, T] of an index without rounding its keys."""
    index = PairsIndex(G, len(tensors["key.bias"]), features.shape[1], queries.shape[-1])
    index.load_state_dict(tensors)
    keys = index._rotated(index.key(features)[None, None], cos[None], sin[None])[0, 0]
    assert (index.keys(features[None], cos[None], sin[None])[0] - keys).abs().max() <= 0.5
    return (index.queries(queries[None], cos[None], sin[None])[0] @ keys.T).detach()


def test_all_pairs_give_the_exact_logits():
    keys, queries, cos, sin = text()
    tensors = observed(keys, queries, cos, sin).best(2 * P * G, keys, 0.25, 1.0)
    expected = 0.25 * exact(keys, queries, cos, sin)
    torch.testing.assert_close(logits(tensors, keys, queries, cos, sin), expected, rtol=1e-3, atol=1e-3)


def test_more_pairs_have_a_smaller_error():
    keys, queries, cos, sin = text()
    candidates, expected = observed(keys, queries, cos, sin), exact(keys, queries, cos, sin)
    assert (candidates.variance >= 0).all()
    errors = [
        float((logits(candidates.best(width, keys, 1.0, 1.0), keys, queries, cos, sin) - expected).square().mean())
        for width in (4, 8, 12, 16, 20, 24)
    ]
    assert errors == sorted(errors, reverse=True) and errors[-1] < 1e-4 * errors[0]
    # The same number of pairs with the smallest variance has a larger error.
    candidates.variance = -candidates.variance
    worst = logits(candidates.best(8, keys, 1.0, 1.0), keys, queries, cos, sin) - expected
    assert worst.square().mean() > 2 * errors[1]


def test_candidates_on_latents_are_exact():
    """Keys are decompressed from latents: the index reads the cached latents."""
    keys, queries, cos, sin = text()
    generator = torch.Generator().manual_seed(1)
    latents, w = torch.randn(T, R, generator=generator), torch.randn(G * 2 * P, R, generator=generator)
    b = torch.randn(G * 2 * P, generator=generator)
    keys = latents @ w.T + b
    candidates = observed(keys, queries, cos, sin).on_latents(w, b)
    got = logits(candidates.best(2 * P * G, latents, 1.0, 1.0), latents, queries, cos, sin)
    expected = exact(keys, queries, cos, sin)
    assert (got - expected).abs().max() < 1e-3 * expected.abs().max()


def test_unrotated_candidates_are_exact():
    """`latent_rope`: products with the latent, beside a rotary key shared by all heads."""
    _, queries, cos, sin = text()
    generator = torch.Generator().manual_seed(2)
    latents, rope = torch.randn(T, R, generator=generator), torch.randn(T, 2 * P, generator=generator)
    still, w_uk = torch.randn(H, T, 8, generator=generator), torch.randn(G, 8, R, generator=generator)
    moments = PairMoments(1, P)
    moments.add(as_complex(rope[:, None]), as_complex(queries.transpose(0, 1)), [torch.complex(cos, sin)])
    outer = torch.einsum("gjtd,gjte->gde", *[still.unflatten(0, (G, -1))] * 2) / T
    rotary = Candidates.rotary(moments)
    rotary.query = rotary.query.expand(G, -1, -1, -1)
    candidates = Candidates.unrotated(torch.cov(latents.T), outer, w_uk).concatenate(rotary)
    features, all_queries = torch.cat((latents, rope), dim=1), torch.cat((still, queries), dim=-1)
    tensors = candidates.best(2 * len(candidates.variance), features, 1.0, 1.0)
    got = logits(tensors, features, all_queries, cos, sin)
    latent_part = still @ torch.einsum("gdr,tr->gtd", w_uk, latents).repeat_interleave(H // G, dim=0).mT
    expected = latent_part + rotated(queries, cos, sin) @ rotated(rope, cos, sin).T
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


def test_rejects_more_pairs_than_candidates():
    keys, queries, cos, sin = text()
    with pytest.raises(UserError, match="an index key of width 32 exceeds the maximum of this layer, 24"):
        observed(keys, queries, cos, sin).best(32, keys, 1.0, 1.0)
