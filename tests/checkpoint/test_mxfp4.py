"""MXFP4 against transformers' dequantisation, and properties of its values."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlaforge.checkpoint import loading, mxfp4
from mlaforge.checkpoint.reader import Reader
from mlaforge.checkpoint.writer import Writer
from mlaforge.ops import mxfp4 as format
from mlaforge.ops import native
from mlaforge.ops.mxfp4 import dequantize, quantize
from mlaforge.runtime import UserError
from support.tiny_models import save_packed


def random_bytes(*shape, high=256, seed=0):
    return torch.randint(0, high, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def same_bits(actual, expected):
    kind = torch.int32 if actual.dtype == torch.float32 else torch.int16
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual.view(kind), expected.view(kind), rtol=0, atol=0)


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_dequantize_equals_transformers_bitwise(dtype, kernel, monkeypatch):
    """Every pair of nibbles under every scale from 0 to 254, in one chunk and in ragged ones, compiled and not."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    if not kernel:
        monkeypatch.setattr(native, "kernels", lambda: None)
    elif native.kernels() is None:
        pytest.skip(f"no compiled kernels: {native.why_not()}")
    # Row n holds all 256 bytes in 16 blocks, all under scale n.
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(2, 255, 16, 16).contiguous()
    blocks[1] = random_bytes(255, 16, 16)
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).expand(2, 255, 16).contiguous()
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    assert expected.shape == (2, 512, 255)
    same_bits(dequantize(blocks, scales, dtype), expected)
    monkeypatch.setattr(format, "CHUNK", 512 * 7)
    same_bits(dequantize(blocks, scales, dtype), expected)


def test_low_nibble_is_the_even_element():
    blocks = torch.zeros(1, 1, 1, 16, dtype=torch.uint8)
    blocks[..., 0] = 0x9 << 4 | 0x7  # 6, then -0.5
    out = dequantize(blocks, torch.full((1, 1, 1), 128, dtype=torch.uint8), torch.float32)
    assert out[0, :3, 0].tolist() == [12.0, -1.0, 0.0]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(0, 254), st.integers(1, 5), st.integers(1, 3))
def test_representable_values_round_trip(seed, scale, n, groups):
    blocks = random_bytes(2, n, groups, 16, seed=seed)
    # 6 · 2^127 overflows fp32; up to 252 every code is finite.
    scales = random_bytes(2, n, groups, high=min(scale, 252) + 1, seed=seed + 1)
    values = dequantize(blocks, scales, torch.float32)
    again = quantize(values)
    # The same values, even if a block of small codes has several encodings.
    same_bits(dequantize(*again, torch.float32), values)
    for first, second in zip(again, quantize(values), strict=True):
        assert torch.equal(first, second)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.floats(1e-30, 1e30))
def test_the_error_is_within_half_a_quantization_step(seed, size):
    weight = torch.randn(2, 64, 3, generator=torch.Generator().manual_seed(seed)) * size
    found = dequantize(*quantize(weight), torch.float32)
    grouped = weight.view(2, 2, 32, 3)
    unit = torch.exp2(torch.floor(torch.log2(grouped.abs().amax(2, keepdim=True).double())) - 2)
    error = (found.view_as(grouped).double() - grouped.double()).abs() / unit
    magnitude = grouped.double().abs() / unit
    # Half the distance of adjacent codes; values above 6 saturate and stay below 8.
    bound = torch.where(magnitude < 2, 0.25, torch.where(magnitude < 4, 0.5, torch.where(magnitude < 5, 1.0, 2.0)))
    assert (error <= bound * (1 + 1e-6)).all()


def test_rounding_ties_go_to_even_and_large_values_saturate():
    values, expected = zip(
        (0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5, 4), (7.9, 6), strict=True
    )
    weight = torch.zeros(1, 32, 1)
    weight[0, :8, 0] = torch.tensor(values)
    weight[0, 8:16, 0] = -torch.tensor(values)
    blocks, scales = quantize(weight)
    assert scales.tolist() == [[[127]]]
    found = dequantize(blocks, scales, torch.float32)[0, :, 0]
    assert found[:8].tolist() == list(expected)
    assert found[8:16].tolist() == [-x for x in expected]


def test_zeros_and_the_smallest_values():
    weight = torch.zeros(1, 64, 2)
    weight[0, 40, 1] = 1e-45  # below every MXFP4 value but zero
    blocks, scales = quantize(weight)
    assert scales.max() == 0
    assert dequantize(blocks, scales, torch.float32).abs().max() == 0


def test_rejects_invalid_shapes_and_values():
    with pytest.raises(ValueError, match="multiple of 32"):
        quantize(torch.zeros(1, 48, 4))
    with pytest.raises(ValueError, match="NaN"):
        quantize(torch.full((1, 32, 1), float("nan")))
    with pytest.raises(ValueError, match=r"\[E, N, G, 16\]"):
        dequantize(random_bytes(1, 2, 3, 16), random_bytes(1, 2, 4), torch.float32)
    with pytest.raises(ValueError, match="uint8"):
        dequantize(torch.zeros(1, 2, 3, 16), random_bytes(1, 2, 3), torch.float32)
    with pytest.raises(UserError, match="48 inputs"):
        mxfp4.stored_shapes((1, 48, 4))


def test_stored_names_and_shapes_follow_the_config():
    expected = {
        "model.layers.0.mlp.experts.gate_up_proj": (4, 64, 192),
        "model.layers.0.mlp.experts.gate_up_proj_bias": (4, 192),
        "model.layers.1.mlp.experts.down_proj": (4, 96, 64),
        "model.layers.0.self_attn.q_proj.weight": (64, 64),
    }
    packed = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}}
    assert mxfp4.stored(packed, expected) == {
        "model.layers.0.mlp.experts.gate_up_proj_blocks": (4, 192, 2, 16),
        "model.layers.0.mlp.experts.gate_up_proj_scales": (4, 192, 2),
        "model.layers.0.mlp.experts.gate_up_proj_bias": (4, 192),
        "model.layers.1.mlp.experts.down_proj_blocks": (4, 64, 3, 16),
        "model.layers.1.mlp.experts.down_proj_scales": (4, 64, 3),
        "model.layers.0.self_attn.q_proj.weight": (64, 64),
    }
    for shape in expected.values():
        if len(shape) == 3:
            blocks, scales = quantize(torch.ones(shape))
            assert (tuple(blocks.shape), tuple(scales.shape)) == mxfp4.stored_shapes(shape)
    packed["quantization_config"]["modules_to_not_convert"].append("model.layers.0")
    assert mxfp4.packed_names(packed, expected) == ["model.layers.1.mlp.experts.down_proj"]
    # A module by the end of its name.
    packed["quantization_config"]["modules_to_not_convert"] = ["1.mlp.experts"]
    assert mxfp4.packed_names(packed, expected) == ["model.layers.0.mlp.experts.gate_up_proj"]
    for plain in ({}, {"quantization_config": None}, {"quantization_config": {"quant_method": "fp8"}}):
        assert mxfp4.stored(plain, expected) == expected


def test_transformers_loads_the_same_weights(tmp_path):
    """Experts packed by mlaforge, loaded by transformers' quantiser on the CPU."""
    from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM, Mxfp4Config

    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=40, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_local_experts=3, head_dim=16,
        num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    state = GptOssForCausalLM(config).state_dict()
    config.architectures = ["GptOssForCausalLM"]
    config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    config.save_pretrained(tmp_path)
    packed = mxfp4.packed_names(config.to_dict(), {name: tuple(t.shape) for name, t in state.items()})
    assert len(packed) == 4
    writer = Writer(tmp_path)
    for name, tensor in state.items():
        if name not in packed:
            writer.add(name, tensor)
            continue
        for part, stored in zip(mxfp4.stored_names(name), quantize(tensor), strict=True):
            writer.add(part, stored)
    writer.finish()
    with Reader(tmp_path) as reader:
        expected = mxfp4.stored(config.to_dict(), {name: tuple(t.shape) for name, t in state.items()})
        assert {name: reader.shape(name) for name in reader} == expected
        for dtype in (torch.bfloat16, torch.float32):
            loaded, info = AutoModelForCausalLM.from_pretrained(
                tmp_path, quantization_config=Mxfp4Config(dequantize=True), dtype=dtype, output_loading_info=True
            )
            assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
            for name in packed:
                expected_values = dequantize(*(reader[part] for part in mxfp4.stored_names(name)), dtype)
                same_bits(loaded.get_parameter(name).data, expected_values)


def test_a_package_missing_for_transformers_is_reported(tiny_models, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.quantizers.quantizer_mxfp4.is_accelerate_available", lambda: False)
    with pytest.raises(UserError, match="pip install accelerate"):
        loading.load_model(save_packed(tiny_models["gpt_oss"], tmp_path / "packed"))
