"""`make-gptoss`: the same function as the source with plain options, and each option changes what it should."""

import json

import pytest
import torch

from mlaforge.checkpoint import loading, mxfp4, source_model
from mlaforge.checkpoint import reader as checkpoint_reader
from mlaforge.data import corpus, overlap
from mlaforge.demo.config import MakeGptOssConfig
from mlaforge.demo.gpt_oss import TOKENS, WINDOW, run
from mlaforge.ops.mxfp4 import dequantize
from mlaforge.runtime import UserError

ONE = {"experts": 1, "top_k": 1}


@pytest.fixture(scope="module")
def long_text(tmp_path_factory):
    """As many bytes, hence tokens, as healing asks for."""
    from pydoc_data.topics import topics

    path = tmp_path_factory.mktemp("text") / "long.txt"
    path.write_text("\n\n".join(topics[key] for key in sorted(topics)[:40])[: 8 * TOKENS], encoding="utf-8")
    return path


@pytest.fixture
def make(tmp_path):
    """make(source, options) -> the directory that was made."""

    def checkpoint(source, name="made", **options):
        run(tmp_path / name, MakeGptOssConfig(from_=str(source), **options))
        return tmp_path / name

    return checkpoint


def load(directory):
    """transformers' own class, strictly."""
    from transformers import AutoModelForCausalLM, Mxfp4Config

    packed = mxfp4.is_packed(checkpoint_reader.read_config(directory))
    extra = {"quantization_config": Mxfp4Config(dequantize=True)} if packed else {}
    model, info = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True, **extra
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


@torch.no_grad()
def logits(directory, ids):
    return load(directory)(ids[None]).logits[0]


def some_ids(length, seed=0):
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("options", "biased"),
    [(ONE, True), ({"experts": 4, "top_k": 2}, False), ({"experts": 3, "top_k": 3, "seed": 5}, True)],
)
def test_plain_options_keep_the_logits(make, tiny_models, biased_llama, biased, options):
    source, ids = biased_llama if biased else tiny_models["llama"], some_ids(300)
    checkpoint = make(source, **options)
    torch.testing.assert_close(logits(checkpoint, ids), logits(source, ids), rtol=0, atol=1e-4)
    config = checkpoint_reader.read_config(checkpoint)
    assert config["model_type"] == "gpt_oss" and config["architectures"] == ["GptOssForCausalLM"]
    assert (config["num_local_experts"], config["num_experts_per_tok"]) == (options["experts"], options["top_k"])
    with checkpoint_reader.Reader(checkpoint) as reader:
        reader.check(*loading.expected_tensors(config))
        experts = reader["model.layers.0.mlp.experts.down_proj"]
        assert torch.equal(reader["lm_head.weight"], checkpoint_reader.Reader(source)["lm_head.weight"])
    assert all(not torch.equal(experts[0], other) for other in experts[1:])


def test_mlp_biases_and_tied_heads_are_carried(make, tmp_path):
    import conftest

    source = conftest.save_model(tmp_path / "source", "llama", 9, mlp_bias=True, tie_word_embeddings=True)
    checkpoint, ids = make(source), some_ids(64)
    torch.testing.assert_close(logits(checkpoint, ids), logits(source, ids), rtol=0, atol=1e-4)


def test_experts_that_differ_are_noisy_copies(make, tiny_models):
    plain, noisy = make(tiny_models["llama"]), make(tiny_models["llama"], "noisy", differ=0.1)
    a, b = (
        checkpoint_reader.Reader(checkpoint)["model.layers.1.mlp.experts.down_proj"] for checkpoint in (plain, noisy)
    )
    # The order of hidden units may differ, so sorted rows' norms are compared, and the noise by its size.
    norms = [x.square().sum(-1).sort().values for x in (a, b)]
    assert 0 < (norms[0] - norms[1]).abs().mean() / norms[0].mean() < 0.1
    assert b.square().mean() / a.square().mean() == pytest.approx(1.01, abs=0.01)
    assert not torch.allclose(logits(plain, some_ids(32)), logits(noisy, some_ids(32)), atol=1e-3)


def test_windows_hide_what_is_further_than_128_tokens(make, tmp_path):
    import conftest

    source = conftest.save_model(tmp_path / "source", "llama", 4, num_hidden_layers=1)
    checkpoint, ids = make(source, **ONE, windows=True), some_ids(WINDOW + 40)
    changed = ids.clone()
    changed[0] = (ids[0] + 1) % 256
    before, after = logits(checkpoint, ids), logits(checkpoint, changed)
    # Token 0 is seen up to position 127, itself counted.
    assert (before - after)[:WINDOW].abs().amax(-1).min() > 1e-6
    torch.testing.assert_close(before[WINDOW:], after[WINDOW:], rtol=0, atol=0)
    torch.testing.assert_close(before[:WINDOW], logits(source, ids)[:WINDOW], rtol=0, atol=1e-4)


def test_even_layers_slide(make, tiny_models):
    kinds = checkpoint_reader.read_config(make(tiny_models["llama"], **ONE, windows=True))["layer_types"]
    assert kinds == ["sliding_attention", "full_attention", "sliding_attention"]


def test_yarn_scales_rope_and_half_of_the_scaling_is_divided_out(make, tiny_models):
    import math

    source = tiny_models["llama"]
    config = checkpoint_reader.read_config(checkpoint := make(source, **ONE, yarn=32.0))
    rope = config["rope_parameters"]
    assert (rope["rope_type"], rope["factor"], rope["truncate"]) == ("yarn", 32.0, False)
    assert (rope["original_max_position_embeddings"], config["max_position_embeddings"]) == (512, 512 * 32)
    scaling = 0.1 * math.log(32) + 1
    with checkpoint_reader.Reader(checkpoint) as new, checkpoint_reader.Reader(source) as old:
        name = "model.layers.0.self_attn.q_proj.weight"
        torch.testing.assert_close(new[name] * scaling, old[name])
    # YaRN of factor 1 is plain RoPE, bit by bit: both keep the logits.
    rotary = [load(m).model.rotary_emb for m in (source, make(source, "one", **ONE, yarn=1.0), checkpoint)]
    assert torch.equal(rotary[0].inv_freq, rotary[1].inv_freq)
    assert rotary[2].attention_scaling == pytest.approx(scaling)


def test_sinks_and_biases_are_not_zero(make, tiny_models, long_text):
    checkpoint = make(tiny_models["llama"], **ONE, windows=True, sinks=True, text=str(long_text))
    with checkpoint_reader.Reader(checkpoint) as reader:
        sinks = [reader[f"model.layers.{i}.self_attn.sinks"] for i in range(3)]
        assert all((s.abs() < 1e3).all() and s.abs().min() > 0 for s in sinks)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            assert reader[f"model.layers.1.self_attn.{name}.bias"].abs().min() > 0
    assert (checkpoint / overlap.PASSAGES).is_file()


def test_a_sink_is_the_mean_logit_of_the_first_token(tiny_models):
    """Against the attention weights that transformers itself reports."""
    from mlaforge.demo.first_token import measure

    ids, after = some_ids(160), 128
    model = loading.load_model(tiny_models["llama"], "float32")
    measured = measure(model, [ids], after)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        shares = model(ids[None], output_attentions=True).attentions
    for one, weights in zip(measured, shares, strict=True):
        torch.testing.assert_close(one.share, weights[0, :, after:, 0].mean(-1), rtol=0, atol=1e-5)
        assert one.logit.shape == (4,) and one.value.shape == (4, 16)


@pytest.mark.parametrize("windows", [True, False])
def test_fused_sinks_are_exact(make, tiny_models, long_text, windows):
    """Logits and gradients of every attention parameter, against transformers' own attention with sinks."""
    from mlaforge.modeling.latent_attention_mla import FUSED

    checkpoint = make(tiny_models["llama"], **ONE, windows=windows, sinks=True, text=str(long_text))
    model, ids, measured = load(checkpoint), some_ids(200), []
    for fused in (False, True):
        if fused:
            model.set_attn_implementation(FUSED)
        model.zero_grad()
        out = model(ids[None], use_cache=False).logits
        out.log_softmax(-1)[..., 7].sum().backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if ".self_attn." in name}
        measured.append({"logits": out.detach(), **gradients})
    for name, expected in measured[0].items():
        torch.testing.assert_close(
            measured[1][name], expected, rtol=1e-3, atol=1e-4 * max(1.0, float(expected.abs().max()))
        )


def test_mxfp4_is_stored_packed_and_loads(make, tiny_models):
    checkpoint, plain = make(tiny_models["llama"], mxfp4=True), make(tiny_models["llama"], "plain")
    config = checkpoint_reader.read_config(checkpoint)
    with checkpoint_reader.Reader(checkpoint) as reader, checkpoint_reader.Reader(plain) as original:
        shapes = {name: original.shape(name) for name in original}
        assert {name: reader.shape(name) for name in reader} == mxfp4.stored(config, shapes)
        name = "model.layers.2.mlp.experts.gate_up_proj"
        blocks, scales = (reader[part] for part in mxfp4.stored_names(name))
        assert blocks.dtype == scales.dtype == torch.uint8
        ours = dequantize(blocks, scales, torch.float32)
        assert torch.equal(load(checkpoint).get_parameter(name).data, ours)
        assert 0 < (ours - original[name]).abs().mean() < 0.1 * original[name].abs().mean() * 2
    # The command line's own strict loader takes it too.
    assert torch.equal(loading.load_model(checkpoint, "float32").get_parameter(name).data, ours)


def test_healing_lowers_the_divergence(make, tiny_models, long_text, evaluation_file):
    def divergence(measured, expected):
        p, q = expected.log_softmax(-1), measured.log_softmax(-1)
        return (p.exp() * (p - q)).sum(-1).mean()

    options = {**ONE, "windows": True, "yarn": 8.0, "sinks": True, "text": str(long_text), "differ": 0.01}
    source = tiny_models["llama"]
    ids = corpus.windows(source_model.load_tokenizer(source), str(evaluation_file), 1, 400).ids[0]
    raw, healed = make(source, "raw", **options), make(source, "healed", **options, heal=6)
    expected = logits(source, ids)
    assert divergence(logits(healed, ids), expected) < divergence(logits(raw, ids), expected)
    manifest = json.loads((healed / "manifest.json").read_text())
    assert len(manifest["metrics"]["kl"]) == 6
    with checkpoint_reader.Reader(raw) as a, checkpoint_reader.Reader(healed) as b:
        for name in a:
            assert torch.equal(a[name], b[name]) == (".self_attn." not in name), name
    assert {path.name for path in healed.iterdir()} == {path.name for path in raw.iterdir()}


def test_evaluation_rejects_the_healing_text(cli, make, tiny_models, long_text):
    checkpoint = make(tiny_models["llama"], **ONE, sinks=True, text=str(long_text))
    done = cli("eval", checkpoint, "--text", long_text, "--seqlen", 64, "--windows", 2, "--device", "cpu")
    assert done.exit_code == 2 and "share text" in done.stderr


def test_finished_result_is_reused(make, tiny_models, cli, tmp_path):
    checkpoint = make(tiny_models["llama"], **ONE)
    stamp = (checkpoint / "config.json").stat().st_mtime_ns
    manifest = run(checkpoint, MakeGptOssConfig(from_=str(tiny_models["llama"]), **ONE))
    assert (checkpoint / "config.json").stat().st_mtime_ns == stamp
    assert manifest.stage == "make-gptoss" and manifest.config["experts"] == 1
    assert sorted([*manifest.files, "manifest.json"]) == sorted(path.name for path in checkpoint.iterdir())
    with pytest.raises(UserError, match="experts was 1, now 2"):
        run(checkpoint, MakeGptOssConfig(from_=str(tiny_models["llama"]), experts=2, top_k=1))


def test_the_verb(cli, tiny_models, tmp_path):
    done = cli("make-gptoss", tmp_path / "out", "--from", tiny_models["llama"], "--experts", 2, "--top-k", 1)
    assert done.exit_code == 0, done.stderr
    assert "GPT-OSS of 2 experts" in done.stdout
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"from: {tiny_models['llama']}\nexperts: 2\ntop-k: 1\n")
    again = cli("make-gptoss", tmp_path / "out", "--recipe", recipe)
    assert again.exit_code == 0 and "is finished already" in again.stderr


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"experts": 2, "top_k": 3}, "top_k = 3 must be at most experts = 2"),
        ({"experts": 0, "top_k": 0}, "experts = 0 must be at least 1"),
        ({"differ": -1.0}, "differ = -1.0"),
        ({"heal": -1}, "heal = -1"),
        ({"yarn": 0.5}, "yarn = 0.5 must be at least 1"),
        ({"sinks": True, "text": "/nowhere.txt"}, "does not exist"),
    ],
)
def test_options_that_make_no_model_are_refused(make, tiny_models, tmp_path, options, line):
    with pytest.raises(UserError, match=line) as caught:
        make(tiny_models["llama"], **options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "made").exists()


def test_other_sources_are_refused(make, tiny_models, model):
    with pytest.raises(UserError, match="only llama checkpoints can be rewritten"):
        make(tiny_models["qwen2"])
    damaged = model()
    config = json.loads((damaged / "config.json").read_text())
    for change, line in (
        ({"hidden_act": "gelu"}, "uses silu, the source 'gelu'"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "RoPE is 'linear'; --yarn needs unscaled RoPE",
        ),
        ({"intermediate_size": 40}, "40 inputs does not fit"),
        ({"max_position_embeddings": 100}, "more than 128 positions"),
    ):
        (damaged / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(UserError, match=line):
            make(damaged, yarn=2.0, mxfp4=True, sinks=True)


@pytest.mark.slow
def test_smollm2_keeps_its_logits(smollm2, make):
    """Real weights, real text, four experts: 1e-3 in fp32."""
    tokenizer = source_model.load_tokenizer(smollm2)
    ids = corpus.windows(tokenizer, corpus.EMBEDDED, 1, 128, evaluation=True).ids[0]
    checkpoint = make("smollm2")
    torch.testing.assert_close(logits(checkpoint, ids), logits(smollm2, ids), rtol=0, atol=1e-3)


@pytest.mark.slow
def test_smollm2_with_everything_loads_and_speaks(smollm2, make):
    """Windows, YaRN, sinks, differing MXFP4 experts, a few steps of healing: finite, and far from random."""
    from mlaforge.evaluation import perplexity
    from mlaforge.evaluation.config import EvalConfig

    checkpoint = make("smollm2", windows=True, yarn=32.0, sinks=True, differ=0.02, mxfp4=True, heal=4)
    config = EvalConfig(windows=2, seqlen=512, dtype="float32", device="cpu")
    original, measured = (perplexity.run(str(model), None, config).metrics["ppl"] for model in (smollm2, checkpoint))
    # Measured: 2.8 after four steps; a model that speaks at random has a perplexity of 49,152.
    assert measured < 4 * original
