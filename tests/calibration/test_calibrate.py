"""`calibrate` as a whole, with its real offline embedder, and what `convert` does with its sets."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from pydoc_data.topics import topics

import pytest
import torch

from mlaforge.artifact import Manifest
from mlaforge.calibration import calibrate, window_store
from mlaforge.calibration.config import CalibrateConfig
from mlaforge.calibration.window_store import Shards
from mlaforge.checkpoint.source_model import SourceModel, load_tokenizer
from mlaforge.conversion import convert
from mlaforge.conversion.config import ConvertConfig
from mlaforge.data import corpus, overlap
from mlaforge.runtime import UserError
from mlaforge.synthesis import own_text
from mlaforge.tensor_store import TensorStore
from support.killed import command, started

FEW = {"window": 120, "passage": 4, "clusters": 6, "neighbours": 3, "device": "cpu"}
OPTIONS = [part for name, value in FEW.items() for part in (f"--{name}", str(value))]


@pytest.fixture(scope="module", autouse=True)
def small_shards():
    """Several shards of a small text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window_store, "SHARD", 20)
        yield


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Two kinds of text, one of them partly twice."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "prose").mkdir()
    prose = [topics[name] for name in sorted(topics)[:8]]
    for i, text in enumerate(prose):
        (folder / "prose" / f"{i:02d}.txt").write_text(text[:1200])
    (folder / "prose" / "copy.txt").write_text(prose[0][:1200])
    lines = [{"text": f"Question {i}: how many are {i} and {i * i}? They are {i + i * i}."} for i in range(20)]
    lines.append({"text": "A scrap."})
    (folder / "sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture(scope="module")
def sourced(texts):
    return ["--source", texts / "prose", "--source", texts / "sums.jsonl", *OPTIONS]


@pytest.fixture(scope="module")
def golden(offline_embedder, sourced, texts, cli, tmp_path_factory):
    out = tmp_path_factory.mktemp("golden") / "out"
    done = cli("calibrate", *sourced, "--out", out, "--license", f"{texts / 'sums.jsonl'}=CC0-1.0")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.count(" texts, ") == 3 and str(out / corpus.CALIBRATION_SETS["swa"]) in done.stdout
    return out


def records(out):
    return {name: [json.loads(line) for line in (out / file).read_text().splitlines()]
            for name, file in corpus.CALIBRATION_SETS.items()}  # fmt: skip


def made(out):
    """Everything but the manifest, which holds wall times."""
    return {path.name: path.read_bytes() for path in out.iterdir() if path.name != "manifest.json"}


def assert_the_same(out, golden):
    """But for the licence that was given for `golden`."""
    without = ({n: b for n, b in made(folder).items() if n.startswith(("calib", "token"))} for folder in (out, golden))
    first, second = without
    assert first == second and len(first) == 4
    sheets = (json.loads((folder / "datasheet.json").read_text()) for folder in (out, golden))
    first, second = ({k: v for k, v in sheet.items() if k != "sources"} for sheet in sheets)
    assert first == second


def test_the_sets(golden, texts, offline_embedder):
    sets, tokenizer = records(golden), load_tokenizer(offline_embedder)
    everything = {p.name: p.read_text() for p in (texts / "prose").iterdir()}
    lines = (texts / "sums.jsonl").read_text().splitlines()
    everything |= {f"sums.jsonl:{i}": json.loads(line)["text"] for i, line in enumerate(lines, 1)}
    for name, own in sets.items():
        assert {r["kind"] for r in own} == {"typical", "hard"}
        assert {r["set"] for r in own} == ({name} if name != "mixed" else {"swa", "full"})
        assert len({r["text"] for r in own}) == len(own)
        for r in own:
            assert set(r) == {"text", "tokens", "source", "document", "set", "cluster", "distance", "kind", "score"}
            assert r["text"] in everything[r["document"]]
            assert r["tokens"] == len(tokenizer(r["text"], add_special_tokens=False)["input_ids"])
    swa, full = sets["swa"], sets["full"]
    assert len({r["cluster"] for r in swa}) == 6 and len({r["source"] for r in swa}) == 2
    assert max(len(r["text"]) for r in swa) <= 150
    lengths = [sum(len(r["text"]) for r in own) / len(own) for own in (swa, full)]
    assert lengths[1] > 2 * lengths[0]
    mixed = {kind: [r for r in sets["mixed"] if r["set"] == kind] for kind in ("swa", "full")}
    halves = [sum(r["tokens"] for r in own) for own in mixed.values()]
    assert all(halves) and abs(halves[0] - halves[1]) <= max(r["tokens"] for r in sets["mixed"])
    assert not any(short["text"] in long["text"] for short in mixed["swa"] for long in mixed["full"])


def test_the_datasheet(golden, texts):
    sheet, text = json.loads((golden / "datasheet.json").read_text()), (golden / "datasheet.md").read_text()
    manifest = Manifest.load(golden)
    for name, own in records(golden).items():
        counts = sheet["sets"][name]
        assert (counts["texts"], counts["tokens"]) == (len(own), sum(r["tokens"] for r in own))
        assert counts["typical"] + counts["hard"] == counts["texts"] == manifest.metrics["sets"][name]["texts"]
        assert f"| {counts['texts']} | {counts['typical']} | {counts['hard']} |" in text
    prose, sums = (sheet["sources"][name] for name in ("prose", "sums.jsonl"))
    assert prose["licence"] == "unknown" and sums["licence"] == "CC0-1.0" and len(sums["sha256"]) == 64
    for words in ("CC0-1.0", sums["sha256"], "find out", "embedded by parts", "after zlib", "the embedder gt-all"):
        assert words in text
    assert sheet["notes"] == {"windows too short to be chosen": {"count": 1, "examples": []}}
    assert "| windows too short to be chosen | 1 |" in text
    assert (golden / "token_histograms.png").read_bytes().startswith(b"\x89PNG")
    assert set(manifest.files) == set(made(golden))


def test_the_same_again(golden, sourced, cli, tmp_path):
    """The same bytes; and what is finished is not done twice."""
    assert cli("calibrate", *sourced, "--out", tmp_path / "out").exit_code == 0
    assert_the_same(tmp_path / "out", golden)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Shards, "embed", None)
        again = cli("calibrate", *sourced, "--out", tmp_path / "out")
        assert again.exit_code == 0 and "finished already" in again.stderr
    other = cli("calibrate", *sourced, "--out", tmp_path / "out", "--seed", 1)
    assert other.exit_code == 2 and "seed was 0, now 1" in other.stderr


def dies_before_the_third_shard(*words):
    """The command in a process of its own."""
    embed = Shards.embed

    def dying(self, number, *rest):
        if number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        embed(self, number, *rest)

    window_store.SHARD, Shards.embed = 20, dying
    command(*words)


def test_a_killed_run_goes_on_with_the_shards_that_it_had(golden, sourced, cli, tmp_path, monkeypatch):
    out = tmp_path / "out"
    words = ("calibrate", *sourced, "--out", out)
    killed = started(dies_before_the_third_shard, *words)
    killed.join(120)
    assert killed.exitcode == -signal.SIGKILL
    assert not out.exists() and len(list((tmp_path / ".out.partial" / "work").rglob("vectors-*.safetensors"))) == 2
    embedded, embed = [], Shards.embed
    monkeypatch.setattr(Shards, "embed", lambda self, n, *rest: (embedded.append(n), embed(self, n, *rest)))
    monkeypatch.setattr(calibrate, "passages", None)  # nothing is cut again
    assert cli(*words).exit_code == 0
    assert embedded == list(range(2, max(embedded) + 1)) and len(embedded) > 2
    assert_the_same(out, golden)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_tokens_of_a_model(offline_embedder, texts, tiny_models, cli, tmp_path):
    done = cli("calibrate", "--source", texts / "sums.jsonl", *OPTIONS, "--out", tmp_path / "out", "--clusters", 4,
               "--tokenizer", tiny_models["llama"])  # fmt: skip
    assert done.exit_code == 0, done.stderr
    assert all(r["tokens"] == len(r["text"].encode()) for own in records(tmp_path / "out").values() for r in own)
    assert "counted by llama)" in (tmp_path / "out" / "datasheet.md").read_text()


# Mistakes


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.txt", b"", "holds no text"),
        ("blank.jsonl", b"\n \n", "holds no text"),
        ("photo.txt", b"\x89PNG\0\0", "is a binary file"),
        ("bad.jsonl", b"{]\n" * 101, "more than 100 lines"),
        ("half.parquet", b"PAR1", "cannot be read as parquet"),
        ("few.txt", b"A few words only, but enough for one window. " * 3, "1 windows of 120 characters, fewer than 6"),
        ("absent.txt", None, "does not exist"),
    ],
)
def test_sources_that_cannot_be_used(name, content, words, offline_embedder, cli, tree, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    before = tree(tmp_path)
    done = cli("calibrate", "--source", tmp_path / name, *OPTIONS, "--out", tmp_path / "a" / "out")
    *warnings, line = done.stderr.splitlines()
    assert done.exit_code == 2 and line.startswith("mlaforge: ") and words in line and "Traceback" not in done.stderr
    assert all(warning.startswith("warning: ") for warning in warnings) and done.stdout == ""
    assert tree(tmp_path) == before


def test_numbers_and_embedders_that_cannot_be(sourced, cli, tree, tmp_path, offline_embedder):
    for options, words in (
        (("--window", 3), "window = 3 must be at least 50"),
        (("--clusters", 0), "clusters = 0"),
        (("--embedder", tmp_path / "none"), "does not exist"),
        (("--tokenizer", tmp_path), "has no tokenizer"),
        (("--license", "MIT"), "SOURCE=LICENCE"),
        (("--device", "abacus"), "abacus"),
    ):
        done = cli("calibrate", *sourced, "--out", tmp_path / "out", *options)
        assert done.exit_code == 2 and words in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert tree(tmp_path) == {}


def test_a_missing_extra_is_one_line(offline_embedder, sourced, cli, tree, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    done = cli("calibrate", *sourced, "--out", tmp_path / "out")
    assert done.exit_code == 2 and "is missing: pip install '.[calibrate]'" in done.stderr, done.stderr
    assert tree(tmp_path) == {}


# What convert does with them


@pytest.fixture
def sets(tmp_path, calibration_file, evaluation_file):
    """A directory as `calibrate` writes one, its two sets of different text."""
    folder = tmp_path / "sets"
    folder.mkdir()
    text = calibration_file.read_text()
    parts = {"swa": text[:6000], "full": text[6000:], "mixed": text[3000:9000]}
    for name, file in corpus.CALIBRATION_SETS.items():
        (folder / file).write_text(json.dumps({"text": parts[name]}) + "\n")
    (folder / "datasheet.md").write_text(evaluation_file.read_text())
    Manifest("calibrate", {}, {}).save(folder)
    return folder


def converting(calibration, **options):
    settings = {"seqlen": 64, "nsamples": 6, "eval_windows": 2, "device": "cpu", "layers": "all", **options}
    return ConvertConfig(calibration=str(calibration), **settings)


def test_each_kind_of_layer_takes_its_set(sets, tiny_models, evaluation_file, tmp_path):
    """Layers 0 and 2 of the tiny model slide, layer 1 does not."""
    source, kept = str(tiny_models["gpt_oss"]), tmp_path / "moments"
    config = converting(sets, evaluation=str(evaluation_file))
    manifest = convert.run(source, tmp_path / "out", config, calibrated=kept)
    told = manifest.inputs["calibration"]
    assert list(told) == ["calib_full_golden", "calib_swa_golden"]
    slides = [layer["window"] is not None for layer in manifest.metrics["layers"]]
    assert slides == [True, False, True]
    found = {}
    for folder in kept.iterdir():
        found |= {int(path.stem.split("-")[1]): TensorStore(folder)[path.stem] for path in folder.glob("moments-*")}
    # Each as from a conversion of that layer alone with that file as its calibration text.
    for index, name in enumerate(["swa", "full", "swa"]):
        alone = converting(sets / corpus.CALIBRATION_SETS[name], evaluation=str(evaluation_file), layers=str(index))
        convert.run(source, tmp_path / f"alone-{index}", alone, calibrated=tmp_path / f"moments-{index}")
        (folder,) = (tmp_path / f"moments-{index}").iterdir()
        for key, tensor in TensorStore(folder)[f"moments-{index:03d}"].items():
            assert torch.equal(tensor, found[index][key]), (index, key)
    remembered = overlap.read_passages(tmp_path / "out" / overlap.PASSAGES)
    for index in (0, 1):
        assert set(overlap.read_passages(tmp_path / f"alone-{index}" / overlap.PASSAGES)) < set(remembered)


def test_a_model_without_windows_takes_the_full_set(sets, tiny_models, evaluation_file, tmp_path):
    config = converting(sets, evaluation=str(evaluation_file))
    manifest = convert.run(str(tiny_models["llama"]), tmp_path / "out", config)
    assert manifest.inputs["calibration"]["source"] == corpus.CALIBRATION_SETS["full"]


@pytest.mark.parametrize("name", ["swa", "full"])
def test_nothing_is_judged_on_either_set(name, sets, tiny_models, tmp_path):
    config = converting(sets, evaluation=str(sets / corpus.CALIBRATION_SETS[name]), nsamples=500, eval_windows=50)
    with pytest.raises(UserError, match="share text with the calibration text"):
        convert.run(str(tiny_models["gpt_oss"]), tmp_path / "out", config)
    assert not (tmp_path / "out").exists()


def test_other_stages_take_the_mixed_set(sets):
    assert corpus.read_text(str(sets)) == json.loads((sets / corpus.CALIBRATION_SETS["mixed"]).read_text())["text"]
    (sets / "manifest.json").unlink()
    assert len(corpus.read_text(str(sets))) > 12000


# The model's own text, and shares


def test_own_text_is_a_source(offline_embedder, texts, tiny_models, tmp_path, monkeypatch):
    """A tiny random model writes noise; here it is taken for text."""
    monkeypatch.setattr(own_text, "cache_home", lambda: tmp_path / "home")
    for name, value in (("LONGEST", 200), ("SHORTEST", 4), ("NOISE", math.inf)):
        monkeypatch.setattr(own_text, name, value)
    monkeypatch.setattr(calibrate, "MOST", 5000)
    model = str(tiny_models["llama"])
    config = CalibrateConfig(source=(corpus.SELF, str(texts / "prose")), share=("self=0.25",), tokenizer=model, **FEW)
    manifest = calibrate.run(tmp_path / "out", config)
    written = "\n".join(text for _, text in own_text.own_text(SourceModel.open(model), 5000, 0, "cpu").documents())
    for name in ("swa", "full"):
        tokens = manifest.metrics["sets"][name]["tokens_by_source"]
        # The last text may be more than the share.
        assert 0 < tokens["self"] < tokens["prose"], tokens
        lines = map(json.loads, (tmp_path / "out" / corpus.CALIBRATION_SETS[name]).read_text().splitlines())
        assert all(line["text"] in written for line in lines if line["source"] == "self")
    assert manifest.inputs["sources"]["self"]["licence"] == "as the model's own licence says of what it writes"
    assert calibrate.run(tmp_path / "out", config).fingerprint == manifest.fingerprint


def test_shares():
    def records(*told):
        return [{"source": source, "tokens": tokens} for source, tokens in told]

    every = records(*[("a", 10), ("b", 5)] * 8)
    assert calibrate._shared(every, {}) == every
    kept = calibrate._shared(every, {"a": 0.5, "b": 0.5})
    assert kept == records(*[("a", 10), ("b", 5)] * 4, *[("b", 5)] * 4)
    assert calibrate._shared(records(("a", 3)), {"a": 0.5, "b": 0.5}) == []


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (["self=0.5"], "name the model with --tokenizer"),
        (["nothing=0.5"], "share 'nothing=0.5' names no source"),
        (["embedded"], "must be SOURCE=FRACTION"),
        (["embedded=half"], "must be a fraction between 0 and 1"),
        (["embedded=1.5"], "must be a fraction between 0 and 1"),
        (["embedded=0.5", "self=0.6"], "must make 1 together"),
    ],
)
def test_shares_that_make_no_whole_are_refused(told, words, refused, tmp_path):
    options = [part for share in told for part in ("--share", share)]
    sources = "--source", corpus.EMBEDDED, "--source", corpus.SELF
    refused(words, "calibrate", *sources, *options, *OPTIONS, "--out", tmp_path / "out")
