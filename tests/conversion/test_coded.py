"""`convert --bits`: ranks and bits of every family and layout, in plain transformers."""

import json
import shutil

import pytest
import torch
from transformers import DynamicCache

from mlaforge.checkpoint import loading
from mlaforge.conversion.config import ConvertConfig
from mlaforge.conversion.convert import completed
from mlaforge.modeling.coded_layout_mla import ALIGNMENT, VERSION, CodedLayout
from mlaforge.modeling.configuration_mla import LlamaMlaConfig
from mlaforge.modeling.modeling_mla import LlamaMlaForCausalLM
from support.tiny_models import CASES, load_original

EVERY = {"layers": "all"}
# Bytes absent from the calibration text exceed the ranges: use more of it.
MORE_TEXT = {"nsamples": 64}


def tokens(rows=2, length=40):
    return torch.randint(0, 256, (rows, length), generator=torch.Generator().manual_seed(5))


def error(directory, tiny_models, text):
    """Return the mean squared error of the logits against the original's."""
    x = torch.tensor([list(text.read_bytes()[at : at + 64]) for at in range(0, 1024, 64)])
    with torch.no_grad():
        return float(
            (loading.load_model(directory)(x).logits - load_original(tiny_models["llama"])(x).logits).square().mean()
        )


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_coded_rows_have_the_requested_bits(family, layout, converted):
    """Decoded rows are the same with and without a cache, in chunks, absorbed and expanded; their bytes are the
    requested share."""
    directory = converted(family, layout, bits=5, **EVERY)
    model, x = loading.load_model(directory), tokens()
    with torch.no_grad():
        plain, off = model(x, use_cache=False).logits, []
        for absorb in (False, True):
            for layer in model.model.layers:
                layer.self_attn.absorb = absorb
            cache, parts = DynamicCache(config=model.config), []
            for part in (x[:, :25], x[:, 25:26], x[:, 26:31], x[:, 31:]):
                parts.append(model(part, past_key_values=cache).logits)
            off.append((torch.cat(parts, 1) - plain).abs())
        for layer in model.model.layers:
            layer.self_attn.coded = None
        rounding = (model(x, use_cache=False).logits - plain).abs()
    # A value halfway between two levels may be rounded to either, so that a few differ by more.
    assert all(error.mean() < 0.01 * rounding.mean() and error.max() < rounding.max() for error in off)
    model, cache = loading.load_model(directory), DynamicCache(config=model.config)
    model(x[:1, :16], past_key_values=cache)
    rows = [layer.keys for layer in cache.layers]
    assert all(row.dtype == torch.uint8 for row in rows)
    metrics = json.loads((directory / "manifest.json").read_text())["metrics"]
    per_token = sum(row.shape[-1] for row in rows)
    assert per_token == metrics["cache"]["mla_bytes_per_token"]
    limit = 5 / 8 * metrics["cache"]["gqa_per_token"]
    assert limit - ALIGNMENT * len(rows) < per_token <= limit
    counts = model.config.mla_code_counts
    assert [code[0] for code in counts] == model.config.mla_kv_lora_ranks
    layouts = [CodedLayout(c, layer.self_attn.rope_dim) for c, layer in zip(counts, model.model.layers, strict=True)]
    assert [layout.row_bytes for layout in layouts] == [row.shape[-1] for row in rows]
    assert model.config.mla_code_version == VERSION


@pytest.mark.parametrize("layout", [pytest.param("latent", marks=pytest.mark.slow), "latent_rope"])
def test_more_bits_lose_less(layout, converted, tiny_models, evaluation_file):
    """The measured and the predicted loss decrease with the number of bits."""
    errors, predicted = [], []
    for bits in (4, 8):
        directory = converted("llama", layout, bits=bits, refit="off", **MORE_TEXT)
        errors.append(error(directory, tiny_models, evaluation_file))
        layers = json.loads((directory / "manifest.json").read_text())["metrics"]["layers"]
        predicted.append(sum(layer["predicted_loss"] for layer in layers))
    assert errors[0] > 2 * errors[1]
    assert predicted[0] > 2 * predicted[1]


def test_bits_beat_rank_at_equal_bytes(converted, tiny_models, evaluation_file):
    coded, cut = (converted("llama", "latent", **MORE_TEXT, **how) for how in ({"bits": 4}, {"budget": 0.25}))
    assert 2 * error(coded, tiny_models, evaluation_file) < error(cut, tiny_models, evaluation_file)


@pytest.mark.parametrize("how", [{"cache_implementation": "static"}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}])
def test_generation_modes_of_transformers(how, converted):
    model, x = loading.load_model(converted("llama", "latent", bits=5, **EVERY)), tokens(1, 30)
    more = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    more["attention_mask"] = torch.ones_like(x)
    beams = {"num_beams": how["num_beams"]} if "num_beams" in how else {}
    assert torch.equal(model.generate(x, **more, **how), model.generate(x, **more, **beams, use_cache=False))


def test_gradients_pass_through_the_code(converted):
    model = loading.load_model(converted("llama", "latent_rope", bits=5, **EVERY)).train()
    model(tokens(), use_cache=False).logits.square().mean().backward()
    for layer in model.model.layers:
        for name, parameter in layer.self_attn.named_parameters():
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize(
    ("options", "bits", "budget"),
    [
        ({}, 4.0, None),
        ({"layout": "latent", "layers": "0", "refit": "on", "q_lora_rank": 24}, 4.0, None),
        ({"bits": 3.0}, 3.0, None),
        ({"budget": 0.5}, None, 0.5),
        ({"kv_lora_rank": 16}, None, 0.5),
        ({"ranks": "uniform"}, None, 0.5),
        ({"layout": "latent_rope"}, None, 0.5),
        ({"qk_mqa_dim": 8}, None, 0.5),
        ({"deepseek_style": True}, None, 0.5),
        ({"layout": "latent_rope", "bits": 4.0}, 4.0, None),
    ],
)
def test_defaults_of_bits_and_budget(options, bits, budget):
    config = completed(ConvertConfig(**options))
    assert (config.bits, config.budget) == (bits, budget)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--bits", "4", "--budget", "0.25"), ("bits", "budget = 0.25")),
        (("--bits", "4", "--budget", "0.5"), ("bits", "budget = 0.5")),
        (("--bits", "4", "--kv-lora-rank", "16"), ("bits", "kv_lora_rank = 16")),
        (("--bits", "4", "--ranks", "uniform"), ("bits", "ranks = uniform")),
        (("--bits", "9"), ("bits", "8")),
        (("--bits", "0"), ("bits", "above 0")),
    ],
)
def test_rejects_contradictory_options(more, words, refused, tiny_models, tmp_path, short):
    refused(words, "convert", tiny_models["llama"], tmp_path / "out", *short, *more)


@pytest.mark.parametrize(
    ("counts", "word"),
    [
        (lambda c: c[:-1], "one for each layer"),
        (lambda c: [[c[0][0] + 8, *c[0][1:]], *c[1:]], "ranks"),
        (lambda c: [[*c[0], c[0][-1] + 8], *c[1:]], "descending"),
        (lambda c: [[*c[0][:-1], 4], *c[1:]], "multiples of 8"),
        (lambda c: [[*c[0], 8.5], *c[1:]], "mla_code_counts"),
    ],
)
def test_rejects_damaged_codes(counts, word, converted, refused, tmp_path):
    out = shutil.copytree(converted("llama", "latent", bits=5, **EVERY), tmp_path / "model")
    config = json.loads((out / "config.json").read_text())
    config["mla_code_counts"] = counts(config["mla_code_counts"])
    (out / "config.json").write_text(json.dumps(config))
    refused(("config.json", word), "eval", out, "--windows", 1)


def test_versions_of_coded_rows(converted, refused, tmp_path):
    """A checkpoint without a version is of the first one and gives the same logits; an unknown version is refused, by
    the model code in the checkpoint too."""
    out = shutil.copytree(converted("llama", "latent", bits=5, **EVERY), tmp_path / "model")
    config, x = json.loads((out / "config.json").read_text()), tokens(1, 30)

    def write(version):
        config.pop("mla_code_version", None)
        (out / "config.json").write_text(json.dumps(config | ({"mla_code_version": version} if version else {})))

    logits = loading.load_model(out)(x).logits
    for version in (None, 1):
        write(version)
        model = loading.load_model(out)
        assert model.config.mla_code_version == 1 and torch.equal(model(x).logits, logits)
    write(3)
    refused(("config.json", "mla_code_version", "one of 1, 2"), "eval", out, "--windows", 1)
    with pytest.raises(ValueError, match="mla_code_version 3 is not one of"):
        LlamaMlaForCausalLM(LlamaMlaConfig(**{**model.config.to_dict(), "mla_code_version": 3}))
