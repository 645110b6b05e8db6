"""Streamed moments against brute force on a tiny model: the same quantities by autograd and by explicit sums."""

import pytest
import torch
from conftest import load_original

from mlaforge import checkpoint, moments
from mlaforge.families import read_spec

T = 20


@pytest.fixture(params=["llama", "qwen2", "mistral", "qwen3"])
def tiny(request, tiny_models):
    directory = tiny_models[request.param]
    model = load_original(directory)
    return model, read_spec(checkpoint.read_config(directory))


def ids(n=2, t=T):
    return torch.randint(0, 250, (n, t), generator=torch.Generator().manual_seed(0))


def collect(model, spec, windows, seed=0):
    return moments.collect(model, dict(enumerate(spec.layers)), iter(windows), spec.softmax_scale, seed)


def qkv(model, spec, layer, tokens):
    """Inputs, and q, k, v [heads, T, D] as projected, of one window at one layer."""
    seen = {}
    attention = model.model.layers[layer].self_attn
    hooks = [
        getattr(attention, f"{n}_proj").register_forward_hook(lambda _, a, out, n=n: seen.update({n: out, "x": a[0]}))
        for n in "qkv"
    ]
    model(tokens[None])
    for hook in hooks:
        hook.remove()
    shaped = [seen[n][0].view(T, -1, spec.layers[layer].head_dim).transpose(0, 1).detach().double() for n in "qkv"]
    return seen["x"][0].detach().double(), *shaped


def rotated(x, spec, by):
    """R_by x for x [..., D] and one position offset `by`."""
    half = x.shape[-1] // 2
    theta = spec.rope.theta ** -(torch.arange(half, dtype=torch.float64) / half)
    z = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * theta * by)
    return torch.cat((z.real, z.imag), -1)


def norm_of(attention, name):
    """What a layer does to projected queries or keys before RoPE, in fp64."""
    if not hasattr(attention, name):
        return lambda x: x
    module = getattr(attention, name)
    gamma = module.weight.detach().double()
    return lambda x: gamma * x / (x.square().mean(-1, keepdim=True) + module.variance_epsilon).sqrt()


def test_fisher_and_weighted_inputs_are_gradients_of_the_sampled_loss(tiny, monkeypatch):
    """The gradient of -log p(y) by k and v, from autograd through the whole model with the labels given."""
    model, spec = tiny
    tokens = ids(1)[0]
    labels = {}
    real = moments._sampled_gradient

    def remember(hidden, head, generator):
        labels["gradient"] = real(hidden, head, generator)
        return labels["gradient"]

    monkeypatch.setattr(moments, "_sampled_gradient", remember)
    found = collect(model, spec, [tokens[None]])
    layer = 1
    attention = model.model.layers[layer].self_attn
    outs = {}
    hooks = [
        getattr(attention, n).register_forward_hook(lambda _, a, out, n=n: outs.update({n: out, "x": a[0]}))
        for n in ("k_proj", "v_proj")
    ]
    hidden = model.model(tokens[None]).last_hidden_state
    for hook in hooks:
        hook.remove()
    loss = (hidden[0] * labels["gradient"]).sum()
    g = torch.cat(torch.autograd.grad(loss, [outs["k_proj"], outs["v_proj"]]), -1)[0].double()
    torch.testing.assert_close(found[layer].fisher, g.T @ g / T, rtol=1e-3, atol=1e-7 * float(g.square().max()))
    x, weight = outs["x"][0].detach().double(), g.square().sum(1)
    mean = weight @ x / weight.sum()
    centred = x - mean
    torch.testing.assert_close(found[layer].mean, mean, rtol=1e-3, atol=1e-4)
    expected = (centred * weight[:, None]).T @ centred / weight.sum()
    torch.testing.assert_close(found[layer].covariance, expected, rtol=1e-2, atol=1e-3 * float(expected.abs().max()))


def test_labels_are_drawn_from_the_model():
    """The mean over draws of dl/dhidden is zero, and its covariance that of one-hot labels under p."""
    head = torch.nn.Linear(6, 11, bias=False)
    hidden = torch.randn(1, 6, generator=torch.Generator().manual_seed(1)).expand(40000, 6)
    with torch.no_grad():
        g = moments._sampled_gradient(hidden, head, torch.Generator().manual_seed(2))
        p = head(hidden[:1]).softmax(-1)[0]
        expected = head.weight.T @ (torch.diag(p) - torch.outer(p, p)) @ head.weight
    spread = float(expected.diagonal().max()) ** 0.5
    assert g.mean(0).abs().max() < 5 * spread / 200
    torch.testing.assert_close(g.T @ g / len(g), expected, rtol=0.1, atol=0.05 * spread**2)


def test_gauss_newton_weights_against_explicit_sums(tiny, monkeypatch):
    """Every row taken and very many keys drawn: the sampled sums come close to the full ones; the rest is exact."""
    model, spec = tiny
    monkeypatch.setattr(moments, "DRAWS", 3000)
    tokens, at = ids(1)[0], 1
    m = collect(model, spec, [tokens[None]])[at]
    layer = spec.layers[at]
    attention = model.model.layers[at].self_attn
    _, q, projected, v = qkv(model, spec, at, tokens)
    q, k = norm_of(attention, "q_norm")(q), norm_of(attention, "k_norm")(projected)
    w_o = attention.o_proj.weight.detach().double()
    H, D = layer.num_heads, layer.head_dim

    def pulled_back(u, key):
        """u times the Jacobian of the norm at a key: diag(gamma)(I - n nᵀ/D)/sigma, n = key/sigma."""
        if not layer.qk_norm:
            return u
        sigma = (key.square().mean() + attention.k_norm.variance_epsilon).sqrt()
        n = key / sigma
        u = attention.k_norm.weight.detach().double() * u
        return (u - n * (n @ u) / D) / sigma

    key_outer, query_outer = torch.zeros(H, D, D).double(), torch.zeros(H, D, D).double()
    phase, total = torch.zeros(H, D // 2, dtype=torch.complex128), torch.zeros(H).double()
    weights = torch.zeros(H, T, T).double()
    theta = spec.rope.theta ** -(torch.arange(D // 2, dtype=torch.float64) / (D // 2))
    for h in range(H):
        block = w_o[:, h * D : (h + 1) * D]
        group = h // layer.group
        kh, vh = k[group], v[group]
        for i in range(T):
            first = 0 if layer.window is None else max(0, i - layer.window + 1)
            rows = [rotated(q[h, i], spec, i - j) for j in range(first, i + 1)]
            logits = torch.stack([spec.softmax_scale * r @ kh[j] for j, r in enumerate(rows, first)])
            a = logits.softmax(0)
            weights[h, i, first : i + 1] = a
            out = a @ vh[first : i + 1]
            for n, j in enumerate(range(first, i + 1)):
                w = float(a[n] ** 2 * (block @ (vh[j] - out)).square().sum())
                felt = pulled_back(rows[n], projected[group, j])
                key_outer[h] += spec.softmax_scale**2 * w * torch.outer(felt, felt)
                query_outer[h] += spec.softmax_scale**2 * w * torch.outer(q[h, i], q[h, i])
                phase[h] += w * torch.exp(-1j * theta * (i - j))
                total[h] += w
    assert m.rows == T
    torch.testing.assert_close(m.weight, total, rtol=1e-3, atol=1e-9)
    torch.testing.assert_close(m.value_mix, torch.einsum("hij,gij->hg", weights, weights), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(m.query_outer, query_outer, rtol=1e-3, atol=1e-5 * float(query_outer.abs().max()))
    torch.testing.assert_close(m.key_outer, key_outer, rtol=0, atol=0.03 * float(key_outer.abs().max()))
    torch.testing.assert_close(m.rho, phase / total[:, None], rtol=0, atol=0.03)


def test_key_weights_are_squared_jacobians_of_the_output(tiny, monkeypatch):
    """By autograd, with no formula: every ∂(W_o o_i)/∂k_j for k_j as projected, norm, RoPE and softmax in between."""
    model, spec = tiny
    monkeypatch.setattr(moments, "DRAWS", 3000)
    tokens, at = ids(1)[0], 2
    found = collect(model, spec, [tokens[None]])[at].key_outer
    layer, attention = spec.layers[at], model.model.layers[at].self_attn
    _, q, k, v = qkv(model, spec, at, tokens)
    q = norm_of(attention, "q_norm")(q)
    w_o = attention.o_proj.weight.detach().double()
    D = layer.head_dim
    for h in range(layer.num_heads):
        expected = torch.zeros(D, D).double()
        for i in range(T):
            first = 0 if layer.window is None else max(0, i - layer.window + 1)

            def output(keys, h=h, i=i, first=first):
                normed = norm_of(attention, "k_norm")(keys)
                turned = torch.stack([rotated(x, spec, j) for j, x in enumerate(normed, first)])
                a = (spec.softmax_scale * turned @ rotated(q[h, i], spec, i)).softmax(0)
                return w_o[:, h * D : (h + 1) * D] @ (a @ v[h // layer.group, first : i + 1])

            jacobian = torch.func.jacfwd(output)(k[h // layer.group, first : i + 1])
            expected += torch.einsum("cjd,cje->de", jacobian, jacobian)
        torch.testing.assert_close(found[h], expected, rtol=0, atol=0.03 * float(found.abs().max()))


def test_windows_in_one_batch_or_several_give_the_same_sums(tiny, monkeypatch):
    model, spec = tiny
    tokens = ids(4)
    monkeypatch.setattr(moments, "_sampled_gradient", lambda hidden, head, generator: torch.ones_like(hidden))
    one, several = collect(model, spec, [tokens]), collect(model, spec, tokens.split(1))
    for i in one:
        torch.testing.assert_close(one[i].fisher, several[i].fisher, rtol=1e-3, atol=1e-9)
        torch.testing.assert_close(one[i].covariance, several[i].covariance, rtol=1e-3, atol=1e-5)
        assert one[i].tokens == several[i].tokens == 4 * T


def test_the_model_is_left_as_it_was(tiny):
    model, spec = tiny
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    collect(model, spec, [ids(1)])
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad and parameter.grad is None
        assert torch.equal(parameter, before[name])
    assert not model.model.layers[0].self_attn.k_proj._forward_hooks
