"""Mixtures of MXFP4 experts: Triton kernels against the reference, and batch invariance."""

from types import SimpleNamespace

import pytest
import torch

from mlaforge import runtime
from mlaforge.ops.mxfp4_experts import OP, Mxfp4Experts
from support.paged_steps import DEVICE, needs_triton

pytestmark = pytest.mark.gpu
# Experts, experts per token, hidden size, intermediate size: tiles of 128 inputs and 64 outputs are partial in all but
# one.
SHAPES = {"small": (4, 2, 64, 96), "odd": (6, 3, 160, 32), "one": (1, 1, 32, 64), "whole": (3, 2, 256, 128)}


def experts(shape, seed=0, dtype=torch.float32):
    """A mixture of random codes, with weights of about the size of a checkpoint's."""
    E, _, C, I = SHAPES[shape]  # noqa: E741
    sizes = {"gate_up_proj": torch.empty(E, C, 2 * I), "down_proj": torch.empty(E, I, C)}
    module = Mxfp4Experts(SimpleNamespace(num_experts=E, alpha=1.702, limit=7.0, **sizes)).to_empty(device="cpu")
    chance = torch.Generator().manual_seed(seed)
    for name, tensor in module.named_buffers():
        if name.endswith("blocks"):
            tensor.random_(256, generator=chance)
        elif name.endswith("scales"):
            # The smallest value is a special case.
            tensor.random_(120, 125, generator=chance).view(-1)[::7] = 0
        else:
            tensor.normal_(generator=chance)
    for name in ("gate_up_proj_bias", "down_proj_bias"):
        module.register_buffer(name, getattr(module, name).to(dtype))
    return module.to(DEVICE)


def tokens(shape, count, dtype=torch.float32, of=None, seed=0):
    """Hidden states, selected experts (of the first `of`) and their weights. Large values reach the gate's limit."""
    E, K, C, _ = SHAPES[shape]
    chance = torch.Generator().manual_seed(seed)
    hidden = 3 * torch.randn(count, C, generator=chance)
    chosen = torch.rand(count, of or E, generator=chance).argsort(dim=1)[:, :K]
    weights = torch.randn(count, K, generator=chance).softmax(dim=1)
    return hidden.to(DEVICE, dtype), chosen.to(DEVICE), weights.to(DEVICE, dtype)


@needs_triton
@pytest.mark.usefixtures("fresh_memory_is_nan")
@pytest.mark.parametrize(
    ("shape", "count", "of"),
    [("small", 1, None), ("small", 40, None), ("small", 21, 2), ("odd", 9, None), ("odd", 3, 3), ("one", 18, None),
     ("whole", 5, None), ("whole", 0, None)],
)  # fmt: skip
def test_triton_matches_the_reference(shape, count, of):
    module, inputs = experts(shape), tokens(shape, count, of=of)
    (actual,), (expected,) = (OP(*inputs, *module.packed, implementation=name) for name in ("triton", "reference"))
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    if count:
        # The compared sums are not all zero.
        assert expected.abs().mean() > 0.1
        torch.testing.assert_close(actual, expected, atol=2e-6 * float(expected.abs().max()), rtol=1e-5)


@needs_triton
def test_triton_in_half_precision():
    module, (hidden, chosen, weights) = experts("small", dtype=torch.float16), tokens("small", 7, torch.float16)
    (actual,) = OP(hidden, chosen, weights, *module.packed, implementation="triton")
    exact = experts("small", dtype=torch.float16).float()(hidden.float(), chosen, weights.float())
    assert actual.dtype == torch.float16
    torch.testing.assert_close(actual.float(), exact, atol=0.02, rtol=0.01)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_row_does_not_depend_on_the_others(dtype):
    module, inputs = experts("odd", dtype=dtype), tokens("odd", 21, dtype)
    (together,) = OP(*inputs, *module.packed, implementation="triton")
    for rows in (slice(0, 1), slice(15, 21), torch.tensor([20, 3, 11])):
        (some,) = OP(*(tensor[rows] for tensor in inputs), *module.packed, implementation="triton")
        assert torch.equal(some, together[rows])


@needs_triton
def test_every_code_under_every_scale():
    """Rows of the identity return an expert's unpacked weights bitwise."""
    from mlaforge.ops import mxfp4_experts_triton as kernels
    from mlaforge.ops.mxfp4 import dequantize

    # 6 · 2^127 overflows fp32; under the scale 252 every code is finite.
    outputs, inputs = 253, 32
    codes = torch.arange(16, dtype=torch.uint8, device=DEVICE)
    blocks = (codes | (15 - codes) << 4).expand(1, outputs, 1, 16).contiguous()
    scales = torch.arange(outputs, dtype=torch.uint8, device=DEVICE).view(1, outputs, 1)
    order, out = torch.arange(inputs, device=DEVICE), torch.full((inputs, outputs), torch.nan, device=DEVICE)
    offsets, bias = torch.tensor([0, inputs], dtype=torch.int32, device=DEVICE), torch.zeros(1, outputs, device=DEVICE)
    launch = kernels.make_launch(
        torch.eye(inputs, device=DEVICE), order, offsets, blocks, scales, bias, out, 1, 1.0, 1.0, gated=False
    )
    kernels.product_kernel[(launch.programs,)](**launch.arguments, **launch.options)
    # A sum that begins with 0 has no negative zero.
    assert torch.equal(out.view(torch.int32), (dequantize(blocks, scales, torch.float32)[0] + 0.0).view(torch.int32))


@needs_triton
def test_rejects_unsupported_inputs():
    module, (hidden, *rest) = experts("small"), tokens("small", 3)
    wide = torch.zeros(3, 128, device=DEVICE)[:, ::2]
    for x, words in ((hidden.double(), "float64"), (wide, "contiguous")):
        with pytest.raises(runtime.UserError, match=words):
            OP(x, *rest, *module.packed, implementation="triton")
    assert OP.choose(hidden.cpu(), *rest, *module.packed)[0] != "triton"
