"""Closed-form refit of o_proj, layer by layer on the converted stream.

The converted model's hidden states drift from the original's; each o_proj is solved to steer its layer's output
back: least squares of ΔW_o on the converted heads' output. Judge it by perplexity on held-out text: its own
residual misleads (docs/conversion.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from mlaforge.runtime import progress
from mlaforge.spec import LayerSpec

# Ridge of the least squares, as a share of the mean squared input.
RIDGE = 0.02
# Tokens that are enough: thousands of rows for each of the few hundred to few thousand inputs of an o_proj.
TOKENS = 16384


class LayerRunner:
    """Runs a decoder one layer at a time on hidden states [1, T, hidden], as its own forward would."""

    def __init__(self, decoder: Any, example: Tensor):
        positions = torch.arange(example.shape[1], device=example.device)[None]
        self.decoder = decoder
        self.positions = positions
        self.rope = decoder.rotary_emb(example, positions)
        given = {
            "config": decoder.config,
            "inputs_embeds": example,
            "attention_mask": None,
            "past_key_values": None,
            "position_ids": positions,
        }
        self.full = create_causal_mask(**given)
        windowed = getattr(decoder.config, "sliding_window", None) is not None
        self.sliding = create_sliding_window_causal_mask(**given) if windowed else None

    def arguments(self, layer: LayerSpec) -> dict[str, Any]:
        """What a decoder layer of this model is called with beside its hidden states."""
        return {
            "attention_mask": self.full if layer.window is None else self.sliding,
            "position_embeddings": self.rope,
            "position_ids": self.positions,
        }


@torch.no_grad()
def refit_o_proj(model: Any, converted: dict[int, Any], specs: tuple[LayerSpec, ...], windows: list[Tensor]) -> None:
    """Solves o_proj (weight and bias) of the converted attention modules in place; they need an o_proj bias.

    model: the original causal LM, left as it is. windows: token ids [1, T] each, all of one length; the first TOKENS
    tokens are used.
    """
    windows = windows[: max(1, TOKENS // windows[0].shape[1])]
    decoder = model.model
    embed = model.get_input_embeddings()
    original = [embed(ids.to(model.device)) for ids in windows]
    drifted = [h.clone() for h in original]
    runner = LayerRunner(decoder, original[0])
    for index in progress(range(len(decoder.layers)), "refit o_proj"):
        layer, arguments = decoder.layers[index], runner.arguments(specs[index])
        own = layer.self_attn
        new = converted.get(index)
        try:
            if new is None:
                for stream in (original, drifted):
                    stream[:] = [layer(h, **arguments) for h in stream]
                continue
            wanted = [own(layer.input_layernorm(h), **arguments)[0] for h in original]
            heads = [new.heads(layer.input_layernorm(h), **arguments).transpose(1, 2).flatten(2) for h in drifted]
            targets = [y + a - b for y, a, b in zip(wanted, original, drifted, strict=True)]
            solve(new.o_proj, heads, targets)
            for stream, outputs in ((original, wanted), (drifted, [new.o_proj(z) for z in heads])):
                for n, y in enumerate(outputs):
                    layer.self_attn = _Given(y)
                    stream[n] = layer(stream[n], **arguments)
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
    """ΔW_o = E[(t - W_o z)zᵀ](E[zzᵀ] + ridge)⁻¹ for z the new heads' output; the bias is z's constant column."""
    n = o_proj.in_features + 1
    zz = torch.zeros(n, n, dtype=torch.float64, device=o_proj.weight.device)
    rz = torch.zeros(o_proj.out_features, n, dtype=torch.float64, device=o_proj.weight.device)
    for z, target in zip(heads, targets, strict=True):
        residual = (target - o_proj(z)).flatten(0, 1).float()
        z = torch.cat((z, torch.ones_like(z[..., :1])), dim=-1).flatten(0, 1).float()
        zz += (z.T @ z).double()
        rz += (residual.T @ z).double()
    # Only the weights are held back, not the bias.
    ridge = zz.diagonal()[:-1].mean() * RIDGE
    zz.diagonal()[:-1].add_(ridge if ridge > 0 else 1.0)
    delta = torch.linalg.solve(zz, rz.T).T
    o_proj.weight.add_(delta[:, :-1].to(o_proj.weight))
    o_proj.bias.add_(delta[:, -1].to(o_proj.bias))
