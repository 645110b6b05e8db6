"""Bits of a latent's coordinates: measured rates, their allocation, and the encoded latent."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlaforge.factorization.code import Rates, RowCurve, allocate_bits, counts, encode, predicted_loss
from mlaforge.factorization.latent import Latent
from mlaforge.factorization.moments import FIRST
from mlaforge.modeling.coded_layout_mla import ALIGNMENT, GROUP, CodedLayout
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


def falling(coordinates, generator):
    """Errors [W, R] of coordinates whose variances fall."""
    errors = torch.rand(LARGEST_CODE + 1, coordinates, generator=generator).sort(0, descending=True).values
    return errors * torch.logspace(1, -1, coordinates)


@given(st.sampled_from([8, 40, 64]), st.sampled_from([0, 6, 16]), st.integers(0, 5))
@settings(max_examples=20)
def test_widths_have_the_least_error_for_every_row_length(coordinates, rope, seed):
    """Compared with all widths of the groups, and the lengths of the layout."""
    error = falling(coordinates, torch.Generator().manual_seed(seed))
    curve, sizes = RowCurve(error, rope), [part.shape[1] for part in error.split(GROUP, 1)]
    least = {}
    for choice in itertools.product(range(LARGEST_CODE + 1), repeat=len(sizes)):
        if any(choice):
            widths = torch.tensor(choice).repeat_interleave(torch.tensor(sizes))
            length = CodedLayout(counts(widths), rope).row_bytes // ALIGNMENT
            least[length] = min(least.get(length, math.inf), 2 * predicted_loss(error, widths))
    assert curve.shortest() == min(least)
    for length in range(curve.shortest(), len(curve.least)):
        best = min(loss for other, loss in least.items() if other <= length)
        # A group that is not full is counted as a full one.
        assert curve.least[length] >= best - 1e-4 and (
            coordinates % GROUP or curve.least[length] == pytest.approx(best, rel=1e-4, abs=1e-5)
        )
        widths = curve.widths(length)
        assert CodedLayout(counts(widths), rope).row_bytes <= length * ALIGNMENT
        assert 2 * predicted_loss(error, widths) == pytest.approx(curve.least[length], rel=1e-4, abs=1e-5)


@given(st.integers(1, 3), st.integers(128, 16000), st.integers(0, 5))
@settings(max_examples=30)
def test_bytes_are_spent_where_they_save_most(layers, total, seed):
    """No row can be longer by what remains; no shorter row of one layer and longer row of another lose less, but for
    the hull's gaps."""
    generator = torch.Generator().manual_seed(seed)
    errors = {i: falling(4 * GROUP, generator) for i in range(layers)}
    total = max(total, 128 * layers)
    widths = allocate_bits(errors, total)
    lengths = {i: CodedLayout(counts(w)).row_bytes // ALIGNMENT for i, w in widths.items()}
    remaining = total // (8 * ALIGNMENT) - sum(lengths.values())
    assert remaining >= 0
    curves = {i: RowCurve(error).least for i, error in errors.items()}
    for i, length in lengths.items():
        assert curves[i][length] <= curves[i][min(length + remaining, len(curves[i]) - 1)] + 1e-9
    for a, b in itertools.permutations(errors, 2):
        if lengths[a] > 1 and lengths[b] + 1 < len(curves[b]):
            lost = curves[a][lengths[a] - 1] - curves[a][lengths[a]]
            saved = curves[b][lengths[b]] - curves[b][lengths[b] + 1]
            assert saved <= lost + 0.05 * curves[b][1]


@pytest.mark.parametrize("rotary", [0, 6])
def test_an_encoded_latent_is_the_rounded_latent(rotary):
    """With many bits its outputs are those of the full rank; cut coordinates are replaced by their mean."""
    generator = torch.Generator().manual_seed(1)
    C, n, R = 80, 96, 64
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
    widths = allocate_bits({0: r.error}, 2 * R)[0]
    part, code = encode(latent, r, widths), CodedRows(counts(widths))
    decoded = code.unpack(code.pack(x @ part.kv_a[: part.rank].T + part.b_kv_a[: part.rank])).double()
    assert part.rank == counts(widths)[0] < R
    error = ((decoded @ part.kv_b.T + part.b_kv_b) - exact).square().mean(0).sum()
    predicted = (2 * predicted_loss(r.error, widths)) * latent.kv_b.square().sum(0).mean()
    assert 0.1 * predicted < error < 1.3 * predicted
