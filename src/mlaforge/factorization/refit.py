"""Closed-form refits of o_proj and of the up-projection kv_b_proj, layer by layer on the converted model's states.

The hidden states of the converted model drift from the original's; each o_proj is solved to correct the output of its
layer: least squares of ΔW_o on the converted heads' output. Evaluate it by perplexity on held-out text: the residual is
misleading (docs/conversion.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mlaforge.checkpoint.layerwise import LayerStream
from mlaforge.runtime import progress

# Ridge of the least squares, as a share of the mean squared input.
RIDGE = 0.02
# Sufficient tokens: an o_proj has a few hundred to a few thousand inputs.
TOKENS = 16384


@torch.no_grad()
def refit_o_proj(
    stream: LayerStream, index: int, layer: Any, new: Any | None, original: list[Tensor], drifted: list[Tensor]
) -> None:
    """Run both streams of hidden states [1, T, C] through one layer, in place, and solve `new.o_proj`.

    original: states of the source model; drifted: states of the model converted so far. layer: the source's decoder
    layer; new: the converted attention, or None if the layer is not converted.
    """
    if new is None:
        for states in (original, drifted):
            states[:] = [stream.run(layer, index, h) for h in states]
        return
    arguments = stream.arguments(index, original[0])
    source_attention = layer.self_attn
    try:
        source_outputs = [source_attention(layer.input_layernorm(h), **arguments)[0] for h in original]
        heads = [new.heads(layer.input_layernorm(h), **arguments).transpose(1, 2).flatten(2) for h in drifted]
        targets = [y + a - b for y, a, b in zip(source_outputs, original, drifted, strict=True)]
        solve(new.o_proj, heads, targets)
        for states, outputs in ((original, source_outputs), (drifted, [new.o_proj(z) for z in heads])):
            for n, y in enumerate(outputs):
                layer.self_attn = _FixedOutput(y)
                states[n] = stream.run(layer, index, states[n])
    finally:
        layer.self_attn = source_attention


class _FixedOutput(nn.Module):
    """Attention stub with a precomputed output, so that the layer computes only the rest."""

    def __init__(self, output: Tensor):
        super().__init__()
        self.output = output

    def forward(self, **kwargs: Any) -> tuple[Tensor, None]:
        return self.output, None


@torch.no_grad()
def refit_student(
    student: LayerStream, teacher: LayerStream, windows: Tensor, up: bool = False
) -> dict[str, Tensor]:  # fmt: skip
    """Solve the student's o_proj (weight, and bias if it has one) layer by layer, such that its hidden states after
    each attention match the teacher's. Returns the tensors by the model's names. windows: token ids [N, T].

    up: first solve kv_b_proj of each latent attention, such that on the student's states it gives the teacher's keys
    and values (in latent_rope only the values, because the keys differ from the teacher's).
    """
    drifted = [student.embed(ids[None]) for ids in windows]
    original = [h.clone() for h in drifted]
    solved: dict[str, Tensor] = {}
    for index in progress(range(student.num_layers), "refit", student.num_layers):
        with student.layer(index) as layer, teacher.layer(index) as teacher_layer:
            changed = [layer.self_attn.o_proj]
            if up and hasattr(layer.self_attn, "kv_b_proj"):
                changed.append(layer.self_attn.kv_b_proj)
            for parameter in (p for module in changed for p in module.parameters()):
                parameter.data = parameter.clone()  # loaded tensors may be memory-mapped
            if len(changed) > 1:
                refit_up(layer, teacher_layer, drifted, original)
            heads: list[Tensor] = []
            o_proj = layer.self_attn.o_proj
            hook = o_proj.register_forward_pre_hook(lambda _, inputs, into=heads: into.append(inputs[0]))
            for n, h in enumerate(drifted):
                with student.text(n):
                    layer.self_attn(layer.input_layernorm(h), **student.arguments(index, h))
            hook.remove()
            teacher_outputs = [
                teacher_layer.self_attn(teacher_layer.input_layernorm(h), **teacher.arguments(index, h))[0]
                for h in original
            ]
            targets = [y + a - b for y, a, b in zip(teacher_outputs, original, drifted, strict=True)]
            solve(o_proj, heads, targets)
            prefix = f"model.layers.{index}."
            for name, module in layer.named_modules():
                if module in changed:
                    solved |= {f"{prefix}{name}.{part}": p.detach() for part, p in module.named_parameters()}
            # Run the rest of the layer on both streams without computing the attention again.
            for decoder_layer, states, outputs in (
                (layer, drifted, [o_proj(z) for z in heads]), (teacher_layer, original, teacher_outputs)
            ):  # fmt: skip
                for n, y in enumerate(outputs):
                    h = states[n] + y
                    mlp = decoder_layer.mlp(decoder_layer.post_attention_layernorm(h))
                    states[n] = h + (mlp[0] if isinstance(mlp, tuple) else mlp)
    return solved


def refit_up(layer: Any, teacher_layer: Any, drifted: list[Tensor], original: list[Tensor]) -> None:
    """Solve kv_b_proj of one layer, in place, on both streams' inputs of that layer [1, T, C].

    The outputs need no weights: every output has a separate row, and all rows have the same inputs.
    """
    new, source = layer.self_attn, teacher_layer.self_attn
    latents, targets = [], []
    for h, o in zip(drifted, original, strict=True):
        row = new.kv_a_proj_with_mqa(layer.input_layernorm(h))
        latent = (row if new.coded is None else new.coded.rounded(row))[..., : new.rank]
        current = new.kv_b_proj(latent).unflatten(-1, (new.num_kv_heads, -1))
        x = teacher_layer.input_layernorm(o)
        k, v = (p(x).unflatten(-1, (new.num_kv_heads, -1)) for p in (source.k_proj, source.v_proj))
        keys = k if new.layout == "latent" else current[..., : new.nope_dim]
        latents.append(latent)
        targets.append(torch.cat((keys, v), dim=-1).flatten(-2))
    solve(new.kv_b_proj, latents, targets)


def solve(linear: nn.Linear, inputs: list[Tensor], targets: list[Tensor]) -> None:
    """Add ΔW = E[(t - W z)zᵀ](E[zzᵀ] + ridge)⁻¹ to W in place, for inputs z and targets t [1, T, ...] per window; the
    bias is a constant column of z."""
    width, biased = linear.in_features, linear.bias is not None
    n = width + biased
    zz = torch.zeros(n, n, dtype=torch.float64, device=linear.weight.device)
    rz = torch.zeros(linear.out_features, n, dtype=torch.float64, device=linear.weight.device)
    for z, target in zip(inputs, targets, strict=True):
        residual = (target - linear(z)).flatten(0, 1).float()
        z = torch.cat((z, torch.ones_like(z[..., :biased])), dim=-1).flatten(0, 1).float()
        zz += (z.T @ z).double()
        rz += (residual.T @ z).double()
    # The ridge applies to the weights, not to the bias.
    ridge = zz.diagonal()[:width].mean() * RIDGE
    zz.diagonal()[:width].add_(ridge if ridge > 0 else 1.0)
    delta = torch.linalg.solve(zz, rz.T).T
    linear.weight.add_(delta[:, :width].to(linear.weight))
    if biased:
        linear.bias.add_(delta[:, -1].to(linear.bias))
