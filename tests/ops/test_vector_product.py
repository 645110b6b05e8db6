"""Triton's product of a few rows against its reference, and its choice by the tuned table."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mlaforge.ops import tuned
from mlaforge.ops.vector_product import MOST_ROWS, OP
from support.paged_steps import DEVICE, needs_triton

pytestmark = [pytest.mark.gpu, needs_triton, pytest.mark.usefixtures("fresh_memory_is_nan")]
HERE = torch.device(DEVICE)
FLOAT16 = torch.float16


@pytest.fixture(autouse=True)
def no_tables(monkeypatch):
    monkeypatch.setattr(tuned, "_state", tuned._State())
    yield
    tuned.use([], HERE)


def make_inputs(N, K, M, bias=False, strided=False, seed=0):
    draw = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=draw).to(HERE, FLOAT16)

    x = random(N, K + 16)[:, :K] if strided else random(N, K)
    return x, random(M, K), random(M) if bias else None


def run(inputs, configuration, out_fp32=False):
    key = tuned.vector_product_key(inputs[1])
    tuned.use([tuned.candidate("vector_product", key, configuration)], HERE)
    return OP(*inputs, out_fp32, implementation="triton")


@given(
    N=st.integers(0, MOST_ROWS), K=st.integers(1, 600), M=st.integers(1, 90), bias=st.booleans(),
    strided=st.booleans(), out_fp32=st.booleans(), splits=st.sampled_from([1, 2, 3, 8]),
    size=st.sampled_from([16, 64]),
)  # fmt: skip
def test_against_the_reference(N, K, M, bias, strided, out_fp32, splits, size):
    inputs = make_inputs(N, K, M, bias, strided)
    out = run(inputs, {"splits": splits, "BLOCK_O": size}, out_fp32)
    expected = OP.reference(*inputs, True)
    assert out.shape == (N, M) and out.dtype == (torch.float32 if out_fp32 else FLOAT16)
    torch.testing.assert_close(out.float(), expected, atol=2e-4 * K**0.5 if out_fp32 else 2e-3 * K**0.5, rtol=2e-3)


@pytest.mark.parametrize("splits", [1, 3])
def test_a_row_has_one_result_beside_any_others(splits):
    """To the bit: one configuration serves all numbers of rows."""
    x, weight, _ = make_inputs(MOST_ROWS, 500, 40)
    configuration = {"splits": splits, "BLOCK_O": 16}
    together = run((x, weight, None), configuration)
    for n in range(MOST_ROWS):
        assert torch.equal(run((x[n : n + 1], weight, None), configuration)[0], together[n])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x, w: (torch.cat((x, x)), w), "at most 8 rows"),
        (lambda x, w: (x.float(), w.float()), "not torch.float32"),
        (lambda x, w: (x, w.T.contiguous().T), "contiguous"),
    ],
)
def test_what_it_does_not_support_is_named(change, reason):
    x, weight, _ = make_inputs(MOST_ROWS, 32, 16)
    supported = OP.implementations["triton"].supports
    assert supported(x, weight, None) is True
    assert reason in supported(*change(x, weight), None)


def test_it_is_never_chosen_without_the_table():
    inputs = make_inputs(1, 32, 16)
    assert OP.choose(*inputs)[0] == "reference"
