"""SmolLM2-135M-Instruct with real weights: fast checks first, of its first layers, then slow tests of quality."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mlaforge.checkpoint import loading, source_model
from mlaforge.conversion import convert
from mlaforge.conversion.config import ConvertConfig
from mlaforge.engine.sampling.params import SamplingParams
from support.engine_driver import watched

DATA = Path(__file__).parents[3] / "shared" / "data" / "wikitext-2"


# A conversion does the same with every layer, and takes half a second for each.
LAYERS = 8


@pytest.fixture(scope="module")
def first_layers(smollm2, tmp_path_factory):
    """A directory with the first layers of the model."""
    folder = tmp_path_factory.mktemp("first") / "model"
    shutil.copytree(smollm2, folder, ignore=shutil.ignore_patterns("*.safetensors*", "manifest.json"))
    config = json.loads((smollm2 / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": LAYERS}))
    (shard,) = smollm2.glob("*.safetensors")
    weights, layer = load_file(shard), re.compile(r"model\.layers\.(\d+)\.")
    left = {name: x for name, x in weights.items() if not (at := layer.match(name)) or int(at[1]) < LAYERS}
    assert len(left) < len(weights) / 2
    save_file(left, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def loaded(first_layers):
    return loading.load_model(first_layers, "float32").requires_grad_(False)


def test_the_model_has_the_expected_geometry(smollm2):
    tokenizer = source_model.load_tokenizer(smollm2)
    ids = tokenizer("The capital of France is", return_tensors="pt")
    out = loading.load_model(smollm2, "float32").generate(**ids, max_new_tokens=1, do_sample=False)
    assert tokenizer.decode(out[0, -1]) == " Paris"
    assert tokenizer.chat_template


def converted(model, out, **options):
    """Conversions into folders of one parent share their moments."""
    config = ConvertConfig(device="cpu", **options)
    return convert.run(str(model), out, config, calibrated=out.parent / "calibration")


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    return tmp_path_factory.mktemp("calibrated")


@pytest.fixture(scope="module", params=["latent", pytest.param("latent_rope", marks=pytest.mark.slow)])
def full_rank(request, first_layers, calibrated):
    """Converted at full rank."""
    out = calibrated / request.param
    converted(first_layers, out, layout=request.param, budget=1.0, nsamples=1, seqlen=128, eval_windows=0)
    return out


def test_full_rank_gives_the_original_logits(full_rank, first_layers, loaded):
    """Both layouts, real weights, fp32: 1e-4."""
    tokenizer = source_model.load_tokenizer(first_layers)
    ids = tokenizer("Multi-head latent attention caches one small vector for every token.", return_tensors="pt")
    with torch.no_grad():
        expected = loaded(**ids).logits
        model = loading.load_model(full_rank)
        for absorb in (False, True):
            for layer in model.model.layers:
                layer.self_attn.absorb = absorb
            torch.testing.assert_close(model(**ids).logits, expected, rtol=0, atol=1e-4)


def test_the_bf16_engine_has_the_originals_perplexity(full_rank, first_layers, loaded, evaluation_file):
    """The mean loss of transformers in fp32, which is the original's, on 256 tokens: within 0.05, measured 0.015. Keys
    turned as if they stood half as far change it by 0.23 in these few layers."""
    ids = source_model.load_tokenizer(first_layers)(evaluation_file.read_text())["input_ids"][:256]
    with torch.no_grad():
        wanted = loaded(torch.tensor([ids]), labels=torch.tensor([ids])).loss
    llm = watched(full_rank, dtype="bfloat16", cache_bytes=64 << 20)
    (read,) = llm.generate([ids], SamplingParams(max_tokens=0, prompt_logprobs=0))
    found = -torch.tensor([entry.logprob for entry in read.prompt_logprobs[1:]]).mean()
    assert abs(found - wanted) < 0.05


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="shared/data is not beside this checkout")
def test_bars_on_wikitext(smollm2, tmp_path):
    """The issue's bars at a quarter of its text: 16,384 calibration and 8,192 test tokens.

    benchmarks/conversion.py measures the full protocol; the bars hold here too, with less calibration.
    """
    texts = {"calibration": str(DATA / "wiki.valid.tokens"), "evaluation": str(DATA / "wiki.test.raw")}
    for layout, budget, bar in (("latent", 0.75, 1.01), ("latent", 0.5, 1.05), ("latent", 0.375, 1.18),
                                ("latent_rope", 0.75, 1.08), ("latent_rope", 0.5, 1.22)):  # fmt: skip
        out = tmp_path / f"{layout}-{budget}"
        found = converted(smollm2, out, layout=layout, budget=budget, nsamples=8, eval_windows=4, **texts).metrics
        assert found["original_ppl"] == pytest.approx(24.5165, abs=0.01)
        assert 0.98 < found["ratio"] <= bar, (layout, budget, found["ratio"])


@pytest.mark.slow
def test_demo_reuses_what_is_finished(smollm2, tmp_path):
    from mlaforge.demo import demo
    from mlaforge.demo.config import DemoConfig

    options = DemoConfig(nsamples=1, eval_windows=1, prompt="Say hello.")
    first = dict(demo.run(tmp_path / "demo", options))
    assert first["report"].stat().st_size > 10_000
    stamp = (tmp_path / "demo" / demo.CONVERTED / "config.json").stat().st_mtime_ns
    second = dict(demo.run(tmp_path / "demo", options))
    assert (tmp_path / "demo" / demo.CONVERTED / "config.json").stat().st_mtime_ns == stamp
    assert second["conversion"].metrics == first["conversion"].metrics
