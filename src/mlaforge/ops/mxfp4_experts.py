"""Mixture of experts on MXFP4 weights (ops/mxfp4.py), which stay packed from the checkpoint file to the product.

Legend: N tokens, C hidden size, I intermediate size, E experts, K experts per token, G blocks of 32 inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mlaforge.ops.dispatch import Op, triton_device
from mlaforge.ops.external import deep_gemm
from mlaforge.ops.mxfp4 import BLOCK, unpack
from mlaforge.ops.native import kernel, supports_device

# Outputs of an expert that are unpacked at a time: 12 MB with 2880 inputs, which fits the outer cache and which an
# allocator reuses. A complete expert would take fresh pages from the OS every time, which took six times as long as
# unpacking.
CHUNK = 1024


def _unpacked(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Unpack an expert's weight [out, in] in parts; yields their slices of the outputs too."""
    for start in range(0, len(scales), CHUNK):
        part = slice(start, start + CHUNK)
        yield part, unpack(blocks[part], scales[part]).to(dtype)


class Product(torch.autograd.Function):
    """x [N, in] times one expert's weight. Saves only blocks and scales for the backward pass."""

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


# Buffers of each of the two weights.
PARTS = ("blocks", "scales", "bias")


class Mxfp4Experts(nn.Module):
    """Replaces transformers' fused experts of the same sizes, with the tensors that a checkpoint stores.

    An expert is down(min(gate, limit) * sigmoid(alpha * gate) * (clamp(up) + 1)), with interleaved gate_up rows.
    Weights are unpacked when they are used. Gradients reach the hidden states and the routing weights.
    """

    gate_up_proj_blocks: Tensor
    gate_up_proj_scales: Tensor
    gate_up_proj_bias: Tensor
    down_proj_blocks: Tensor
    down_proj_scales: Tensor
    down_proj_bias: Tensor

    def __init__(self, experts: Any):
        """`experts`: transformers' module, from which sizes, alpha and limit are taken."""
        super().__init__()
        self.num_experts, self.alpha, self.limit = experts.num_experts, experts.alpha, experts.limit
        for name in ("gate_up_proj", "down_proj"):
            E, inputs, outputs = getattr(experts, name).shape
            tensors = {
                "blocks": torch.empty(E, outputs, inputs // BLOCK, BLOCK // 2, dtype=torch.uint8, device="meta"),
                "scales": torch.empty(E, outputs, inputs // BLOCK, dtype=torch.uint8, device="meta"),
                "bias": torch.empty(E, outputs, device="meta"),
            }
            for part, tensor in tensors.items():
                self.register_buffer(f"{name}_{part}", tensor)

    @property
    def packed(self) -> tuple[Any, ...]:
        """The six tensors, alpha and limit, in the op's order of arguments."""
        tensors = (getattr(self, f"{name}_{part}") for name in ("gate_up_proj", "down_proj") for part in PARTS)
        return (*tensors, self.alpha, self.limit)

    def forward(self, hidden_states: Tensor, router_indices: Tensor, routing_weights: Tensor) -> Tensor:
        """Return [N, C] from hidden states [N, C], the selected experts [N, K] and their weights [N, K]."""
        out_NC: Tensor = OP(hidden_states, router_indices, routing_weights, *self.packed)[0]
        return out_NC


def reference(
    hidden_NC: Tensor, topk_ids_NK: Tensor, topk_weights_NK: Tensor, gate_up_blocks: Tensor, gate_up_scales: Tensor,
    gate_up_bias: Tensor, down_blocks: Tensor, down_scales: Tensor, down_bias: Tensor, alpha: float, limit: float,
) -> tuple[Tensor]:  # fmt: skip
    """Return [N, C], computed expert by expert. Synchronises to read which experts are active."""
    out_NC = torch.zeros_like(hidden_NC)
    for expert in topk_ids_NK.unique().tolist():
        rows, places = torch.where(topk_ids_NK == expert)
        gate_up = Product.apply(hidden_NC[rows], gate_up_blocks[expert], gate_up_scales[expert]) + gate_up_bias[expert]
        gate, up = gate_up[..., ::2].clamp(max=limit), gate_up[..., 1::2].clamp(min=-limit, max=limit)
        gated = (up + 1) * gate * torch.sigmoid(gate * alpha)
        down = Product.apply(gated, down_blocks[expert], down_scales[expert]) + down_bias[expert]
        out_NC.index_add_(0, rows, (down * topk_weights_NK[rows, places, None]).to(out_NC.dtype))
    return (out_NC,)


def mixture_reference(hidden_NC: Tensor, logits_NE: Tensor, top_k: int, *packed: Any) -> Tensor:
    """Return [N, C] for a router's logits: the `top_k` experts with the largest ones, weighted by their softmax."""
    out_NC: Tensor = OP(hidden_NC, *_routed(logits_NE, top_k), *packed)[0]
    return out_NC


def _routed(logits_NE: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Experts of each token and their weights, [N, K]."""
    best_NK, topk_ids_NK = logits_NE.topk(top_k)
    return topk_ids_NK, best_NK.softmax(dim=-1)


def _triton(*inputs: Any) -> tuple[Tensor]:
    from mlaforge.ops import mxfp4_experts_triton

    return (mxfp4_experts_triton.mixture(*inputs),)


def _triton_supports(
    hidden_NC: Tensor, topk_ids_NK: Tensor, topk_weights_NK: Tensor, *packed: Any
) -> Literal[True] | str:
    if (reason := triton_device(hidden_NC.device)) is not True:
        return reason
    from mlaforge.ops import mxfp4_experts_triton

    return mxfp4_experts_triton.supports(hidden_NC, *packed[:-2])


def _deep_gemm(*inputs: Any) -> tuple[Tensor]:
    return (deep_gemm.mixture(*inputs),)


def _deep_gemm_mixture(hidden_NC: Tensor, logits_NE: Tensor, top_k: int, *packed: Any) -> Tensor:
    return deep_gemm.mixture(hidden_NC, *_routed(logits_NE, top_k), *packed)


def _deep_gemm_supports(hidden_NC: Tensor, logits_NE: Tensor, top_k: int, *packed: Any) -> Literal[True] | str:
    return deep_gemm.supports(hidden_NC, logits_NE, logits_NE, *packed)


def _native(hidden_NC: Tensor, topk_ids_NK: Tensor, topk_weights_NK: Tensor, *packed: Any) -> tuple[Tensor]:
    # 16-bit integer activations: an error of 1e-4 of the result's norm, where bf16 has 2e-3.
    return (kernel("mixture_mxfp4")(hidden_NC, topk_ids_NK, topk_weights_NK, *packed),)


def _native_supports(
    hidden_NC: Tensor, topk_ids_NK: Tensor, topk_weights_NK: Tensor, *packed: Any
) -> Literal[True] | str:
    if (reason := supports_device(hidden_NC.device)) is not True:
        return reason
    if torch.is_grad_enabled() and (hidden_NC.requires_grad or topk_weights_NK.requires_grad):
        return "it computes no gradients"
    if not all(tensor.is_contiguous() for tensor in packed[:-2]):
        return "weights must be contiguous"
    # The hidden states' and the biases' dtypes.
    dtypes = {hidden_NC.dtype, packed[2].dtype, packed[5].dtype} - {torch.bfloat16, torch.float32}
    return f"it supports bfloat16 and float32, not {dtypes.pop()}" if dtypes else True


# The reference, which also trains, rounds to the dtype of the inputs between its products.
OP = Op("mxfp4_experts", reference, tolerance=(3e-2, 3e-2))
OP.register_native(_native_supports, _native)
OP.register("triton", _triton, _triton_supports, device_type="cuda", capturable=True)
OP.register("deep_gemm", _deep_gemm, deep_gemm.supports, device_type="cuda", on_request=True)
MIXTURE = Op("mxfp4_mixture", mixture_reference, tolerance=(3e-2, 3e-2))
MIXTURE.register_triton("mxfp4_experts_triton", "mixture_of_logits", "mixture_supports")
MIXTURE.register("deep_gemm", _deep_gemm_mixture, _deep_gemm_supports, device_type="cuda", on_request=True)
