"""Defaults of the engine that depend on the device."""

import pytest
import torch

from mlaforge.config import described, resolve
from mlaforge.engine.config import EngineConfig
from mlaforge.engine.config_checks import check_config
from mlaforge.engine.llm import LLM
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.ops.native import kernels
from mlaforge.runtime import UserError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(("device", "tokens", "fraction"), [(CPU, 512, 0.5), (CUDA, 4096, 0.85)])
def test_step_and_cache_follow_the_device(device, tokens, fraction):
    config = check_config(resolve(EngineConfig), device)
    assert (config.max_num_batched_tokens, config.cache_fraction) == (tokens, fraction)
    fields = EngineConfig.__dataclass_fields__
    assert str(tokens) in described(fields["max_num_batched_tokens"])
    assert str(fraction) in described(fields["cache_fraction"])
    stated = check_config(EngineConfig(max_num_batched_tokens=100, cache_fraction=0.25), device)
    assert (stated.max_num_batched_tokens, stated.cache_fraction) == (100, 0.25)
    message = f"^max_num_batched_tokens = {tokens} must be at least max_num_seqs = {tokens + 1}"
    with pytest.raises(UserError, match=message):
        check_config(EngineConfig(max_num_seqs=tokens + 1), device)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cuda"}, "deterministic is for CPUs: on a GPU norms, attention and .*; use device cpu"),
        ({"dtype": "float32"}, "deterministic: no compiled kernel multiplies float32; use dtype bfloat16, .*"),
        ({"kv_cache_dtype": "fp8"}, "deterministic: no compiled CPU kernel reads kv_cache_dtype fp8; use int8 or bf16"),
        ({"dtype": "int8", "native": "0"}, "deterministic needs the compiled CPU kernels: MLAFORGE_NATIVE is 0"),
    ],
    ids=str,
)  # fmt: skip
def test_rejects_deterministic_where_it_does_not_hold(options, message, tiny_models, monkeypatch):
    options = {"device": "cpu", **options}
    if options["device"] == "cuda":
        monkeypatch.setattr("mlaforge.engine.builder.resolve_device", lambda name: CUDA)
    if choice := options.pop("native", None):
        monkeypatch.setenv("MLAFORGE_NATIVE", choice)
        monkeypatch.setattr("mlaforge.ops.native.kernels", lambda: None)
    with pytest.raises(UserError, match=f"^{message}$"):
        LLM(tiny_models["llama"], deterministic=True, **options)


@pytest.mark.skipif(kernels() is None, reason="there are no compiled kernels")
def test_deterministic_changes_nothing_on_a_cpu(tiny_models):
    prompts, params = [[5, 6, 7], [9, 8, 7, 6, 5, 4]], SamplingParams(temperature=0.0, max_tokens=8, logprobs=4)
    options = {"device": "cpu", "dtype": "bfloat16", "cache_bytes": 1 << 20, "prefix_caching": False}
    llm = LLM(tiny_models["llama"], deterministic=True, **options)
    together = [output.outputs[0].logprobs for output in llm.generate(prompts, params)]
    assert together == [llm.generate([prompt], params)[0].outputs[0].logprobs for prompt in prompts]
    plain = LLM(tiny_models["llama"], **options).generate(prompts, params)
    assert together == [output.outputs[0].logprobs for output in plain]


def test_engine_uses_the_defaults_of_its_device(tiny_models):
    engine = LLM(tiny_models["llama"], device="cpu").engine
    assert engine.scheduler.max_num_batched_tokens == engine.config.max_num_batched_tokens == 512
    assert engine.config.cache_fraction == 0.5
