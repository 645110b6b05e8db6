"""Kernels that a layer launches in a decode step on a GPU: small ones cost about as much as their launches."""

import pytest
import torch

from mlaforge.engine.config import EngineConfig
from mlaforge.engine.engine import Engine
from mlaforge.engine.execution import model as execution
from mlaforge.engine.sampling.params import SamplingParams
from support.tiny_models import save_packed

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="it needs the simulated device")
# Model -> most kernels of a layer.
MOST = {
    "llama": 10,
    "qwen3": 10,
    "gpt_oss": 13,
    "latent_rope": 12,
    "fp8": 10,
    "int8": 10,
    "sparse": 15,
    "coded": 13,
    "sparse coded": 18,
}


@pytest.fixture(scope="module")
def models(tiny_models, converted, sparse, tmp_path_factory):
    packed = save_packed(tiny_models["gpt_oss"], tmp_path_factory.mktemp("kernels") / "packed")
    return {
        **tiny_models, "gpt_oss": packed, "fp8": tiny_models["llama"],
        "int8": tiny_models["llama"],
        "latent_rope": converted("llama", "latent_rope"), "sparse": sparse("llama", "gqa", topk=24),
        "coded": converted("llama", "latent", bits=6), "sparse coded": sparse("llama", "coded", topk=24),
    }  # fmt: skip


# These run the kernels of others, or take the interpreter half a minute.
SLOW = ("qwen3", "fp8", "int8", "sparse", "gpt_oss", "coded")


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in MOST])
def test_kernels_of_a_layer(name, models, cuda, monkeypatch):
    layers: list[list[str]] = []
    deferred = execution.Layer.deferred

    def counted(layer, *inputs):
        before = len(cuda.kernels)
        outputs = deferred(layer, *inputs)
        layers.append(cuda.kernels[before:])
        return outputs

    monkeypatch.setattr(execution.Layer, "deferred", counted)
    options = {"kv_cache_dtype": name} if name in ("fp8", "int8") else {}
    config = EngineConfig(
        device="cuda", dtype="float32", cache_bytes=1 << 22, block_size=16, max_model_len=1024, **options
    )
    engine = Engine(models[name], config)
    # Longer than what sparse layers read.
    engine.add("0", [*range(60, 90)], SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
    while not engine.scheduler.running or not engine.scheduler.running[0].decoding:
        engine.step()
    # Captured at its first use.
    engine.step()
    layers.clear()
    cuda.clear()
    engine.step()
    assert not [wait for wait in cuda.waits if "execution" in wait.line]
    assert len(layers) >= 2
    # The first sparse layer computes what depends on the view only.
    shared = {"arange.default", "mul.Tensor", "clamp_max.default", "add.Tensor"} if "sparse" in name else set()
    layers[0] = [kernel for kernel in layers[0] if kernel not in shared]
    for kernels in layers:
        # Longer texts have several splits, which are merged.
        merges = "merge_kernel" not in kernels
        assert {"attend_kernel", "latent_sum_kernel"} & {*kernels} and len(kernels) + merges <= MOST[name], kernels
