"""Bits of a latent's coordinates: measured rates, their allocation, and the encoded latent."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mlaforge.factorization.code import BLOCK, Rates, allocate_bits, counts, encode, predicted_loss
from mlaforge.factorization.latent import Latent
from mlaforge.factorization.moments import FIRST
from mlaforge.modeling.coded_rows_mla import LARGEST_CODE, CodedRows


def samples(n=4000, numbers=32, seed=0, tail=1.0):
    x = torch.randn(n, numbers, generator=torch.Generator().manual_seed(seed)) * torch.logspace(1, -3, numbers)
    return x * tail


def rates(x, first=None):
    first = x[: 2 * FIRST] if first is None else first
    return Rates.of(x, torch.ones(len(x)), first, torch.ones(len(first)))


def test_rates_decrease_like_those_of_a_normal_variable():
    """One more bit reduces the error to nearly a fourth; no code is below the rate-distortion bound."""
    r = rates(samples())
    assert torch.equal(r.order, torch.arange(32)), "coordinates are in descending order of the bits that they need"
    ratio = r.error[1:] / r.error[:-1]
    assert ((ratio[1:8] > 0.2) & (ratio[1:8] < 0.45)).all()
    bound = r.error[0] * 4.0 ** -torch.arange(LARGEST_CODE + 1)[:, None]
    assert (r.error[1:] > bound[1:]).all() and (r.error[4] < 4.5 * bound[4]).all()


def test_the_first_token_is_on_a_level():
    """It is an outlier, and represented nearly exactly by every coordinate with a few bits."""
    x = samples()
    first = x[: 4 * FIRST].clone()
    first[::FIRST] = 9 * x.std(0) * (torch.arange(32) % 5 == 0) + 0.3 * x.std(0)
    weight = torch.ones(len(first))
    weight[::FIRST] = 1000
    r = Rates.of(x, torch.ones(len(x)), first, weight)
    for width in (4, 7):
        exact = first[0, r.order]
        level = ((exact - r.centre[width]) / r.step[width] - 0.5).round()
        assert (level.abs() <= 2 ** (width - 1)).all()
        decoded = (level + 0.5) * r.step[width] + r.centre[width]
        assert ((decoded - exact).abs() < 0.02 * r.step[width]).all()


@pytest.mark.parametrize("n", [4095, 4096])
def test_constant_coordinates_need_no_bits(n):
    """With one repeated token a first layer's inputs are equal, but differ from their mean as rounded to fp32."""
    x = samples(n)
    x[:, 3:20] = 1.2345 * torch.linspace(-7, 70, 17)
    x[:, 5] = 0
    r = rates(x, x[:1].repeat(2 * FIRST, 1))
    assert all(tensor.isfinite().all() for tensor in (r.error, r.step, r.centre)) and (r.step > 0).all()
    assert set(range(3, 20)) <= set(r.order[-17:].tolist())
    assert predicted_loss(r.error, allocate_bits({0: r.error}, 32 * LARGEST_CODE)[0]) <= 1e-4 * r.error[0].sum()


@given(st.integers(1, 3), st.integers(8, 900), st.integers(0, 5))
def test_bits_are_spent_where_they_save_most(layers, total, seed):
    """Exchanging a block's last bit for another's next one lowers the sum by no more than the hull's gaps."""
    generator = torch.Generator().manual_seed(seed)
    errors = {}
    for i in range(layers):
        # Convex curves, as on the hull of any code.
        falls = torch.rand(LARGEST_CODE, 4 * BLOCK, generator=generator).sort(0, descending=True).values
        errors[i] = torch.cat((falls.flip(0).cumsum(0).flip(0), torch.zeros(1, 4 * BLOCK)))
    total = max(total, 8 * layers)
    widths = allocate_bits(errors, total)
    spent = sum(int(w.sum()) for w in widths.values())
    assert spent <= total and (total - spent < BLOCK or spent == layers * 4 * BLOCK * LARGEST_CODE)
    assert all(int(w.view(-1, BLOCK)[0, 0]) >= 1 for w in widths.values())
    last, following = [], []
    for i, at in itertools.product(errors, range(4)):
        curve, width = errors[i].view(-1, 4, BLOCK).sum(-1)[:, at], int(widths[i][at * BLOCK])
        if width > (at == 0):
            last.append(float(curve[width - 1] - curve[width]))
        if width < LARGEST_CODE:
            following.append(float(curve[width] - curve[width + 1]))
    assert not last or not following or min(last) >= max(following) - 1e-4


@pytest.mark.parametrize("rotary", [0, 6])
def test_an_encoded_latent_is_the_rounded_latent(rotary):
    """With many bits its outputs are those of the full rank; cut coordinates are replaced by their mean."""
    generator = torch.Generator().manual_seed(1)
    C, n, R = 40, 48, 32
    kv_a = (
        torch.randn(R + rotary, C, generator=generator).double() * torch.logspace(1, -2, R + rotary).double()[:, None]
    )
    latent = Latent(
        kv_a=kv_a, b_kv_a=torch.randn(R + rotary, generator=generator).double() if rotary else torch.zeros(R).double(),
        kv_b=torch.randn(n, R, generator=generator).double(), at_mean=torch.zeros(n).double(),
        centre=torch.zeros(R).double(), values=torch.ones(R).double(), lost=torch.zeros(()).double(),
    )  # fmt: skip
    latent.b_kv_a[:R] = 0
    x = torch.randn(2000, C, generator=generator).double()
    c = x @ kv_a[:R].T
    r = Rates.of(c.float(), torch.ones(len(c)), c[:8].float(), torch.ones(8))
    widths = torch.full((R,), LARGEST_CODE)
    part = encode(latent, r, widths)
    assert counts(widths) == (R,) * LARGEST_CODE and predicted_loss(r.error, widths) < 1e-5 * float(r.error[0].sum())
    row = x @ part.kv_a.T + part.b_kv_a
    assert torch.allclose(row[:, R:], x @ kv_a[R:].T + latent.b_kv_a[R:])
    rounded = row[:, :R].round() @ part.kv_b.T + part.b_kv_b
    exact = c @ latent.kv_b.T
    assert (rounded - exact).std() < 5e-3 * exact.std()
    # Cut and rounded like a row: the error is at most the predicted one, which assumes text that varies more.
    widths = allocate_bits({0: r.error}, 3 * R)[0]
    part, code = encode(latent, r, widths), CodedRows(counts(widths))
    decoded = code.unpack(code.pack(x @ part.kv_a[: part.rank].T + part.b_kv_a[: part.rank])).double()
    assert part.rank == counts(widths)[0] < R
    error = ((decoded @ part.kv_b.T + part.b_kv_b) - exact).square().mean(0).sum()
    predicted = (2 * predicted_loss(r.error, widths)) * latent.kv_b.square().sum(0).mean()
    assert 0.1 * predicted < error < 1.3 * predicted
