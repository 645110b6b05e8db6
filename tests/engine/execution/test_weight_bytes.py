"""Weight bytes computed from shapes, compared with the memory of a loaded engine."""

import gc
import itertools

import pytest
import torch

from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.engine.config import EngineConfig
from mlaforge.engine.engine import Engine
from mlaforge.engine.execution.model import EngineModel
from mlaforge.engine.execution.weight_bytes import weight_bytes
from support.tiny_models import save_model, save_packed

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Models of which most are weights of linear layers, with no sides that are filled up."""
    folder = tmp_path_factory.mktemp("wide")
    shape = {"hidden_size": 256, "intermediate_size": 192}
    models = {family: save_model(folder / family, family, 1, **shape) for family in ("llama", "gpt_oss")}
    return {**models, "packed": save_packed(models["gpt_oss"], folder / "packed")}


def tensors() -> dict[int, int]:
    """Bytes of every storage of the process that a tensor is on, by its address."""
    gc.collect()
    sizes = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sizes


# Each model, each format, and every format with unpacked experts or packed ones; the rest is slow.
FEW = [("llama", "float32"), ("gpt_oss", "int4"), ("packed", "int8"), ("latent", "int8"), ("latent_rope", "bfloat16")]
CASES = [
    pytest.param(*case, marks=() if case in FEW else pytest.mark.slow)
    for case in itertools.product(
        ("llama", "gpt_oss", "packed", "latent", "latent_rope"), ("float32", "bfloat16", "int8", "int4")
    )
]


@pytest.mark.parametrize(("name", "format"), CASES)
def test_weight_bytes_equal_resident_bytes(name, format, wide, converted):
    layout = name if name.startswith("latent") else None
    path = converted("llama", layout) if layout else wide[name]
    before = tensors()
    engine = Engine(path, EngineConfig(device="cpu", dtype=format, cache_bytes=1 << 20, max_num_seqs=2))
    cache = {tensor.untyped_storage().data_ptr() for tensor in engine.cache.tensors}
    resident = sum(size for at, size in tensors().items() if at not in before and at not in cache)
    predicted = EngineModel(SourceModel.open(path), format, CPU).weight_bytes(format)
    # Less are the vectors that norms keep several times, more what int4 takes where it is torch's.
    assert 0.96 * resident <= predicted <= 1.12 * resident


def test_weight_bytes_of_a_20b_model():
    """Experts as they are stored, on either device; the head beside the embedding."""
    from transformers import GptOssConfig

    from mlaforge.checkpoint import loading

    spared = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config = GptOssConfig(num_hidden_layers=24, num_local_experts=32, architectures=["GptOssForCausalLM"]).to_dict()
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": spared}
    model = loading.skeleton(config)
    loading.keep_packed(model, config)
    experts = 24 * 32 * 3 * 2880 * 2880 * 17 // 32
    for device in (CPU, torch.device("cuda")):
        predicted = weight_bytes(model, "bfloat16", device)
        assert experts + 2 * 2 * 201088 * 2880 < predicted < 1.01 * 13.8e9
    # Of the rest int8 saves about half, but for the embedding.
    rest = (predicted - experts - 2 * 201088 * 2880) / 2
    assert predicted - weight_bytes(model, "int8", CPU) == pytest.approx(rest, rel=0.02)
