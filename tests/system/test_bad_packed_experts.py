"""Damaged MXFP4 experts: one line of error that names the tensor, and no files are left behind."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from mlaforge.checkpoint import loading
from mlaforge.checkpoint.reader import Reader, is_finite, read_config
from mlaforge.demo.config import MakeGptOssConfig
from mlaforge.demo.gpt_oss import run
from support.tiny_models import WEIGHTS

BLOCKS = "model.layers.1.mlp.experts.gate_up_proj_blocks"
SCALES = "model.layers.1.mlp.experts.down_proj_scales"


@pytest.fixture(scope="module")
def made(tiny_models, tmp_path_factory):
    """A tiny llama as GPT-OSS with packed experts, in one file. Read-only."""
    directory = tmp_path_factory.mktemp("packed") / "made"
    run(directory, MakeGptOssConfig(from_=str(tiny_models["llama"]), mxfp4=True))
    (shard,) = directory.glob("*.safetensors")
    shard.rename(directory / WEIGHTS)
    (directory / "model.safetensors.index.json").unlink()
    return directory


@pytest.fixture
def damaged(made, tmp_path):
    """damaged(change) -> a copy with tensors modified by `change`."""

    def copy(change):
        directory = shutil.copytree(made, tmp_path / "damaged")
        tensors = load_file(directory / WEIGHTS)
        change(tensors)
        save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
        return directory

    return copy


def put(name, value):
    def change(tensors):
        tensors[name].view(-1)[tensors[name].numel() // 2] = value

    return change


def cut(name, *places):
    """Return a damage that truncates a tensor."""
    return lambda tensors: tensors.update({name: tensors[name][places].contiguous()})


DAMAGE = {
    "truncated blocks": (cut(BLOCKS, slice(None), slice(100)), (BLOCKS, "[4, 100, 2, 16]")),
    "blocks of another width": (cut(BLOCKS, ..., slice(8)), (BLOCKS, "[4, 192, 2, 8]")),
    "no blocks": (lambda tensors: tensors.pop(BLOCKS), ("lacks", BLOCKS)),
    "blocks of numbers": (lambda tensors: tensors.update({BLOCKS: tensors[BLOCKS].float()}), (BLOCKS, "F32")),
    "scales of another shape": (cut(SCALES, ..., slice(2)), (SCALES, "[4, 64, 2]")),
    "no scales": (lambda tensors: tensors.pop(SCALES), ("lacks", SCALES)),
    "an expert too few": (cut(SCALES, slice(3)), (SCALES, "[3, 64, 3]", "[4, 64, 3]")),
}


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("verb", ["convert", "eval", "generate"])
def test_damaged_experts(verb, how, damaged, refused, short, evaluation_file, tmp_path):
    change, words = DAMAGE[how]
    judged = ("--text", evaluation_file, "--seqlen", 64)
    more = {"convert": short, "eval": judged, "generate": ("--dtype", "float32")}[verb]
    refused(words, verb, damaged(change), tmp_path / "out", *more)


def test_rejects_another_number_of_experts_in_the_config(damaged, refused, short, tmp_path):
    directory = damaged(lambda tensors: None)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_local_experts": 8}))
    refused(("experts", "4", "8", "config.json calls for"), "convert", directory, tmp_path / "out", *short)


def test_rejects_a_nan_scale(damaged, refused, short, tmp_path):
    refused((SCALES, "the scale 255"), "convert", damaged(put(SCALES, 255)), tmp_path / "out", *short)


def test_checking_does_not_read_the_blocks(made, monkeypatch):
    """They are most of a checkpoint, and have no encoding of NaN."""
    read, get = [], Reader.__getitem__
    monkeypatch.setattr(Reader, "__getitem__", lambda self, name: read.append(name) or get(self, name))
    with Reader(made) as reader:
        reader.check(*loading.expected_tensors(read_config(made)))
    assert SCALES in read and "lm_head.weight" in read
    assert not any(name.endswith("_blocks") for name in read)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), None])
@pytest.mark.parametrize("place", [0, 517, 999])
def test_is_finite(dtype, value, place):
    tensor = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
    if value is not None:
        tensor[place] = value
    assert is_finite(tensor) == (value is None)
    assert is_finite(tensor[:0])
