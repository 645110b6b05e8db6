"""Artifacts: fingerprints, atomic writes, locks and resumption."""

import dataclasses
import errno
import itertools
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlaforge.artifact import FINGERPRINT, LOCK, MANIFEST, WORK, Manifest, finished, locked, sha256, writing
from mlaforge.checkpoint import reader, source_model
from mlaforge.conversion.config import ConvertConfig
from mlaforge.planning import plan_file
from mlaforge.planning.plan import make_plan
from mlaforge.runtime import UserError
from support.killed import finish_artifact, started

# Without the characters of absolute paths, which no manifest may contain.
TEXT = st.text(st.characters(codec="utf-8", exclude_characters=":~/"), max_size=5)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
RECORD = st.dictionaries(TEXT, PLAIN, max_size=3)


def manifest(**changes):
    return Manifest(**{"stage": "convert", "config": {"budget": 0.5}, "inputs": {"model": {"sha256": "a1"}}, **changes})


def reverse_keys(values):
    """Return a copy with the keys of every dictionary in reverse order."""
    if isinstance(values, list):
        return [reverse_keys(value) for value in values]
    if isinstance(values, dict):
        return {key: reverse_keys(values[key]) for key in reversed(values)}
    return values


# Fingerprints


@given(RECORD, RECORD, RECORD, RECORD)
def test_fingerprints_are_equal_exactly_for_equal_config_and_inputs(config, inputs, other_config, other_inputs):
    requested = Manifest("convert", config, inputs)
    same = Manifest("convert", reverse_keys(config), reverse_keys(inputs))
    same.metrics, same.seconds, same.files = {"ppl": 20.8}, {"load": 1.0}, {"config.json": "e3"}
    same.environment = {"torch": "9.9", "device": "abacus"}
    assert same.fingerprint == requested.fingerprint
    other = Manifest("convert", other_config, other_inputs)
    equal = json.dumps([config, inputs], sort_keys=True) == json.dumps([other_config, other_inputs], sort_keys=True)
    assert (other.fingerprint == requested.fingerprint) == equal
    assert Manifest("eval", config, inputs).fingerprint != requested.fingerprint
    older = Manifest("convert", config, inputs, environment={"mlaforge": "0.0.9"})
    assert older.fingerprint != requested.fingerprint


@given(RECORD, RECORD, RECORD)
def test_a_manifest_round_trips_through_its_file(tmp_path_factory, config, inputs, metrics):
    folder = tmp_path_factory.mktemp("saved")
    saved = Manifest("eval", config, inputs, metrics, {"eval": 1.5}, {}, {"a": "e3", "b": "f4"})
    saved.save(folder)
    assert saved.environment["mlaforge"]
    read = Manifest.load(folder)
    assert read == saved and read.fingerprint == saved.fingerprint
    assert json.loads((folder / MANIFEST).read_text())["fingerprint"] == saved.fingerprint


def test_the_files_of_an_older_manifest_have_no_hash(tmp_path):
    body = {"stage": "convert", "config": {}, "inputs": {}, "files": ["a", "b"]}
    (tmp_path / MANIFEST).write_text(json.dumps(body))
    assert Manifest.load(tmp_path).files == {"a": "", "b": ""}


# Every option of `convert` that is part of the fingerprint -> another value that is legal for the tiny model.
OTHER = {
    "bits": ["3"],
    "budget": [0.75],
    "layout": ["latent_rope"],
    "kv_lora_rank": [24],
    "qk_rope_head_dim": [8, "--layout", "latent_rope"],
    "q_lora_rank": [24],
    "layers": ["1"],
    "ranks": ["uniform"],
    "calibration": ["embedded"],
    "nsamples": [5],
    "seqlen": [65],
    "batch_size": [2],
    "evaluation": ["embedded"],
    "eval_windows": [3],
    "refit": ["on"],
    "dtype": ["bfloat16"],
    "seed": [1],
    "qk_mqa_dim": [8],
    "collapse": ["auto"],
    "freqfold": ["auto"],
    "deepseek_style": [],
    "plan": ["{folder}/plan.json"],
    # The model's context is too short for the default index.
    "topk": [64, "--window", 16],
    "window": [16, "--topk", 64],
    "sink": [2, "--topk", 64, "--window", 16],
    "width": [16, "--topk", 64, "--window", 16],
}


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


# Every file that a conversion reads -> a change of it.
INPUTS = {
    "model.safetensors": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\1"),
    "config.json": lambda path: edit(path, '"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'),
    "chat_template.jinja": lambda path: edit(path, "assistant:", "model:"),
    "generation_config.json": lambda path: edit(path, '"eos_token_id": 258', '"eos_token_id": 257'),
    "calibration.txt": lambda path: path.write_text("Another beginning. " + path.read_text()),
    "evaluation.txt": lambda path: path.write_text("Another beginning. " + path.read_text()),
}


@pytest.fixture(scope="module")
def made(tiny_models, calibration_file, evaluation_file, cli, short, tmp_path_factory):
    """The command of a finished conversion, whose inputs are in one folder."""
    folder = tmp_path_factory.mktemp("made")
    shutil.copytree(tiny_models["llama"], folder / "model")
    texts = [shutil.copy(file, folder) for file in (calibration_file, evaluation_file)]
    command = ["convert", folder / "model", folder / "out", *short, "--calibration", texts[0], "--evaluation", texts[1]]
    done = cli(*command)
    assert done.exit_code == 0, done.stderr
    spec = source_model.read_spec(reader.read_config(folder / "model"))
    plan_file.write(folder / "plan.json", make_plan(spec, 0.75), {}, [None] * spec.num_layers, [])
    return command


def test_every_option_of_convert_is_covered():
    assert {*OTHER, "dense"} == {field.name for field in dataclasses.fields(ConvertConfig)} - {"device"}


@pytest.mark.parametrize("name", OTHER)
def test_changing_an_option_changes_the_fingerprint(name, made, cli):
    values = [value.format(folder=made[1].parent) if isinstance(value, str) else value for value in OTHER[name]]
    done = cli(*made, f"--{name.replace('_', '-')}", *values)
    assert done.exit_code == 2 and "holds another convert result" in done.stderr, done.stderr


def test_leaving_out_the_index_changes_the_fingerprint(made, cli, tmp_path):
    model = shutil.copytree(made[1], tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    command = ["convert", model, tmp_path / "out", *made[3:]]
    assert cli(*command).exit_code == 0
    done = cli(*command, "--dense")
    assert done.exit_code == 2 and "holds another convert result" in done.stderr, done.stderr


@pytest.mark.parametrize("name", INPUTS)
def test_changing_an_input_changes_the_fingerprint(name, made, cli):
    folder = made[1].parent
    path = folder / name if name.endswith(".txt") else folder / "model" / name
    before = path.read_bytes()
    try:
        INPUTS[name](path)
        done = cli(*made)
    finally:
        path.write_bytes(before)
    assert done.exit_code == 2 and "holds another convert result" in done.stderr, done.stderr


def test_irrelevant_changes_keep_the_fingerprint(made, cli):
    """The device, file times, other files beside the weights, and text beyond the windows that are read."""
    model = made[1]
    (model / "model.safetensors").touch()
    (model / "README.md").write_text("My model.")
    with (model.parent / "evaluation.txt").open("a") as file:
        file.write("Beyond the second window.")
    done = cli(*made, "--device", "auto")
    assert done.exit_code == 0 and "finished already" in done.stderr, done.stderr


# finished


def test_finished_is_none_for_a_missing_or_empty_folder(tmp_path):
    assert finished(tmp_path / "out", manifest()) is None
    (tmp_path / "out").mkdir()
    assert finished(tmp_path / "out", manifest()) is None


@pytest.fixture
def out(tmp_path):
    """A finished artifact with one file."""
    with writing(tmp_path / "out", written := manifest()) as partial:
        (partial / "a").write_text("old")
    assert written.environment and written.files == {"a": sha256(tmp_path / "out" / "a")}
    return tmp_path / "out"


def test_finished_returns_the_manifest_with_its_metrics(tmp_path):
    with writing(tmp_path / "out", manifest(metrics={"ppl": 20.8})):
        pass
    present = finished(tmp_path / "out", manifest())
    assert present.metrics == {"ppl": 20.8}
    assert finished(tmp_path / "out", manifest(), overwrite=True) == present


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        (manifest(config={"budget": 0.75}), "budget was 0.5, now 0.75"),
        (manifest(config={"budget": 0.5, "seed": 1}), "seed was None, now 1"),
        (manifest(inputs={"model": {"sha256": "b2"}}), "model sha256 was a1, now b2"),
        (manifest(stage="eval"), "stage convert, not eval"),
        (manifest(environment={"mlaforge": "0.0.9"}), "made by another version of mlaforge"),
    ],
)
def test_another_artifact_is_refused_without_overwrite(expected, message, out):
    with pytest.raises(UserError, match=message):
        finished(out, expected)
    assert finished(out, expected, overwrite=True) is None


def test_tuples_equal_the_lists_of_the_manifest_file(tmp_path):
    """JSON has no tuples."""
    with writing(tmp_path / "out", manifest(config={"seqlen": (512, 2048), "steps": 1})):
        pass
    assert finished(tmp_path / "out", manifest(config={"seqlen": (512, 2048), "steps": 1})) is not None
    with pytest.raises(UserError, match=r"result \(steps was 1, now 2\)"):
        finished(tmp_path / "out", manifest(config={"seqlen": (512, 2048), "steps": 2}))


# writing


def test_writing_replaces_an_artifact_atomically(out, tree, tmp_path):
    with writing(out, manifest(stage="eval")) as partial:
        assert partial.parent == out.parent and [path.name for path in partial.iterdir()] == [WORK]
        (partial / "b").write_text("new")
        assert (out / "a").read_text() == "old"
    assert sorted(tree(tmp_path)) == ["out", "out/b", f"out/{MANIFEST}"]
    assert Manifest.load(out).stage == "eval"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, OSError])
def test_a_failure_leaves_no_files(error, out, tree, tmp_path):
    before = tree(tmp_path)
    for where in (out, tmp_path / "new", tmp_path / "a" / "b" / "new"):
        with pytest.raises(error), writing(where, manifest()) as partial:
            (partial / "half").write_text("x")
            raise error
        assert tree(tmp_path) == before


def test_the_remains_of_a_killed_process_are_removed(out, tree, tmp_path):
    for folder in (".out.partial", ".out.former.partial"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "half").write_text("x")
    with writing(out, manifest()):
        pass
    assert sorted(tree(tmp_path)) == ["out", f"out/{MANIFEST}"]


def test_a_second_process_is_refused_and_changes_no_file(out, tree, tmp_path):
    for where in (out, tmp_path / "new"):
        with writing(where, manifest(stage="eval"), resumable=True) as partial:
            (partial / "b").write_text("half")
            before = tree(tmp_path)
            for other in (manifest(stage="eval"), manifest(stage="report")):
                for resumable in (True, False):
                    message = f"another process is at work on {where}"
                    with pytest.raises(UserError, match=message), writing(where, other, resumable):
                        raise AssertionError("two processes hold the lock")
            assert tree(tmp_path) == before
        assert Manifest.load(where).stage == "eval" and sorted(path.name for path in where.iterdir()) == ["b", MANIFEST]


def test_a_lock_has_one_holder_at_a_time(tmp_path):
    """Threads increment a number non-atomically."""
    number = tmp_path / "number"
    number.write_text("0")

    def add(_):
        with locked(tmp_path / "folder" / "lock", "the number", wait=True):
            value = int(number.read_text())
            number.write_text("")
            number.write_text(str(value + 1))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(200)))
    assert number.read_text() == "200" and list((tmp_path / "folder").iterdir()) == []


def test_locked_survives_the_concurrent_removal_of_its_folder(tmp_path, monkeypatch):
    """The folder exists when mkdir is called and is removed before mkdir checks its type."""
    real, failed = os.mkdir, []

    def mkdir(path, mode=0o777):
        if not failed:
            failed.append(path)
            raise FileExistsError(errno.EEXIST, "File exists", str(path))
        real(path, mode)

    monkeypatch.setattr("os.mkdir", mkdir)
    with locked(tmp_path / "folder" / "lock", "it"):
        assert failed == [tmp_path / "folder"]
    monkeypatch.undo()
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError), locked(tmp_path / "file" / "lock", "it"):
        raise AssertionError("a file is no folder")


def test_a_file_system_without_locks_is_logged_and_used(monkeypatch, out, capsys):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with writing(out, manifest(stage="eval")):
        pass
    assert Manifest.load(out).stage == "eval" and "has no locks" in capsys.readouterr().err


def test_a_run_killed_at_any_moment_of_its_end_resumes_or_is_finished(tree, tmp_path):
    """Before every change of the file system, from the manifest to the last file that is removed."""
    requested = manifest(stage="eval")
    for moment in itertools.count():
        out = tmp_path / str(moment) / "out"
        with writing(out, manifest()) as partial:
            (partial / "a").write_text("old")
        process = started(finish_artifact, out, requested, moment)
        process.join()
        # A command without --overwrite finds the old artifact or the new one.
        with pytest.raises(UserError, match="holds another"):
            finished(out, manifest(stage="report"))
        if finished(out, requested, overwrite=True) is None:
            assert (out / "a").read_text() == "old"
            with writing(out, requested, resumable=True) as partial:
                assert (partial / WORK / "piece").read_text() == "hours of work"
                (partial / "b").write_text("new")
        assert sorted(tree(out.parent)) == ["out", "out/b", f"out/{MANIFEST}"]
        assert (out / "b").read_text() == "new"
        if process.exitcode == 0:
            break
    assert moment > 8


def test_a_work_folder_without_a_lock_is_not_removed(out):
    """A killed process leaves its lock in its work folder."""
    (out / WORK).mkdir()
    (out / WORK / "mine").write_text("x")
    assert finished(out, manifest()) is not None and (out / WORK / "mine").is_file()
    (out / WORK / LOCK).touch()
    (out / WORK / FINGERPRINT).touch()
    assert finished(out, manifest()) is not None and not (out / WORK).exists()


def test_a_resumed_run_logs_its_last_checkpoint(tmp_path, capsys):
    out = tmp_path / "out"

    def run(*pieces):
        with pytest.raises(KeyboardInterrupt), writing(out, manifest(), resumable=True) as partial:
            for piece in pieces:
                (partial / WORK / f"{piece}.safetensors").touch()
            raise KeyboardInterrupt
        return capsys.readouterr().err

    assert run() == ""
    assert "it had finished nothing" in run("layer-000", "layer-001")
    line = run()
    assert f"{out}: resuming the run of 20" in line and "had finished 2 pieces, the last of them layer-001" in line
    with writing(out, manifest(stage="eval"), resumable=True):
        pass
    assert capsys.readouterr().err == ""
