"""Closed-form refits, layer by layer on the converted stream: of o_proj, and of the up-projections kv_b_proj.

The converted model's hidden states drift from the original's; each o_proj is solved to steer its layer's output
back: least squares of ΔW_o on the converted heads' output. Judge it by perplexity on held-out text: its own
residual misleads (docs/conversion.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mlaforge.checkpoint.layerwise import LayerStream
from mlaforge.runtime import progress

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
                layer.self_attn = _KnownOutput(y)
                states[n] = stream.run(layer, index, states[n])
    finally:
        layer.self_attn = own


class _KnownOutput(nn.Module):
    """Stands for an attention whose output is known already, so that the layer computes only the rest."""

    def __init__(self, output: Tensor):
        super().__init__()
        self.output = output

    def forward(self, **kwargs: Any) -> tuple[Tensor, None]:
        return self.output, None


@torch.no_grad()
def steer(ours: LayerStream, theirs: LayerStream, windows: Tensor, up: bool = False) -> dict[str, Tensor]:
    """The student's o_proj (weight, and bias where it has one) solved layer by layer on its own stream, so that after
    each attention it is where the teacher is: tensors by the model's names. windows: token ids [N, T].

    up: before it, each latent attention's kv_b_proj is solved so that on the student's stream it gives the keys and
    values that the teacher has on its own (in latent_rope only the values: its keys are no longer the teacher's).
    """
    drifted = [ours.embed(ids[None]) for ids in windows]
    original = [h.clone() for h in drifted]
    solved: dict[str, Tensor] = {}
    for index in progress(range(ours.num_layers), "steer", ours.num_layers):
        with ours.layer(index) as own, theirs.layer(index) as their:
            changed = [own.self_attn.o_proj]
            if up and hasattr(own.self_attn, "kv_b_proj"):
                changed.append(own.self_attn.kv_b_proj)
            for parameter in (p for module in changed for p in module.parameters()):
                parameter.data = parameter.clone()  # what was loaded may be the file itself
            if len(changed) > 1:
                refit_up(own, their, drifted, original)
            heads: list[Tensor] = []
            hook = own.self_attn.o_proj.register_forward_pre_hook(lambda _, inputs, into=heads: into.append(inputs[0]))
            for n, h in enumerate(drifted):
                with ours.text(n):
                    own.self_attn(own.input_layernorm(h), **ours.arguments(index, h))
            hook.remove()
            wanted = [their.self_attn(their.input_layernorm(h), **theirs.arguments(index, h))[0] for h in original]
            targets = [y + a - b for y, a, b in zip(wanted, original, drifted, strict=True)]
            o_proj = own.self_attn.o_proj
            solve(o_proj, heads, targets)
            prefix = f"model.layers.{index}."
            for name, module in own.named_modules():
                if module in changed:
                    solved |= {f"{prefix}{name}.{part}": p.detach() for part, p in module.named_parameters()}
            # What follows the attention, on both streams, without computing it again.
            for layer, states, outputs in (
                (own, drifted, [o_proj(z) for z in heads]), (their, original, wanted)
            ):  # fmt: skip
                for n, y in enumerate(outputs):
                    h = states[n] + y
                    mixed = layer.mlp(layer.post_attention_layernorm(h))
                    states[n] = h + (mixed[0] if isinstance(mixed, tuple) else mixed)
    return solved


def refit_up(own: Any, their: Any, drifted: list[Tensor], original: list[Tensor]) -> None:
    """Solves kv_b_proj of one layer, in place, on both streams' inputs of that layer [1, T, C].

    Which output error counts how much does not matter: every output has its own row, and all see the same inputs.
    """
    new, source = own.self_attn, their.self_attn
    latents, targets = [], []
    for h, o in zip(drifted, original, strict=True):
        row = new.kv_a_proj_with_mqa(own.input_layernorm(h))
        latent = (row if new.coded is None else new.coded.rounded(row))[..., : new.rank]
        now = new.kv_b_proj(latent).unflatten(-1, (new.num_kv_heads, -1))
        x = their.input_layernorm(o)
        k, v = (p(x).unflatten(-1, (new.num_kv_heads, -1)) for p in (source.k_proj, source.v_proj))
        keys = k if new.layout == "latent" else now[..., : new.nope_dim]
        latents.append(latent)
        targets.append(torch.cat((keys, v), dim=-1).flatten(-2))
    solve(new.kv_b_proj, latents, targets)


def solve(linear: nn.Linear, inputs: list[Tensor], targets: list[Tensor]) -> None:
    """W += ΔW = E[(t - W z)zᵀ](E[zzᵀ] + ridge)⁻¹ in place, for inputs z and targets t [1, T, ...] per window; a bias is
    z's constant column."""
    width, biased = linear.in_features, linear.bias is not None
    n = width + biased
    zz = torch.zeros(n, n, dtype=torch.float64, device=linear.weight.device)
    rz = torch.zeros(linear.out_features, n, dtype=torch.float64, device=linear.weight.device)
    for z, target in zip(inputs, targets, strict=True):
        residual = (target - linear(z)).flatten(0, 1).float()
        z = torch.cat((z, torch.ones_like(z[..., :biased])), dim=-1).flatten(0, 1).float()
        zz += (z.T @ z).double()
        rz += (residual.T @ z).double()
    # Only the weights are held back, not the bias.
    ridge = zz.diagonal()[:width].mean() * RIDGE
    zz.diagonal()[:width].add_(ridge if ridge > 0 else 1.0)
    delta = torch.linalg.solve(zz, rz.T).T
    linear.weight.add_(delta[:, :width].to(linear.weight))
    if biased:
        linear.bias.add_(delta[:, -1].to(linear.bias))
