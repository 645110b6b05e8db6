"""EAGLE-3 heads in int8: format, loading and refusal of damaged heads."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from mlaforge.checkpoint import eagle3
from mlaforge.checkpoint.eagle3 import read_head, write_head
from mlaforge.checkpoint.head_reader import SCALE
from mlaforge.engine.execution import linear
from mlaforge.engine.llm import LLM
from mlaforge.ops.native import kernels
from mlaforge.ops.rounded_weights import packed8
from mlaforge.runtime import UserError
from support.eagle3_heads import HEADS, make

KINDS = {**HEADS, "biases": {"layer": {"attention_bias": True}}}


def stored(folder, **fields):
    """Save a head in int8 with a row of zeros; return it and its tensors on disk."""
    folder.mkdir(exist_ok=True)
    head = make(**fields)
    head.fc.weight[3] = 0
    write_head(head, folder, torch.int8)
    return head, load_file(folder / "model.safetensors")


@pytest.mark.parametrize("kind", KINDS)
def test_every_matrix_is_int8_with_a_scale_per_row(kind, tmp_path):
    head, tensors = stored(tmp_path, **KINDS[kind])
    matrices = {name for name, tensor in head.state_dict().items() if tensor.ndim == 2}
    assert {"fc.weight", "lm_head.weight", "midlayer.mlp.down_proj.weight"} <= matrices
    assert tensors.keys() == head.state_dict().keys() | {f"{name}{SCALE}" for name in matrices}
    again = read_head(tmp_path, 3)
    for name, tensor in head.state_dict().items():
        read = again.state_dict()[name]
        if name in matrices:
            codes, scale = tensors[name], tensors[f"{name}{SCALE}"]
            assert codes.dtype == torch.int8 and int(codes.abs().max()) == 127
            assert scale.dtype == torch.float32 and scale.shape == (len(codes), 1)
            assert bool(((read - tensor).abs() <= tensor.abs().amax(1, keepdim=True) / 254 * 1.0001).all())
        elif tensor.is_floating_point():
            assert torch.equal(tensors[name], tensor.half()) and torch.equal(read, tensor.half().float())
        else:
            assert torch.equal(tensors[name], tensor) and torch.equal(read, tensor)


def test_rounding_again_gives_the_same_codes_and_scales(tmp_path):
    _, tensors = stored(tmp_path / "head", has_embed_tokens=True)
    (tmp_path / "again").mkdir()
    write_head(read_head(tmp_path / "head", 3), tmp_path / "again", torch.int8)
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(again[name], tensor), name


@pytest.mark.skipif(kernels() is None, reason="no compiler: the engine then packs int8 in torch's layout")
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_the_engine_packs_the_stored_codes(dtype, tiny_models, tmp_path, monkeypatch):
    """Bitwise, although the model computes in bf16."""
    _, tensors = stored(tmp_path)
    packed = []
    monkeypatch.setattr(linear, "packed8", lambda weight: packed.append(packed8(weight)) or packed[-1])
    LLM(tiny_models["llama"], dtype=dtype, device="cpu", cache_bytes=1 << 24, speculative=str(tmp_path))
    names = ("fc", "midlayer.self_attn.o_proj", "midlayer.mlp.down_proj", "lm_head")
    for name in (f"{name}.weight" for name in names):
        codes, scale = packed8(tensors[name].float() * tensors[f"{name}{SCALE}"])
        assert any(torch.equal(codes, other_codes) and torch.equal(scale, other) for other_codes, other in packed), name
        assert torch.equal(scale[: len(tensors[name]), None], tensors[f"{name}{SCALE}"])


def test_fp16_that_overflows_is_refused(tmp_path):
    head = make()
    head.norm.weight[0] = 1e6
    for dtype in (torch.float16, torch.int8):
        with pytest.raises(UserError, match=r"'norm.weight' holds values that are not finite in torch.float16"):
            write_head(head, tmp_path, dtype)
    assert not list(tmp_path.iterdir())


def weights_of(config):
    return config["quantization_config"]["config_groups"]["group_0"]["weights"]


UP = "midlayer.mlp.up_proj.weight"
DAMAGES = {
    "missing codes": (lambda tensors, _: tensors.pop(UP), f"lacks the tensor '{UP}'"),
    "missing scale": (lambda tensors, _: tensors.pop(f"{UP}_scale"), f"lacks the tensor '{UP}_scale'"),
    "extra scale": (lambda tensors, _: tensors.update({"norm.weight_scale": torch.ones(64, 1)}), "'norm.weight_scale'"),
    "shape of codes": (lambda tensors, _: tensors.update({UP: tensors[UP][:, :8].clone()}), f"'{UP}' has shape"),
    "shape of scale": (lambda tensors, _: tensors.update({f"{UP}_scale": torch.ones(96)}), f"'{UP}_scale' has shape"),
    "unsigned": (lambda tensors, _: tensors.update({UP: tensors[UP].to(torch.uint8)}), f"'{UP}' is stored as U8; I8"),
    "float": (lambda tensors, _: tensors.update({UP: tensors[UP].half()}), f"'{UP}' is stored as F16; I8"),
    "whole scale": (lambda tensors, _: tensors.update({f"{UP}_scale": torch.ones(96, 1, dtype=torch.int64)}),
                    f"'{UP}_scale' is stored as I64"),
    "scale is NaN": (lambda tensors, _: tensors[f"{UP}_scale"].fill_(torch.nan), "holds NaN"),
    "int8 that config.json does not declare": (lambda _, config: config.pop("quantization_config"), "I8"),
    "method": (lambda _, config: config["quantization_config"].update(quant_method="fp8"), "quantization_config"),
    "packed": (lambda _, config: config["quantization_config"].update(format="pack-quantized"), "quantization_config"),
    "ignore": (lambda _, config: config["quantization_config"].update(ignore=["lm_head"]), "quantization_config"),
    "bits": (lambda _, config: weights_of(config).update(num_bits=4), "quantization_config"),
    "asymmetric": (lambda _, config: weights_of(config).update(symmetric=False), "quantization_config"),
    "per tensor": (lambda _, config: weights_of(config).update(strategy="tensor"), "quantization_config"),
    "no groups": (lambda _, config: config["quantization_config"].pop("config_groups"), "quantization_config"),
    "a list": (lambda _, config: config.update(quantization_config=[1]), "quantization_config"),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_head_is_refused(what, tmp_path):
    _, tensors = stored(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    damage, words = DAMAGES[what]
    damage(tensors, config)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError) as refusal:
        read_head(tmp_path, 3)
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_scale_in_fp16_is_read(tmp_path):
    """Other tools write scales in fp16."""
    _, tensors = stored(tmp_path)
    tensors["fc.weight_scale"] = tensors["fc.weight_scale"].half()
    save_file(tensors, tmp_path / "model.safetensors")
    expected = tensors["fc.weight"].float() * tensors["fc.weight_scale"].float()
    assert torch.equal(read_head(tmp_path, 3).fc.weight, expected)


def test_boundaries_are_read_without_a_target(tmp_path):
    """If the convention in config.json does not depend on the target."""
    stored(tmp_path, boundaries=(0, 2, eagle3.AFTER_NORM))
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    assert read_head(tmp_path, None).config.boundaries == (0, 2, eagle3.AFTER_NORM)
    ids, convention = "eagle_aux_hidden_state_layer_ids", "eagle_aux_hidden_state_convention"
    path.write_text(json.dumps({**config, ids: [0, 1, 2], convention: "output"}))
    assert read_head(tmp_path, None).config.boundaries == (1, 2, 3)
    for change in ({ids: None}, {ids: [0, 1, 2], convention: "hidden_states"}, {ids: [-2, 1, 2], convention: "output"}):
        path.write_text(json.dumps({**config, **change}))
        with pytest.raises(UserError):
            read_head(tmp_path, None)
