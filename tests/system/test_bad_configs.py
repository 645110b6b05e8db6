"""Invalid config.json, generation_config.json and tokenizer files, and pipes or devices in place of files: every
command refuses them in one line that names the field."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.eagle3_heads import saved

DEEP = ("[" * 100_000 + "]" * 100_000, '{"a":' * 100_000 + "1" + "}" * 100_000)
HUGE = 10**12
WEIGHTS = "model.safetensors"


def edit(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; `...` removes one."""
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))


# Changes of an original's config.json, and the expected message.
ORIGINAL = {
    "architectures is text": ({"architectures": "LlamaForCausalLM"}, "architectures = 'LlamaForCausalLM' must be"),
    "architectures is a number": ({"architectures": 7}, "architectures = 7 must be a list"),
    "architectures of numbers": ({"architectures": [7]}, "architectures = [7] must be a list"),
    "odd head_dim": ({"head_dim": 33}, "head_dim = 33 must be even"),
    "huge head_dim": ({"head_dim": HUGE}, f"head_dim = {HUGE} must be"),
    "head_dim that is true": ({"head_dim": True}, "head_dim = True must be"),
    "huge hidden_size": ({"hidden_size": HUGE}, f"hidden_size = {HUGE} must be"),
    "no tensor can have it": ({"hidden_size": 2**31 - 1, "intermediate_size": 2**31 - 1}, "makes no llama model"),
    "huge vocab_size": ({"vocab_size": HUGE}, f"vocab_size = {HUGE} must be"),
    "huge num_attention_heads": ({"num_attention_heads": HUGE}, f"num_attention_heads = {HUGE} must be"),
    "a million layers": ({"num_hidden_layers": 10**6}, "num_hidden_layers = 1000000 must be"),
    "no positions": ({"max_position_embeddings": 0}, "max_position_embeddings = 0 must be"),
    "minus one position": ({"max_position_embeddings": -1}, "max_position_embeddings = -1 must be"),
    "positions are text": ({"max_position_embeddings": "512"}, "max_position_embeddings = '512' must be"),
    "end token -1": ({"eos_token_id": -1}, "eos_token_id = -1 must be"),
    "end token is text": ({"eos_token_id": "x"}, "eos_token_id = 'x' must be"),
    "an end token is text": ({"eos_token_id": [258, "x"]}, "eos_token_id = [258, 'x'] must be"),
    "beginning is half a token": ({"bos_token_id": 1.5}, "bos_token_id = 1.5 must be"),
    "epsilon is negative": ({"rms_norm_eps": -1e-6}, "rms_norm_eps = -1e-06 must be"),
    "epsilon is NaN": ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan must be"),
    "RoPE base is 0": ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "rope_theta = 0 must be"),
    "RoPE factor is text": (
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": "x"}}, "factor = 'x' must be"
    ),
    "RoPE is a number": ({"rope_parameters": 7}, "rope_parameters = 7 must be an object"),
    "activation is a number": ({"hidden_act": 7}, "hidden_act = 7 must be text"),
    "tied is text": ({"tie_word_embeddings": "no"}, "tie_word_embeddings = 'no' must be true or false"),
    "biased is text": ({"attention_bias": "no"}, "attention_bias = 'no' must be true or false"),
    "dtype is a list": ({"dtype": ["float32"]}, "dtype = ['float32'] must be text"),
    "quantisation is text": ({"quantization_config": "mxfp4"}, "quantization_config = 'mxfp4' must be an object"),
    "layer_types is text": ({"layer_types": "full_attention"}, "layer_types = 'full_attention' must be a list"),
    "layer_types of another kind": ({"layer_types": ["linear_attention"] * 3}, "layer_types"),
}  # fmt: skip
# Changes of a converted model's config.json, and the expected message.
CONVERTED = {
    "no architectures": ({"architectures": ...}, "has no 'architectures'"),
    "architectures is empty": ({"architectures": []}, "architectures = [] must be ['LlamaMlaForCausalLM']"),
    "architectures is text": ({"architectures": "LlamaMlaForCausalLM"}, "architectures = 'LlamaMlaForCausalLM' must"),
    "architectures is another's": ({"architectures": ["BertModel"]}, "architectures = ['BertModel'] must be"),
    "no layer types": ({"mla_layer_types": ...}, "has no 'mla_layer_types'"),
    "layer types are text": ({"mla_layer_types": "latent"}, "mla_layer_types = 'latent' must be"),
    "layer types are empty": ({"mla_layer_types": []}, "mla_layer_types = [] must"),
    "a layer type too few": ({"mla_layer_types": ["latent"] * 2}, "mla_layer_types = ['latent', 'latent'] must"),
    "an unknown layer type": ({"mla_layer_types": ["mla"] * 3}, "mla_layer_types = ['mla', 'mla', 'mla'] must"),
    "nothing converted": ({"mla_layer_types": ["gqa"] * 3, "mla_kv_lora_ranks": [0] * 3}, "mla_layer_types"),
    "no ranks": ({"mla_kv_lora_ranks": ...}, "has no 'mla_kv_lora_ranks'"),
    "ranks are text": ({"mla_kv_lora_ranks": "32"}, "mla_kv_lora_ranks = '32' must be"),
    "ranks are empty": ({"mla_kv_lora_ranks": []}, "mla_kv_lora_ranks = [] must"),
    "a rank is text": ({"mla_kv_lora_ranks": [32, "32", 32]}, "mla_kv_lora_ranks"),
    "a rank is 0": ({"mla_kv_lora_ranks": [32, 0, 32]}, "mla_kv_lora_ranks"),
    "a rank is negative": ({"mla_kv_lora_ranks": [32, -32, 32]}, "mla_kv_lora_ranks"),
    "a huge rank": ({"mla_kv_lora_ranks": [32, HUGE, 32]}, "mla_kv_lora_ranks"),
    "no kv_lora_rank": ({"kv_lora_rank": ...}, "has no 'kv_lora_rank'"),
    "kv_lora_rank is not the largest": ({"kv_lora_rank": 7}, "kv_lora_rank = 7 must be"),
    "odd rotary key": ({"qk_rope_head_dim": 3}, "qk_rope_head_dim = 3 must be"),
    "a rotary key beside none": ({"qk_rope_head_dim": 8}, "qk_rope_head_dim = 8 must be"),
    "huge head": ({"qk_nope_head_dim": HUGE}, "qk_nope_head_dim"),
    "another head_dim": ({"head_dim": 32}, "qk_nope_head_dim = 16 must be 32"),
    "odd head_dim": ({"head_dim": 33}, "head_dim = 33 must be even"),
    "v_head_dim is text": ({"v_head_dim": "16"}, "v_head_dim = '16' must be"),
    "no softmax_scale": ({"softmax_scale": ...}, "has no 'softmax_scale'"),
    "softmax_scale is 0": ({"softmax_scale": 0}, "softmax_scale = 0 must be"),
    "softmax_scale is text": ({"softmax_scale": "x"}, "softmax_scale = 'x' must be"),
    "q_lora_rank is 0": ({"q_lora_rank": 0}, "q_lora_rank = 0 must be"),
    "a flag is text": ({"mla_q_bias": "no"}, "mla_q_bias = 'no' must be true or false"),
    "end token -1": ({"eos_token_id": -1}, "eos_token_id = -1 must be"),
    "no positions": ({"max_position_embeddings": 0}, "max_position_embeddings = 0 must be"),
    "huge head_dim": ({"head_dim": HUGE}, "head_dim"),
}  # fmt: skip


@pytest.fixture
def mla(converted, tmp_path) -> Path:
    """A converted model, to be modified."""
    return Path(shutil.copytree(converted("llama", "latent"), tmp_path / "mla"))


@pytest.fixture
def reads(refused, evaluation_file, tmp_path):
    """reads(words, directory, ...): assert that several commands refuse the directory with the same message."""

    def check(words: tuple[str, ...] | str, directory: Path, *more: tuple[Any, ...]) -> None:
        refused(words, "eval", directory, tmp_path / "out", "--text", evaluation_file, "--seqlen", 64)
        refused(words, "generate", directory, "--dtype", "float32")
        for verb in more:
            refused(words, *verb)

    return check


@pytest.mark.parametrize("how", ORIGINAL)
def test_originals(how, model, reads, short, tmp_path):
    directory = model("llama")
    changes, words = ORIGINAL[how]
    edit(directory / "config.json", **changes)
    convert = ("convert", directory, tmp_path / "out", *short)
    plan = [("plan", directory)] if how != "no tensor can have it" else []
    reads(words, directory, convert, *plan)


@pytest.mark.parametrize("how", CONVERTED)
def test_converted_models(how, mla, model, reads, tmp_path):
    changes, words = CONVERTED[how]
    edit(mla / "config.json", **changes)
    heal = ("heal", "--teacher", model("llama"), "--student", mla, "--out", tmp_path / "out")
    export = ("export", "deepseek", mla, tmp_path / "out")
    reads(words, mla, heal, export)


HEADS = {
    "huge vocab_size as text": ({"vocab_size": str(2**63)}, "vocab_size"),
    "huge intermediate_size": ({"intermediate_size": 10**30}, "intermediate_size"),
    "negative heads": ({"num_attention_heads": -1}, "num_attention_heads = -1 must be"),
    "half a vocabulary": ({"draft_vocab_size": 0.5}, "draft_vocab_size = 0.5 must be"),
    "captured states are text": ({"eagle_aux_hidden_state_layer_ids": "0"}, "eagle_aux_hidden_state_layer_ids = '0'"),
    "a config within is text": ({"eagle_config": "x"}, "eagle_config = 'x' must be an object"),
}  # fmt: skip


@pytest.mark.parametrize("how", HEADS)
def test_draft_heads(how, tiny_models, refused, evaluation_file, tmp_path):
    changes, words = HEADS[how]
    head = saved(tmp_path / "head")
    edit(head / "config.json", **changes)
    refused(words, "generate", tiny_models["llama"], "--speculative", head, "--dtype", "float32")
    refused(words, "draft", "check", head, "--target", tiny_models["llama"], "--text", evaluation_file)


EXPERTS = {
    "more experts than there are": ({"num_experts_per_tok": 5}, "num_experts_per_tok = 5 must be"),
    "experts are text": ({"num_local_experts": "4"}, "num_local_experts"),
    "no window": ({"sliding_window": 0}, "sliding_window = 0 must be"),
    "layer_types too short": ({"layer_types": ["full_attention"]}, ("layer_types", "3 layers")),
    "heads that do not divide": ({"num_key_value_heads": 3}, ("4 attention heads", "3 KV heads")),
    "spared modules are no patterns": (
        {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["("]}}, "modules_to_not_convert"
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", EXPERTS)
def test_mixtures_of_experts(how, model, reads, short, tmp_path):
    directory = model("gpt_oss")
    changes, words = EXPERTS[how]
    edit(directory / "config.json", **changes)
    reads(words, directory, ("convert", directory, tmp_path / "out", *short))


# What stands in place of a file's JSON -> files, and the words for each.
@pytest.mark.parametrize("content", ["[]", '"text"', "7", "null", *DEEP], ids=["[]", "text", "7", "null", "[[[", "{{{"])
@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "index"]
)
def test_rejects_json_of_another_type(name, content, model, reads, short, tmp_path):
    directory = model("llama")
    if name == "index":
        name = "model.safetensors.index.json"
    (directory / name).write_text(content)
    reads(name, directory, ("convert", directory, tmp_path / "out", *short))


TOKENIZERS = {
    "no kind of model": lambda t: t["model"].update(type="X"),
    "a vocabulary that is a list": lambda t: t["model"].update(vocab=[]),
    "a token -1": lambda t: t["model"]["vocab"].update(a=-1),
    "merges of what is no token": lambda t: t["model"].update(merges=[["a", "zzz"]]),
    "added tokens are a number": lambda t: t.update(added_tokens=7),
}


@pytest.mark.parametrize("how", TOKENIZERS)
def test_rejects_invalid_tokenizers(how, model, reads, short, tmp_path):
    directory = model("llama")
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    TOKENIZERS[how](tokenizer)
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    reads(("no tokenizer", "tokenizer.json"), directory, ("convert", directory, tmp_path / "out", *short))


@pytest.mark.parametrize("value", ["x", -1, 1.5, ["x"], [1, -1], {"a": 1}, True, [[1]]])
def test_end_tokens_of_the_generation_config(value, model, reads, short, tmp_path):
    directory = model("llama")
    edit(directory / "generation_config.json", eos_token_id=value)
    words = ("generation_config.json", f"eos_token_id = {value!r} must be")
    reads(words, directory, ("convert", directory, tmp_path / "out", *short))


@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
@pytest.mark.parametrize(
    "name", ["config.json", WEIGHTS, "shard", "tokenizer.json", "generation_config.json", "chat_template.jinja"]
)
def test_rejects_pipes_and_devices(name, kind, model, reads, short, tmp_path, monkeypatch):
    """Reading a pipe would block for ever."""
    directory = model("llama")
    path = directory / ("model-00001-of-00001.safetensors" if name == "shard" else name)
    if name == "shard":
        names = dict.fromkeys(load_file(directory / WEIGHTS), path.name)
        (directory / WEIGHTS).rename(path)
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        monkeypatch.chdir(directory)
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    else:
        path.symlink_to("/dev/zero")
    plan = [("plan", directory)] if name == "config.json" else []
    convert = ("convert", directory, tmp_path / "out", *short)
    reads((str(path), "not a file"), directory, convert, *plan)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn])
def test_rejects_tensors_of_another_dtype(dtype, model, mla, reads, short, tmp_path):
    directory, name = model("llama"), "model.layers.1.mlp.down_proj.weight"
    for folder, file in ((directory, WEIGHTS), (mla, "model-00001-of-00001.safetensors")):
        tensors = load_file(folder / file)
        tensors[name] = tensors[name].to(dtype)
        save_file(tensors, folder / file, metadata={"format": "pt"})
    kind = {"int32": "I32", "int64": "I64", "uint8": "U8", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3"}
    words = (name, kind[str(dtype).removeprefix("torch.")])
    reads(words, directory, ("convert", directory, tmp_path / "out", *short))
    reads(words, mla)
