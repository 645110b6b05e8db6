"""The token index that `convert` writes by default, compared with that of `sparsify` on the dense conversion."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from mlaforge.artifact import Manifest
from mlaforge.checkpoint import loading
from mlaforge.checkpoint.index_files import INDEX_SHARD
from mlaforge.checkpoint.reader import Reader
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.conversion import convert, index
from mlaforge.conversion.config import ConvertConfig
from mlaforge.evaluation import perplexity
from mlaforge.evaluation.config import EvalConfig
from mlaforge.factorization import observation
from mlaforge.sparsity import sparsify
from mlaforge.sparsity.config import SparsifyConfig

INDEX = {"topk": 24, "width": 16, "sink": 2, "window": 8}
CASES = [("llama", "latent", {"bits": 6}), ("gpt_oss", "latent", {"bits": 6}), ("llama", "latent_rope", {})]
CASES += [("qwen3", "latent", {})]


@pytest.fixture(autouse=True)
def all_windows(monkeypatch):
    """Compute indexes from all calibration windows, as sparsify does."""
    monkeypatch.setattr(index, "INDEX_SHARE", 1)


@pytest.mark.parametrize(("family", "layout", "rows"), CASES)
def test_convert_composes_conversion_and_sparsify(
    family, layout, rows, tiny_models, converted, calibration_file, evaluation_file, tmp_path
):
    """One directory with the dense conversion's tensors and the index that sparsify computes from the same windows."""
    directory, dense = converted(family, layout, **rows, **INDEX), converted(family, layout, **rows, dense=True)
    config = SparsifyConfig(text=str(calibration_file), seqlen=64, nsamples=12, device="cpu", **INDEX)
    sparsify.run(str(dense), tmp_path / "sparse", config)
    assert (directory / INDEX_SHARD).read_bytes() == (tmp_path / "sparse" / INDEX_SHARD).read_bytes()
    assert SourceModel.open(directory).config == SourceModel.open(tmp_path / "sparse").config
    with Reader(directory, ".index.") as one, Reader(dense) as other:
        assert [*one] == [*other] and all(torch.equal(one[name], other[name]) for name in one)
    manifests = [Manifest.load(path) for path in (directory, dense)]
    assert manifests[0].stage == "convert" and manifests[0].config["topk"] == 24 and not manifests[0].config["dense"]
    assert manifests[0].metrics["mla_ppl"] == manifests[1].metrics["mla_ppl"]
    # With the index, the files are evaluated as `eval` reads them: every token has a selection.
    teacher = str(tiny_models[family])
    evaluation = EvalConfig(
        text=str(evaluation_file), windows=4, seqlen=64, dtype="float32", device="cpu", teacher=teacher
    )
    for options, name, prefix in (({}, "sparse_ppl", "sparse_"), ({"dense": True}, "mla_ppl", "")):
        metrics = perplexity.run(str(directory), None, dataclasses.replace(evaluation, **options)).metrics
        written = [manifests[0].metrics[key] for key in (name, f"{prefix}ratio", f"{prefix}log_ratio_stderr")]
        assert [metrics[key] for key in ("ppl", "ratio", "log_ratio_stderr")] == pytest.approx(written, rel=1e-4)
        assert metrics["topk"] == (24 if prefix else None)
    assert "sparse_ppl" not in manifests[1].metrics
    indexes = loading.load_model(directory).config.indexer_types.count("full")
    caches = [manifest.metrics["cache"] for manifest in manifests]
    assert caches[0]["index_bytes_per_token"] == 16 * indexes and caches[1]["index_bytes_per_token"] == 0
    assert caches[0]["mla_bytes_per_token"] == caches[1]["mla_bytes_per_token"] + 16 * indexes
    assert caches[0]["fraction"] > caches[1]["fraction"]
    assert manifests[0].seconds["index"] > 0 and "index" not in manifests[1].seconds


@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_interrupted_index_resumes(moment, converted, tiny_models, calibration_file, evaluation_file, tmp_path):
    """Before its tensors are stored and after the model became sparse; the bytes are those of one run."""
    place = (observation.LayerObserver, "index") if moment == "before" else (Manifest, "save")
    texts = {"calibration": str(calibration_file), "evaluation": str(evaluation_file)}
    config = ConvertConfig(
        layout="latent", bits=6, seqlen=64, nsamples=12, eval_windows=4, device="cpu", **texts, **INDEX
    )
    with pytest.MonkeyPatch.context() as patch:
        complete, calls = getattr(*place), []

        def interrupt(*arguments):
            calls.append(arguments)
            if len(calls) == 2 or moment == "after":
                raise KeyboardInterrupt
            return complete(*arguments)

        patch.setattr(*place, interrupt)
        with pytest.raises(KeyboardInterrupt):
            convert.run(str(tiny_models["llama"]), tmp_path / "out", config)
    convert.run(str(tiny_models["llama"]), tmp_path / "out", config)
    expected = converted("llama", "latent", bits=6, **INDEX)
    files = {path.relative_to(expected) for path in expected.rglob("*") if path.is_file()} - {Path("manifest.json")}
    assert {path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*")} >= files
    assert all((tmp_path / "out" / name).read_bytes() == (expected / name).read_bytes() for name in files)
    one, other = (json.loads((path / "manifest.json").read_text()) for path in (tmp_path / "out", expected))
    assert one["metrics"] == other["metrics"]


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("llama", (), "the model's context of 512 tokens is not above topk = 1024 and the 132 that are always read"),
        ("mistral", ("--layers", "all"), "every layer has a sliding window"),
        ("llama", ("--deepseek-style",), "DeepSeek's format (deepseek_style) has none"),
        ("llama", ("--dense",), None),
    ],
)
def test_the_reason_for_no_index_is_one_line(family, options, reason, converts, tiny_models, tmp_path):
    """Options for an index that cannot be are refused; without them the model is written densely."""
    done = converts(tiny_models[family], tmp_path / "out", *options)
    lines = [line for line in done.stderr.splitlines() if "no index: " in line]
    assert len(lines) == (reason is not None) and (reason is None or reason in lines[0])
    assert Manifest.load(tmp_path / "out").config["dense"]
    assert not (tmp_path / "out" / INDEX_SHARD).exists()


@pytest.mark.parametrize(
    ("family", "options", "words"),
    [
        ("llama", ("--topk", "400"), "topk = 400 is for an index, and the model's context of 512 tokens"),
        ("llama", ("--dense", "--width", "16"), "width = 16 is for an index, and dense leaves it out; leave it out"),
        ("llama", ("--deepseek-style", "--topk", "256"), "topk = 256 is for an index, and DeepSeek's format"),
        ("mistral", ("--topk", "256"), "topk = 256 is for an index, and every layer has a sliding window"),
        ("llama", ("--topk", "100"), "above the 132 tokens that are always read (sink 4, window 128)"),
        ("llama", ("--topk", "256", "--width", "20"), "width = 20 must be a multiple of 8"),
    ],
)
def test_rejects_options_of_an_index_that_cannot_be(family, options, words, refused, tiny_models, short, tmp_path):
    refused(words, "convert", tiny_models[family], tmp_path / "out", *short, *options)
