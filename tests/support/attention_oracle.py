"""Projected queries, keys and values of a transformers model, in fp64."""

import torch


def qkv(model, spec, layer, tokens):
    """Return the inputs and the projected q, k, v [heads, T, D] of one window at one layer."""
    captured = {}
    attention = model.model.layers[layer].self_attn
    hooks = [
        getattr(attention, f"{n}_proj").register_forward_hook(
            lambda _, a, out, n=n: captured.update({n: out, "x": a[0]})
        )
        for n in "qkv"
    ]
    model(tokens[None])
    for hook in hooks:
        hook.remove()
    shape = len(tokens), -1, spec.layers[layer].head_dim
    shaped = [captured[n][0].view(shape).transpose(0, 1).detach().double() for n in "qkv"]
    return captured["x"][0].detach().double(), *shaped


def rotated(x, rotary, by):
    """Return R_by x for x [..., D] and a position offset `by`, times YaRN's factor of cos and sin for q and for k."""
    half = x.shape[-1] // 2
    turn = rotary.attention_scaling**2 * torch.exp(1j * rotary.inv_freq.double() * by)
    z = torch.complex(x[..., :half], x[..., half:]) * turn
    return torch.cat((z.real, z.imag), -1)


def norm_of(attention, name):
    """Return a layer's norm of queries or keys in fp64; the identity if it has none."""
    if not hasattr(attention, name):
        return lambda x: x
    module = getattr(attention, name)
    gamma = module.weight.detach().double()
    return lambda x: gamma * x / (x.square().mean(-1, keepdim=True) + module.variance_epsilon).sqrt()
