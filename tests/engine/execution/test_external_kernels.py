"""The engine with other libraries' kernels on stand-ins: a GPT-OSS with random weights (sinks, windows, packed
experts), converted to `latent_rope`; log probabilities are those of the reference."""

import pytest
import torch

from mlaforge.demo.drawn_model import DrawnModel, Latent, converted
from mlaforge.demo.geometry import settings
from mlaforge.engine.config import EngineConfig
from mlaforge.engine.engine import Engine
from mlaforge.gpu_verification.drawn_engine import TINY
from mlaforge.ops.row_formats.fp8_ds_mla import Fp8DsMla
from mlaforge.ops.row_formats.plain import Plain
from mlaforge.planning.plan import LayerPlan, Plan
from mlaforge.runtime import UserError
from support import mock_kernels
from support.engine_driver import greedy, random_prompts
from support.mock_kernels import deep_gemm, flash_mla, flashinfer, flashinfer_mla, vllm_decode, vllm_unified

PROMPTS, NEW = random_prompts(110, 9, seed=4), 4
KERNELS = {
    "flash_mla": (flash_mla, "flash_mla_with_kvcache"),
    "flashinfer": (flashinfer.BatchPrefillWithPagedKVCacheWrapper, "run"),
    "flashinfer, MLA": (flashinfer_mla.BatchMLAPagedAttentionWrapper, "run"),
    "vllm": (vllm_unified, "unified_attention"),
    "vllm, MLA": (vllm_decode, "decode_attention_fwd"),
    "deep_gemm": (deep_gemm, "m_grouped_fp8_gemm_nt_contiguous"),
}


# Largest difference of log probabilities: of attention in bf16, and of experts whose inputs are 8-bit floats.
TOLERANCE, FP8_TOLERANCE = 0.05, 0.2


def make_engine(latent, **options):
    torch.manual_seed(0)
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64}
    model = DrawnModel.of(converted(settings("20b", 2) | TINY | heads, latent), torch.device("cpu"))
    return Engine(model, EngineConfig(
        device="cpu", dtype="bfloat16", cache_bytes=16 << 20, prefix_caching=False, **{"block_size": 64, **options}
    ))  # fmt: skip


def answers(monkeypatch, ops, latent, **options):
    """Log probabilities of greedy tokens, and the formats of the layers' rows."""
    # What layers are composed of on a GPU, without its kernels.
    monkeypatch.setenv("MLAFORGE_OPS", f"reference+triton,{ops}")
    engine = make_engine(latent, **options)
    for number, prompt in enumerate(PROMPTS):
        engine.add(str(number), prompt, greedy(NEW, logprobs=1))
    outputs = {}
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id] = output.outputs[0]
    logprobs = [[entry.logprob for entry in outputs[number].logprobs] for number in sorted(outputs)]
    return torch.tensor(logprobs), [type(layer.format) for layer in engine.cache.layers]


@pytest.mark.parametrize(
    ("ops", "used", "topk", "options"),
    [
        ("packed_latent_attention=flash_mla", ["flash_mla"], 0, {"kv_cache_dtype": "fp8_ds_mla"}),
        ("packed_latent_attention=flash_mla", ["flash_mla"], 96, {"kv_cache_dtype": "fp8_ds_mla"}),
        ("flash_mla+reference", ["flash_mla"], 0, {}),
        ("flashinfer+reference", ["flashinfer", "flashinfer, MLA"], 96, {}),
        ("vllm+reference", ["vllm", "vllm, MLA"], 96, {"block_size": 16}),
        ("deep_gemm", ["deep_gemm"], 0, {}),
    ],
)
def test_log_probabilities_are_those_of_the_reference(ops, used, topk, options, monkeypatch):
    mock_kernels.install(monkeypatch)
    calls = []
    for name, (owner, function) in KERNELS.items():
        kernel = getattr(owner, function)
        monkeypatch.setattr(
            owner, function, lambda *inputs, name=name, kernel=kernel, **named: (
                calls.append(name), kernel(*inputs, **named)
            )[1],
        )  # fmt: skip
    latent = Latent("latent_rope", 192, 64, topk=topk) if topk else Latent("latent_rope", 192, 64)
    want, formats = answers(monkeypatch, "reference", latent, **options)
    assert not calls
    got, _ = answers(monkeypatch, ops, latent, **options)
    assert sorted(set(calls)) == used
    torch.testing.assert_close(got, want, atol=FP8_TOLERANCE if ops == "deep_gemm" else TOLERANCE, rtol=0)
    assert set(formats) == ({Plain, Fp8DsMla} if "kv_cache_dtype" in options else {Plain})


def test_plan_predicts_the_bytes_of_fp8_ds_mla():
    """The grouped-query layer has rows of bf16."""
    engine = make_engine(Latent("latent_rope", 192, 64), kv_cache_dtype="fp8_ds_mla")
    layers = LayerPlan("gqa", 0, 0), LayerPlan("latent_rope", 192, 64)
    plan = Plan(engine.model.spec, layers, "fp8_ds_mla")
    formats = [chosen.rows(layer, "fp8_ds_mla") for chosen, layer in zip(layers, plan.spec.layers, strict=True)]
    assert formats == [layer.format for layer in engine.cache.layers]
    assert [format.bytes_per_token for format in formats] == [2 * 8 * 64 * 2, 656]


@pytest.mark.parametrize(
    ("latent", "message"),
    [
        (Latent("latent", 48), "kv_cache_dtype fp8_ds_mla is for models that were converted to latent_rope; use auto"),
        (
            Latent("latent_rope", 48, 8),
            r"kv_cache_dtype fp8_ds_mla stores .* exactly 64 rotary elements, not 48 \+ 8; .*",
        ),
    ],
)
def test_models_that_fp8_ds_mla_cannot_store(latent, message):
    with pytest.raises(UserError, match=f"^{message}$"):
        make_engine(latent, kv_cache_dtype="fp8_ds_mla")
