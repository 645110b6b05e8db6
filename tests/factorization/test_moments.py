"""Streamed moments of tiny models against autograd and explicit sums."""

import pytest
import torch

from mlaforge.checkpoint import reader
from mlaforge.checkpoint.layerwise import LayerStream
from mlaforge.factorization import moments
from mlaforge.families import read_spec
from mlaforge.tensor_store import TensorStore
from support.attention_oracle import norm_of, qkv, rotated
from support.tiny_models import load_original

T = 20


@pytest.fixture(params=["llama", "qwen2", "mistral", "qwen3", "gpt_oss"])
def tiny(request, tiny_models):
    """A model loaded by transformers, its spec, and collect(windows, folder) for its directory."""
    directory = tiny_models[request.param]
    model = load_original(directory)

    def collect(windows, folder, seed=0):
        store = TensorStore(folder)
        with LayerStream(directory, torch.float32, torch.device("cpu")) as stream:
            moments.collect(stream, range(stream.num_layers), windows, store, seed)
        return [moments.load(store, i) for i in range(stream.num_layers)]

    return model, read_spec(reader.read_config(directory)), collect


def ids(n=2, t=T):
    return torch.randint(0, 250, (n, t), generator=torch.Generator().manual_seed(0))


def sinks_of(attention, layer):
    """Return the learned sinks, or -inf, which has no effect."""
    if not layer.sinks:
        return torch.full((layer.num_heads,), -torch.inf, dtype=torch.float64)
    return attention.sinks.detach().double()


def test_fisher_and_weighted_inputs_are_gradients_of_the_sampled_loss(tiny, monkeypatch, tmp_path):
    """The gradient of -log p(y) by k and v, by autograd through the whole model with the same labels."""
    model, _, collect = tiny
    tokens = ids(1)[0]
    labels = {}
    real = moments._sampled_gradient

    def remember(hidden, head, generator):
        labels["gradient"] = real(hidden, head, generator)
        return labels["gradient"]

    monkeypatch.setattr(moments, "_sampled_gradient", remember)
    collected = collect([tokens[None]], tmp_path)
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
    torch.testing.assert_close(collected[layer].fisher, g.T @ g / T, rtol=1e-3, atol=1e-7 * float(g.square().max()))
    x, weight = outs["x"][0].detach().double(), g.square().sum(1)
    mean = weight @ x / weight.sum()
    centred = x - mean
    torch.testing.assert_close(collected[layer].mean, mean, rtol=1e-3, atol=1e-4)
    expected = (centred * weight[:, None]).T @ centred / weight.sum()
    torch.testing.assert_close(
        collected[layer].covariance, expected, rtol=1e-2, atol=1e-3 * float(expected.abs().max())
    )


def test_labels_are_drawn_from_the_model():
    """The mean of dl/dhidden over samples is zero, and its covariance that of one-hot labels under p."""
    head = torch.nn.Linear(6, 11, bias=False)
    hidden = torch.randn(1, 6, generator=torch.Generator().manual_seed(1)).expand(40000, 6)
    with torch.no_grad():
        g = moments._sampled_gradient(hidden, head.weight, torch.Generator().manual_seed(2))
        p = head(hidden[:1]).softmax(-1)[0]
        expected = head.weight.T @ (torch.diag(p) - torch.outer(p, p)) @ head.weight
    spread = float(expected.diagonal().max()) ** 0.5
    assert g.mean(0).abs().max() < 5 * spread / 200
    torch.testing.assert_close(g.T @ g / len(g), expected, rtol=0.1, atol=0.05 * spread**2)


def test_gauss_newton_weights_against_explicit_sums(tiny, monkeypatch, tmp_path):
    """With all rows and many sampled keys the sampled sums are close to the full ones; the others are exact."""
    model, spec, collect = tiny
    monkeypatch.setattr(moments, "DRAWS", 3000)
    tokens, at = ids(1)[0], 1
    m = collect([tokens[None]], tmp_path)[at]
    layer, rotary = spec.layers[at], model.model.rotary_emb
    attention = model.model.layers[at].self_attn
    _, q, projected, v = qkv(model, spec, at, tokens)
    q, k = norm_of(attention, "q_norm")(q), norm_of(attention, "k_norm")(projected)
    w_o, sinks = attention.o_proj.weight.detach().double(), sinks_of(attention, layer)
    H, D = layer.num_heads, layer.head_dim

    def pulled_back(u, key):
        """Return u times the Jacobian of the norm at a key: diag(gamma)(I - n nᵀ/D)/sigma, n = key/sigma."""
        if not layer.qk_norm:
            return u
        sigma = (key.square().mean() + attention.k_norm.variance_epsilon).sqrt()
        n = key / sigma
        u = attention.k_norm.weight.detach().double() * u
        return (u - n * (n @ u) / D) / sigma

    key_outer, query_outer = torch.zeros(H, D, D).double(), torch.zeros(H, D, D).double()
    phase, total = torch.zeros(H, D // 2, dtype=torch.complex128), torch.zeros(H).double()
    weights = torch.zeros(H, T, T).double()
    theta = rotary.inv_freq.double()
    for h in range(H):
        block = w_o[:, h * D : (h + 1) * D]
        group = h // layer.group
        kh, vh = k[group], v[group]
        for i in range(T):
            first = 0 if layer.window is None else max(0, i - layer.window + 1)
            rows = [rotated(q[h, i], rotary, i - j) for j in range(first, i + 1)]
            logits = torch.stack([spec.softmax_scale * r @ kh[j] for j, r in enumerate(rows, first)])
            a = torch.cat((logits, sinks[h : h + 1])).softmax(0)[:-1]
            weights[h, i, first : i + 1] = a
            out = a @ vh[first : i + 1]
            for n, j in enumerate(range(first, i + 1)):
                w = float(a[n] ** 2 * (block @ (vh[j] - out)).square().sum())
                gradient = pulled_back(rows[n], projected[group, j])
                key_outer[h] += spec.softmax_scale**2 * w * torch.outer(gradient, gradient)
                query_outer[h] += spec.softmax_scale**2 * w * torch.outer(q[h, i], q[h, i])
                phase[h] += w * torch.exp(-1j * theta * (i - j))
                total[h] += w
    assert m.rows == T
    torch.testing.assert_close(m.weight, total, rtol=1e-3, atol=1e-9)
    torch.testing.assert_close(m.value_mix, torch.einsum("hij,gij->hg", weights, weights), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(m.query_outer, query_outer, rtol=1e-3, atol=1e-5 * float(query_outer.abs().max()))
    torch.testing.assert_close(m.key_outer, key_outer, rtol=0, atol=0.03 * float(key_outer.abs().max()))
    torch.testing.assert_close(m.rho, phase / total[:, None], rtol=0, atol=0.03)


def test_key_weights_are_squared_jacobians_of_the_output(tiny, monkeypatch, tmp_path):
    """By autograd: every ∂(W_o o_i)/∂k_j for the projected k_j, through norm, RoPE and softmax."""
    model, spec, collect = tiny
    monkeypatch.setattr(moments, "DRAWS", 3000)
    tokens, at = ids(1)[0], 2
    key_outer = collect([tokens[None]], tmp_path)[at].key_outer
    layer, attention, rotary = spec.layers[at], model.model.layers[at].self_attn, model.model.rotary_emb
    _, q, k, v = qkv(model, spec, at, tokens)
    q = norm_of(attention, "q_norm")(q)
    w_o, sinks = attention.o_proj.weight.detach().double(), sinks_of(attention, layer)
    D = layer.head_dim
    for h in range(layer.num_heads):
        expected = torch.zeros(D, D).double()
        for i in range(T):
            first = 0 if layer.window is None else max(0, i - layer.window + 1)
            rows = torch.stack([rotated(q[h, i], rotary, i - j) for j in range(first, i + 1)])

            def output(keys, h=h, i=i, first=first, rows=rows):
                logits = spec.softmax_scale * (rows * norm_of(attention, "k_norm")(keys)).sum(-1)
                a = torch.cat((logits, sinks[h : h + 1])).softmax(0)[:-1]
                return w_o[:, h * D : (h + 1) * D] @ (a @ v[h // layer.group, first : i + 1])

            jacobian = torch.func.jacfwd(output)(k[h // layer.group, first : i + 1])
            expected += torch.einsum("cjd,cje->de", jacobian, jacobian)
        torch.testing.assert_close(key_outer[h], expected, rtol=0, atol=0.03 * float(key_outer.abs().max()))


def test_windows_in_one_batch_or_several_give_the_same_sums(tiny, monkeypatch, tmp_path):
    _, _, collect = tiny
    tokens = ids(4)
    monkeypatch.setattr(moments, "_sampled_gradient", lambda hidden, head, generator: torch.ones_like(hidden))
    one, several = collect([tokens], tmp_path / "one"), collect(tokens.split(1), tmp_path / "several")
    for a, b in zip(one, several, strict=True):
        torch.testing.assert_close(a.fisher, b.fisher, rtol=1e-3, atol=1e-6 * float(a.fisher.abs().max()))
        torch.testing.assert_close(a.covariance, b.covariance, rtol=1e-3, atol=1e-5)
        assert a.tokens == b.tokens == 4 * T


def test_only_the_moments_stay_on_disk_and_are_not_computed_again(tiny, tmp_path, monkeypatch):
    _, spec, collect = tiny
    collect([ids(1)], tmp_path)
    remaining = {path.name.split("-")[0] for path in tmp_path.iterdir()}
    assert remaining == {"moments", "backward"}
    monkeypatch.setattr(LayerStream, "loaded", None)
    assert len(collect([ids(1)], tmp_path)) == spec.num_layers
