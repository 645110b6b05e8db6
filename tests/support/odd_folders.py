"""Unusual model directories of other tools: those that are loaded like in transformers, and those that are refused."""

import json
import shutil

import torch
from safetensors.torch import load_file, save_file

from support.tiny_models import ALTERNATING, INDEX, WEIGHTS, save_model, save_packed, shard


def edit_config(directory, **changes):
    """Change keys of config.json; `...` removes one."""
    path = directory / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


def rename(directory, name_of):
    """Rename every tensor by `name_of`; tensors renamed to None are removed."""
    tensors = {name_of(name): tensor for name, tensor in load_file(directory / WEIGHTS).items()}
    tensors.pop(None, None)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, directory / WEIGHTS, {"format": "pt"})


def untied_head(directory):
    save_model(directory, "llama", 0)
    edit_config(directory, tie_word_embeddings=True)


def stale_index(directory):
    """A single file, and the index of missing shards."""
    save_model(directory, "llama", 0)
    shutil.copytree(directory, directory / "old")
    shutil.move(shard(directory / "old") / INDEX, directory / INDEX)
    shutil.rmtree(directory / "old")


def windows_by_layer(directory):
    save_model(directory, "mistral", 0)
    edit_config(directory, layer_types=ALTERNATING)


def rope_in_two_places(directory):
    save_model(directory, "llama", 0)
    edit_config(directory, rope_scaling={"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0})


def unpacked_experts(directory):
    """A GPT-OSS fine-tuned in bf16 whose config still declares MXFP4."""
    save_model(directory / "whole", "gpt_oss", 0)
    save_packed(directory / "whole", directory / "packed")
    for path in (directory / "whole").iterdir():
        shutil.move(path, directory / path.name)
    shutil.move(directory / "packed" / "config.json", directory / "config.json")
    shutil.rmtree(directory / "whole")
    shutil.rmtree(directory / "packed")
    edit_config(directory, dtype="float32")


def two_sets(directory):
    save_model(directory, "llama", 0)
    shutil.copytree(directory, directory / "old")
    for path in shard(directory / "old").glob("model*"):
        shutil.move(path, directory / path.name)
    shutil.rmtree(directory / "old")


def absent_shards(directory):
    shard(save_model(directory, "llama", 0))
    for path in directory.glob("*.safetensors"):
        path.unlink()


def wrapped(prefix):
    def make(directory):
        save_model(directory, "llama", 0)
        rename(directory, lambda name: prefix + name)

    return make


def base_model(directory):
    save_model(directory, "llama", 0)
    rename(directory, lambda name: None if name == "lm_head.weight" else name.removeprefix("model."))


def adapter(directory):
    save_model(directory, "llama", 0)
    tensors = load_file(directory / WEIGHTS)
    tensors["model.layers.0.self_attn.q_proj.lora_A.weight"] = torch.zeros(4, 64)
    save_file(tensors, directory / WEIGHTS, {"format": "pt"})


def resized(directory):
    save_model(directory, "llama", 0, vocab_size=264)
    edit_config(directory, vocab_size=260)


def headless(directory):
    save_model(directory, "llama", 0, tie_word_embeddings=True)
    edit_config(directory, tie_word_embeddings=False)


def tekken(directory):
    save_model(directory, "llama", 0)
    for path in directory.glob("tokenizer*"):
        path.unlink()
    (directory / "tekken.json").write_text("{}")


SOUND = {
    "a head of its own, said to be tied": untied_head,
    "the whole file beside a stale index": stale_index,
    "a mistral with layer_types": windows_by_layer,
    "RoPE in two places": rope_in_two_places,
    "MXFP4 in the config, plain experts": unpacked_experts,
}
REFUSED = {
    "two sets of weights": (two_sets, "two sets of weights"),
    "an index of absent shards": (absent_shards, "3 files, all of which are missing"),
    "compiled": (wrapped("_orig_mod."), "torch.compile"),
    "data parallel": (wrapped("module."), "DataParallel"),
    "without a head": (base_model, "AutoModelForCausalLM"),
    "an adapter": (adapter, "merge_and_unload"),
    "a resized vocabulary": (resized, "set vocab_size to 264"),
    "neither tied nor a head": (headless, "'lm_head.weight'"),
    "tekken.json alone": (tekken, "tekken.json"),
}
