"""End-to-end tests of `calibrate` with its real offline embedder, and of its sets in `convert`."""

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
from mlaforge.calibration import calibrate, datasheet, window_store
from mlaforge.calibration.config import CalibrateConfig
from mlaforge.calibration.window_store import Shards
from mlaforge.checkpoint.source_model import SourceModel, load_tokenizer
from mlaforge.conversion import convert
from mlaforge.conversion.config import ConvertConfig
from mlaforge.data import corpus, overlap
from mlaforge.runtime import UserError
from mlaforge.synthesis import self_generated_text
from mlaforge.tensor_store import TensorStore
from support.killed import command, started

FEW = {"window": 120, "passage": 4, "clusters": 6, "neighbours": 3, "device": "cpu"}
OPTIONS = [part for name, value in FEW.items() for part in (f"--{name}", str(value))]


@pytest.fixture(scope="module", autouse=True)
def small_shards():
    """Make a small text span several shards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window_store, "MIN_SHARD_WINDOWS", 20)
        yield


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Two kinds of text, one with a duplicate document."""
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
def source_args(texts):
    return ["--source", texts / "prose", "--source", texts / "sums.jsonl", *OPTIONS]


@pytest.fixture(scope="module")
def golden(offline_embedder, source_args, texts, cli, tmp_path_factory):
    out = tmp_path_factory.mktemp("golden") / "out"
    done = cli("calibrate", *source_args, "--out", out, "--license", f"{texts / 'sums.jsonl'}=CC0-1.0")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.count(" texts, ") == 3 and str(out / corpus.CALIBRATION_SETS["swa"]) in done.stdout
    return out


def records(out):
    return {name: [json.loads(line) for line in (out / file).read_text().splitlines()]
            for name, file in corpus.CALIBRATION_SETS.items()}  # fmt: skip


def output_files(out):
    """All output files except the manifest, which contains wall times."""
    return {path.name: path.read_bytes() for path in out.iterdir() if path.name != "manifest.json"}


def assert_same_output(out, golden):
    """Compare everything except the licence, which only `golden` was given."""
    without = (
        {n: b for n, b in output_files(folder).items() if n.startswith(("calib", "token"))} for folder in (out, golden)
    )
    first, second = without
    assert first == second and len(first) == 4
    sheets = (json.loads((folder / "datasheet.json").read_text()) for folder in (out, golden))
    first, second = ({k: v for k, v in sheet.items() if k != "sources"} for sheet in sheets)
    assert first == second


def test_records_match_their_sources_and_balance(golden, texts, offline_embedder):
    sets, tokenizer = records(golden), load_tokenizer(offline_embedder)
    everything = {p.name: p.read_text() for p in (texts / "prose").iterdir()}
    lines = (texts / "sums.jsonl").read_text().splitlines()
    everything |= {f"sums.jsonl:{i}": json.loads(line)["text"] for i, line in enumerate(lines, 1)}
    for name, set_records in sets.items():
        assert {r["kind"] for r in set_records} == {"typical", "hard"}
        assert {r["set"] for r in set_records} == ({name} if name != "mixed" else {"swa", "full"})
        assert len({r["text"] for r in set_records}) == len(set_records)
        for r in set_records:
            assert set(r) == {"text", "tokens", "source", "document", "set", "cluster", "distance", "kind", "score"}
            assert r["text"] in everything[r["document"]]
            assert r["tokens"] == len(tokenizer(r["text"], add_special_tokens=False)["input_ids"])
    swa, full = sets["swa"], sets["full"]
    assert len({r["cluster"] for r in swa}) == 6 and len({r["source"] for r in swa}) == 2
    assert max(len(r["text"]) for r in swa) <= 150
    lengths = [sum(len(r["text"]) for r in set_records) / len(set_records) for set_records in (swa, full)]
    assert lengths[1] > 2 * lengths[0]
    mixed = {kind: [r for r in sets["mixed"] if r["set"] == kind] for kind in ("swa", "full")}
    halves = [sum(r["tokens"] for r in set_records) for set_records in mixed.values()]
    assert all(halves) and abs(halves[0] - halves[1]) <= max(r["tokens"] for r in sets["mixed"])
    assert not any(short["text"] in long["text"] for short in mixed["swa"] for long in mixed["full"])


def test_datasheet_matches_the_sets(golden, texts):
    sheet, text = json.loads((golden / "datasheet.json").read_text()), (golden / "datasheet.md").read_text()
    manifest = Manifest.load(golden)
    for name, set_records in records(golden).items():
        counts = sheet["sets"][name]
        assert (counts["texts"], counts["tokens"]) == (len(set_records), sum(r["tokens"] for r in set_records))
        assert counts["typical"] + counts["hard"] == counts["texts"] == manifest.metrics["sets"][name]["texts"]
        assert f"| {counts['texts']} | {counts['typical']} | {counts['hard']} |" in text
    prose, sums = (sheet["sources"][name] for name in ("prose", "sums.jsonl"))
    assert prose["licence"] == "unknown" and sums["licence"] == "CC0-1.0" and len(sums["sha256"]) == 64
    for words in (
        "CC0-1.0",
        sums["sha256"],
        "clarify it before use",
        "embedded by parts",
        "compressed size (zlib",
        "the embedder gt-all",
    ):
        assert words in text
    assert sheet["notes"] == {"windows too short to be chosen": {"count": 1, "examples": []}}
    assert "| windows too short to be chosen | 1 |" in text
    assert (golden / "token_histograms.png").read_bytes().startswith(b"\x89PNG")
    assert set(manifest.files) == set(output_files(golden))


def test_datasheet_without_matplotlib_logs_the_missing_histograms(golden, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    sheet = json.loads((golden / "datasheet.json").read_text())
    datasheet.write(tmp_path, {key: value for key, value in sheet.items() if key != "sets"}, records(golden))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["datasheet.json", "datasheet.md"]
    assert "token_histograms" not in (tmp_path / "datasheet.md").read_text()
    assert "the histograms of token_histograms.png are left out" in capsys.readouterr().err


def test_runs_are_deterministic_and_cached(golden, source_args, cli, tmp_path):
    """The same bytes; a finished result is reused, and other options are rejected."""
    assert cli("calibrate", *source_args, "--out", tmp_path / "out").exit_code == 0
    assert_same_output(tmp_path / "out", golden)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Shards, "embed", None)
        again = cli("calibrate", *source_args, "--out", tmp_path / "out")
        assert again.exit_code == 0 and "finished already" in again.stderr
    other = cli("calibrate", *source_args, "--out", tmp_path / "out", "--seed", 1)
    assert other.exit_code == 2 and "seed was 0, now 1" in other.stderr


def run_and_die_before_the_third_shard(*words):
    """Run the command and kill its process before the third shard is embedded."""
    embed = Shards.embed

    def embed_or_die(self, number, *rest):
        if number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        embed(self, number, *rest)

    window_store.MIN_SHARD_WINDOWS, Shards.embed = 20, embed_or_die
    command(*words)


def test_a_killed_run_resumes_with_the_next_shard(golden, source_args, cli, tmp_path, monkeypatch):
    out = tmp_path / "out"
    words = ("calibrate", *source_args, "--out", out)
    killed = started(run_and_die_before_the_third_shard, *words)
    killed.join(120)
    assert killed.exitcode == -signal.SIGKILL
    assert not out.exists() and len(list((tmp_path / ".out.partial" / "work").rglob("vectors-*.safetensors"))) == 2
    embedded, embed = [], Shards.embed
    monkeypatch.setattr(Shards, "embed", lambda self, n, *rest: (embedded.append(n), embed(self, n, *rest)))
    monkeypatch.setattr(calibrate, "passages", None)  # nothing is split again
    assert cli(*words).exit_code == 0
    assert embedded == list(range(2, max(embedded) + 1)) and len(embedded) > 2
    assert_same_output(out, golden)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_counts_tokens_with_the_given_tokenizer(offline_embedder, texts, tiny_models, cli, tmp_path):
    done = cli("calibrate", "--source", texts / "sums.jsonl", *OPTIONS, "--out", tmp_path / "out", "--clusters", 4,
               "--tokenizer", tiny_models["llama"])  # fmt: skip
    assert done.exit_code == 0, done.stderr
    all_records = [r for set_records in records(tmp_path / "out").values() for r in set_records]
    assert all(r["tokens"] == len(r["text"].encode()) for r in all_records)
    assert "counted by llama)" in (tmp_path / "out" / "datasheet.md").read_text()


# Mistakes


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.txt", b"", "contains no text"),
        ("blank.jsonl", b"\n \n", "contains no text"),
        ("photo.txt", b"\x89PNG\0\0", "is a binary file"),
        ("bad.jsonl", b"{]\n" * 101, "more than 100 lines"),
        ("half.parquet", b"PAR1", "cannot be read as parquet"),
        ("few.txt", b"A few words only, but enough for one window. " * 3, "1 windows of 120 characters, fewer than 6"),
        ("absent.txt", None, "does not exist"),
    ],
)
def test_rejects_unusable_sources(name, content, words, offline_embedder, cli, tree, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    before = tree(tmp_path)
    done = cli("calibrate", "--source", tmp_path / name, *OPTIONS, "--out", tmp_path / "a" / "out")
    *warnings, line = done.stderr.splitlines()
    assert done.exit_code == 2 and line.startswith("mlaforge: ") and words in line and "Traceback" not in done.stderr
    assert all(warning.startswith("warning: ") for warning in warnings) and done.stdout == ""
    assert tree(tmp_path) == before


def test_rejects_invalid_options(source_args, cli, tree, tmp_path, offline_embedder):
    for options, words in (
        (("--window", 3), "window = 3 must be at least 50"),
        (("--clusters", 0), "clusters = 0"),
        (("--embedder", tmp_path / "none"), "does not exist"),
        (("--tokenizer", tmp_path), "has no tokenizer"),
        (("--license", "MIT"), "SOURCE=LICENCE"),
        (("--device", "abacus"), "abacus"),
    ):
        done = cli("calibrate", *source_args, "--out", tmp_path / "out", *options)
        assert done.exit_code == 2 and words in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert tree(tmp_path) == {}


def test_a_missing_extra_is_a_one_line_error(offline_embedder, source_args, cli, tree, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    done = cli("calibrate", *source_args, "--out", tmp_path / "out")
    assert done.exit_code == 2 and "is missing: pip install '.[calibrate]'" in done.stderr, done.stderr
    assert tree(tmp_path) == {}


# The sets in convert


@pytest.fixture
def sets(tmp_path, calibration_file, evaluation_file):
    """A directory as written by `calibrate`, with different text in its sets."""
    folder = tmp_path / "sets"
    folder.mkdir()
    text = calibration_file.read_text()
    parts = {"swa": text[:6000], "full": text[6000:], "mixed": text[3000:9000]}
    for name, file in corpus.CALIBRATION_SETS.items():
        (folder / file).write_text(json.dumps({"text": parts[name]}) + "\n")
    (folder / "datasheet.md").write_text(evaluation_file.read_text())
    Manifest("calibrate", {}, {}).save(folder)
    return folder


def convert_config(calibration, **options):
    settings = {"seqlen": 64, "nsamples": 6, "eval_windows": 2, "device": "cpu", "layers": "all", **options}
    return ConvertConfig(calibration=str(calibration), **settings)


def test_conversion_uses_one_set_per_layer_kind(sets, tiny_models, evaluation_file, tmp_path):
    """Layers 0 and 2 of the tiny model have a sliding window, layer 1 has none."""
    source, moments_folder = str(tiny_models["gpt_oss"]), tmp_path / "moments"
    config = convert_config(sets, evaluation=str(evaluation_file))
    manifest = convert.run(source, tmp_path / "out", config, calibrated=moments_folder)
    calibration = manifest.inputs["calibration"]
    assert list(calibration) == ["calib_full_golden", "calib_swa_golden"]
    slides = [layer["window"] is not None for layer in manifest.metrics["layers"]]
    assert slides == [True, False, True]
    moments = {}
    for folder in moments_folder.iterdir():
        moments |= {int(path.stem.split("-")[1]): TensorStore(folder)[path.stem] for path in folder.glob("moments-*")}
    # The moments of each layer equal those of a conversion of that layer alone, with that file as calibration text.
    for index, name in enumerate(["swa", "full", "swa"]):
        alone = convert_config(sets / corpus.CALIBRATION_SETS[name], evaluation=str(evaluation_file), layers=str(index))
        convert.run(source, tmp_path / f"alone-{index}", alone, calibrated=tmp_path / f"moments-{index}")
        (folder,) = (tmp_path / f"moments-{index}").iterdir()
        for key, tensor in TensorStore(folder)[f"moments-{index:03d}"].items():
            assert torch.equal(tensor, moments[index][key]), (index, key)
    tuned = overlap.read_passages(tmp_path / "out" / overlap.PASSAGES)
    for index in (0, 1):
        assert set(overlap.read_passages(tmp_path / f"alone-{index}" / overlap.PASSAGES)) < set(tuned)


def test_a_model_without_windows_takes_the_full_set(sets, tiny_models, evaluation_file, tmp_path):
    config = convert_config(sets, evaluation=str(evaluation_file))
    manifest = convert.run(str(tiny_models["llama"]), tmp_path / "out", config)
    assert manifest.inputs["calibration"]["source"] == corpus.CALIBRATION_SETS["full"]


@pytest.mark.parametrize("name", ["swa", "full"])
def test_conversion_rejects_evaluation_text_from_either_set(name, sets, tiny_models, tmp_path):
    config = convert_config(sets, evaluation=str(sets / corpus.CALIBRATION_SETS[name]), nsamples=500, eval_windows=50)
    with pytest.raises(UserError, match="share text with the calibration text"):
        convert.run(str(tiny_models["gpt_oss"]), tmp_path / "out", config)
    assert not (tmp_path / "out").exists()


def test_other_stages_use_the_mixed_set(sets):
    assert corpus.read_text(str(sets)) == json.loads((sets / corpus.CALIBRATION_SETS["mixed"]).read_text())["text"]
    (sets / "manifest.json").unlink()
    assert len(corpus.read_text(str(sets))) > 12000


# Self-generated text, and shares


def test_self_generated_text_is_a_source(offline_embedder, texts, tiny_models, tmp_path, monkeypatch):
    """A tiny random model writes noise; the noise check is switched off."""
    monkeypatch.setattr(self_generated_text, "cache_home", lambda: tmp_path / "home")
    for name, value in (("MAX_NEW_TOKENS", 200), ("MIN_NEW_TOKENS", 4), ("NOISE_THRESHOLD", math.inf)):
        monkeypatch.setattr(self_generated_text, name, value)
    monkeypatch.setattr(calibrate, "MAX_TOKENS", 5000)
    model = str(tiny_models["llama"])
    config = CalibrateConfig(source=(corpus.SELF, str(texts / "prose")), share=("self=0.25",), tokenizer=model, **FEW)
    manifest = calibrate.run(tmp_path / "out", config)
    generated = self_generated_text.self_generated_text(SourceModel.open(model), 5000, 0, "cpu")
    written = "\n".join(text for _, text in generated.documents())
    for name in ("swa", "full"):
        tokens = manifest.metrics["sets"][name]["tokens_by_source"]
        # The last text may exceed the share.
        assert 0 < tokens["self"] < tokens["prose"], tokens
        lines = map(json.loads, (tmp_path / "out" / corpus.CALIBRATION_SETS[name]).read_text().splitlines())
        assert all(line["text"] in written for line in lines if line["source"] == "self")
    assert manifest.inputs["sources"]["self"]["licence"] == "as the model's own licence says of what it writes"
    assert calibrate.run(tmp_path / "out", config).fingerprint == manifest.fingerprint


def test_shares_limit_tokens_per_source():
    def records(*shares):
        return [{"source": source, "tokens": tokens} for source, tokens in shares]

    all_records = records(*[("a", 10), ("b", 5)] * 8)
    assert calibrate._limit_to_shares(all_records, {}) == all_records
    selected = calibrate._limit_to_shares(all_records, {"a": 0.5, "b": 0.5})
    assert selected == records(*[("a", 10), ("b", 5)] * 4, *[("b", 5)] * 4)
    assert calibrate._limit_to_shares(records(("a", 3)), {"a": 0.5, "b": 0.5}) == []


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        (["self=0.5"], "name the model with --tokenizer"),
        (["nothing=0.5"], "share 'nothing=0.5' names no source"),
        (["embedded"], "must be SOURCE=FRACTION"),
        (["embedded=half"], "must be a fraction between 0 and 1"),
        (["embedded=1.5"], "must be a fraction between 0 and 1"),
        (["embedded=0.5", "self=0.6"], "must sum to 1"),
    ],
)
def test_rejects_invalid_shares(shares, words, refused, tmp_path):
    options = [part for share in shares for part in ("--share", share)]
    sources = "--source", corpus.EMBEDDED, "--source", corpus.SELF
    refused(words, "calibrate", *sources, *options, *OPTIONS, "--out", tmp_path / "out")
