"""What follows attention in a decoder layer, rewritten in place: fused gated MLPs and mixtures of experts.

Legend: N tokens, C hidden size, E experts, K experts per token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mlaforge.engine.linear import PackedLinear, fused


class GatedMlp(nn.Module):
    """down(act(gate(x)) * up(x)) with gate and up as one product."""

    def __init__(self, mlp: Any, format: str):
        super().__init__()
        self.gate_up = fused([mlp.gate_proj, mlp.up_proj], format)
        self.down = fused([mlp.down_proj], format)
        self.act = mlp.act_fn

    def forward(self, hidden_NC: Tensor) -> Tensor:
        gate, up = self.gate_up(hidden_NC).chunk(2, dim=-1)
        out: Tensor = self.down(self.act(gate).mul_(up))
        return out


class CpuExperts(nn.Module):
    """A mixture of experts on a CPU: only the experts that were chosen are read, each once per step for all its tokens.

    Router and gate are the source's own; its expert weights, stored [E, in, out], are packed one by one.
    """

    def __init__(self, mlp: Any, format: str):
        super().__init__()
        self.router, experts = mlp.router, mlp.experts
        self.gate = experts._apply_gate
        self.gate_up = _packed(experts.gate_up_proj, experts.gate_up_proj_bias, format)
        self.down = _packed(experts.down_proj, experts.down_proj_bias, format)
        del experts.gate_up_proj, experts.down_proj

    def forward(self, hidden_NC: Tensor) -> tuple[Tensor, None]:
        """As the source's: ([N, C], nothing that anyone reads)."""
        _, weights_NK, chosen_NK = self.router(hidden_NC)
        out_NC = torch.zeros_like(hidden_NC)
        order = chosen_NK.flatten().argsort(stable=True)
        row_of = order // chosen_NK.shape[1]
        counts = chosen_NK.flatten().bincount(minlength=len(self.down)).tolist()
        start = 0
        for expert, count in enumerate(counts):
            if count:
                pairs, rows = order[start : start + count], row_of[start : start + count]
                found = self.down[expert](self.gate(self.gate_up[expert](hidden_NC[rows])))
                out_NC.index_add_(0, rows, found * weights_NK.flatten()[pairs, None])
                start += count
        return out_NC, None


def _packed(weight_EKM: Tensor, bias_EM: Tensor, format: str) -> list[PackedLinear]:
    return [PackedLinear(weight.T, bias, format) for weight, bias in zip(weight_EKM, bias_EM, strict=True)]


class GroupedExperts(nn.Module):
    """A mixture of experts on a GPU: transformers' own, through its grouped product, which does not wait for the host
    (config._experts_implementation decides)."""

    def __init__(self, mlp: Any):
        super().__init__()
        self.mlp = mlp

    def forward(self, hidden_NC: Tensor) -> tuple[Tensor, None]:
        return self.mlp(hidden_NC[None])[0][0], None


def rewritten(mlp: Any, format: str, device: torch.device) -> nn.Module:
    """The MLP of a decoder layer as the engine runs it."""
    if not hasattr(mlp, "experts"):
        return GatedMlp(mlp, format)
    return CpuExperts(mlp, format) if device.type == "cpu" else GroupedExperts(mlp)
