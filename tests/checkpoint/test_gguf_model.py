"""GGUF files: equality with transformers, and refusal of unsupported keys and tensors."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from mlaforge.checkpoint import resolve
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.runtime import UserError
from support.gguf_file import save_gguf

pytest.importorskip("gguf")
IDS = torch.randint(0, 250, (1, 200), generator=torch.Generator().manual_seed(0))
SCALING = "llama.rope.scaling."
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def divisors(rope, head_dim=16):
    """Return llama.cpp's tensor for RoPE of type llama3: the plain frequencies divided by the scaled ones."""
    config = transformers.LlamaConfig(hidden_size=64, num_attention_heads=4, head_dim=head_dim, rope_parameters=rope)
    scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = rope["rope_theta"] ** -(torch.arange(0, head_dim, 2) / head_dim)
    return {"rope_freqs.weight": (plain / scaled).numpy().astype(np.float32)}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("MLAFORGE_HOME", str(tmp_path / "home"))


@torch.no_grad()
def logits(directory, **changes):
    config = transformers.AutoConfig.from_pretrained(directory, **changes)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, config=config, dtype=torch.float32)
    return model.eval()(IDS).logits


@pytest.mark.parametrize("quantized", [False, True])
def test_plain_rope_equals_transformers(quantized, tmp_path):
    path = save_gguf(tmp_path / "tiny.gguf", quantized=quantized)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, quantization_config=transformers.GgufConfig(dequantize=True), dtype=torch.float32
    )
    with torch.no_grad():
        torch.testing.assert_close(logits(resolve.locate(str(path))), theirs.eval()(IDS).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("keys", "tensors", "rope"),
    [
        (
            {f"{SCALING}type": "yarn", f"{SCALING}factor": 4.0, f"{SCALING}original_context_length": 64},
            {},
            {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
        ),
        (
            {f"{SCALING}type": "linear", f"{SCALING}factor": 2.0},
            {},
            {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
        ),
        ({"llama.rope.scale_linear": 2.0}, {}, {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}),
        ({}, divisors(LLAMA3), LLAMA3),
    ],
    ids=["yarn", "linear", "linear of old", "llama3"],
)
def test_rope_scaling_is_read(keys, tensors, rope, tmp_path):
    plain = resolve.locate(str(save_gguf(tmp_path / "plain.gguf")))
    scaled = resolve.locate(str(save_gguf(tmp_path / "scaled.gguf", keys, tensors)))
    expected = logits(plain, rope_parameters=rope)
    torch.testing.assert_close(logits(scaled), expected, atol=1e-6, rtol=1e-6)
    assert not torch.allclose(logits(plain), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"parts": 3}, "part 1 of 3; join them first"),
        ({"without": "blk.1"}, "lacks the tensor 'model.layers.1"),
        ({"tensors": {"blk.0.attn_q.bias": np.zeros(64, np.float32)}}, "'blk.0.attn_q.bias', which"),
        ({"tensors": {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}}, "attn_sinks.weight' is not read"),
        ({"tensors": {"blk.2.attn_norm.weight": np.zeros(64, np.float32)}}, "'blk.2.attn_norm.weight', which"),
        ({"tensors": {"rope_freqs.weight": np.arange(1, 9, dtype=np.float32)}}, "is not that of RoPE of type llama3"),
        ({"keys": {f"{SCALING}type": "longrope", f"{SCALING}factor": 4.0}}, "'longrope' is not supported"),
        ({"keys": {f"{SCALING}type": "yarn", f"{SCALING}factor": 4.0}}, "original_context_length"),
        ({"keys": {"llama.rope.dimension_sections": 3}}, "dimension_sections = 3 is not supported"),
        ({"keys": {"llama.attention.sliding_window": 32}}, "sliding_window = 32 is not supported"),
        ({"keys": {"llama.attention.causal": False}}, "causal = False is not supported; True is"),
        ({"keys": {"llama.expert_count": 8}}, "expert_count = 8 is not supported"),
        ({"keys": {"llama.attention.value_length": 8}}, "value_length = 8 is not supported; 16 is"),
        ({"keys": {"another.key": 8}}, "the header key 'another.key' is not known"),
    ],
)
def test_unsupported_keys_and_tensors_are_refused_by_name(how, words, tmp_path):
    path = save_gguf(tmp_path / "tiny.gguf", **how)
    for read in (resolve.locate, resolve.find_config):
        with pytest.raises(UserError) as refused:
            read(str(path))
        assert words in str(refused.value)
    assert not [*Path(tmp_path / "home").rglob("*.safetensors")]


def test_the_suffix_is_case_insensitive(tmp_path):
    path = save_gguf(tmp_path / "TINY.GGUF")
    config = json.loads((resolve.locate(str(path)) / "config.json").read_text())
    assert resolve.find_config(str(path)) == config
    assert SourceModel.open(path).spec.num_layers == 2
