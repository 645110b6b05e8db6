"""The cache's share of the memory that weights leave, and errors before loading where something does not fit."""

import pytest
import torch

from mlaforge.engine import memory
from mlaforge.engine.config import EngineConfig
from mlaforge.engine.engine import Engine
from mlaforge.engine.execution.model import EngineModel
from mlaforge.runtime import UserError
from support.eagle3_heads import saved
from support.tiny_models import save_packed


@pytest.fixture(scope="module")
def packed(tiny_models, tmp_path_factory):
    return save_packed(tiny_models["gpt_oss"], tmp_path_factory.mktemp("memory") / "packed")


@pytest.fixture
def free(monkeypatch):
    """free(bytes): so many are."""
    return lambda count: monkeypatch.setattr(memory, "free_bytes", lambda device: count)


@pytest.fixture
def nothing_is_loaded(monkeypatch):
    def load(*_):
        raise AssertionError("it is loaded before memory is known to do")

    monkeypatch.setattr(EngineModel, "load", load)


def make(model, **options):
    defaults = {"device": "cpu", "dtype": "bfloat16", "max_num_seqs": 64, "max_model_len": 512}
    return Engine(model, EngineConfig(**{**defaults, **options}))


def weights_of(model, **options) -> int:
    """The bytes that a refusal names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "free_bytes", lambda device: 1000)
        with pytest.raises(UserError) as caught:
            make(model, **options)
    return int(str(caught.value).split(" take ")[1].split()[0].replace(",", ""))


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "packed"])
def test_cache_takes_its_fraction_of_free_memory_after_weights(name, tiny_models, packed, free):
    model = packed if name == "packed" else tiny_models[name]
    weights = weights_of(model)
    half, most = (make(model, cache_bytes=size).stats().cache_bytes for size in (1 << 19, 1 << 20))
    free(weights + (1 << 20))
    assert make(model).stats().cache_bytes == half
    assert make(model, cache_fraction=1.0).stats().cache_bytes == most > half
    # What a cache takes is asked for beside the weights, not of what they need.
    assert weights > 1 << 17


@pytest.mark.usefixtures("nothing_is_loaded")
def test_weights_that_do_not_fit_name_a_dtype_that_would(tiny_models, packed, free):
    model = tiny_models["llama"]
    weights, smaller = weights_of(model, dtype="float32"), weights_of(model, dtype="int8")
    free(smaller + 100_000)
    with pytest.raises(UserError) as caught:
        make(model, dtype="float32")
    line = str(caught.value)
    assert "\n" not in line and f"llama does not fit into memory: its weights in float32 take {weights:,} bytes" in line
    assert f"{smaller + 100_000:,} are free on this cpu; dtype int8 would fit: {smaller:,} bytes of weights" in line
    # Experts that are packed become no smaller by another dtype.
    free(10_000)
    with pytest.raises(UserError, match=r"no dtype would fit: the smallest needs [0-9,]+ in all$"):
        make(packed)


@pytest.mark.usefixtures("nothing_is_loaded")
def test_minimum_cache_must_fit_beside_weights(tiny_models, free):
    model = tiny_models["llama"]
    weights = weights_of(model, dtype="int4")
    with pytest.raises(UserError) as caught:
        make(model, dtype="int4", cache_bytes=1)
    least = int(str(caught.value).split("at least ")[1].split()[0])
    free(weights + least - 1)
    with pytest.raises(
        UserError, match=f"the smallest cache {least:,}, and {weights + least - 1:,} are free"
    ) as caught:
        make(model, dtype="int4")
    assert f"the smallest needs {weights + least:,} in all" in str(caught.value)
    free(weights + least)
    with pytest.raises(AssertionError, match="it is loaded"):
        make(model, dtype="int4", cache_fraction=1.0)


@pytest.mark.usefixtures("nothing_is_loaded")
def test_rejects_cache_bytes_that_do_not_fit(tiny_models, free):
    model = tiny_models["llama"]
    free(weights_of(model) + (1 << 20))
    with pytest.raises(UserError, match=f"{1 << 20:,} of the [0-9,]+ that are free on this cpu remain"):
        make(model, cache_bytes=1 << 21)
    # No more is taken than so many contexts can use.
    with pytest.raises(AssertionError, match="it is loaded"):
        make(model, cache_bytes=1 << 30, max_num_seqs=1)


def test_memory_of_speculation_is_counted(tiny_models, tmp_path):
    model = tiny_models["llama"]
    plain = weights_of(model)
    head = saved(tmp_path / "head")
    with_head = weights_of(model, speculative=str(head))
    assert with_head > plain
    rounded = weights_of(model, speculative="ngram", specpv=True, specpv_dtype="int8")
    embedding = 260 * 64 * torch.bfloat16.itemsize
    assert rounded == plain + weights_of(model, dtype="int8") - embedding
