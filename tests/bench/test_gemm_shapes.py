"""Recorded matrix products: every product of a run, by tag and shape, and those of replayed graphs."""

import json
import types

import pytest
import torch

from mlaforge.bench.gemm_shapes import FILE, Recorder, Shapes
from mlaforge.engine.config import EngineConfig
from mlaforge.engine.execution.linear import PackedLinear
from mlaforge.engine.llm import LLM
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.ops import tuned
from mlaforge.runtime import UserError
from support.simulated_cuda import FakeCapture
from support.tiny_models import save_packed

PROMPT, TOKENS = 5, 4


def products(llm):
    """Calls of each tag with M rows, in a run of one prompt and four tokens."""
    recorder = Recorder(llm.engine)
    with recorder.active() as shapes:
        llm.generate([[3, 1, 4, 1, 5]], SamplingParams(max_tokens=TOKENS, temperature=0))
    return shapes, {(shape.tag, shape.M): usage.count for shape, usage in shapes.usage.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_every_product_of_a_run_is_recorded_once(tiny_models, dtype):
    llm = LLM(tiny_models["llama"], EngineConfig(dtype=dtype, device="cpu", cache_bytes=1 << 20))
    shapes, counts = products(llm)
    spec = llm.engine.model.spec
    layers, steps = spec.num_layers, TOKENS - 1
    expected = {
        (tag, rows): n for tag in ("qkv", "o", "gate_up", "down") for rows, n in ((PROMPT, layers), (1, layers * steps))
    }
    assert counts == expected | {("lm_head", 1): TOKENS}
    hidden = spec.hidden_size
    for shape, usage in shapes.usage.items():
        assert shape.dtype == dtype and shape.device == "cpu" and usage.seconds > 0
        assert hidden == shape.K or shape.tag in ("o", "down")
        assert hidden == shape.N or shape.tag not in ("o", "down")
    assert PackedLinear.__call__.__module__ == "mlaforge.engine.execution.linear"


def test_mixtures_are_recorded_whole(tiny_models, tmp_path):
    model = save_packed(tiny_models["gpt_oss"], tmp_path / "packed")
    llm = LLM(model, EngineConfig(dtype="float32", device="cpu", cache_bytes=1 << 20))
    shapes, counts = products(llm)
    layers = llm.engine.model.spec.num_layers
    for tag in ("experts", "router"):
        assert counts[tag, PROMPT] == layers and counts[tag, 1] == layers * (TOKENS - 1)
    shape = next(shape for shape in shapes.usage if shape.tag == "experts")
    moe = llm.engine.model.spec.layers[0].moe
    assert (shape.experts, shape.top_k, shape.K) == (
        moe.num_experts,
        moe.top_k,
        llm.engine.model.spec.hidden_size,
    )
    assert shape.key[0] == "experts" and shape.dtype == "mxfp4"


def test_products_of_a_graph_count_once_for_every_replay(tiny_models):
    """A capture whose graph replays three times runs its products four times."""
    llm = LLM(tiny_models["llama"], EngineConfig(dtype="float32", device="cpu", cache_bytes=1 << 20))
    layer, x = llm.engine.model.head, torch.randn(1, llm.engine.model.spec.hidden_size)
    llm.engine.runner.graphs = types.SimpleNamespace(capture=FakeCapture())
    recorder = Recorder(llm.engine)
    with recorder.active() as shapes:
        replay, _ = llm.engine.runner.graphs.capture(lambda: layer(x))
        for _ in range(3):
            replay()
    (usage,) = shapes.usage.values()
    assert usage.count == 4


def test_a_file_is_read_back_sorted_by_time(tmp_path):
    shapes, path = Shapes(), tmp_path / FILE
    shape = {"M": 1, "N": 32, "K": 16, "dtype": "int8", "device": "cpu", "experts": 0, "top_k": 0}
    rows = [{"tag": tag, **shape, "count": 2, "seconds": seconds} for tag, seconds in (("o", 1.0), ("qkv", 2.0))]
    path.write_text(json.dumps({"shapes": rows}))
    shapes.update(Shapes.read(path))
    shapes.update(Shapes.read(path))
    shapes.write(path)
    again = json.loads(path.read_text())["shapes"]
    assert [(row["tag"], row["count"], row["seconds"]) for row in again] == [("qkv", 4, 4.0), ("o", 4, 2.0)]
    assert next(iter(shapes.usage)).key == ("product", tuned.product_key("int8", 32, 16, 1))
    path.write_text("{}")
    with pytest.raises(UserError, match="has no shapes"):
        Shapes.read(path)
