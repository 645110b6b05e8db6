"""Converted models against their originals, through the written checkpoint, for every family and both layouts."""

import json
from collections import Counter

import pytest
import torch
from transformers import DynamicCache

from mlaforge.checkpoint import loading, source_model
from mlaforge.checkpoint import reader as checkpoint_reader
from mlaforge.conversion import convert
from mlaforge.conversion.config import ConvertConfig
from mlaforge.conversion.solve import LayerSolver
from mlaforge.factorization import moments
from mlaforge.families import read_spec
from mlaforge.modeling.latent_attention_mla import FUSED
from mlaforge.runtime import Interrupted, UserError
from support.tiny_models import CASES, load_original

LAYOUTS = ["latent", "latent_rope"]
FULL = {"budget": 1.0}


def original(tiny_models, family):
    return load_original(tiny_models[family])


def perplexity(model, windows):
    """Return the perplexity by transformers' loss."""
    with torch.no_grad():
        return float(torch.stack([model(ids[None], labels=ids[None]).loss for ids in windows]).mean().exp())


def cache_bytes(cache):
    """Return the allocated bytes of a transformers cache."""
    tensors = [t for layer in cache.layers for t in (layer.keys, layer.values) if t is not None]
    return sum(tensor.untyped_storage().nbytes() for tensor in {id(t): t for t in tensors}.values())


def tokens(n=2, t=40):
    return torch.randint(0, 250, (n, t), generator=torch.Generator().manual_seed(3))


def force(model, absorb):
    for layer in model.model.layers:
        if hasattr(layer.self_attn, "absorb"):
            layer.self_attn.absorb = absorb
    return model


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_full_rank_equals_the_original(family, layout, converted, tiny_models):
    model = loading.load_model(converted(family, layout, **FULL))
    with torch.no_grad():
        expected = original(tiny_models, family)(tokens()).logits
        for absorb in (False, True, None):
            torch.testing.assert_close(force(model, absorb)(tokens()).logits, expected, rtol=0, atol=1e-4)
        # transformers' sdpa ignores learned sinks, so that it is refused for a model with sinks.
        for attention in ("eager", FUSED, *(["sdpa"] if family != "gpt_oss" else [])):
            model.set_attn_implementation(attention)
            torch.testing.assert_close(force(model, False)(tokens()).logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_absorbed_equals_expanded_and_cached_equals_uncached(family, layout, converted):
    model = loading.load_model(converted(family, layout, budget=0.75))
    x = tokens()
    with torch.no_grad():
        expanded = force(model, False)(x).logits
        torch.testing.assert_close(force(model, True)(x).logits, expanded, rtol=1e-4, atol=1e-4)
        for absorb in (False, True):
            cache, parts = DynamicCache(config=model.config), []
            for part in (x[:, :25], x[:, 25:26], x[:, 26:31], x[:, 31:]):
                parts.append(force(model, absorb)(part, past_key_values=cache).logits)
            torch.testing.assert_close(torch.cat(parts, 1), expanded, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_left_padding_changes_nothing(family, layout, converted):
    model = loading.load_model(converted(family, layout, budget=0.75))
    x, pad = tokens(1, 20), 7
    padded = torch.cat((torch.zeros(1, pad, dtype=torch.int64), x), 1)
    mask = torch.cat((torch.zeros(1, pad), torch.ones(1, 20)), 1).long()
    more = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(x, attention_mask=torch.ones_like(x), **more)[:, 20:]
    assert torch.equal(model.generate(padded, attention_mask=mask, **more)[:, 20 + pad :], plain)


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_generation_modes_of_transformers(family, layout, converted, tiny_models):
    """At full rank every mode gives the original's tokens."""
    models, x = (loading.load_model(converted(family, layout, **FULL)), original(tiny_models, family)), tokens(1, 30)
    for how in ({"cache_implementation": "static"}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}):
        more = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False, "pad_token_id": 0, **how}
        more["attention_mask"] = torch.ones_like(x)
        assert torch.equal(*(model.generate(x, **more) for model in models)), how


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_the_cache_has_the_size_in_the_manifest(family, layout, converted):
    directory = converted(family, layout, budget=0.5, layers="all")
    model, x = loading.load_model(directory), tokens(1, 16)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(x, past_key_values=cache)
    metrics = json.loads((directory / "manifest.json").read_text())["metrics"]["cache"]
    assert cache_bytes(cache) == 16 * metrics["mla_bytes_per_token"]
    assert metrics["mla_per_token"] <= 0.5 * metrics["gqa_per_token"]


def test_a_sliding_window_bounds_the_latent_cache(converted):
    model = loading.load_model(converted("mistral", "latent", budget=0.5))
    window, cache = model.config.sliding_window, DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens(1, 40), past_key_values=cache)
        model(tokens(1, 1), past_key_values=cache)
    assert all(layer.keys.shape[2] == window - 1 for layer in cache.layers)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_named_layers_are_converted(layout, converted, tiny_models):
    directory = converted("llama", layout, budget=0.5, layers="1")
    config = checkpoint_reader.read_config(directory)
    assert config["mla_layer_types"] == ["gqa", layout] + ["gqa"] * (config["num_hidden_layers"] - 2)
    with checkpoint_reader.Reader(directory) as new, checkpoint_reader.Reader(tiny_models["llama"]) as old:
        assert "model.layers.1.self_attn.kv_b_proj.weight" in new
        assert "model.layers.1.self_attn.k_proj.weight" not in new
        for name in old:
            if "layers.1.self_attn" not in name:
                assert torch.equal(new[name], old[name]), name


def test_a_larger_budget_loses_less(converted, tiny_models, evaluation_file):
    """KL divergence from the original decreases with the budget, for either layout."""
    x = tokens(4, 60)
    with torch.no_grad():
        expected = original(tiny_models, "qwen2")(x).logits.log_softmax(-1)
        for layout in LAYOUTS:
            kl = []
            for budget in (0.6, 0.8, 1.0):
                got = loading.load_model(converted("qwen2", layout, budget=budget))(x).logits.log_softmax(-1)
                kl.append(float((expected.exp() * (expected - got)).sum(-1).mean()))
            assert kl[0] > kl[1] > kl[2], (layout, kl)
            assert kl[2] < 1e-6


HALF = {"budget": 0.5}


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        ("latent", {"bits": 4.0}),
        *(
            pytest.param(layout, {**HALF, **more}, marks=pytest.mark.slow)
            for layout, more in (("latent", {}), ("latent_rope", {}), ("latent", {"q_lora_rank": 48}))
        ),
    ],
)
def test_each_layer_is_decomposed_once_even_by_a_resumed_run(
    layout, more, converted, tiny_models, calibration_file, evaluation_file, tmp_path, monkeypatch
):
    texts = {"calibration": str(calibration_file), "evaluation": str(evaluation_file)}
    sizes = {"seqlen": 64, "nsamples": 12, "batch_size": 12, "eval_windows": 4, "device": "cpu"}
    config, loaded, decomposed = ConvertConfig(layout=layout, **texts, **sizes, **more), [], []
    load, svd, solved = moments.load, torch.linalg.svd, LayerSolver._solved

    def stopped(self, index, *others):
        if index == 1:
            raise KeyboardInterrupt
        return solved(self, index, *others)

    monkeypatch.setattr(
        moments, "load", lambda store, index, device: loaded.append(index) or load(store, index, device)
    )
    monkeypatch.setattr(torch.linalg, "svd", lambda a, **how: decomposed.append(a.shape) or svd(a, **how))
    monkeypatch.setattr(LayerSolver, "_solved", stopped)
    with pytest.raises(Interrupted):
        convert.run(str(tiny_models["qwen2"]), tmp_path / "out", config)
    monkeypatch.setattr(LayerSolver, "_solved", solved)
    convert.run(str(tiny_models["qwen2"]), tmp_path / "out", config)
    assert loaded == [0, 1, 2]
    # A factored query is a separate decomposition.
    assert len(decomposed) == 3 * (1 + ("q_lora_rank" in more))
    at_once = converted("qwen2", layout, batch_size=12, **more)
    for path in at_once.glob("*.safetensors"):
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize(("layout", "k_proj", "o_proj"), [("latent", 5, 6), ("latent_rope", 6, 6)])
def test_weights_are_read_as_often_as_documented(
    layout, k_proj, o_proj, tiny_models, calibration_file, evaluation_file, tmp_path, monkeypatch
):
    source, tensors, files = tiny_models["qwen2"], Counter(), Counter()
    texts = {"calibration": str(calibration_file), "evaluation": str(evaluation_file)}
    get, hashed = checkpoint_reader.Reader.__getitem__, checkpoint_reader.sha256

    def counted(self, name):
        tensors.update([name] if self.directory == source else [])
        return get(self, name)

    monkeypatch.setattr(checkpoint_reader.Reader, "__getitem__", counted)
    monkeypatch.setattr(checkpoint_reader, "sha256", lambda path: files.update([path]) or hashed(path))
    convert.run(
        str(source), tmp_path / "out",
        ConvertConfig(layout=layout, **texts, seqlen=64, nsamples=12, eval_windows=4, device="cpu"),
    )  # fmt: skip
    # As docs/notes/project.md counts them; the fingerprint reads whole files, and so each tensor once more.
    assert set(files.values()) == {1}
    assert {tensors[f"model.layers.{layer}.self_attn.k_proj.weight"] for layer in range(3)} == {k_proj}
    assert {tensors[f"model.layers.{layer}.self_attn.o_proj.weight"] for layer in range(3)} == {o_proj}


@pytest.mark.parametrize("layout", ["latent", pytest.param("latent_rope", marks=pytest.mark.slow)])
def test_converts_with_a_calibration_text_of_one_repeated_token(layout, tiny_models, tmp_path, evaluation_file):
    """All inputs of a layer are equal: their variance is rounding error of either sign."""
    (text := tmp_path / "text.txt").write_text("a" * 2000)
    settings = {"calibration": str(text), "evaluation": str(evaluation_file), "seqlen": 64, "device": "cpu"}
    for name, how in (("full", FULL), ("coded", {"bits": 4})):
        convert.run(str(tiny_models["llama"]), tmp_path / name, ConvertConfig(layout=layout, **settings, **how))
    with torch.no_grad():
        expected = original(tiny_models, "llama")(tokens()).logits
        full, coded = (loading.load_model(tmp_path / name)(tokens()).logits for name in ("full", "coded"))
    torch.testing.assert_close(full, expected, rtol=0, atol=1e-4)
    assert coded.isfinite().all()


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_factored_query_at_full_rank_is_exact(family, converted, tiny_models):
    model = loading.load_model(converted(family, "latent", budget=1.0, q_lora_rank=64))
    assert model.model.layers[0].self_attn.q_a_proj.weight.shape == (64, 64)
    with torch.no_grad():
        expected = original(tiny_models, family)(tokens()).logits
        torch.testing.assert_close(model(tokens()).logits, expected, rtol=0, atol=1e-4)


def test_deepseek_style_has_uniform_ranks_and_standard_frequencies(converted):
    directory = converted("llama", "latent_rope", budget=0.75, deepseek_style=True, qk_rope_head_dim=16)
    config = checkpoint_reader.read_config(directory)
    assert set(config["mla_layer_types"]) == {"latent_rope"}
    assert set(config["mla_kv_lora_ranks"]) == {config["kv_lora_rank"]}
    with checkpoint_reader.Reader(directory) as reader:
        for i in range(config["num_hidden_layers"]):
            assert reader[f"model.layers.{i}.self_attn.rope_index"].tolist() == list(range(8))


@pytest.mark.parametrize(
    ("options", "rope_dim"),
    [
        ({"qk_mqa_dim": 8}, 8),
        ({"collapse": "2"}, 8),
        ({"collapse": "auto", "qk_mqa_dim": 16}, 16),
        ({"freqfold": "4"}, 24),
    ],
)
def test_transmla_names_mean_latent_rope(options, rope_dim, converted):
    config = checkpoint_reader.read_config(converted("llama", None, budget=0.75, **options))
    assert config["qk_rope_head_dim"] == rope_dim
    assert set(config["mla_layer_types"]) == {"latent_rope"}


@pytest.mark.parametrize(
    ("family", "layout"), [("qwen2", "latent_rope"), ("qwen3", "latent"), ("gpt_oss", "latent_rope")]
)
def test_gradients_reach_every_projection_and_checkpointing_changes_nothing(family, layout, converted):
    model = loading.load_model(converted(family, layout, budget=0.75)).train()
    grads = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(tokens(), labels=tokens()).loss.backward()
        grads.append({n: p.grad.clone() for n, p in model.named_parameters() if "self_attn" in n})
    for name, grad in grads[0].items():
        assert grad.abs().max() > 0, name
        torch.testing.assert_close(grads[1][name], grad)


def test_perplexities_and_text_hashes_are_recorded(converted, tiny_models, evaluation_file):
    from mlaforge.data import corpus

    directory = converted("llama", "latent_rope", budget=0.75)
    manifest = json.loads((directory / "manifest.json").read_text())
    metrics = manifest["metrics"]
    tokenizer = source_model.load_tokenizer(directory)
    text = corpus.windows(tokenizer, str(evaluation_file), 4, 64)
    assert manifest["inputs"]["evaluation"]["sha256"] == text.sha256
    assert metrics["mla_ppl"] == pytest.approx(perplexity(loading.load_model(directory), text.ids), rel=1e-5)
    assert metrics["original_ppl"] == pytest.approx(perplexity(original(tiny_models, "llama"), text.ids), rel=1e-5)
    assert metrics["ratio"] == metrics["mla_ppl"] / metrics["original_ppl"]
    # Partial RoPE alone changes the model.
    assert metrics["partial_rope_ppl"] != metrics["original_ppl"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_checkpoints(dtype, converted, tiny_models):
    directory = converted("llama", "latent_rope", budget=1.0, dtype=dtype, batch_size=1)
    model = loading.load_model(directory)
    assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}
    assert model.model.layers[0].self_attn.rope_index.dtype == torch.int64
    with torch.no_grad():
        expected = original(tiny_models, "llama")(tokens()).logits
        assert torch.cosine_similarity(model(tokens()).logits.float(), expected, dim=-1).min() > 0.99


def test_sinks_scale_the_attention_output(converted):
    """A LatentAttention with sinks equals one whose softmax has the sink as one more column (absorbed and expanded)."""
    directory = converted("llama", "latent_rope", budget=0.75)
    model = loading.load_model(directory)
    layer = model.model.layers[0].self_attn
    x = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(0))
    rope = model.model.rotary_emb(x, torch.arange(9)[None])
    layer.kv_b_proj.bias.data.normal_(generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        plain = layer.heads(x, rope)
        layer.sinks = torch.nn.Parameter(torch.linspace(-2, 2, layer.num_heads))
        layer.config.mla_sinks = True
        forms = []
        for absorb in (False, True):
            layer.absorb = absorb
            forms.append(layer.heads(x, rope))
    torch.testing.assert_close(forms[0], forms[1], rtol=1e-4, atol=1e-5)
    share = (forms[0] * plain).sum(-1, keepdim=True) / plain.square().sum(-1, keepdim=True)
    torch.testing.assert_close(forms[0], share * plain, rtol=1e-3, atol=1e-5)
    assert ((share > 0) & (share < 1 + 1e-4)).all()
    assert share.min() < 0.9


@pytest.mark.parametrize("options", [{}, {"deepseek_style": True}, {"qk_mqa_dim": 8}])
def test_norms_on_keys_refuse_a_shared_rotary_key(options, tiny_models, tmp_path):
    """In one line, before loading, for every option that implies the layout."""
    layout = None if options else "latent_rope"
    with pytest.raises(UserError, match=r"layer 0 .* its key norm .* use layout latent$") as caught:
        convert.run(str(tiny_models["qwen3"]), tmp_path / "out", ConvertConfig(layout=layout, **options))
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_norms_equal_those_of_the_source(converted, tiny_models):
    directory = converted("qwen3", "latent", budget=0.75)
    assert checkpoint_reader.read_config(directory)["mla_qk_norm"]
    assert not checkpoint_reader.read_config(converted("qwen2", "latent", budget=0.75))["mla_qk_norm"]
    with checkpoint_reader.Reader(directory) as new, checkpoint_reader.Reader(tiny_models["qwen3"]) as old:
        for name in (n for n in old if "q_norm" in n or "k_norm" in n):
            assert torch.equal(new[name], old[name])
    x = torch.randn(3, 5, 20, generator=torch.Generator().manual_seed(0)) * 3
    for dtype in (torch.float32, torch.bfloat16):
        source_norm = original(tiny_models, "qwen3").model.layers[0].self_attn.k_norm.to(dtype)
        norm = loading.load_model(directory).model.layers[0].self_attn.k_norm.to(dtype)
        assert torch.equal(norm(x.to(dtype)), source_norm(x.to(dtype)))


@pytest.mark.parametrize("q_lora_rank", [None, 48])
def test_refit_runs_with_norms(q_lora_rank, converted):
    directory = converted("qwen3", "latent", budget=0.5, q_lora_rank=q_lora_rank, refit="on")
    assert loading.load_model(directory).model.layers[0].self_attn.o_proj.bias.any()


def test_drafting_layers_are_left_out(converted, tiny_models, capsys):
    """The original is read without them, and the converted checkpoint contains neither them nor the original's type."""
    source = tiny_models["mimo"]
    with torch.no_grad():
        expected = original(tiny_models, "mimo")(tokens()).logits
        # The memory alignment of the weights differs, by which matrix products may be split differently.
        logits = loading.load_model(source, "float32")(tokens()).logits
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    directory = converted("mimo", "latent", budget=0.75)
    config = checkpoint_reader.read_config(directory)
    assert (config["model_type"], config["architectures"]) == ("qwen2_mla", ["Qwen2MlaForCausalLM"])
    with checkpoint_reader.Reader(directory) as new, checkpoint_reader.Reader(source) as old:
        assert len(old.left_out) == 13 and all(name.startswith("model.mtp_layers.") for name in old.left_out)
        assert not any("mtp" in name for name in (*new, *old, *new.left_out))
        capsys.readouterr()
        old.check(*loading.expected_tensors(checkpoint_reader.read_config(source)))
    assert "left out: 13 unused tensors" in capsys.readouterr().err


def test_read_spec_of_the_tiny_models(tiny_models):
    assert read_spec(checkpoint_reader.read_config(tiny_models["qwen2"])).layers[0].k_bias
    assert read_spec(checkpoint_reader.read_config(tiny_models["mistral"])).layers[0].window == 24
    normed = read_spec(checkpoint_reader.read_config(tiny_models["qwen3"])).layers
    assert [layer.window for layer in normed] == [None, None, 24]
    assert all(layer.qk_norm and layer.head_dim == 20 and not layer.k_bias for layer in normed)
    assert read_spec(checkpoint_reader.read_config(tiny_models["mimo"])).layers[0].k_bias
