"""MXFP4 experts in vLLM, on platforms with and without kernels for them."""

import json
import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from mlaforge.conversion import convert
from mlaforge.conversion.config import ConvertConfig
from mlaforge.ops.mxfp4 import dequantize, quantize
from mlaforge.runtime import UserError
from mlaforge.vllm_plugin.experts import checked_by, unpacked
from support.tiny_models import save_packed

PYTHON = os.environ.get("MLAFORGE_VLLM_PYTHON")
# Prints vLLM's quantization choice for each model: on this machine, then as if it had a GPU.
CHOOSE = """
import json, sys
from vllm import ModelRegistry
from vllm.config import ModelConfig
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from mlaforge.vllm_plugin.model import GptOssMlaForCausalLM
load_general_plugins()
ModelRegistry.register_model("GptOssMlaForCausalLM", GptOssMlaForCausalLM)
chosen = []
for is_cpu in (True, False):
    type(current_platform).is_cpu = lambda self: is_cpu
    for model in sys.argv[1:]:
        found = ModelConfig(model=model, dtype="bfloat16", skip_tokenizer_init=True)
        chosen.append([found.quantization, getattr(found.hf_config, "quantization_config", None) is not None])
print("TOLD " + json.dumps(chosen))
"""


def test_experts_are_unpacked_while_loading(capsys):
    """Blocks and scales in any order; other weights pass through. Two weights of 384 bytes in bf16."""
    weight = torch.randn(2, 64, 6, generator=torch.Generator().manual_seed(0))
    blocks, scales = quantize(weight)
    other = torch.ones(3)
    weights = [
        ("experts.up_scales", scales),
        ("norm", other),
        ("experts.up_blocks", blocks),
        ("experts.up_bias", other),
    ]
    loaded = dict(unpacked(weights, torch.bfloat16))
    assert list(loaded) == ["norm", "experts.up", "experts.up_bias"] and loaded["norm"] is other
    assert torch.equal(loaded["experts.up"], dequantize(blocks, scales, torch.bfloat16))
    [line] = capsys.readouterr().err.splitlines()
    assert "408 to 1,536 bytes" in line
    with pytest.raises(UserError, match=r"has experts\.up_scales without .* download"):
        dict(unpacked(weights[:2], torch.bfloat16))


def test_plain_weights_are_not_mentioned(capsys):
    weights = [("norm", torch.ones(3))]
    assert list(unpacked(weights, torch.float32)) == weights
    assert capsys.readouterr().err == ""


class Base:
    """Like vLLM's class for GPT-OSS: it renames the method in config.json, but not in the copy."""

    @staticmethod
    def verify_and_update_model_config(model_config):
        loaded = getattr(model_config.hf_config, "quantization_config", None)
        if loaded is not None and loaded["quant_method"] == "mxfp4":
            loaded["quant_method"] = "gpt_oss_mxfp4"


@pytest.mark.parametrize("is_cpu", [True, False])
@pytest.mark.parametrize("method", ["mxfp4", "awq", None])
def test_quantization_config_on_cpu_and_gpu(method, is_cpu, monkeypatch):
    platforms = ModuleType("vllm.platforms")
    platforms.current_platform = SimpleNamespace(is_cpu=lambda: is_cpu)
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    config = SimpleNamespace() if method is None else SimpleNamespace(quantization_config={"quant_method": method})
    copy = SimpleNamespace(quantization_config=method and {"quant_method": method})
    model = SimpleNamespace(hf_config=config, hf_text_config=config, model_arch_config=copy)
    checked_by(Base).verify_and_update_model_config(model)
    hidden = {"mxfp4": None if is_cpu else "gpt_oss_mxfp4"}
    expected = hidden.get(method, method)
    for vllm_config in (config, copy):
        quantization = getattr(vllm_config, "quantization_config", None)
        assert (quantization and quantization["quant_method"]) == expected


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="MLAFORGE_VLLM_PYTHON names no Python that has vLLM: make test-vllm")
def test_a_gpu_s_kernels_are_the_original_s(tiny_models, calibration_file, tmp_path):
    """On a CPU the converted model counts as unquantized; elsewhere vLLM treats it like the original."""
    packed, out = save_packed(tiny_models["gpt_oss"], tmp_path / "packed"), tmp_path / "out"
    settings = {"seqlen": 64, "nsamples": 6, "eval_windows": 0, "device": "cpu", "budget": 0.5}
    convert.run(str(packed), out, ConvertConfig(calibration=str(calibration_file), **settings))
    done = subprocess.run(
        [PYTHON, "-c", CHOOSE, str(packed), str(out)], capture_output=True, text=True, cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )  # fmt: skip
    reports = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("TOLD ")]
    assert reports, done.stderr[-3000:]
    original = ["gpt_oss_mxfp4", True]
    assert reports[0] == [original, [None, False], original, original]
