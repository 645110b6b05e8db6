"""8-bit and 4-bit weights: their decoded values, and their compiled products against exact integer sums."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from mlaforge.ops.native import kernels
from mlaforge.ops.rounded_weights import packed4, packed8, unpacked4, unpacked8

PACKED = {"linear_int8": packed8, "linear_int4": packed4}


UNPACKED = {"linear_int8": unpacked8, "linear_int4": unpacked4}


@pytest.mark.parametrize(("M", "K"), [(1, 1), (16, 64), (33, 100), (100, 250)])
def test_eight_bits_round_to_nearest(M, K):
    weight = torch.randn(M, K, generator=torch.Generator().manual_seed(0))
    weight[0] = 0
    packed, scale = packed8(weight)
    values = unpacked8(packed) * scale[:, None]
    assert packed.dtype == torch.uint8 and values.shape == (M + -M % 16, K + -K % 64)
    assert bool((values[:, K:] == 0).all() and (values[M:] == 0).all())
    expected = weight.abs().amax(1, keepdim=True) / 254
    assert bool(((values[:M, :K] - weight).abs() <= expected * 1.0001).all())


@pytest.mark.parametrize("bias", [0.0, 1.0, -5.0])
@pytest.mark.parametrize(("M", "K"), [(16, 64), (33, 128), (5, 100)])
def test_four_bits_span_each_group(M, K, bias):
    """As close as 16 even steps from minimum to maximum, except for steps and zeros in 8 bits."""
    torch.manual_seed(0)
    weight = torch.randn(M, K) + bias
    packed, scale = packed4(weight)
    values = (unpacked4(packed) * scale[:, None])[:M, :K]
    groups = F.pad(weight, (0, -K % 64)).view(M, -1, 32)
    least, step = groups.amin(-1, keepdim=True), (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / 15
    free = (torch.round((groups - least) / step.clamp_min(1e-9)) * step + least).view(M, -1)[:, :K]
    assert float((values - weight).norm()) < 1.1 * float((free - weight).norm()) + float(scale[:M].norm() * K**0.5)


def test_four_bit_weights_are_exact():
    """A checkpoint that was rounded to 16 even steps per group of 32 loses no more than in 8 bits."""
    torch.manual_seed(0)
    codes, step, least = torch.randint(0, 16, (32, 8, 32)), torch.rand(32, 8, 1) + 0.5, torch.randn(32, 8, 1) - 7
    codes[..., 0], codes[..., 1] = 0, 15
    weight = (codes * step + least).view(32, 256)
    packed, scale = packed4(weight)
    error = (unpacked4(packed) * scale[:, None] - weight) / scale[:, None]
    # A byte is a step of 1: the error of rounding a zero and truncating a product.
    assert float(error.square().mean().sqrt()) < 0.6 and float(error.abs().max()) < 2


def bytes_of(x):
    """Quantize x to 16-bit integers and a scale, as the kernel does."""
    x = x.float()
    largest = x.abs().amax(1, keepdim=True)
    scale = torch.where(largest > 1e-30, largest / 32639, torch.tensor(1e-30))
    return torch.round(x * (1 / scale)).long(), scale


@given(
    st.sampled_from(["linear_int8", "linear_int4"]), st.integers(1, 40), st.integers(1, 70), st.integers(1, 150),
    st.booleans(), st.booleans(), st.integers(0, 9),
)  # fmt: skip
def test_products_match_integer_arithmetic(compiled, name, N, M, K, with_bias, with_plus, seed):
    """Exact sums, scaled once: the only error is the final rounding to bf16."""
    torch.manual_seed(seed)
    x, bias, plus = (torch.randn(*shape).bfloat16() for shape in ((N, K), (M,), (N, M)))
    x[:, 0] *= 50  # an outlier, to which 8 bits would lose the rest
    packed, scale = PACKED[name](torch.randn(M, K))
    product = getattr(compiled, name)
    actual = product(x, packed, scale, M, bias if with_bias else None, plus if with_plus else None)
    whole, x_scale = bytes_of(x)
    sums = (
        F.pad(whole, (0, packed.shape[1] * (64 if name == "linear_int4" else 4) - K))
        @ UNPACKED[name](packed)[:M].T.long()
    )
    expected = sums.double() * x_scale.double() * scale[:M].double()
    size = expected.abs()
    for extra in (bias if with_bias else None, plus if with_plus else None):
        if extra is not None:
            expected, size = expected + extra.double(), size + extra.double().abs()
    assert actual.dtype == torch.bfloat16
    assert bool(((actual.double() - expected).abs() <= 2**-8 * expected.abs() + 1e-6 * size).all())


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("K", [512, 513, 4100])
def test_the_largest_sums_fit(compiled, name, K):
    """Rows and weights of one sign, whose sums exceed 32 bits."""
    x, weight = torch.full((5, K), 3.0).bfloat16(), torch.full((16, K), -2.0)
    x[1] *= -1
    x[2, ::2] = 0
    packed, scale = PACKED[name](weight)
    actual = getattr(compiled, name)(x, packed, scale, 16, None, None, True)
    whole, x_scale = bytes_of(x)
    sums = F.pad(whole, (0, -K % 64)).double() @ UNPACKED[name](packed).T.double()
    torch.testing.assert_close(actual.double(), sums * x_scale.double() * scale.double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("K", [32, 250, 576])
def test_products_are_batch_invariant(compiled, name, K):
    """Bitwise equal alone and among others, and in every form."""
    torch.manual_seed(0)
    x, (packed, scale) = torch.randn(600, K).bfloat16(), PACKED[name](torch.randn(100, K))
    product, fastest = getattr(compiled, name), kernels()
    whole = (product if fastest is None else getattr(fastest, name))(x, packed, scale, 100, None, None)
    for first, last in ((0, 1), (5, 9), (16, 33), (3, 70), (0, 600)):
        assert torch.equal(product(x[first:last], packed, scale, 100, None, None), whole[first:last])


@pytest.mark.parametrize("name", PACKED)
def test_strided_rows_zeros_and_nan(compiled, name):
    torch.manual_seed(0)
    wide, plus = torch.randn(5, 96).bfloat16(), torch.randn(33, 5).bfloat16().T
    packed, scale = PACKED[name](torch.randn(33, 64))
    product = getattr(compiled, name)
    actual = product(wide[:, 16:80], packed, scale, 33, None, plus)
    assert torch.equal(actual, product(wide[:, 16:80].contiguous(), packed, scale, 33, None, plus.contiguous()))
    wide[1], wide[2, 20], wide[3, 20] = 0, torch.nan, torch.inf
    actual = product(wide[:, 16:80], packed, scale, 33, None, None)
    assert bool((actual[1] == 0).all() and actual[2].isnan().all() and (~actual[3].isfinite()).all())
    assert bool(actual[[0, 4]].isfinite().all())
