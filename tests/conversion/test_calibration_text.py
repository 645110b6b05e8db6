"""What `convert` calibrates on: one text, several by equal shares, and what it does where nothing is said."""

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
    """A tiny random model writes noise; here it is taken for text."""
    monkeypatch.setattr(self_generated_text, "cache_home", lambda: tmp_path / "home")
    for name, value in (("MAX_NEW_TOKENS", 48), ("MIN_NEW_TOKENS", 4), ("NOISE_THRESHOLD", math.inf)):
        monkeypatch.setattr(self_generated_text, name, value)


def chosen(source, judged=None, **options):
    found = calibration_windows(source, [0, 1, 2], ConvertConfig(**{**SMALL, **options}), judged)
    assert list(found) == [(0, 1, 2)]
    return found[0, 1, 2]


def test_texts_have_equal_shares_in_turn(source, calibration_file, evaluation_file):
    files = str(calibration_file), str(evaluation_file)
    one = corpus.windows(source.tokenizer, files[0], 4, 64, seed=0).ids
    two = corpus.windows(source.tokenizer, files[1], 3, 64, seed=0).ids
    both = chosen(source, calibration=files)
    assert both.source == "calibration.txt, evaluation.txt"
    assert torch.equal(both.ids, torch.stack([one[0], two[0], one[1], two[1], one[2], two[2], one[3]]))
    alone = chosen(source, calibration=files[0])
    assert torch.equal(alone.ids, corpus.windows(source.tokenizer, files[0], 7, 64, seed=0).ids)


def test_nothing_said_is_own_text_and_embedded_by_halves(source, writes):
    found = chosen(source)
    assert found.source == "self, embedded" and found.ids.shape == (7, 64)
    own = self_generated_text.self_generated_text(source, 4 * 64, 0, "cpu").windows(4, 64)
    assert torch.equal(found.ids[::2], own.ids)
    assert torch.equal(found.ids[1::2], corpus.windows(source.tokenizer, corpus.EMBEDDED, 3, 64, seed=0).ids)
    assert torch.equal(chosen(source, calibration=corpus.SELF).ids[:4], own.ids)


def test_what_own_text_lacks_the_embedded_makes_up_for(source, writes, monkeypatch):
    few = self_generated_text.self_generated_text(source, 3 * 64, 0, "cpu")
    monkeypatch.setattr(calibration_text, "self_generated_text", lambda *_: few)
    own = few.windows(7, 64).ids
    assert 3 <= len(own) < 7
    found = chosen(source, nsamples=20)
    assert len(found.ids) == 20 and len(own) == sum(any(torch.equal(w, o) for o in own) for w in found.ids)


def test_own_text_is_free_of_what_is_judged(source, writes):
    own = self_generated_text.self_generated_text(source, 900, 0, "cpu").windows(8, 64)
    judged = corpus.Windows(own.ids[2:3], "judged.txt")
    found = chosen(source, judged, calibration=corpus.SELF, nsamples=8)
    assert not overlap.overlapping(judged, overlap.passages(found))


def test_a_model_that_writes_nothing(tiny_models, tmp_path, monkeypatch, capsys):
    """It is said in one line, and refused where it was asked for."""
    monkeypatch.setattr(self_generated_text, "cache_home", lambda: tmp_path / "home")
    options = {**SMALL, "nsamples": 2, "eval_windows": 2}
    manifest = convert.run(str(tiny_models["llama"]), tmp_path / "out", ConvertConfig(**options))
    lines = [line for line in capsys.readouterr().err.splitlines() if "calibrat" in line and ":" in line]
    assert any("close to that of a random model; calibrating on the embedded" in line for line in lines)
    told = manifest.inputs["calibration"]
    assert told["source"] == corpus.EMBEDDED and told["windows"] == 2
    again = convert.run(str(tiny_models["llama"]), tmp_path / "out", ConvertConfig(**options))
    assert again.fingerprint == manifest.fingerprint
    for asked in (corpus.SELF, (corpus.EMBEDDED, corpus.SELF)):
        with pytest.raises(UserError, match="close to that of a random model"):
            convert.run(str(tiny_models["llama"]), tmp_path / "other", ConvertConfig(**options, calibration=asked))
    assert not (tmp_path / "other").exists()


def test_a_conversion_on_own_text(tiny_models, tmp_path, writes, evaluation_file):
    config = ConvertConfig(**SMALL, eval_windows=2, evaluation=str(evaluation_file))
    manifest = convert.run(str(tiny_models["llama"]), tmp_path / "out", config)
    assert manifest.inputs["calibration"]["source"] == "self, embedded"
    assert manifest.config["calibration"] is None and math.isfinite(manifest.metrics["ratio"])


def test_nobody_waits_for_text_that_cannot_be_used(tiny_models, tmp_path, monkeypatch):
    """What is wrong with the place of the result is said before a model is asked for text."""
    monkeypatch.setattr(calibration_text, "self_generated_text", None)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="was not made by mlaforge"):
        convert.run(str(tiny_models["llama"]), tmp_path / "out", ConvertConfig(**SMALL))
    with pytest.raises(UserError, match="does not exist"):
        convert.run(str(tiny_models["llama"]), tmp_path / "new", ConvertConfig(**SMALL, evaluation="nowhere.txt"))
