"""Features of GPT-OSS: packed experts, learned sinks, sliding and full layers, YaRN on dimensions without RoPE."""

import hashlib
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GptOssConfig, Mxfp4Config

from mlaforge.artifact import Manifest
from mlaforge.checkpoint import loading
from mlaforge.config import resolve
from mlaforge.conversion import convert
from mlaforge.conversion.config import ConvertConfig
from mlaforge.families import read_spec
from mlaforge.planning.plan import window_choices
from mlaforge.report.report import write_report
from support.tiny_models import load_original, save_packed


@pytest.fixture(scope="module")
def packed(tiny_models, tmp_path_factory) -> Path:
    """The tiny model in bf16 with MXFP4 experts, like public checkpoints."""
    return save_packed(tiny_models["gpt_oss"], tmp_path_factory.mktemp("packed") / "model")


@pytest.fixture
def run(calibration_file, evaluation_file, tmp_path):
    """run(MODEL, **options) -> the converted directory and its manifest."""

    def convert_it(source: Path, **options) -> tuple[Path, Manifest]:
        out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        settings = {"seqlen": 64, "nsamples": 12, "eval_windows": 4, "device": "cpu", **options}
        config = ConvertConfig(calibration=str(calibration_file), evaluation=str(evaluation_file), **settings)
        return out, convert.run(str(source), out, config)

    return convert_it


RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("gptoss-*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=[path.stem for path in RECIPES])
def test_recipes_agree_with_their_comments(recipe):
    """Every key is known, the plan fits the model, and the numbers in the comments are those of `plan`."""
    layers, experts = {"gptoss-20b": (24, 32), "gptoss-120b": (36, 128)}[recipe.stem]
    config = resolve(ConvertConfig, recipe)
    spec = read_spec(GptOssConfig(num_hidden_layers=layers, num_local_experts=experts).to_dict())
    chosen = convert.choose(spec, convert.completed(config))
    assert chosen.plan.converted == tuple(range(1, layers, 2)) and chosen.refit and not chosen.allocated
    assert {chosen.plan.cached[i] for i in chosen.plan.converted} == {576}
    text = recipe.read_text()
    assert f"{layers} layers, {layers // 2} of them full" in text and f"{experts} experts" in text
    assert f"{chosen.plan.converted_fraction:.2%}".replace("%", " %") in text
    cache_mib = {name: sizes[32768] / 2**20 for name, sizes in window_choices(chosen.plan).items()}
    assert f"{cache_mib['full'] - cache_mib['all']:.2g} of {int(cache_mib['full'])} MiB" in text
    waiting = config.nsamples * config.seqlen * spec.hidden_size * layers
    assert f"{4 * waiting / 1e9:.0f} GB over" in text and f"{2 * waiting / 1e9:.0f} GB in bf16" in text
    tokens = config.nsamples * config.seqlen, config.eval_windows * config.seqlen
    assert f"{tokens[0]:,} tokens" in text and f"{tokens[1]:,} held-out tokens" in text


def tokens(t=40):
    return torch.randint(0, 250, (2, t), generator=torch.Generator().manual_seed(3))


def stored(directory: Path) -> dict[str, str]:
    """Return the SHA-256 of every MXFP4 tensor."""
    digests = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (a safe_open is no mapping)
                if name.endswith(("_blocks", "_scales")):
                    digests[name] = hashlib.sha256(file.get_tensor(name).numpy().tobytes()).hexdigest()
    return digests


@pytest.mark.parametrize("layout", ["latent", "latent_rope"])
def test_packed_experts_are_copied_byte_for_byte_and_the_rest_is_exact(layout, packed, run):
    out, manifest = run(packed, layout=layout, budget=1.0)
    assert len(stored(packed)) == 2 * 2 * 3 and stored(out) == stored(packed)
    assert json.loads((out / "config.json").read_text())["quantization_config"]["quant_method"] == "mxfp4"
    assert manifest.metrics["mla_ppl"] == pytest.approx(manifest.metrics["original_ppl"], rel=1e-3)
    whole = AutoModelForCausalLM.from_pretrained(packed, quantization_config=Mxfp4Config(dequantize=True))
    converted = loading.load_model(out)
    for name, tensor in whole.state_dict().items():
        if "self_attn" not in name:
            assert torch.equal(converted.state_dict()[name], tensor), name
    with torch.no_grad():
        wanted = whole.float()(tokens(), output_router_logits=True)
        # Only the new projections were rounded to bf16 once more, which may tip a router that is undecided.
        choices = torch.stack([logits.sort(-1, descending=True).values for logits in wanted.router_logits])
        k = whole.config.num_experts_per_tok
        decided = (choices[..., k - 1] - choices[..., k] > 0.02).all(0).view(wanted.logits.shape[:2])
        assert decided.float().mean() > 0.75
        found = converted.float()(tokens()).logits
        torch.testing.assert_close(found[decided], wanted.logits[decided], rtol=0, atol=0.03)


def test_only_full_layers_are_converted_by_default(tiny_models, run):
    out, manifest = run(tiny_models["gpt_oss"], budget=0.5)
    config = json.loads((out / "config.json").read_text())
    assert config["layer_types"] == ["sliding_attention", "full_attention", "sliding_attention"]
    assert config["mla_layer_types"] == ["gqa", "latent", "gqa"]
    before, after = load_file(tiny_models["gpt_oss"] / "model.safetensors"), {}
    for path in out.glob("*.safetensors"):
        after |= load_file(path)
    for name, tensor in before.items():
        if "layers.1.self_attn" not in name:
            assert torch.equal(after[name], tensor), name
    choices = manifest.metrics["cache"]["window_choices"]
    # fp32: two sliding layers of 64 numbers for 24 tokens, one full layer of 64 or 32 numbers for every token.
    # The longest that the model was made for is below all that are told of larger ones.
    (tokens,) = choices["gqa"]
    assert tokens == config["max_position_embeddings"]
    assert choices["gqa"][tokens] == 4 * (2 * 64 * 24 + 64 * tokens)
    assert choices["full"][tokens] == 4 * (2 * 64 * 24 + 32 * tokens)
    assert choices["all"][tokens] == 4 * (2 * 32 * 24 + 32 * tokens)
    write_report(out.parent, page := out.parent / "report.html")
    text = re.sub(r"<[^>]*>|\s", " ", page.read_text(encoding="utf-8"))
    table = text[text.index("layers converted") :]
    for name in ("none (GQA)", "full", "all"):
        table = table[table.index(name) :]


def sink_shares(model, ids) -> torch.Tensor:
    """Return the softmax share of each layer's sink, computed from `lse`, [layers, B, H, T]."""
    from mlaforge.modeling import latent_attention_mla as mla

    shares = []
    real = mla.sink_share

    def remember(lse, sinks):
        shares.append(1 - real(lse, sinks))
        return real(lse, sinks)

    mla.sink_share = remember
    try:
        with torch.no_grad():
            model(ids)
    finally:
        mla.sink_share = real
    return torch.stack(shares)


@pytest.mark.parametrize("absorb", [False, True])
@pytest.mark.parametrize("layout", ["latent", "latent_rope"])
def test_the_share_of_the_sinks_equals_the_originals(layout, absorb, tiny_models, converted):
    """Exactly at full rank, and closer with a larger budget."""
    original = load_original(tiny_models["gpt_oss"])
    with torch.no_grad():
        kept = torch.stack(original(tokens(), output_attentions=True).attentions).sum(-1)
    assert 0.05 < float((1 - kept).mean()) < 0.95
    error = {}
    for budget in (1.0, 0.75, 0.25):
        model = loading.load_model(converted("gpt_oss", layout, layers="all", budget=budget))
        for layer in model.model.layers:
            layer.self_attn.absorb = absorb
        error[budget] = float((sink_shares(model, tokens()) - (1 - kept)).abs().mean())
    assert error[1.0] < 1e-5 < error[0.75] < error[0.25] < 0.1
