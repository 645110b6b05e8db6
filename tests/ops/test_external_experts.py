"""DeepGEMM's grouped products for MXFP4 experts, on a stand-in with the library's signature and checks."""

import inspect

import pytest
import torch

from mlaforge.bench.layer_operations import experts_inputs
from mlaforge.ops.external import deep_gemm as adapter
from mlaforge.ops.mxfp4 import unpack
from mlaforge.ops.mxfp4_experts import MIXTURE, OP, reference
from mlaforge.runtime import UserError
from support import mock_kernels
from support.mock_kernels import deep_gemm

# Experts, experts per token, hidden size, intermediate size: whole tiles, and parts of tiles.
SIZES = [(4, 2, 256, 128), (6, 3, 160, 224)]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    mock_kernels.install(monkeypatch)
    monkeypatch.delenv("MLAFORGE_OPS", raising=False)


@pytest.mark.parametrize("tokens", [1, 7, 300])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_result_differs_by_the_rounding_of_inputs(tokens, sizes):
    inputs = experts_inputs(tokens, sizes, torch.bfloat16, CPU)
    got = OP(*inputs, implementation="deep_gemm")[0].double()
    want = reference(*(x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs))[0]
    error = (got - want).norm() / want.norm()
    assert 0.002 < error < 0.06


def test_mixture_routes_and_computes():
    hidden, _, _, *packed = experts_inputs(5, SIZES[0], torch.bfloat16, CPU)
    logits = torch.randn(5, 4)
    got = MIXTURE(hidden, logits, 2, *packed, implementation="deep_gemm")
    best, ids = logits.topk(2)
    assert torch.equal(got, OP(hidden, ids, best.softmax(-1), *packed, implementation="deep_gemm")[0])


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_weights_are_converted_exactly(sizes):
    _, _, _, blocks, scales, *_ = experts_inputs(1, sizes, torch.bfloat16, CPU)
    # Scales of a tile that differ by 2^14.
    scales = torch.randint(110, 125, scales.shape, dtype=torch.uint8)
    codes, tile_scales = adapter.weight_codes(blocks, scales)
    Y, X = codes.shape[1:]
    whole = tile_scales.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :Y, :X]
    assert torch.equal(codes.float() * whole, unpack(blocks, scales))


def test_weights_are_converted_once(capsys):
    inputs = experts_inputs(2, SIZES[0], torch.bfloat16, CPU)
    for _ in range(2):
        OP(*inputs, implementation="deep_gemm")
    assert capsys.readouterr().err.count("converted to 8 bits") == 2


@pytest.mark.parametrize("ids", [[[0, 1]], [[3, 0], [3, 1], [3, 2]], [[2, 1]] * 200])
def test_groups_start_at_whole_tiles(ids):
    ids = torch.tensor(ids)
    rows, of_row = adapter.group_rows(ids, 4, 128)
    assert len(of_row) % 128 == 0 and len(set(rows.tolist())) == ids.numel()
    assert torch.equal(of_row[rows].long(), ids.flatten())
    assert (of_row >= 0).sum() == ids.numel()
    for tile in of_row.split(128):
        assert len(set(tile.tolist()) - {-1}) <= 1 and (tile[0] >= 0 or (tile == -1).all())


@pytest.mark.parametrize(
    ("dtype", "widths", "capability", "reason"),
    [
        (torch.bfloat16, {2880}, (9, 0), None), (torch.bfloat16, {2880}, (10, 0), None),
        (torch.bfloat16, {2880}, (8, 9), "this GPU has 8.9"), (torch.float16, {2880}, (9, 0), "torch.float16"),
        (torch.bfloat16, {2880, 40}, (9, 0), "rows of 40 bytes"),
    ],
)  # fmt: skip
def test_refusals(dtype, widths, capability, reason):
    refused = adapter.refusal(dtype, widths, capability)
    assert refused is None if reason is None else reason in refused


def test_gradients_are_refused():
    hidden, *rest = experts_inputs(2, SIZES[0], torch.bfloat16, CPU)
    with pytest.raises(UserError, match="deep_gemm cannot run here: it computes no gradients"):
        OP(hidden.requires_grad_(), *rest, implementation="deep_gemm")


def test_the_stand_in_refuses_misnamed_arguments_and_scales_that_are_no_powers_of_two():
    signature = inspect.signature(deep_gemm.m_grouped_fp8_gemm_nt_contiguous)
    with pytest.raises(TypeError):
        signature.bind(1, 2, 3, m_indices=4)
    x, w = torch.zeros(128, 128).to(torch.float8_e4m3fn), torch.zeros(1, 128, 128).to(torch.float8_e4m3fn)
    pairs = (x, torch.full((128, 1), 0.3)), (w, torch.ones(1, 1, 1))
    out, layout = torch.empty(128, 128).bfloat16(), torch.zeros(128, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="powers of two"):
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(*pairs, out, layout)
