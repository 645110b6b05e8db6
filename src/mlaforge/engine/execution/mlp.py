"""MLPs of decoder layers as the engine runs them: fused gated MLPs and mixtures of experts.

Legend: N tokens, C hidden size, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mlaforge.engine.execution.linear import QUANTIZED, PackedLinear, fused
from mlaforge.ops import native
from mlaforge.ops.dispatch import prefers_triton
from mlaforge.ops.elementwise import SILU_MUL
from mlaforge.ops.linear import GATED_MLP
from mlaforge.ops.mxfp4_experts import MIXTURE, Mxfp4Experts


class GatedMlp:
    """down(act(gate(x)) * up(x)) with gate and up as one product."""

    def __init__(self, mlp: Any, format: str, tags: tuple[str, str] = ("gate_up", "down")):
        self.gate_up = fused([mlp.gate_proj, mlp.up_proj], format, tags[0])
        self.down = fused([mlp.down_proj], format, tags[1])
        self.act = mlp.act_fn
        weight = mlp.gate_proj.weight
        # transformers has its own class besides torch's.
        silu = type(self.act).__name__ in ("SiLU", "SiLUActivation")
        dtype = QUANTIZED.get(format, weight.dtype)
        native_act = weight.device.type == "cpu" and dtype == torch.bfloat16 and native.is_available()
        example = weight.new_empty(0, 0, dtype=dtype)
        # Elsewhere two of torch's kernels round between them, as the model's class does.
        self.silu_mul = SILU_MUL.bind(example) if silu and (native_act or prefers_triton(weight.device)) else None
        packed = self.gate_up.packed is not None and self.down.packed is not None
        self.gated_mlp = GATED_MLP.bind(example) if silu and native_act and packed else None

    def __call__(self, normed_NC: Tensor, residual_NC: Tensor | None) -> Tensor:
        if self.gated_mlp is not None:
            first, last = self.gate_up, self.down
            out_NC: Tensor = self.gated_mlp(
                normed_NC, first.packed, first.bias, last.packed, last.bias, residual_NC, last.in_features,
                *(first.norm or ()),
            )  # fmt: skip
            return out_NC
        gate_up = self.gate_up(normed_NC)
        if self.silu_mul is not None:
            return self.down(self.silu_mul(gate_up), residual_NC)
        gate, up = gate_up.chunk(2, dim=-1)
        return self.down(self.act(gate).mul_(up), residual_NC)


class CpuExperts:
    """A mixture of experts on a CPU: reads only the routed experts, each once per step for all its tokens.

    The gate is the source's; its expert weights, stored [E, in, out], are packed one by one. In the router's product
    rows do not depend on each other: drafted tokens must be routed to the same experts as in decoding.
    """

    def __init__(self, mlp: Any, format: str):
        router, experts = mlp.router, mlp.experts
        self.router = _router(router)
        self.top_k = router.top_k
        self.gate = experts._apply_gate
        self.gate_up = _packed(experts.gate_up_proj, experts.gate_up_proj_bias, format)
        self.down = _packed(experts.down_proj, experts.down_proj_bias, format)
        del experts.gate_up_proj, experts.down_proj

    def __call__(self, normed_NC: Tensor, residual_NC: Tensor | None) -> Tensor:
        best_NK, expert_NK = self.router(normed_NC).topk(self.top_k)
        weights_NK = best_NK.softmax(dim=-1)
        out_NC = torch.zeros_like(normed_NC) if residual_NC is None else residual_NC.clone()
        order = expert_NK.flatten().argsort(stable=True)
        row_of = order // expert_NK.shape[1]
        counts = expert_NK.flatten().bincount(minlength=len(self.down)).tolist()
        start = 0
        for expert, count in enumerate(counts):
            if count:
                pairs, rows = order[start : start + count], row_of[start : start + count]
                expert_out = self.down[expert](self.gate(self.gate_up[expert](normed_NC[rows])))
                out_NC.index_add_(0, rows, expert_out * weights_NK.flatten()[pairs, None])
                start += count
        return out_NC


def _router(router: Any) -> PackedLinear:
    return PackedLinear(router.weight, router.bias, str(router.weight.dtype).removeprefix("torch."), tag="router")


def _packed(weight_EKM: Tensor, bias_EM: Tensor, format: str) -> list[PackedLinear]:
    return [
        PackedLinear(weight.T, bias, format, tag="experts") for weight, bias in zip(weight_EKM, bias_EM, strict=True)
    ]


class Mxfp4Mixture:
    """A mixture of experts that stay in MXFP4, mapped from the checkpoint's file where it is in memory."""

    def __init__(self, mlp: Any):
        router = mlp.router
        self.router = _router(router)
        self.top_k, self.packed = router.top_k, mlp.experts.packed

    def __call__(self, normed_NC: Tensor, residual_NC: Tensor | None) -> Tensor:
        out_NC: Tensor = MIXTURE(normed_NC, self.router(normed_NC), self.top_k, *self.packed)
        return out_NC if residual_NC is None else out_NC.add_(residual_NC)

    def capturable(self) -> bool:
        """Whether a CUDA graph can capture a step of this mixture."""
        *_, bias_EC, _, _ = self.packed
        return MIXTURE.capturable(bias_EC[:0], bias_EC[:0], self.top_k, *self.packed)


class GroupedExperts:
    """A mixture of experts on a GPU: transformers' module with its grouped product, which does not wait for the host
    (config._experts_implementation selects it)."""

    def __init__(self, mlp: Any):
        self.mlp = mlp

    def __call__(self, normed_NC: Tensor, residual_NC: Tensor | None) -> Tensor:
        out: Tensor = self.mlp(normed_NC[None])[0][0]
        return out if residual_NC is None else out.add_(residual_NC)


Mlp = Callable[[Tensor, Tensor | None], Tensor]


def make_mlp(mlp: Any, format: str, device: torch.device) -> Mlp:
    """Return the engine's MLP for that of a decoder layer: from normed hidden states [N, C], plus a residual if
    there is one."""
    if not hasattr(mlp, "experts"):
        return GatedMlp(mlp, format)
    if isinstance(mlp.experts, Mxfp4Experts):
        return Mxfp4Mixture(mlp)
    return CpuExperts(mlp, format) if device.type == "cpu" else GroupedExperts(mlp)
