"""Calibration text of `convert`: one text, several in equal shares, and the default."""

import math

import pytest
import torch

from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.conversion import calibration_text, convert
from mlaforge.conversion.calibration_text import calibration_windows
from mlaforge.conversion.config import ConvertConfig
from mlaforge.data import corpus, overlap
from mlaforge.runtime import UserError
from mlaforge.synthesis import self_generated_text

SMALL = {"seqlen": 64, "nsamples": 7, "device": "cpu"}


@pytest.fixture
def source(tiny_models):
    return SourceModel.open(tiny_models["llama"])


@pytest.fixture
def writes(tmp_path, monkeypatch):
    """A tiny random model writes noise; accept it as text."""
    monkeypatch.setattr(self_generated_text, "cache_home", lambda: tmp_path / "home")
    for name, value in (("MAX_NEW_TOKENS", 48), ("MIN_NEW_TOKENS", 4), ("NOISE_THRESHOLD", math.inf)):
        monkeypatch.setattr(self_generated_text, name, value)


def chosen(source, eval_windows=None, **options):
    windows = calibration_windows(source, [0, 1, 2], ConvertConfig(**{**SMALL, **options}), eval_windows)
    assert list(windows) == [(0, 1, 2)]
    return windows[0, 1, 2]


def test_texts_have_equal_shares_in_turn(source, calibration_file, evaluation_file):
    files = str(calibration_file), str(evaluation_file)
    one = corpus.windows(source.tokenizer, files[0], 4, 64, seed=0).ids
    two = corpus.windows(source.tokenizer, files[1], 3, 64, seed=0).ids
    mixed = chosen(source, calibration=files)
    assert mixed.source == "calibration.txt, evaluation.txt"
    assert torch.equal(mixed.ids, torch.stack([one[0], two[0], one[1], two[1], one[2], two[2], one[3]]))
    alone = chosen(source, calibration=files[0])
    assert torch.equal(alone.ids, corpus.windows(source.tokenizer, files[0], 7, 64, seed=0).ids)


def test_the_default_is_half_generated_and_half_embedded_text(source, writes):
    windows = chosen(source)
    assert windows.source == "self, embedded" and windows.ids.shape == (7, 64)
    generated = self_generated_text.self_generated_text(source, 4 * 64, 0, "cpu").windows(4, 64)
    assert torch.equal(windows.ids[::2], generated.ids)
    assert torch.equal(windows.ids[1::2], corpus.windows(source.tokenizer, corpus.EMBEDDED, 3, 64, seed=0).ids)
    assert torch.equal(chosen(source, calibration=corpus.SELF).ids[:4], generated.ids)


def test_embedded_text_makes_up_for_short_generated_text(source, writes, monkeypatch):
    short = self_generated_text.self_generated_text(source, 3 * 64, 0, "cpu")
    monkeypatch.setattr(calibration_text, "self_generated_text", lambda *_: short)
    generated = short.windows(7, 64).ids
    assert 3 <= len(generated) < 7
    windows = chosen(source, nsamples=20)
    matches = sum(any(torch.equal(window, ids) for ids in generated) for window in windows.ids)
    assert len(windows.ids) == 20 and len(generated) == matches


def test_generated_text_excludes_the_evaluation_windows(source, writes):
    generated = self_generated_text.self_generated_text(source, 900, 0, "cpu").windows(8, 64)
    eval_windows = corpus.Windows(generated.ids[2:3], "eval.txt")
    windows = chosen(source, eval_windows, calibration=corpus.SELF, nsamples=8)
    assert not overlap.overlapping(eval_windows, overlap.passages(windows))


def test_a_model_that_generates_no_text(tiny_models, tmp_path, monkeypatch, capsys):
    """The default falls back to embedded text with a log line; an explicit request is refused."""
    monkeypatch.setattr(self_generated_text, "cache_home", lambda: tmp_path / "home")
    options = {**SMALL, "nsamples": 2, "eval_windows": 2}
    manifest = convert.run(str(tiny_models["llama"]), tmp_path / "out", ConvertConfig(**options))
    lines = [line for line in capsys.readouterr().err.splitlines() if "calibrat" in line and ":" in line]
    assert any("close to that of a random model; calibrating on the embedded" in line for line in lines)
    record = manifest.inputs["calibration"]
    assert record["source"] == corpus.EMBEDDED and record["windows"] == 2
    again = convert.run(str(tiny_models["llama"]), tmp_path / "out", ConvertConfig(**options))
    assert again.fingerprint == manifest.fingerprint
    for texts in (corpus.SELF, (corpus.EMBEDDED, corpus.SELF)):
        with pytest.raises(UserError, match="close to that of a random model"):
            convert.run(str(tiny_models["llama"]), tmp_path / "other", ConvertConfig(**options, calibration=texts))
    assert not (tmp_path / "other").exists()


def test_a_conversion_on_generated_text(tiny_models, tmp_path, writes, evaluation_file):
    config = ConvertConfig(**SMALL, eval_windows=2, evaluation=str(evaluation_file))
    manifest = convert.run(str(tiny_models["llama"]), tmp_path / "out", config)
    assert manifest.inputs["calibration"]["source"] == "self, embedded"
    assert manifest.config["calibration"] is None and math.isfinite(manifest.metrics["ratio"])


def test_invalid_paths_are_refused_before_text_is_generated(tiny_models, tmp_path, monkeypatch):
    monkeypatch.setattr(calibration_text, "self_generated_text", None)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="was not made by mlaforge"):
        convert.run(str(tiny_models["llama"]), tmp_path / "out", ConvertConfig(**SMALL))
    with pytest.raises(UserError, match="does not exist"):
        convert.run(str(tiny_models["llama"]), tmp_path / "new", ConvertConfig(**SMALL, evaluation="nowhere.txt"))
