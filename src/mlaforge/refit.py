"""Closed-form refit of o_proj, layer by layer on the converted stream.

The converted model's hidden states drift from the original's; each o_proj is solved to steer its layer's output
back: least squares of ΔW_o on the converted heads' output. Judge it by perplexity on held-out text: its own
residual misleads (docs/conversion.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mlaforge.stream import LayerStream

# Ridge of the least squares, as a share of the mean squared input.
RIDGE = 0.02
# Tokens that are enough: thousands of rows for each of the few hundred to few thousand inputs of an o_proj.
TOKENS = 16384


@torch.no_grad()
def refit_o_proj(
    stream: LayerStream, index: int, layer: Any, new: Any | None, original: list[Tensor], drifted: list[Tensor]
) -> None:
    """Takes both streams of hidden states [1, T, C] through one layer, in place; solves `new.o_proj` on the way.

    original: what the source model computes; drifted: what the model converted so far does. layer: the source's
    decoder layer; new: the converted attention, or None where the layer stays.
    """
    if new is None:
        for states in (original, drifted):
            states[:] = [stream.run(layer, index, h) for h in states]
        return
    arguments = stream.arguments(index, original[0])
    own = layer.self_attn
    try:
        wanted = [own(layer.input_layernorm(h), **arguments)[0] for h in original]
        heads = [new.heads(layer.input_layernorm(h), **arguments).transpose(1, 2).flatten(2) for h in drifted]
        targets = [y + a - b for y, a, b in zip(wanted, original, drifted, strict=True)]
        solve(new.o_proj, heads, targets)
        for states, outputs in ((original, wanted), (drifted, [new.o_proj(z) for z in heads])):
            for n, y in enumerate(outputs):
                layer.self_attn = _Given(y)
                states[n] = stream.run(layer, index, states[n])
    finally:
        layer.self_attn = own


class _Given(nn.Module):
    """Stands for an attention whose output is known already, so that the layer computes only the rest."""

    def __init__(self, output: Tensor):
        super().__init__()
        self.output = output

    def forward(self, **kwargs: Any) -> tuple[Tensor, None]:
        return self.output, None


def solve(o_proj: nn.Linear, heads: list[Tensor], targets: list[Tensor]) -> None:
    """ΔW_o = E[(t - W_o z)zᵀ](E[zzᵀ] + ridge)⁻¹ for z the new heads' output; a bias is z's constant column."""
    inputs, biased = o_proj.in_features, o_proj.bias is not None
    n = inputs + biased
    zz = torch.zeros(n, n, dtype=torch.float64, device=o_proj.weight.device)
    rz = torch.zeros(o_proj.out_features, n, dtype=torch.float64, device=o_proj.weight.device)
    for z, target in zip(heads, targets, strict=True):
        residual = (target - o_proj(z)).flatten(0, 1).float()
        z = torch.cat((z, torch.ones_like(z[..., :biased])), dim=-1).flatten(0, 1).float()
        zz += (z.T @ z).double()
        rz += (residual.T @ z).double()
    # Only the weights are held back, not the bias.
    ridge = zz.diagonal()[:inputs].mean() * RIDGE
    zz.diagonal()[:inputs].add_(ridge if ridge > 0 else 1.0)
    delta = torch.linalg.solve(zz, rz.T).T
    o_proj.weight.add_(delta[:, :inputs].to(o_proj.weight))
    if biased:
        o_proj.bias.add_(delta[:, -1].to(o_proj.bias))
