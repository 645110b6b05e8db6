"""Files of EAGLE-3 heads: what is written is read again, published heads are read, damaged ones refused."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from mlaforge.checkpoint.eagle3 import check_head, read_head, write_head
from mlaforge.modeling.eagle3 import Eagle3Config, Eagle3Head
from mlaforge.runtime import UserError
from support.eagle3_heads import HEADS, LAYER, make, saved


@pytest.mark.parametrize("name", HEADS)
def test_head_round_trips(name, tmp_path):
    head = make(**HEADS[name])
    write_head(head, tmp_path, torch.float32)
    again = read_head(tmp_path, 3)
    assert dataclasses.replace(again.config, layer=None) == dataclasses.replace(head.config, layer=None)
    assert again.config.layer.rope_parameters == head.config.layer.rope_parameters
    assert again.state_dict().keys() == head.state_dict().keys()
    for key, tensor in head.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[key])


def test_tensor_names_and_shapes_match_published_heads(tmp_path):
    """GPT-OSS's, on the meta device; and a file that says layers.0, without our fields."""
    layer = LlamaConfig(**{**LAYER, "hidden_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8,
                           "head_dim": 64, "intermediate_size": 17280, "vocab_size": 201088})  # fmt: skip
    with torch.device("meta"):
        head = Eagle3Head(Eagle3Config(layer, 2880, 32000, (1, 17, 32)))
    assert {name: list(tensor.shape) for name, tensor in head.state_dict().items()} == {
        "fc.weight": [2880, 8640], "midlayer.hidden_norm.weight": [2880], "midlayer.input_layernorm.weight": [2880],
        "midlayer.self_attn.q_proj.weight": [4096, 5760], "midlayer.self_attn.k_proj.weight": [512, 5760],
        "midlayer.self_attn.v_proj.weight": [512, 5760], "midlayer.self_attn.o_proj.weight": [2880, 4096],
        "midlayer.post_attention_layernorm.weight": [2880], "midlayer.mlp.gate_proj.weight": [17280, 2880],
        "midlayer.mlp.up_proj.weight": [17280, 2880], "midlayer.mlp.down_proj.weight": [2880, 17280],
        "norm.weight": [2880], "lm_head.weight": [32000, 2880], "d2t": [32000], "t2d": [201088],
    }  # fmt: skip
    folder = saved(tmp_path / "head", norm_before_residual=True)
    tensors = load_file(folder / "model.safetensors")
    save_file({k.replace("midlayer.", "layers.0."): v for k, v in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    ours = ("eagle_aux_hidden_state_layer_ids", "eagle_aux_hidden_state_convention", "norm_before_residual")
    config = {k: v for k, v in config.items() if k not in (*ours, "rope_parameters")} | {"rope_theta": 500.0}
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    (folder / "config.json").write_text(json.dumps(config))
    head = read_head(folder, 3)
    assert head.config.boundaries == (1, 2, 3) and not head.config.norm_before_residual
    assert head.config.layer.rope_parameters["rope_theta"] == 500.0
    config["eagle_config"] = {"eagle_aux_hidden_state_convention": "output", "eagle_aux_hidden_state_layer_ids": [0, 1]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"fc.weight.*shape"):
        read_head(folder, 3)
    del config["eagle_config"]
    (folder / "config.json").write_text(json.dumps(config))
    assert read_head(folder, 30).config.boundaries == (2, 15, 27)


def damage(tensors, config, what):
    if what == "missing":
        del tensors["midlayer.mlp.up_proj.weight"]
    elif what == "extra":
        tensors["midlayer.self_attn.q_proj.scale"] = torch.ones(1)
    elif what == "shape":
        tensors["fc.weight"] = tensors["fc.weight"][:, :64].clone()
    elif what == "absolute ids":
        tensors["d2t"] += torch.arange(len(tensors["d2t"]))
    elif what == "t2d":
        tensors["t2d"][4] = True
    elif what == "nan":
        tensors["fc.weight"][0, 0] = torch.nan
    else:
        config.update(what)


DAMAGES = [
    ("missing", "lacks the tensor 'midlayer.mlp.up_proj.weight'"), ("extra", "q_proj.scale"), ("shape", "'fc.weight'"),
    ("absolute ids", "d2t must be offsets"), ("t2d", "other tokens than t2d marks"), ("nan", "holds NaN"),
    ({"architectures": ["LlamaForCausalLM"]}, "no EAGLE-3 head"), ({"num_hidden_layers": 2}, "num_hidden_layers = 2"),
    ({"eagle_aux_hidden_state_layer_ids": [0, 1, 4]}, "captures boundary 4; the target has 3 layers"),
    ({"eagle_aux_hidden_state_convention": "after"}, "'after'"), ({"target_hidden_size": 60}, "shape"),
    ({"hidden_size": "many"}, "config.json"), ({"markov_rank": 8}, "needs a mask_token_id"),
]  # fmt: skip


@pytest.mark.parametrize(("what", "words"), DAMAGES, ids=str)
def test_refuses_a_damaged_head(what, words, tmp_path):
    folder = saved(tmp_path / "head")
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    damage(tensors, config, what)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError) as refusal:
        read_head(folder, 3)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_refuses_a_head_of_another_model(tiny_models, tmp_path, refused):
    folder = saved(tmp_path / "head", layer={"vocab_size": 300})
    asked = ("generate", tiny_models["llama"], "--dtype", "float32", "--speculative")
    refused(("vocab_size is 300", "260"), *asked, folder)
    with pytest.raises(UserError, match="embed_tokens"):
        check_head(make(layer={"hidden_size": 48}).config, 64, 260)
    refused(("speculative = 'ngrams'", "draft head"), *asked, "ngrams")
