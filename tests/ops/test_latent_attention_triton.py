"""Triton's kernels of latent attention, layout `latent`, and of coded rows, against their references."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mlaforge.modeling.coded_rows_mla import CodedRows
from mlaforge.modeling.latent_attention_mla import HeadRMSNorm
from mlaforge.ops import latent_attention_gpu
from mlaforge.ops.coded_rows import PACK_ROWS
from mlaforge.ops.gpu_properties import gpu_properties
from mlaforge.ops.integer_rows import in_columns, integer_columns
from mlaforge.ops.latent_attention import LATENT
from mlaforge.ops.latent_weights_gpu import GpuLatentWeights
from mlaforge.ops.paged_rows import PagedRows
from mlaforge.ops.row_formats.coded import Coded
from mlaforge.ops.row_formats.plain import Plain
from support.paged_steps import DEVICE, Shape, make_step, needs_triton
from support.pairwise import pairwise

pytestmark = [pytest.mark.gpu, needs_triton, pytest.mark.usefixtures("fresh_memory_is_nan")]

# Counts of codes with a rank of 96: of up to 8 bits, of up to 11 bits, and of 8 coordinates each (version 1).
COUNTS = {
    "coded": (96, 96, 96, 64, 32),
    "wide codes": (96, 96, 96, 96, 64, 64, 64, 64, 32, 32, 32),
    "version 1": (96, 88, 80, 64, 48, 40, 24, 24, 16, 8),
}
RANK = 96


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def make_layer(H, G, D, V, rows, norms=False, sinks=False, dtype=torch.float32):
    """The parts of a layer's module from which weights are made."""
    scale = torch.ones(RANK, device=DEVICE)
    if isinstance(rows.format, Coded):
        scale = 1 / rows.format.code.halves(torch.device(DEVICE)).float()
    w_uk, w_uv = (random(G, X, RANK, seed=X) * scale / RANK**0.5 for X in (D, V + 1))
    layer = SimpleNamespace(config=SimpleNamespace(mla_sinks=sinks), qk_norm=norms)
    weight = torch.cat((w_uk, w_uv[:, :V]), dim=1).to(dtype)
    bias = random(G, D + V, seed=5).to(dtype)
    layer.up_projections = lambda: (weight[:, :D], weight[:, D:], bias[:, :D], bias[:, D:])
    if sinks:
        layer.sinks = random(H, seed=6, dtype=dtype)
    if norms:
        layer.q_norm, layer.k_norm = (HeadRMSNorm(D, 1e-5).to(DEVICE, dtype) for _ in range(2))
        layer.q_norm.weight.data.copy_(random(D, seed=7).abs() + 0.5)
        layer.k_norm.weight.data.copy_(random(D, seed=8).abs() + 0.5)
    return layer


def cached_rows(format, step, dtype):
    """A cache with rows at the slots of a step, NaN or nonsense elsewhere."""
    rows = PagedRows(format, format.empty(len(step.k), torch.device(DEVICE)), dtype)
    latents = step.k[:, 0, :RANK]
    if isinstance(format, Coded):
        latents = latents.float() * format.code.halves(torch.device(DEVICE)).float() / 2
    format.write(rows.packed, torch.arange(len(latents), device=DEVICE), latents.to(dtype))
    return rows


def compare(sequences, name="plain", view=None, shape=(8, 2, 16), dtype=torch.float32, window=None, **options):
    """Compare the op's implementations on a step; return the result."""
    H, G, D = shape
    step = make_step(Shape(H, 1, RANK, RANK, aliased=True), sequences, 16, window, dtype=dtype)
    stored = "float8_e4m3fn" if name == "fp8" else str(dtype).removeprefix("torch.")
    format = Coded(COUNTS[name]) if name in COUNTS else Plain(RANK, stored)
    rows = cached_rows(format, step, dtype)
    weights = GpuLatentWeights.of(make_layer(H, G, D, 24, rows, dtype=dtype, **options), rows)
    N = len(step.q)
    latents = random(N, RANK, seed=2)
    if isinstance(format, Coded):
        latents = (latents * format.code.halves(torch.device(DEVICE)).float() / 2).bfloat16()
    inputs = torch.cat((random(N, H * D, seed=3), latents.float()), dim=1).to(dtype)
    # Only differences of positions matter: implementations count from different rows of a window.
    angle = torch.arange(400.0, device=DEVICE)[:, None] * random(D // 2, seed=4)
    view = step.view if view is None else view(step.view)
    results = []
    for implementation in ("triton", "reference"):
        mine = dataclasses.replace(rows, packed=rows.packed.clone())
        out = LATENT(inputs, angle.cos(), angle.sin(), weights, mine, view, 0.2, implementation=implementation)
        results += [(out, format.read(mine.packed, view.slots_N))]
    (actual, written), (expected, expected_rows) = results
    assert torch.equal(written, expected_rows)
    assert actual.dtype == expected.dtype and actual.shape == (N, H * 24)
    size = float(expected.float().abs().max())
    assert size > 0.1
    tolerance = 4e-3 if dtype == torch.float16 or isinstance(format, Coded) else 1e-4
    torch.testing.assert_close(actual.float(), expected.float(), atol=tolerance * size, rtol=tolerance)
    return actual


STEPS = [
    [(1, 1), (70, 1), (130, 1)],
    [(300, 4), (5, 5), (9, 1)],
    [(40, 9), (200, 9)],
]


@pairwise({"sequences": STEPS, "name": ["plain", "fp8", *COUNTS], "dtype": [torch.float32, torch.float16]}, more=0)
def test_latent(sequences, name, dtype):
    compare(sequences, name, dtype=dtype)


@pytest.mark.parametrize("name", ["plain", "coded"])
def test_padding_of_a_captured_step_sees_nothing(name):
    """A sequence without rows between others, and one with fewer rows than query tokens."""
    step = make_step(Shape(8, 1, RANK, RANK, aliased=True), [(70, 2), (5, 2), (9, 2)], 16)
    format = Coded(COUNTS[name]) if name in COUNTS else Plain(RANK, "float32")
    rows = cached_rows(format, step, torch.float32)
    weights = GpuLatentWeights.of(make_layer(8, 2, 16, 24, rows, sinks=True), rows)
    latents = step.k[step.view.slots_N, 0]
    latents = format.read(rows.packed, step.view.slots_N).float() if isinstance(format, Coded) else latents
    inputs = torch.cat((random(6, 8 * 16, seed=3), latents), dim=1)
    angle = torch.arange(80.0, device=DEVICE)[:, None] * random(8, seed=4)
    lengths = torch.tensor([70, 0, 1], dtype=torch.int32, device=DEVICE)
    padded = dataclasses.replace(step.view, seq_lens_S=lengths, lengths=(), runs=())
    out, whole = (
        LATENT(inputs, angle.cos(), angle.sin(), weights, rows, view, 0.2, implementation="triton")
        for view in (padded, step.view)
    )
    torch.testing.assert_close(out[:2], whole[:2], atol=2e-3, rtol=2e-3)
    assert out.isfinite().all() and not torch.allclose(out[2:5], whole[2:5], atol=1e-2)
    # With learned sinks nothing is left of a token that sees nothing.
    assert not out[2:5].any() and out[5].any()


@pairwise(
    {
        "options": [{"norms": True}, {"sinks": True}, {"window": 40}], "shape": [(9, 3, 64), (4, 1, 24), (6, 6, 16)],
        "name": ["plain", "coded"],
    },
    more=0,
)  # fmt: skip
def test_latent_of_a_family(shape, options, name):
    compare([(90, 3), (33, 1)], name, shape=shape, **options)


def test_long_sequences_are_split_and_grouped(monkeypatch):
    """Sums of several pieces are merged; sequences whose temporary results exceed the workspace are computed in
    groups."""
    gpu = dataclasses.replace(gpu_properties(torch.device(DEVICE)), multiprocessors=16)
    monkeypatch.setattr(latent_attention_gpu, "gpu_properties", lambda device: gpu)
    sequences = [(390, 2), (1, 1), (260, 2)]
    for name in ("plain", "coded"):
        whole = compare(sequences, name)
        with monkeypatch.context() as patch:
            patch.setattr(latent_attention_gpu, "WORKSPACE", 1)
            torch.testing.assert_close(compare(sequences, name), whole, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("name", ["plain", "coded"])
@pytest.mark.parametrize("window", [None, 30])
def test_latent_of_a_tree(window, name):
    tree = [[0, -1, -1, -1], [1, 0, -1, -1], [1, -1, 0, -1], [2, 1, -1, 0]]
    tree_Tn = torch.tensor(tree, dtype=torch.int32, device=DEVICE)
    compare([(70, 4)], name, lambda view: dataclasses.replace(view, tree_Tn=tree_Tn), window=window)


@pytest.mark.parametrize("name", ["plain", "coded"])
def test_latent_of_a_selection(name):
    """Rows at given slots with given positions, the token itself last."""

    def selected(view):
        positions = [[0, 3, 4, 60, 99], [0, 0, 0, 0, 0], [1, 2, 6, 0, 0]]
        counts = (5, 1, 3)
        positions_SK = torch.tensor(positions, dtype=torch.int32, device=DEVICE)
        slots_SK = torch.zeros_like(positions_SK)
        for s, count in enumerate(counts):
            at = positions_SK[s, :count].long()
            slots_SK[s, :count] = view.block_table_SB[s, at // 16] * 16 + (at % 16).int()
        first_S = torch.arange(0, 15, 5, dtype=torch.int32, device=DEVICE)
        return dataclasses.replace(
            view, block_table_SB=slots_SK, positions_SK=positions_SK, first_S=first_S, counts=counts, lengths=counts,
            seq_lens_S=first_S + torch.tensor(counts, dtype=torch.int32, device=DEVICE), block_size=1,
        )  # fmt: skip

    compare([(100, 1), (1, 1), (7, 1)], name, selected)


counts_of_codes = st.lists(st.integers(0, 6), min_size=1, max_size=11).map(
    lambda numbers: tuple(16 + 16 * count for count in sorted(numbers, reverse=True))
)


@given(counts=counts_of_codes, seed=st.integers(0, 1000))
def test_integers_and_weights_give_the_product_of_codes(counts, seed):
    """256 times the product of high bytes, the product of low bytes, and that of the offset."""
    generator, code, columns = torch.Generator().manual_seed(seed), CodedRows(counts), integer_columns(counts)
    halves = code.halves(torch.device("cpu"))
    codes = torch.rand(3, counts[0], generator=generator).mul(2 * halves).floor().long() - halves
    weight = torch.randint(-9, 10, (2, counts[0]), generator=generator)
    integers, ordered = columns.integers(codes).long(), in_columns(weight, columns)
    high, low = (integers[:, part] @ ordered[:, part].T for part in (slice(columns.wide), slice(columns.wide, None)))
    assert torch.equal(256 * high + low + (columns.offset.long() @ weight.T), codes @ weight.T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", COUNTS)
def test_rows_are_packed(name, dtype):
    format, units = Coded(COUNTS[name]), torch.tensor([5, 0, 3, 2], device=DEVICE)
    halves = format.code.halves(torch.device(DEVICE)).float()
    # Beyond both ends of the codes' ranges, halves, and what no code represents.
    row = (random(4, RANK, seed=1) * halves).bfloat16()
    row[0, :6] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.5, 1.5, -2.5])
    rows = [torch.zeros(6, format.unit_bytes, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    for out, implementation in zip(rows, ("triton", "reference"), strict=True):
        PACK_ROWS(row.to(dtype), format, out, units, implementation=implementation)
    assert torch.equal(*rows) and rows[0].any()


@pytest.mark.parametrize("name", ["plain", "coded"])
def test_an_entry_changes_the_launches_and_not_the_result(with_entry, name, monkeypatch):

    tiles = []
    original = latent_attention_gpu.make_launches

    def recorded(*arguments, **options):
        launches = original(*arguments, **options)
        tiles.append((launches.logits[1]["BLOCK_N"], launches.logits[2], launches.sum[1]["BLOCK_C"]))
        return launches

    monkeypatch.setattr(latent_attention_gpu, "make_launches", recorded)
    configuration = {"rows": 32, "num_warps": 8, "num_stages": 3, "BLOCK_C": 32, "waves": 3}
    default, changed, key = with_entry("latent", configuration, lambda: compare([(70, 1), (40, 2)], name))
    torch.testing.assert_close(changed, default, rtol=2e-2, atol=2e-2)
    assert tiles[0] != tiles[1] == (32, {"num_warps": 8, "num_stages": 3}, 32)
    assert key[0] == "latent" and key[5] == ("fp32" if name == "plain" else "coded")
