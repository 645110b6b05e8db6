"""Latent projections: optimality, exactness at the mean and at full rank, and allocation of ranks."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlaforge.factorization import latent as F
from mlaforge.factorization.moments import LayerMoments
from mlaforge.families.spec import LayerSpec
from mlaforge.modeling.rope_mla import rotate

LAYER = LayerSpec(num_heads=6, num_kv_heads=2, head_dim=8, mlp_params=0, mlp_bits=16)
HIDDEN = 24


def psd(n, g):
    a = torch.randn(n, 2 * n, generator=g, dtype=torch.float64)
    return a @ a.T / n


def random_layer(seed=0):
    """Projections with biases, and moments of the right shapes and symmetries."""
    g = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    H, G, D = LAYER.num_heads, LAYER.num_kv_heads, LAYER.head_dim
    p = F.Projections(rand(H * D, HIDDEN), rand(G * D, HIDDEN), rand(G * D, HIDDEN), rand(HIDDEN, H * D),
                      rand(H * D), rand(G * D), rand(G * D))  # fmt: skip
    mean = rand(HIDDEN)
    outer = torch.stack([psd(D, g) for _ in range(H)])
    m = LayerMoments(
        x_outer=psd(HIDDEN, g) + torch.outer(mean, mean), x_sum=mean, g_outer=psd(LAYER.cached, g), key_outer=outer,
        query_outer=outer.flip(0), value_mix=psd(H, g), phase=torch.polar(torch.rand(H, D // 2, generator=g).double(),
        rand(H, D // 2)), weight=torch.ones(H, dtype=torch.float64), samples=mean[None], sample_weight=torch.ones(1),
        first=mean[None], first_weight=torch.ones(1), x_weight=1.0, tokens=1, rows=1,
    )  # fmt: skip
    return p, m


def test_roots():
    matrix = psd(7, torch.Generator().manual_seed(0))
    root, inverse = F.roots(matrix)
    torch.testing.assert_close(root @ root, matrix)
    torch.testing.assert_close(root @ inverse, torch.eye(7, dtype=torch.float64))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 31))
def test_truncation_error_is_what_the_spectrum_predicts(seed, rank):
    """E‖M^½ (y - ŷ)‖² over x ~ (mean, covariance) equals the sum of the dropped values, which is optimal."""
    p, m = random_layer(seed)
    spectrum = F.latent_spectrum(p, m, LAYER)
    down, up = spectrum.truncate(rank)
    w = torch.cat((p.w_k, p.w_v))
    error = w - up @ down
    weight = spectrum.root @ spectrum.root
    measured = torch.trace(weight @ error @ m.covariance @ error.T)
    torch.testing.assert_close(measured, spectrum.values[rank:].sum(), rtol=1e-6, atol=1e-9 * float(spectrum.values[0]))
    assert spectrum.loss(rank) == pytest.approx(float(spectrum.values[rank:].sum()) / 2, abs=1e-12)
    exact = w @ m.mean + torch.cat((p.b_k, p.b_v))
    torch.testing.assert_close(spectrum.at_mean, exact)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, HIDDEN))
def test_cutting_equals_solving_at_the_lower_rank(seed, rank):
    """In both layouts; the outputs at the mean input stay exact."""
    p, m = random_layer(seed)
    candidates = F.channels(p, m, LAYER)
    split = F.split_rope(p, m, LAYER, candidates, candidates.best(2), 1.0)
    for make, part in ((F.to_latent, F.latent_spectrum(p, m, LAYER)), (F.to_latent_rope, split)):
        cut, solved = make(part, LAYER, HIDDEN).cut(rank), make(part, LAYER, rank)
        assert cut.rank == rank and cut.dropped == solved.dropped
        assert set(cut.tensors()) == set(solved.tensors())
        for name, tensor in solved.tensors().items():
            torch.testing.assert_close(cut.tensors()[name], tensor)
        spectrum = getattr(part, "spectrum", part)
        exact = F.by_head(spectrum.w @ m.mean + spectrum.bias, LAYER)
        torch.testing.assert_close(cut.kv_b @ (cut.kv_a[:rank] @ m.mean) + cut.b_kv_b, exact)


def test_no_other_projection_of_that_rank_is_better():
    p, m = random_layer(3)
    spectrum = F.latent_spectrum(p, m, LAYER)
    w, weight = torch.cat((p.w_k, p.w_v)), spectrum.root @ spectrum.root
    g = torch.Generator().manual_seed(0)

    def loss(error):
        return float(torch.trace(weight @ error @ m.covariance @ error.T))

    down, up = spectrum.truncate(10)
    best = loss(w - up @ down)
    for scale in (1e-3, 1e-2, 0.1):
        for _ in range(5):
            bent = up + scale * torch.randn(up.shape, generator=g, dtype=torch.float64)
            bent_down = down + scale * torch.randn(down.shape, generator=g, dtype=torch.float64)
            assert loss(w - bent @ bent_down) > best


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.floats(0, 1e6), min_size=24, max_size=48), min_size=1, max_size=6), st.integers(8, 24))
def test_allocation_spends_the_total_and_beats_uniform(spectra, rank):
    values = {i: torch.tensor(sorted(s, reverse=True), dtype=torch.float64) for i, s in enumerate(spectra)}
    rank = rank // 8 * 8
    ranks = F.allocate(values, rank * len(values), minimum=8)
    assert sum(ranks.values()) == rank * len(values)
    assert all(8 <= ranks[i] <= len(v) for i, v in values.items())
    dropped = sum(float(v[ranks[i] :].sum()) for i, v in values.items())
    uniform = sum(float(v[rank:].sum()) for v in values.values())
    assert dropped <= uniform * (1 + 1e-9) + 1e-9


def logits(q_rows, k_rows, x, index, scale=1.0):
    """Return the logits [H, T, T] of rotated queries and keys; rows are (weight, bias), `index` the frequency of every
    pair."""
    T = x.shape[0]
    frequency = 100.0 ** -(torch.arange(LAYER.head_dim // 2, dtype=torch.float64) / (LAYER.head_dim // 2))
    angle = torch.arange(T, dtype=torch.float64)[:, None] * frequency[index]
    q, k = ((x @ rows[:, :-1].T + rows[:, -1]).view(T, -1, 2 * len(index)).transpose(0, 1) for rows in (q_rows, k_rows))
    q, k = (rotate(t, scale * angle.cos(), scale * angle.sin()) for t in (q, k))
    return q @ k.transpose(1, 2)


@pytest.mark.parametrize("fold", [1, 2])
def test_every_channel_has_mean_square_one(fold):
    """A token's rotary key is rounded with one scale."""
    p, m = random_layer(7)
    candidates = F.channels(p, m, LAYER, fold)
    split = F.split_rope(p, m, LAYER, candidates, candidates.best(len(candidates.gain)), 1.0)
    x = torch.cat((m.mean, torch.ones(1)))
    second = torch.block_diag(m.covariance, torch.zeros(1, 1)) + torch.outer(x, x)
    re, im = (split.rope @ second @ split.rope.T).diagonal().chunk(2)
    torch.testing.assert_close(re + im, torch.ones_like(re))


@pytest.mark.parametrize("fold", [1, 2])
@pytest.mark.parametrize("scale", [1.0, 1.3466])
def test_every_channel_kept_gives_the_original_logits(fold, scale):
    """With fold 1 the result is exact; folding merges neighbouring frequencies, so that it must differ."""
    p, m = random_layer(1)
    candidates = F.channels(p, m, LAYER, fold)
    split = F.split_rope(p, m, LAYER, candidates, candidates.best(len(candidates.gain)), scale)
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    H, G, D = LAYER.num_heads, LAYER.num_kv_heads, LAYER.head_dim
    pairs = torch.arange(D // 2)
    k = torch.cat((p.w_k, p.b_k[:, None]), 1).view(G, D, -1).repeat_interleave(LAYER.group, 0)
    whole = logits(torch.cat((p.w_q, p.b_q[:, None]), 1), k.reshape(H * D, -1), x, pairs, scale)
    rotary_query = split.query.view(H, D + split.rope.shape[0], -1)[:, D:].reshape(-1, HIDDEN + 1)
    shared_key = split.rope.repeat(H, 1)
    turned = logits(rotary_query, shared_key, x, split.index, scale)
    rest = split.spectrum.w[: G * D]
    if fold == 1:
        torch.testing.assert_close(turned, whole)
        assert rest.abs().max() < 1e-9
    else:
        assert (turned - whole).abs().max() > 1e-3


def test_channels_are_ordered_and_read_inverts_write():
    p, m = random_layer(4)
    candidates = F.channels(p, m, LAYER)
    assert (candidates.gain.diff() <= 0).all()
    identity = torch.ones(len(candidates.gain)).to(candidates.read)
    torch.testing.assert_close((candidates.write.conj() * candidates.read).sum(1), identity)


def test_one_per_pair_takes_deepseeks_frequencies():
    p, m = random_layer(5)
    candidates = F.channels(p, m, LAYER)
    assert candidates.index[candidates.one_per_pair(4)].tolist() == [0, 1, 2, 3]
    assert candidates.index[candidates.one_per_pair(2)].tolist() == [0, 2]
    for i in candidates.one_per_pair(4):
        same = candidates.gain[candidates.band == candidates.band[i]]
        assert candidates.gain[i] == same.max()


def test_dimensions_that_lose_rope_are_multiplied_by_the_attention_scaling():
    """YaRN scales cos and sin, so that logits contain its square; queries without RoPE must contain it, too."""
    p, m = random_layer(6)
    candidates = F.channels(p, m, LAYER)
    plain, scaled = (F.split_rope(p, m, LAYER, candidates, candidates.best(2), s) for s in (1.0, 1.3466))
    D = LAYER.head_dim
    shape = (LAYER.num_heads, D + 4, HIDDEN + 1)
    torch.testing.assert_close(scaled.query.view(shape)[:, :D], 1.3466**2 * plain.query.view(shape)[:, :D])
    torch.testing.assert_close(scaled.query.view(shape)[:, D:], plain.query.view(shape)[:, D:])


def test_by_head_interleaves_keys_and_values_per_head():
    D = LAYER.head_dim
    rows = torch.arange(LAYER.cached)
    ordered = F.by_head(rows, LAYER).tolist()
    assert ordered[:D] == list(range(D))
    assert ordered[D : 2 * D] == list(range(2 * D, 3 * D))
    assert sorted(ordered) == rows.tolist()


def test_factored_query_is_exact_at_full_rank_and_at_the_mean():
    p, m = random_layer(7)
    q_a, q_b, bias = F.factor_query(p.w_q, p.b_q, m, HIDDEN)
    torch.testing.assert_close(q_b @ q_a, p.w_q)
    q_a, q_b, bias = F.factor_query(p.w_q, p.b_q, m, 5)
    torch.testing.assert_close(q_b @ (q_a @ m.mean) + bias, p.w_q @ m.mean + p.b_q)


def test_moments_scale_out():
    """Twice the tokens with the same statistics give the same spectrum."""
    p, m = random_layer(8)
    doubled = dataclasses.replace(m, **{f.name: 2 * getattr(m, f.name) for f in dataclasses.fields(m)})
    a, b = F.latent_spectrum(p, m, LAYER), F.latent_spectrum(p, doubled, LAYER)
    torch.testing.assert_close(a.values, b.values)
