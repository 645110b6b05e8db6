"""A mixture of experts whose weights stay in MXFP4 (mxfp4.py) from the checkpoint's file to the product.

Legend: N tokens, C hidden size, I intermediate size, E experts, K experts per token, G blocks of 32 inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

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

    def gate(self, gate_up: Tensor) -> Tensor:
        """[..., 2 I] -> [..., I]."""
        gate = gate_up[..., ::2].clamp(max=self.limit)
        up = gate_up[..., 1::2].clamp(min=-self.limit, max=self.limit)
        return (up + 1) * gate * torch.sigmoid(gate * self.alpha)

    def forward(self, hidden_states: Tensor, router_indices: Tensor, routing_weights: Tensor) -> Tensor:
        """[N, C] from hidden states [N, C], the chosen experts [N, K] and their weights [N, K]."""
        gradient = torch.is_grad_enabled() and (hidden_states.requires_grad or routing_weights.requires_grad)
        if (native := native_mixture(self)) is not None and not gradient and hidden_states.dtype in native.dtypes:
            return native(hidden_states, router_indices, routing_weights)
        out_NC = torch.zeros_like(hidden_states)
        for expert in router_indices.unique().tolist():
            rows, places = torch.where(router_indices == expert)
            up = Product.apply(hidden_states[rows], self.gate_up_proj_blocks[expert], self.gate_up_proj_scales[expert])
            gated = self.gate(up + self.gate_up_proj_bias[expert])
            down = Product.apply(gated, self.down_proj_blocks[expert], self.down_proj_scales[expert])
            weighted = (down + self.down_proj_bias[expert]) * routing_weights[rows, places, None]
            out_NC.index_add_(0, rows, weighted.to(out_NC.dtype))
        return out_NC


class NativeMixture:
    """The same by our own CPU kernel (cpu/mixture_mxfp4.h), which reads the tensors where they are. Activations are
    whole numbers of 16 bits: 1e-4 of the result's norm, where bf16 has 2e-3."""

    dtypes = (torch.bfloat16, torch.float32)

    def __init__(self, experts: Mxfp4Experts, product: Any):
        self._product = product
        self._weights = [
            part
            for name in ("gate_up_proj", "down_proj")
            for part in (
                getattr(experts, f"{name}_blocks").contiguous(),
                getattr(experts, f"{name}_scales").contiguous(),
                getattr(experts, f"{name}_bias").float().contiguous(),
            )
        ]
        self._gate = experts.alpha, experts.limit

    def __call__(self, x_NC: Tensor, chosen_NK: Tensor, weights_NK: Tensor, plus_NC: Tensor | None = None) -> Tensor:
        """[N, C] in the dtype of x, with `plus_NC` added."""
        out_NC: Tensor = self._product(x_NC, chosen_NK, weights_NK, *self._weights, *self._gate, plus_NC)
        return out_NC


def native_mixture(experts: Mxfp4Experts) -> NativeMixture | None:
    """None where the experts are not on the CPU, or nothing was compiled."""
    native = kernels() if experts.gate_up_proj_blocks.device.type == "cpu" else None
    return None if native is None else NativeMixture(experts, native.mixture_mxfp4.default)
