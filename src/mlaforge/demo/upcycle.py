"""Rewriting of a dense MLP as an equivalent mixture of experts with biases: tensors in, tensors out.

Legend: E experts, H hidden, I intermediate. The dense MLP is down(silu(gate x) · up x); an expert computes
down((up' + 1) · gate · sigmoid(alpha · gate)) with up' = its up projection and bias. With alpha = 1 and an up bias of
-1 the two are equal. Experts are copies with permuted hidden units: different tensors, the same function, so any
routing whose weights sum to 1 preserves the output.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Dense:
    """MLP of one layer: gate and up [I, H], down [H, I], biases [I], [I], [H] or None."""

    gate: Tensor
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None


def experts(dense: Dense, count: int, differ: float, draw: torch.Generator) -> dict[str, Tensor]:
    """`count` experts of one layer, fp32: gate_up_proj [E, H, 2I] (even columns gate, odd up), down_proj [E, I, H] and
    their biases [E, 2I] and [E, H].

    differ: normal noise added to the weights, relative to their root mean square; at 0 the function is the dense one.
    The first expert keeps the order of the hidden units.
    """
    intermediate, hidden = dense.gate.shape
    gate_up, down = torch.empty(count, hidden, 2 * intermediate), torch.empty(count, intermediate, hidden)
    gate_up_bias, down_bias = torch.zeros(count, 2 * intermediate), torch.zeros(count, hidden)
    for expert in range(count):
        order = torch.randperm(intermediate, generator=draw) if expert else torch.arange(intermediate)
        gate_up[expert, :, ::2] = _noisy(dense.gate, differ, draw)[order].T
        gate_up[expert, :, 1::2] = _noisy(dense.up, differ, draw)[order].T
        down[expert] = _noisy(dense.down, differ, draw).T[order]
        if dense.gate_bias is not None:
            gate_up_bias[expert, ::2] = dense.gate_bias[order]
        # The runtime adds 1 to the output of the up projection.
        gate_up_bias[expert, 1::2] = -1.0 if dense.up_bias is None else dense.up_bias[order] - 1.0
        if dense.down_bias is not None:
            down_bias[expert] = dense.down_bias
    return {
        "gate_up_proj": gate_up,
        "gate_up_proj_bias": gate_up_bias,
        "down_proj": down,
        "down_proj_bias": down_bias,
    }


def _noisy(weight: Tensor, differ: float, draw: torch.Generator) -> Tensor:
    weight = weight.float()
    if not differ:
        return weight
    return weight + torch.randn(weight.shape, generator=draw) * (differ * weight.square().mean().sqrt())


def router(count: int, hidden: int, draw: torch.Generator) -> dict[str, Tensor]:
    """Random router, weight [E, H] and bias [E]: logits of about unit variance for inputs of unit root mean square."""
    return {
        "weight": torch.randn(count, hidden, generator=draw) * hidden**-0.5,
        "bias": torch.randn(count, generator=draw) * 0.1,
    }
