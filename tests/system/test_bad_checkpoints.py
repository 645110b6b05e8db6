"""Damaged model directories are refused in one line that names the damage, and no files are left behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from mlaforge.checkpoint.reader import TABLE
from support.tiny_models import INDEX, WEIGHTS, shard

NORM = "model.layers.1.post_attention_layernorm.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"


def edit_config(directory: Path, **changes: Any) -> None:
    """Change keys of a config.json; `...` removes one."""
    path = directory / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def edit_weights(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(directory / WEIGHTS).items()}
    change(tensors)
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})


def put(name: str, value: float) -> Callable[[dict[str, torch.Tensor]], Any]:
    """Return a damage that writes one value into the middle of a tensor."""
    return lambda tensors: tensors[name].view(-1)[tensors[name].numel() // 2].fill_(value)


def edit_index(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    index = json.loads((directory / INDEX).read_text())
    change(index)
    (directory / INDEX).write_text(json.dumps(index))


def truncate(path: Path, share: float) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def link_to_nothing(path: Path) -> None:
    """Dangling links, as in a hub cache whose blobs were deleted."""
    path.unlink()
    path.symlink_to("gone")


def assert_same_weights(*directories: Path) -> None:
    one, other = (load_file(directory / "model-00001-of-00001.safetensors") for directory in directories)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_sharded_model_converts_like_a_single_file(model, converts, tmp_path):
    """The shards are valid before the tests below damage them."""
    converts(model("llama"), tmp_path / "one")
    converts(shard(tmp_path / "llama"), tmp_path / "three")
    assert_same_weights(tmp_path / "one", tmp_path / "three")


SHARD = "model-00002-of-00003.safetensors"
SHARDED = {
    "missing shard": (lambda d: (d / SHARD).unlink(), (SHARD, "missing")),
    "dangling shard": (lambda d: link_to_nothing(d / SHARD), (SHARD, "cannot be read")),
    "truncated shard": (lambda d: truncate(d / SHARD, 0.9), (SHARD, "truncated")),
    "empty shard": (lambda d: truncate(d / SHARD, 0), (SHARD, "truncated")),
    "no safetensors": (lambda d: (d / SHARD).write_bytes(b"\0" * 4096), (SHARD, "truncated")),
    "index names a tensor": (lambda d: edit_index(d, lambda i: i["weight_map"].update(ghost=SHARD)), "'ghost'"),
    "index names a number": (lambda d: edit_index(d, lambda i: i["weight_map"].update(ghost=7)), "7 is missing"),
    "index without map": (lambda d: edit_index(d, lambda i: i.pop("weight_map")), INDEX),
    "index's metadata is text": (lambda d: edit_index(d, lambda i: i.update(metadata="2")), "metadata = '2' must be"),
    "index is a list": (lambda d: (d / INDEX).write_text("[]"), INDEX),
    "index is not JSON": (lambda d: truncate(d / INDEX, 0.5), INDEX),
}


@pytest.mark.parametrize("how", SHARDED)
def test_damaged_shards(how, model, refused, short, tmp_path):
    directory = shard(model("llama"))
    damage, words = SHARDED[how]
    damage(directory)
    refused(words, "convert", directory, tmp_path / "out", *short)


TENSORS = {
    "missing tensor": (lambda t: t.pop(NORM), ("lacks", NORM)),
    "extra tensor": (lambda t: t.update(ghost=torch.ones(2)), ("'ghost'", "does not call for")),
    "wrong shape": (lambda t: t.update({DOWN: t[DOWN][:, :5].contiguous()}), (DOWN, "[64, 5]", "[64, 96]")),
    "transposed": (lambda t: t.update({DOWN: t[DOWN].T.contiguous()}), (DOWN, "[96, 64]", "[64, 96]")),
    "NaN": (put(DOWN, float("nan")), (DOWN, "NaN or infinity")),
    "infinity": (put(DOWN, float("inf")), (DOWN, "NaN or infinity")),
    "minus infinity in an untouched tensor": (put("lm_head.weight", float("-inf")), ("lm_head.weight", "infinity")),
}


@pytest.mark.parametrize("how", TENSORS)
def test_damaged_tensors(how, model, refused, short, tmp_path):
    directory = model("llama")
    change, words = TENSORS[how]
    edit_weights(directory, change)
    refused(words, "convert", directory, tmp_path / "out", *short)


@pytest.mark.parametrize("how", ["missing tensor", "extra tensor", "wrong shape", "NaN"])
@pytest.mark.parametrize("verb", ["eval", "generate"])
def test_damaged_tensors_are_not_evaluated(verb, how, model, refused, evaluation_file, tmp_path):
    directory = model("llama")
    edit_weights(directory, TENSORS[how][0])
    name = {"extra tensor": "ghost", "missing tensor": NORM}.get(how, DOWN)
    more = ("--text", evaluation_file, "--seqlen", 64) if verb == "eval" else ()
    refused(name, verb, directory, tmp_path / "out", "--dtype", "float32", *more)


@given(share=st.floats(0, 1, exclude_max=True))
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_weights_cut_anywhere_are_refused(share, tiny_models, refused, short, tmp_path):
    shutil.copytree(tiny_models["llama"], tmp_path / "m", dirs_exist_ok=True)
    truncate(tmp_path / "m" / WEIGHTS, share)
    refused(WEIGHTS, "convert", tmp_path / "m", tmp_path / "out", *short)


def test_pickle_is_never_read(model, refused, short, tmp_path):
    directory = model("llama")
    (directory / WEIGHTS).unlink()
    opened = tmp_path / "pickle-was-run"

    class Bomb:
        def __reduce__(self) -> Any:
            return (open, (str(opened), "w"))

    torch.save(Bomb(), directory / "pytorch_model.bin")
    refused(("pickle", "pytorch_model.bin", "safetensors"), "convert", directory, tmp_path / "out", *short)
    refused("pytorch_model.bin", "eval", directory, "--windows", 1)
    assert not opened.exists()


def test_the_rope_table_of_old_checkpoints_is_ignored(model, converts, tmp_path):
    """Llama 2 has one in every layer; the conversion is the same as without."""
    converts(model("llama"), tmp_path / "without")
    edit_weights(
        tmp_path / "llama", lambda t: t.update({f"model.layers.{i}.self_attn.{TABLE}": torch.ones(8) for i in range(3)})
    )
    converts(tmp_path / "llama", tmp_path / "with")
    assert_same_weights(tmp_path / "without", tmp_path / "with")


def test_no_weights_at_all(model, refused, short, tmp_path):
    directory = model("llama")
    (directory / WEIGHTS).unlink()
    refused((WEIGHTS, INDEX), "convert", directory, tmp_path / "out", *short)


SUPPORTED = "gpt_oss, llama, mimo, ministral, mistral, qwen2, qwen3"
CONFIGS = {
    "near miss": ({"model_type": "lama"}, ("'lama'", SUPPORTED, "did you mean 'llama'?")),
    "far miss": ({"model_type": "bert"}, ("'bert'", SUPPORTED)),
    "no model_type": ({"model_type": ...}, "model_type"),
    "odd model_type": ({"model_type": ["llama"]}, "model_type"),
    "no hidden_size": ({"hidden_size": ...}, ("hidden_size", "llama")),
    "text for a number": ({"hidden_size": "64"}, ("hidden_size", "'64'")),
    "no heads": ({"num_attention_heads": 0}, ("num_attention_heads", "0")),
    "minus one layer": ({"num_hidden_layers": -1}, ("num_hidden_layers", "-1")),
    "half a KV head": ({"num_key_value_heads": 1.5}, ("num_key_value_heads", "1.5")),
    "heads that do not divide": ({"num_key_value_heads": 3}, ("4 attention heads", "3 KV heads")),
    "text for head_dim": ({"head_dim": "x"}, ("head_dim", "'x'")),
    "odd head_dim": ({"head_dim": 15}, ("head_dim", "15")),
    "other hidden_size": ({"hidden_size": 128}, ("lm_head.weight", "[260, 64]", "[260, 128]")),
    "one layer more": ({"num_hidden_layers": 4}, "model.layers.3."),
    "one layer less": ({"num_hidden_layers": 2}, "model.layers.2."),
    "RoPE that follows the length": ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
    "RoPE is a list": ({"rope_parameters": [1]}, "rope_parameters"),
    "RoPE base is text": ({"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, ("rope_theta", "'x'")),
    "YaRN without factor": ({"rope_parameters": {"rope_type": "yarn"}}, "'factor'"),
    "unknown activation": ({"hidden_act": "shrug"}, "'shrug' is not known"),
    "text for a float": ({"rms_norm_eps": "x"}, "rms_norm_eps"),
    "dtype that is none": ({"dtype": "int4"}, ("'int4'", "float32")),
}


@pytest.mark.parametrize("how", CONFIGS)
def test_damaged_configs(how, model, refused, short, tmp_path):
    directory = model("llama")
    changes, words = CONFIGS[how]
    edit_config(directory, **changes)
    refused(words, "convert", directory, tmp_path / "out", *short)


def test_layer_types_must_name_every_layer(model, refused, short, tmp_path):
    directory = model("qwen2")
    edit_config(directory, layer_types=["full_attention"])
    refused(("layer_types", "3 layers"), "convert", directory, tmp_path / "out", *short)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (None, "no config.json"),
        ("folder", "cannot be read"),
        (b"{oops", "not JSON"),
        (b"\xff\xfe{}", "not JSON"),
        (b"[1]", "no JSON object"),
    ],
)
@pytest.mark.parametrize("verb", ["convert", "eval", "generate", "plan"])
def test_rejects_invalid_config_files(verb, content, word, model, refused, tmp_path, calibration_file):
    directory = model("llama")
    if content in (None, "folder"):
        (directory / "config.json").unlink()
        if content:
            (directory / "config.json").mkdir()
    else:
        (directory / "config.json").write_bytes(content)
    more = {"convert": [tmp_path / "out"], "eval": ["--text", calibration_file, "--seqlen", 64]}.get(verb, [])
    refused((word, str(directory)), verb, directory, *more)


def test_other_quantisations_are_refused(model, refused, short, tmp_path):
    directory = model("llama")
    edit_config(directory, quantization_config={"quant_method": "fp8"})
    for words in (("convert", directory, tmp_path / "out", *short), ("plan", directory), ("generate", directory)):
        refused(("'fp8'", "original checkpoint"), *words)


def test_a_converted_model_is_not_converted_again(model, converts, refused, short, tmp_path):
    converts(model("llama"), tmp_path / "once")
    refused("already converted (llama_mla)", "convert", tmp_path / "once", tmp_path / "twice", *short)


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: (d / "tokenizer.json").unlink(),
        lambda d: (d / "tokenizer.json").write_text("{"),
        lambda d: (d / "tokenizer.json").write_text("{}"),
        lambda d: (d / "tokenizer_config.json").write_text("{"),
    ],
    ids=["missing", "not JSON", "empty", "config not JSON"],
)
def test_damaged_tokenizer(damage, model, refused, short, tmp_path):
    directory = model("llama")
    damage(directory)
    refused(("no tokenizer", str(directory)), "convert", directory, tmp_path / "out", *short)


def test_another_models_tokenizer(model, refused, short, evaluation_file, tmp_path):
    """Its ids exceed the embedding; torch would raise `index out of range in self`."""
    directory = model("llama")

    def cut(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = tensors[name][:90].contiguous()

    edit_weights(directory, cut)
    edit_config(directory, vocab_size=90, pad_token_id=None, bos_token_id=None, eos_token_id=None)
    refused(("tokenizer", "has 90"), "convert", directory, tmp_path / "out", *short)
    refused(("tokenizer", "has 90"), "eval", directory, "--text", evaluation_file, "--seqlen", 64)
    refused(("tokenizer", "has 90"), "generate", directory, "--dtype", "float32")


@pytest.mark.parametrize("eval_windows", [2, 0])
@pytest.mark.parametrize("name", [DOWN, "model.layers.1.self_attn.v_proj.weight", "lm_head.weight"])
@pytest.mark.parametrize("layout", ["latent", "latent_rope"])
def test_a_model_that_overflows_is_refused(layout, name, eval_windows, model, refused, short, tmp_path):
    directory = model("llama")
    edit_weights(directory, lambda tensors: tensors[name].fill_(3e38))
    more = ("--eval-windows", eval_windows, "--layout", layout, "--budget", 0.75)
    refused("overflows in torch.float32", "convert", directory, tmp_path / "out", *short, *more)


def test_an_original_whose_loss_is_not_a_number(model, refused, evaluation_file, tmp_path):
    directory = model("llama")
    edit_weights(directory, lambda tensors: tensors["lm_head.weight"].fill_(3e38))
    refused("overflows in torch.float32", "eval", directory, tmp_path / "out", "--text", evaluation_file,
            "--seqlen", 64)  # fmt: skip


@pytest.mark.parametrize("eval_windows", [2, 0])
def test_weights_that_overflow_in_the_requested_dtype(eval_windows, model, refused, converts, short, tmp_path):
    """A finite fp32 weight of 1e6 is infinity in fp16: no such checkpoint may be written."""
    directory = model("llama")
    edit_weights(directory, put(DOWN, 1e6))
    more = ("--eval-windows", eval_windows)
    words = (DOWN, "torch.float16", "bfloat16")
    refused(words, "convert", directory, tmp_path / "out", *short, *more, "--dtype", "float16")
    converts(directory, tmp_path / "out", *more, "--dtype", "bfloat16")


@pytest.mark.parametrize("layout", ["latent", "latent_rope"])
@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "o_proj"])
def test_a_layer_with_a_zero_projection_converts(name, layout, model, converts, tmp_path):
    """Models grown from smaller ones have layers whose o_proj is zero; no gradient reaches their keys and values."""
    directory = model("llama")
    edit_weights(directory, lambda tensors: tensors[f"model.layers.1.self_attn.{name}.weight"].zero_())
    converts(directory, tmp_path / "out", "--layout", layout, "--budget", 1.0)
    metrics = json.loads((tmp_path / "out" / "manifest.json").read_text())["metrics"]
    assert metrics["mla_ppl"] == pytest.approx(metrics["original_ppl"], rel=1e-4)
