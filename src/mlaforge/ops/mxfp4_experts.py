"""A mixture of experts whose weights stay in MXFP4 (mxfp4.py) from the checkpoint's file to the product.

Legend: N tokens, C hidden size, I intermediate size, E experts, K experts per token, G blocks of 32 inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mlaforge import runtime
from mlaforge.ops.dispatch import Op
from mlaforge.ops.mxfp4 import BLOCK, unpack
from mlaforge.ops.native import kernels

# Outputs of an expert that are unpacked at a time: with 2880 inputs 12 MB, which a processor's outer cache holds and an
# allocator gives out again. A whole expert's would be fresh pages from the system every time, which took six times as
# long as unpacking.
CHUNK = 1024


def _unpacked(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """An expert's weight [out, in] in parts, and which outputs they are."""
    for start in range(0, len(scales), CHUNK):
        part = slice(start, start + CHUNK)
        yield part, unpack(blocks[part], scales[part]).to(dtype)


class Product(torch.autograd.Function):
    """x [N, in] times one expert's weight, of which nothing but its blocks and scales is kept for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, blocks: Tensor, scales: Tensor) -> Tensor:
        ctx.packed = blocks, scales
        out = x.new_empty(len(x), len(scales))
        for part, weight in _unpacked(blocks, scales, x.dtype):
            torch.mm(x, weight.T, out=out[:, part])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        blocks, scales = ctx.packed
        (grad,) = grads
        x_grad = grad.new_zeros(len(grad), scales.shape[-1] * BLOCK)
        for part, weight in _unpacked(blocks, scales, grad.dtype):
            x_grad.addmm_(grad[:, part], weight)
        return x_grad, None, None


# What is kept of each of a mixture's two weights.
PARTS = ("blocks", "scales", "bias")


class Mxfp4Experts(nn.Module):
    """Takes the place of transformers' fused experts of the same sizes, with the tensors that a checkpoint stores.

    An expert is down((min(gate, limit)) * sigmoid(alpha * gate) * (clamp(up) + 1)), its gate_up rows interleaved. An
    expert's weights are unpacked while they are used. Gradients reach the hidden states and the routing weights.
    """

    gate_up_proj_blocks: Tensor
    gate_up_proj_scales: Tensor
    gate_up_proj_bias: Tensor
    down_proj_blocks: Tensor
    down_proj_scales: Tensor
    down_proj_bias: Tensor

    def __init__(self, experts: Any):
        """`experts`: transformers' module, of which the sizes and the gate's two numbers are taken."""
        super().__init__()
        self.num_experts, self.alpha, self.limit = experts.num_experts, experts.alpha, experts.limit
        for name in ("gate_up_proj", "down_proj"):
            E, inputs, outputs = getattr(experts, name).shape
            kept = {
                "blocks": torch.empty(E, outputs, inputs // BLOCK, BLOCK // 2, dtype=torch.uint8, device="meta"),
                "scales": torch.empty(E, outputs, inputs // BLOCK, dtype=torch.uint8, device="meta"),
                "bias": torch.empty(E, outputs, device="meta"),
            }
            for part, tensor in kept.items():
                self.register_buffer(f"{name}_{part}", tensor)

    @property
    def packed(self) -> tuple[Any, ...]:
        """The six tensors and the gate's alpha and limit, in the order that the operation takes them in."""
        kept = (getattr(self, f"{name}_{part}") for name in ("gate_up_proj", "down_proj") for part in PARTS)
        return (*kept, self.alpha, self.limit)

    def forward(self, hidden_states: Tensor, router_indices: Tensor, routing_weights: Tensor) -> Tensor:
        """[N, C] from hidden states [N, C], the chosen experts [N, K] and their weights [N, K]."""
        out_NC: Tensor = OP(hidden_states, router_indices, routing_weights, *self.packed)[0]
        return out_NC


def reference(
    hidden_NC: Tensor, chosen_NK: Tensor, weights_NK: Tensor, gate_up_blocks: Tensor, gate_up_scales: Tensor,
    gate_up_bias: Tensor, down_blocks: Tensor, down_scales: Tensor, down_bias: Tensor, alpha: float, limit: float,
) -> tuple[Tensor]:  # fmt: skip
    """[N, C], expert after expert. It waits for the device to know which experts were chosen."""
    out_NC = torch.zeros_like(hidden_NC)
    for expert in chosen_NK.unique().tolist():
        rows, places = torch.where(chosen_NK == expert)
        gate_up = Product.apply(hidden_NC[rows], gate_up_blocks[expert], gate_up_scales[expert]) + gate_up_bias[expert]
        gate, up = gate_up[..., ::2].clamp(max=limit), gate_up[..., 1::2].clamp(min=-limit, max=limit)
        gated = (up + 1) * gate * torch.sigmoid(gate * alpha)
        down = Product.apply(gated, down_blocks[expert], down_scales[expert]) + down_bias[expert]
        out_NC.index_add_(0, rows, (down * weights_NK[rows, places, None]).to(out_NC.dtype))
    return (out_NC,)


def _triton(*inputs: Any) -> tuple[Tensor]:
    from mlaforge.ops import mxfp4_experts_triton

    return (mxfp4_experts_triton.mixture(*inputs),)


def _triton_supports(hidden_NC: Tensor, chosen_NK: Tensor, weights_NK: Tensor, *packed: Any) -> Literal[True] | str:
    # Loading Triton takes a second, which a CPU that never runs it should not pay.
    if hidden_NC.device.type != "cuda" and not runtime.triton_interpreted():
        return f"it needs CUDA tensors, these are on {hidden_NC.device.type}"
    if find_spec("triton") is None:
        return "triton is not installed"
    from mlaforge.ops import mxfp4_experts_triton

    return mxfp4_experts_triton.supports(hidden_NC, *packed[:-2])


def _native(hidden_NC: Tensor, chosen_NK: Tensor, weights_NK: Tensor, *packed: Any) -> tuple[Tensor]:
    # Activations are whole numbers of 16 bits: 1e-4 of the result's norm, where bf16 has 2e-3.
    return (kernels().mixture_mxfp4(hidden_NC, chosen_NK, weights_NK, *packed),)  # type: ignore[union-attr]


def _native_supports(hidden_NC: Tensor, chosen_NK: Tensor, weights_NK: Tensor, *packed: Any) -> Literal[True] | str:
    if hidden_NC.device.type != "cpu":
        return f"it reads host memory, these are on {hidden_NC.device.type}"
    if kernels() is None:
        return "it is not compiled"
    if torch.is_grad_enabled() and (hidden_NC.requires_grad or weights_NK.requires_grad):
        return "it gives no gradients"
    if not all(tensor.is_contiguous() for tensor in packed[:-2]):
        return "the numbers of a weight must lie one after another"
    # Of the hidden states and of both biases.
    others = {hidden_NC.dtype, packed[2].dtype, packed[5].dtype} - {torch.bfloat16, torch.float32}
    return f"it takes bfloat16 and float32, not {others.pop()}" if others else True


OP = Op("mxfp4_experts", reference)
OP.register("native", _native, _native_supports, device_type="cpu", quiet=True)
OP.register("triton", _triton, _triton_supports, device_type="cuda", capturable=True)
