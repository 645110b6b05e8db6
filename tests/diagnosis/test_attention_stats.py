"""Statistics of attention, routing and geometry, compared with transformers' eager attention and explicit loops."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mlaforge.checkpoint import reader, source_model
from mlaforge.checkpoint.layerwise import LayerStream
from mlaforge.diagnosis import attention_stats, diagnose, geometry
from mlaforge.diagnosis.attention_stats import AttentionStats
from mlaforge.diagnosis.geometry import Geometry, effective_rank
from mlaforge.diagnosis.routing import RoutingStats
from mlaforge.factorization import moments
from mlaforge.factorization.latent import RIDGE
from mlaforge.families import family_of
from mlaforge.tensor_store import TensorStore
from support.attention_oracle import norm_of, qkv, rotated
from support.tiny_models import load_original

T = 64
# Windows that fit into texts of T tokens.
RECENT = (1, 8, 24)


def ids(n=2, t=T):
    return torch.randint(0, 250, (n, t), generator=torch.Generator().manual_seed(5))


def observe_model(directory, folder, tokens):
    """Return per layer AttentionStats, Geometry, RoutingStats or None, and the bytes of its cache."""
    family = family_of(reader.read_config(directory))
    store = TensorStore(folder)
    with LayerStream(directory, torch.float32, torch.device("cpu")) as stream:
        watch = diagnose.DiagnosisObserver(stream, tokens, store, family.router, torch.bfloat16)
        moments.collect(stream, range(stream.num_layers), tokens.split(1), store, 0, watch)
        spec = stream.spec
    layers = []
    for i in range(spec.num_layers):
        observed = store[f"seen-{i:03d}"]

        def part(kind, name, observed=observed):
            chosen = {n.split(".")[1]: t for n, t in observed.items() if n.startswith(f"{name}.")}
            return kind(**chosen) if chosen else None

        parts = (part(AttentionStats, "attention"), part(Geometry, "geometry"), part(RoutingStats, "routing"))
        layers.append((*parts, int(observed["cache.allocated"])))
    return spec, layers, [float(store[f"losses-{n:04d}"]["mean"]) for n in range(len(tokens))]


# A window, norms of queries and keys, sinks and experts; the others have none of these.
FAMILIES = ["mistral", "qwen3", "gpt_oss", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "qwen2"))]


@pytest.fixture(scope="module", params=FAMILIES)
def observed(request, tiny_models, tmp_path_factory):
    """A transformers model with eager attention, its spec, and the statistics of every layer."""
    model = load_original(tiny_models[request.param])
    model.set_attn_implementation("eager")
    return model, *observe_model(tiny_models[request.param], tmp_path_factory.mktemp("seen"), ids())


def eager(model):
    """[layer] -> attention of the second half's queries over all windows, [N, H, T/2, T], fp64."""
    with torch.no_grad():
        return [a[:, :, T // 2 :].double() for a in model(ids(), output_attentions=True).attentions]


def test_attention_statistics_match_eager_attention(observed, monkeypatch):
    model, spec, layers, _ = observed
    monkeypatch.setattr(attention_stats, "RECENT", RECENT)
    rows, columns = torch.arange(T // 2, T)[:, None], torch.arange(T)
    for layer, a, (stats, *_) in zip(spec.layers, eager(model), layers, strict=True):
        described = stats.describe()
        for count in (1, 4, 16):
            expected = a[..., :count].sum(-1).mean((0, 2))
            torch.testing.assert_close(
                torch.tensor(described["first"][str(count)]).double(), expected, rtol=1e-4, atol=1e-6
            )
        sink = (1 - a.sum(-1)).clamp_min(0) if layer.sinks else torch.zeros_like(a[..., 0])
        torch.testing.assert_close(
            torch.tensor(described["learned_sink"]).double(), sink.mean((0, 2)), rtol=1e-4, atol=1e-5
        )
        entropy = torch.special.entr(a).sum(-1) + torch.special.entr(sink)
        torch.testing.assert_close(
            torch.tensor(described["entropy"]).double(), entropy.mean((0, 2)), rtol=1e-3, atol=1e-4
        )
        for w in RECENT:
            expected = (a * (rows - columns < w)).sum(-1).mean((0, 2))
            torch.testing.assert_close(
                torch.tensor(described["recent"][str(w)]).double(), expected, rtol=1e-4, atol=1e-6
            )
        moving = a * (columns >= 4)
        for h, context in enumerate(described["effective_context"]):
            shares = [
                float((moving[:, h] * (rows - columns < w)).sum() / moving[:, h].sum()) for w in (context - 1, context)
            ]
            assert shares[0] < 0.9 + 1e-5 and shares[1] >= 0.9 - 1e-5


def test_logits_and_norms_match_explicit_rotation(observed):
    model, spec, layers, _ = observed
    index = 1
    layer, rotary, attention = spec.layers[index], model.model.rotary_emb, model.model.layers[index].self_attn
    low, high, norms, first = [], [], [], []
    for tokens in ids():
        _, q, k, v = qkv(model, spec, index, tokens)
        q_in, k_in = norm_of(attention, "q_norm")(q), norm_of(attention, "k_norm")(k)
        logits = [
            spec.softmax_scale * float(rotated(q_in[h, i], rotary, i - j) @ k_in[h // layer.group, j])
            for h in range(layer.num_heads) for i in range(T // 2, T) for j in range(i + 1)
            if layer.window is None or j > i - layer.window
        ]  # fmt: skip
        low.append(min(logits)), high.append(max(logits))
        scale = rotary.attention_scaling
        norms.append([x.norm(dim=-1).mean(-1) for x in (q, scale * q_in, k, scale * k_in, v)])
        first.append(torch.stack((k_in[:, 0].norm(dim=-1), k_in[:, 1:].norm(dim=-1).mean(-1))))
    stats, shape, *_ = layers[index]
    attention_described, described = stats.describe(), shape.describe()
    assert min(lo for lo, _ in attention_described["logit_range"]) == pytest.approx(min(low), rel=1e-4)
    assert max(hi for _, hi in attention_described["logit_range"]) == pytest.approx(max(high), rel=1e-4)
    ratio = sum(first)[0] / sum(first)[1]
    assert attention_described["sink_key_norm"] == pytest.approx(ratio.tolist(), rel=1e-4)
    names = ("q_norm", "q_rotated_norm", "k_norm", "k_rotated_norm", "v_norm")
    for name, expected in zip(names, zip(*norms, strict=True), strict=True):
        assert described[name] == pytest.approx((sum(expected) / 2).tolist(), rel=1e-4)
    # A rotary pair consists of dimensions l and l + D/2, after the norm.
    pair = torch.stack([norm_of(attention, "k_norm")(qkv(model, spec, index, t)[2]) for t in ids()])
    energy = pair[..., : layer.head_dim // 2].square() + pair[..., layer.head_dim // 2 :].square()
    torch.testing.assert_close(torch.tensor(described["k_pairs"]).double(), energy.mean((0, 2)), rtol=1e-4, atol=1e-6)


def test_spectra_match_the_covariances(observed):
    model, spec, layers, _ = observed
    layer = spec.layers[2]
    rows = [torch.cat(qkv(model, spec, 2, t)[2:]).transpose(0, 1).flatten(1) for t in ids()]
    kv, half = torch.cat(rows), layer.cached // 2
    eye = torch.eye(layer.head_dim).double().expand(layer.num_heads, -1, -1)
    m = moments.LayerMoments.empty(layer, spec.hidden_size, torch.device("cpu"))
    m.key_outer, m.rows = 3 * eye, 1
    w_o = torch.zeros(spec.hidden_size, layer.num_heads * layer.head_dim).double()
    projections = type("Own", (), {"o_gram": w_o.T @ w_o})
    spectra = layers[2][1].spectra(projections, m, layer)
    covariance = torch.cov(kv.T, correction=0)
    k, v = covariance[:half, :half], covariance[half:, half:]
    scale = torch.cat([(1 / part.trace().sqrt()).expand(half) for part in (k, v)])
    # With equal queries the weighted spectrum is the plain one times the query heads of a group (and the ridge).
    expected = {
        "k": k,
        "v": v,
        "joint": half * scale[:, None] * covariance * scale,
        "k_weighted": 3 * (1 + RIDGE) * layer.group * k,
    }
    for name, matrix in expected.items():
        values = torch.linalg.eigvalsh(matrix).flip(-1)
        torch.testing.assert_close(spectra[name], values, rtol=1e-3, atol=1e-4 * float(values[0]))


def test_losses_match_the_model(observed):
    model, _, _, losses = observed
    for tokens, loss in zip(ids(), losses, strict=True):
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, :-1]
        assert loss == pytest.approx(float(torch.nn.functional.cross_entropy(logits, tokens[1:])), rel=1e-4)


def test_cache_bytes_match_a_running_model(observed):
    """Reference: transformers' cache after a prompt and one token, in bf16."""
    model, _, layers, _ = observed
    with torch.no_grad():
        cache = model(ids()[:1, :-1], use_cache=True).past_key_values
        cache = model(ids()[:1, -1:], past_key_values=cache).past_key_values
    for layer, (*_, allocated) in zip(cache.layers, layers, strict=True):
        assert allocated == (layer.keys.untyped_storage().nbytes() + layer.values.untyped_storage().nbytes()) / 2


def test_routing_statistics_match_explicit_loops(tiny_models, observed):
    model, spec, layers, _ = observed
    if spec.layers[0].moe is None:
        assert all(routing is None for _, _, routing, _ in layers)
        return
    moe = spec.layers[0].moe
    recorded = [[] for _ in spec.layers]
    hooks = [
        layer.mlp.router.register_forward_hook(lambda _, __, out, i=i: recorded[i].append(out))
        for i, layer in enumerate(model.model.layers)
    ]
    with torch.no_grad():
        model(ids())
    for hook in hooks:
        hook.remove()
    for (*_, routing, _), ((logits, _, served),) in zip(layers, recorded, strict=True):
        visits = [[0] * moe.num_experts for _ in range(moe.num_experts)]
        entropy = 0.0
        for scores, experts in zip(logits.double(), served.tolist(), strict=True):
            p = scores.softmax(0)
            entropy -= float((p * p.log()).sum())
            for e in experts:
                for f in experts:
                    visits[e][f] += 1
        described, n = routing.describe(), 2 * T
        load = [visits[e][e] * moe.num_experts / (n * moe.top_k) for e in range(moe.num_experts)]
        assert described["together"] == visits and sum(described["load"]) == pytest.approx(moe.num_experts)
        assert described["load"] == pytest.approx(load) and described["max_over_mean"] == pytest.approx(max(load))
        spread = math.sqrt(sum((x - 1) ** 2 for x in load) / len(load))
        assert described["cv"] == pytest.approx(spread) and described["router_entropy"] == pytest.approx(
            entropy / n, rel=1e-5
        )
        for pair in described["pairs"]:
            e, f = pair["experts"]
            assert e < f and visits[e][f] and pair["share"] == pytest.approx(visits[e][f] / n)
            assert pair["lift"] == pytest.approx(visits[e][f] * n / (visits[e][e] * visits[f][f]))


def test_reports_dead_and_hot_experts():
    routing = RoutingStats.empty(type("Moe", (), {"num_experts": 8})(), torch.device("cpu"))
    logits = torch.zeros(1, 100, 8)
    logits[..., 2], logits[..., 5] = 9.0, torch.linspace(-10, 10, 100)
    logits[..., 7] = -99.0
    routing.add(logits, 1)
    described = routing.describe()
    assert described["hot"] == [2] and 7 in described["dead"] and 5 not in described["dead"]
    assert sum(described["load"]) == pytest.approx(8)


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
@pytest.mark.parametrize("chunk", [1, 700, 5000])
def test_statistics_do_not_depend_on_the_chunk_size(family, chunk, tiny_models, tmp_path, monkeypatch):
    whole = observe_model(tiny_models[family], tmp_path / "whole", ids())[1]
    monkeypatch.setattr(attention_stats, "MAX_WEIGHTS", chunk)
    parts = observe_model(tiny_models[family], tmp_path / "parts", ids())[1]
    for (a, *_), (b, *_) in zip(whole, parts, strict=True):
        for name, value in vars(a).items():
            torch.testing.assert_close(vars(b)[name], value, rtol=1e-5, atol=1e-6)


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest tensor that any operation returns."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return out


def test_memory_grows_linearly_with_the_length(tiny_models, monkeypatch, tmp_path):
    """Model, moments and statistics: twice the window length at most doubles the largest tensor."""
    monkeypatch.setattr(attention_stats, "MAX_WEIGHTS", 1 << 16)
    largest = {}
    for length in (512, 1024):
        with LargestTensor() as observed:
            observe_model(tiny_models["llama"], tmp_path / str(length), ids(1, length))
        largest[length] = observed.numbers
    assert largest[1024] < 2.1 * largest[512]
    # The memory of the attention statistics is bounded for any length.
    layer = source_model.read_spec(reader.read_config(tiny_models["llama"])).layers[0]
    for length in (512, 2048):
        stats, (q, k) = AttentionStats.empty(layer, length, torch.device("cpu")), torch.randn(2, 4, length, 16)
        with LargestTensor() as observed:
            stats.add(q, k[:2], layer, 0.25, None)
        assert observed.numbers <= max(2.1 * (1 << 16), 4 * length * 16)


def test_effective_rank():
    assert effective_rank(torch.tensor([2.0] * 5 + [0.0] * 3)) == pytest.approx(5)
    assert effective_rank(torch.tensor([1.0, 0.0])) == pytest.approx(1)
    halves = torch.tensor([0.5, 0.25, 0.25])
    assert effective_rank(halves) == pytest.approx(2**1.5)


def test_reports_a_planted_outlier():
    square = torch.ones(2, 16)
    square[1, 3] = 49.0
    described = geometry._outliers(square)
    assert described["dimensions"] == [{"head": 1, "dimension": 3, "ratio": pytest.approx(7.0)}]
    assert described["largest"] == pytest.approx([1.0, 7.0])
