"""A student that has drifted from its teacher, steered back on text: o_proj in closed form, then KL divergence."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mlaforge.refit import solve
from mlaforge.runtime import UserError, progress
from mlaforge.stream import LayerStream

# Learning rates: vectors (biases, sinks) may move far, matrices hardly.
VECTOR_RATE, MATRIX_RATE = 1e-3, 1.5e-4
WARM_UP = 0.05
CLIP = 1.0


def divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean over rows of KL(teacher | student) in nats, for logits [T, V]."""
    return torch.nn.functional.kl_div(
        student.float().log_softmax(-1), teacher.float().log_softmax(-1), log_target=True, reduction="batchmean"
    )


def fit(student: Any, teacher: Any, names: list[str], windows: Tensor, steps: int) -> list[float]:
    """Trains the student's parameters `names` in place for `steps` windows [N, T] of text; the loss of every step.

    Both are causal LMs of one vocabulary, in fp32. Steps beyond N start the text again. UserError where it diverges.
    """
    student.requires_grad_(False)
    parameters = [student.get_parameter(name).requires_grad_(True) for name in names]
    groups = [
        {"params": [p for p in parameters if (p.ndim > 1) == matrices], "lr": rate}
        for matrices, rate in ((False, VECTOR_RATE), (True, MATRIX_RATE))
    ]
    # Nothing decays: the parameters start where the function is nearly right.
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], betas=(0.9, 0.98), weight_decay=0.0)
    warm = max(1, int(WARM_UP * steps))

    def rate(step: int) -> float:
        if step < warm:
            return (step + 1) / warm
        return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    losses = []
    for step in progress(range(steps), "heal", steps):
        ids = windows[step % len(windows)][None]
        with torch.no_grad():
            wanted = teacher(ids, use_cache=False).logits[0]
        loss = divergence(student(ids, use_cache=False).logits[0], wanted)
        if not math.isfinite(loss.item()):
            raise UserError(f"healing diverged at step {step + 1} of {steps}; heal for fewer steps, or give other text")
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    student.requires_grad_(False)
    return losses


@torch.no_grad()
def steer(ours: LayerStream, theirs: LayerStream, windows: Tensor) -> dict[str, Tensor]:
    """The student's o_proj (weight and bias) solved layer by layer on its own stream, so that after each attention it
    is where the teacher is: tensors by name. windows: token ids [N, T]."""
    drifted = [ours.embed(ids[None]) for ids in windows]
    original = [h.clone() for h in drifted]
    solved = {}
    for index in progress(range(ours.num_layers), "steer", ours.num_layers):
        with ours.layer(index) as own, theirs.layer(index) as their:
            heads: list[Tensor] = []
            hook = own.self_attn.o_proj.register_forward_pre_hook(lambda _, given, into=heads: into.append(given[0]))
            for h in drifted:
                own.self_attn(own.input_layernorm(h), **ours.arguments(index, h))
            hook.remove()
            wanted = [their.self_attn(their.input_layernorm(h), **theirs.arguments(index, h))[0] for h in original]
            targets = [y + a - b for y, a, b in zip(wanted, original, drifted, strict=True)]
            o_proj = own.self_attn.o_proj
            o_proj.weight.data, o_proj.bias.data = o_proj.weight.clone(), o_proj.bias.clone()
            solve(o_proj, heads, targets)
            for name, parameter in o_proj.named_parameters():
                solved[f"model.layers.{index}.self_attn.o_proj.{name}"] = parameter.detach()
            # What follows the attention, on both streams, without computing it again.
            for layer, states, outputs in (
                (own, drifted, [o_proj(z) for z in heads]), (their, original, wanted)
            ):  # fmt: skip
                for n, y in enumerate(outputs):
                    h = states[n] + y
                    mixed = layer.mlp(layer.post_attention_layernorm(h))
                    states[n] = h + (mixed[0] if isinstance(mixed, tuple) else mixed)
    return solved
