"""`make-gptoss --geometry`: the public models' sizes, random weights that a model computes finite states with."""

import dataclasses
import shutil
import types

import pytest
import torch

from mlaforge.checkpoint import loading
from mlaforge.checkpoint.reader import Reader, read_config
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.demo import geometry
from mlaforge.families import read_spec
from support import configs

TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 300, "num_local_experts": 8,
}  # fmt: skip


@pytest.fixture
def tiny(monkeypatch):
    """The same code on a model that fits into a test."""
    whole = geometry.settings
    monkeypatch.setattr(geometry, "settings", lambda name: whole(name, 2) | TINY)


@pytest.mark.parametrize(("name", "public"), [("20b", configs.GPT_OSS), ("120b", configs.GPT_OSS_120B)])
def test_sizes_are_the_public_models(name, public):
    config = geometry.settings(name)
    ours, theirs = read_spec(config), read_spec(public | {"max_position_embeddings": 131072})
    assert dataclasses.replace(ours, rope=theirs.rope) == theirs
    assert ours.rope.attention_scaling == theirs.rope.attention_scaling
    same = set(public) & set(config) - {"quantization_config"}
    assert len(same) > 12 and {key: config[key] for key in same} == {key: public[key] for key in same}
    assert (config["swiglu_alpha"], config["swiglu_limit"]) == (1.702, 7.0)


def test_random_weights_make_a_model_that_computes(tiny, cli, tmp_path):
    done = cli("make-gptoss", tmp_path / "out", "--geometry", "20b")
    assert done.exit_code == 0, done.stderr
    assert "of 20b's geometry" in done.stdout
    config = read_config(tmp_path / "out")
    with Reader(tmp_path / "out") as reader:
        reader.check(*loading.expected_tensors(config))
        blocks = reader["model.layers.1.mlp.experts.gate_up_proj_blocks"]
        scales = reader["model.layers.1.mlp.experts.gate_up_proj_scales"]
    counts = torch.stack([torch.bincount((blocks >> shift & 15).flatten(), minlength=16) for shift in (0, 4)])
    assert (counts / counts.sum(1, keepdim=True) - 1 / 16).abs().max() < 0.01
    # Every byte of the four that are drawn at once has its highest bit now and then.
    assert ((blocks >> 7).view(-1, 4).float().mean(0) - 0.5).abs().max() < 0.05
    assert scales.unique().numel() == 2
    loaded = loading.load_model(tmp_path / "out", "float32")
    states = loaded(torch.arange(48)[None], output_hidden_states=True).hidden_states
    assert all(torch.isfinite(h).all() and 0.001 < h.std() < 100 for h in states)


def test_the_seed_decides_and_nothing_else(tiny, cli, tmp_path):
    def write_model(name, *options):
        done = cli("make-gptoss", tmp_path / name, "--geometry", "20b", *options)
        assert done.exit_code == 0, done.stderr
        return SourceModel.open(tmp_path / name).fingerprint

    assert write_model("one") == write_model("two") != write_model("other", "--seed", 1)
    again = cli("make-gptoss", tmp_path / "one", "--geometry", "20b")
    assert again.exit_code == 0 and "is finished already" in again.stderr


def test_too_small_a_disk_is_said_before_anything_is_written(tiny, cli, tmp_path, monkeypatch):
    usage = types.SimpleNamespace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    refused = cli("make-gptoss", tmp_path / "a" / "out", "--geometry", "20b")
    assert refused.exit_code and "takes 0.0 GiB and the disk has 0.0 GiB free" in refused.stderr
    assert not any(tmp_path.iterdir())


def test_rejects_options_of_rewriting(tiny, cli, tmp_path):
    refused = cli("make-gptoss", tmp_path / "out", "--geometry", "20b", "--windows")
    assert refused.exit_code and "windows = True applies to a rewritten model" in refused.stderr
    assert not any(tmp_path.iterdir())
