"""Triton kernels of the small operations of a layer against their references: norms, gates, rotation and the write to
the cache, the ends of the absorbed form, and the routing of experts."""

from types import SimpleNamespace

import pytest
import torch

from mlaforge.ops.absorbed_latents import ABSORB_AND_STORE, UP_PROJECT_VALUES, AbsorbedWeights
from mlaforge.ops.coded_rows import UNPACK_ROWS
from mlaforge.ops.elementwise import ADD_RMS_NORM, SILU_MUL
from mlaforge.ops.paged_rows import PagedRows
from mlaforge.ops.rope_and_store import OP as ROPE_AND_STORE
from mlaforge.ops.row_formats.coded import Coded
from mlaforge.ops.row_formats.int8 import Int8
from mlaforge.ops.row_formats.plain import Plain
from support.paged_steps import DEVICE, needs_triton
from support.pairwise import pairwise

pytestmark = [pytest.mark.gpu, needs_triton, pytest.mark.usefixtures("fresh_memory_is_nan")]
DTYPES = [torch.float32, torch.float16]


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def rotation(N, pairs):
    angle = random(N, 1, pairs, seed=9)
    return torch.complex(angle.cos(), angle.sin())


def empty_rows(width, slots, dtype, cached):
    format = Plain(width, str(cached or dtype).removeprefix("torch."))
    rows = PagedRows.empty(format, slots, dtype, torch.device(DEVICE))
    rows.packed.view(torch.uint8).zero_()
    return rows


def int8_rows(G, D, slots, dtype):
    rows = PagedRows.empty(Int8((D,) * 2 * G), slots, dtype, torch.device(DEVICE))
    rows.packed.zero_()
    return rows


def assert_equal(actual, expected, dtype):
    """Up to a rounding of the last bit."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    assert expected.float().abs().max() > 0.1
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(actual.float(), expected.float(), atol=tolerance, rtol=tolerance)


@pairwise({"dtype": DTYPES, "N,C": [(1, 48), (5, 128), (3, 2880), (0, 64)], "add": [True, False]}, more=0)
def test_norm_of_a_sum(N, C, add, dtype):
    x, residual, weight = random(N, C, dtype=dtype), random(N, C, dtype=dtype, seed=1), random(C, dtype=dtype, seed=2)
    inputs = (x, residual if add else None, weight, 1e-5)
    results = [ADD_RMS_NORM(*inputs, implementation=name) for name in ("triton", "reference")]
    for actual, expected in zip(*results, strict=True):
        assert actual.shape == (N, C)
        if N:
            assert_equal(actual, expected, dtype)
    assert torch.equal(results[0][1], results[1][1]), "the sum is rounded before the norm"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("N", "width"), [(2, 40), (3, 1536)])
def test_gate(N, width, dtype):
    gate_up = 3 * random(N, 2 * width, dtype=dtype)
    actual, expected = (SILU_MUL(gate_up, implementation=name) for name in ("triton", "reference"))
    assert_equal(actual, expected, dtype)


@pairwise(
    {
        "dtype": DTYPES, "H,G,D": [(4, 2, 16), (9, 3, 64), (5, 5, 24)], "norms": [True, False],
        "cached": ["plain", "int8"],
    }
)  # fmt: skip
def test_rope_and_store(H, G, D, norms, dtype, cached):
    N = 5
    qkv = random(N, (H + 2 * G) * D, dtype=dtype)
    weights = (random(D, dtype=dtype, seed=3), random(D, dtype=dtype, seed=4), 1e-5) if norms else None
    slots = torch.tensor([7, 0, 3, 9, 4], device=DEVICE)
    results = []
    for name in ("triton", "reference"):
        mine = qkv.clone()
        # A head of zeros has scale 0.
        mine[0, -D:] = 0
        rows = empty_rows(2 * G * D, 10, dtype, None) if cached == "plain" else int8_rows(G, D, 10, dtype)
        ROPE_AND_STORE(mine, rotation(N, D // 2), rows, slots, H + G, D, weights, implementation=name)
        results.append((mine, rows.packed))
    (actual, written), (expected, expected_rows) = results
    assert_equal(actual, expected, dtype)
    if cached == "plain":
        assert_equal(written, expected_rows, dtype)
    else:
        # A code may be rounded to its other neighbour.
        assert (written != expected_rows).float().mean() < 0.01
        numbers = [rows.format.read(packed, slots).float() for packed in (written, expected_rows)]
        torch.testing.assert_close(*numbers, atol=float(numbers[1].abs().max()) / 64, rtol=0.0)
    assert not written[[1, 2, 5, 6, 8]].any(), "no other slot is written"


def test_rope_and_store_to_fp8():
    """Numbers that fp8 has, because Triton's interpreter rounds to fp8 wrongly, and one that is too large."""
    qkv = (random(3, 4 * 16, dtype=torch.float16) * 2).round() / 2
    qkv[0, -1], qkv[1, -2] = 500.0, -500.0
    results = []
    for name in ("triton", "reference"):
        rows = empty_rows(2 * 16, 3, torch.float16, torch.float8_e4m3fn)
        still = torch.ones(3, 1, 8, dtype=torch.complex64, device=DEVICE)
        ROPE_AND_STORE(qkv.clone(), still, rows, torch.arange(3, device=DEVICE), 3, 16, implementation=name)
        results.append(rows.packed.float())
    assert torch.equal(*results)
    assert results[0].max() == 448 and results[0].min() == -448


def absorbed_weights(H, G, D, V, R, E, sinks, dtype):
    kv_b = random(G * (D + V), R, dtype=dtype, seed=5) / R**0.5
    bias = random(G * (D + V), dtype=dtype, seed=6)
    parts = kv_b.view(G, D + V, R).split([D, V], dim=1)
    biases = (part.contiguous() for part in bias.view(G, D + V).split([D, V], dim=1))
    index = torch.randperm(12, generator=torch.Generator().manual_seed(7))[: E // 2].to(DEVICE)
    return AbsorbedWeights(*parts, *biases, random(H, dtype=dtype, seed=8) if sinks else None, index)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("N", "H", "G", "D", "V", "R", "E"), [(3, 4, 2, 16, 16, 40, 8), (1, 6, 2, 24, 32, 200, 16), (9, 8, 1, 8, 20, 64, 4)]
)
@pytest.mark.parametrize("sinks", [True, False])
def test_absorbed_form(N, H, G, D, V, R, E, sinks, dtype):
    weights = absorbed_weights(H, G, D, V, R, E, sinks, dtype)
    x = random(N, H * (D + E) + R + E, dtype=dtype)
    slots = torch.arange(10, 10 + N, device=DEVICE).flip(0)
    results = []
    for name in ("triton", "reference"):
        rows = empty_rows(R + E, 20, dtype, None)
        q, shift = ABSORB_AND_STORE(x, rotation(N, 12), weights, rows, slots, 0.3, implementation=name)
        results.append((q, shift, rows.packed))
    (q, shift, written), (expected_q, expected_shift, expected_rows) = results
    assert_equal(q, expected_q, dtype)
    assert_equal(written, expected_rows, dtype)
    assert (shift is None) == (expected_shift is None) == (not sinks)
    if sinks:
        assert_equal(shift, expected_shift, dtype)
    out, lse = random(N, H, R, dtype=dtype, seed=11), random(N, H, seed=12)
    values = [UP_PROJECT_VALUES(out, lse, shift, weights, implementation=name) for name in ("triton", "reference")]
    assert_equal(*values, dtype)


@pytest.mark.parametrize(("N", "E", "K"), [(1, 4, 2), (7, 6, 3), (40, 32, 4), (1, 128, 4), (20, 5, 5)])
def test_routing_chooses_and_sorts_as_torch(N, E, K):
    from mlaforge.ops import mxfp4_experts_triton as experts

    logits = random(N, E)
    arguments, _ = experts.route_launch(logits, K)
    experts.route_kernel[(1,)](**arguments)
    best, chosen = logits.topk(K)
    order, offsets = experts.route(chosen, E)
    torch.testing.assert_close(arguments["weights"], best.softmax(-1))
    assert torch.equal(arguments["order"], order) and torch.equal(arguments["offsets"], offsets)


def test_routing_of_logits_that_are_not_finite_stays_in_bounds():
    from mlaforge.ops import mxfp4_experts_triton as experts

    logits = random(3, 6)
    logits[0], logits[1, :5] = torch.nan, -torch.inf
    arguments, _ = experts.route_launch(logits, 2)
    experts.route_kernel[(1,)](**arguments)
    assert arguments["order"].sort().values.tolist() == list(range(6))
    assert arguments["offsets"][-1] == 6


@pytest.mark.parametrize("tokens", [3, 5])
def test_mixture_of_logits(tokens, monkeypatch):
    """With its own routing, and beyond what that holds with torch's."""
    from mlaforge.ops import mxfp4_experts_triton as experts
    from mlaforge.ops.mxfp4_experts import MIXTURE, OP, Mxfp4Experts

    monkeypatch.setattr(experts, "ROUTED", 4 * 4)
    weights = {"gate_up_proj": torch.empty(4, 64, 192), "down_proj": torch.empty(4, 96, 64)}
    module = Mxfp4Experts(SimpleNamespace(num_experts=4, alpha=1.702, limit=7.0, **weights)).to_empty(device="cpu")
    for name, tensor in module.named_buffers():
        if tensor.dtype == torch.uint8:
            low, high = (0, 256) if name.endswith("blocks") else (120, 125)
            tensor.random_(low, high, generator=torch.Generator().manual_seed(0))
        else:
            tensor.normal_(generator=torch.Generator().manual_seed(1))
    module.to(DEVICE)
    hidden, logits = random(tokens, 64), random(tokens, 4, seed=2)
    actual = MIXTURE(hidden, logits, 2, *module.packed, implementation="triton")
    best, chosen = logits.topk(2)
    (expected,) = OP(hidden, chosen, best.softmax(-1), *module.packed, implementation="reference")
    torch.testing.assert_close(actual, expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-4)


@pytest.mark.parametrize(
    ("counts", "rope_dim"),
    [((192, 192, 192, 128, 96, 64, 32, 32, 8), 0), ((64, 64, 40, 24, 16, 8, 8), 8), ((40, 40, 32), 0),
     ((*([96] * 8), 64, 32, 16), 16)],
)  # fmt: skip
def test_coded_rows_are_unpacked_exactly(counts, rope_dim):
    """Every plane, runs that do not fill words, repeated units; rotary keys to the last bit of bf16, which Triton's
    interpreter truncates."""
    format = Coded(counts, rope_dim)
    x = random(7, format.width) * torch.linspace(5, 0, format.width, device=DEVICE).exp()
    rows, units = format.code.pack(x), torch.tensor([3, 1, 6, 0, 0], device=DEVICE)
    actual, expected = (UNPACK_ROWS(rows, format, units, implementation=name) for name in ("triton", "reference"))
    assert (
        torch.equal(actual[:, : counts[0]], expected[:, : counts[0]]) and expected[:, : counts[0]].unique().numel() > 4
    )
    torch.testing.assert_close(actual[:, counts[0] :], expected[:, counts[0] :], atol=0, rtol=2**-7)
