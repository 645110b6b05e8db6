"""No absolute paths in records, in published files and in tracked files."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from mlaforge.artifact import ABSOLUTE_PATH, Manifest, record_name, record_names, record_path, record_text, writing
from mlaforge.calibration.sources import Source, names
from mlaforge.evaluation import perplexity
from mlaforge.evaluation.config import EvalConfig
from mlaforge.healing.config import HealConfig
from mlaforge.report import publish
from mlaforge.runtime import UserError
from support.recorded import MACHINE

ROOT = Path(__file__).parents[2]
# Split, so that this file passes the search, too.
HOME, WORK = "/" + "home/me", "/" + "work/models"
PLACES = (
    f'{{"path": "{WORK}/tiny"}}', f"trained from {HOME}/tiny on", f"--data={HOME}/data", f"({HOME}/x/y)",
    f"model:{WORK}/tiny", "'~" + "/models/tiny'",
)  # fmt: skip
DRIVES = ("C:" + r"\Users\me", "C:" + "/U" + "sers/me")
HARMLESS = (
    "https://example.org/a/b/c", '"http://127.0.0.1:8000/v1/completions"', '"/v1/chat/completions"', '"/NaN"',
    "/health", "/dev/null", "/proc/self/status", "../shared/data/x", "src/mlaforge/ops", "org/name", "tokens/s/layer",
    "a / b / c", "</p>", "1/2/3", "base64,/9j/4AAQ/SkZ", "*/a/b", "{model}/a/b", "latent/latent_rope/gqa", '"^/(a|b)/"',
)  # fmt: skip


def test_absolute_paths_are_recognised() -> None:
    assert [text for text in PLACES + DRIVES if not ABSOLUTE_PATH.search(text)] == []
    assert [text for text in PLACES if ABSOLUTE_PATH.search(record_text(text))] == []


def test_other_texts_with_slashes_are_not_paths() -> None:
    assert [text for text in HARMLESS if ABSOLUTE_PATH.search(text) or record_text(text) != text] == []


def test_recorded_names_have_no_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    for name in ("a.txt", "models/a.txt"):
        (tmp_path / name).write_text("a")
    monkeypatch.chdir(tmp_path)
    paths = (tmp_path / "models" / "tiny", "models/tiny", "./models/tiny/", f"../{tmp_path.name}/models/tiny")
    assert {record_name(path) for path in paths} == {"tiny"}
    assert record_name(".") == tmp_path.name
    config = HealConfig(text=f"a.txt, {tmp_path}/models/a.txt,embedded")
    assert record_names(config, "text", "swa_text") == {"text": ["a.txt", "a.txt", "embedded"], "swa_text": None}
    # Names that do not exist here are not paths.
    assert record_name("org/name") == "org/name" and record_name("embedded") == "embedded"
    assert record_path(tmp_path / "models" / "tiny") == "models/tiny" and record_path("../other/x") == "x"
    sources = [
        Source.parse(place) for place in ("a.txt", str(tmp_path / "models" / "a.txt"), f"rfc:{tmp_path}", "embedded")
    ]
    assert list(names(sources).values()) == ["a.txt", "a.txt (2)", f"rfc:{tmp_path.name}", "embedded"]


def test_a_finished_result_is_reused_from_any_working_folder(
    tiny_models: dict[str, Path], evaluation_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other paths of the same model and text give the same result; another model or text of the same name does not."""
    settings = {"windows": 2, "seqlen": 64, "device": "cpu"}
    for folder in ("models", "others"):
        (tmp_path / folder).mkdir()
    shutil.copytree(tiny_models["llama"], tmp_path / "models" / "tiny")
    shutil.copytree(tiny_models["qwen2"], tmp_path / "others" / "tiny")
    shutil.copyfile(evaluation_file, tmp_path / "models" / "text.txt")
    (tmp_path / "others" / "text.txt").write_text(evaluation_file.read_text()[1000:])
    out = tmp_path / "out"

    def run(model: str, text: str) -> Manifest:
        return perplexity.run(model, out, EvalConfig(text=text, **settings))

    monkeypatch.chdir(tmp_path)
    first = run(str(tmp_path / "models" / "tiny"), str(tmp_path / "models" / "text.txt"))
    with monkeypatch.context() as patch:
        patch.setattr(perplexity, "window_losses", None)
        assert run("models/tiny", "models/text.txt").metrics == first.metrics
        patch.chdir(tmp_path / "models")
        assert run("tiny", "../models/text.txt").fingerprint == first.fingerprint
    for model, text in (("others/tiny", "models/text.txt"), ("models/tiny", "others/text.txt")):
        with pytest.raises(UserError, match=r"another eval result .*sha256"):
            run(model, text)


# Every kind of file, and every kind of path.
@pytest.mark.parametrize(
    ("name", "text"),
    [(name, PLACES[0]) for name in ("manifest.json", "plan.json", "README.md", "notes.yaml")]
    + [("README.md", text) for text in PLACES[1:] + DRIVES],
)
def test_files_with_absolute_paths_are_not_published(name: str, text: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    metrics = {"note": text} if name == "manifest.json" else {}
    with writing(model, Manifest("convert", {}, {}, metrics, environment=MACHINE)) as partial:
        (partial / "config.json").write_text("{}")
        (partial / name).write_text(text)
    with pytest.raises(UserError, match="a path of this machine") as refused:
        publish.pack([model], "someone/tiny")
    assert str(model / name) in str(refused.value) and "\n" not in str(refused.value)


def test_other_texts_with_slashes_are_published(tmp_path: Path) -> None:
    """Third-party files may contain anything: a vocabulary, a licence, the text of a calibration set."""
    model = tmp_path / "model"
    foreign = ("tokenizer.json", "vocab.json", "merges.txt", "LICENSE.txt", "swa.jsonl")
    with writing(model, Manifest("convert", {}, {}, environment=MACHINE)) as partial:
        (partial / "config.json").write_text(json.dumps(HARMLESS))
        (partial / "README.md").write_text("\n".join(HARMLESS))
        for name in foreign:
            (partial / name).write_text(json.dumps([f"{HOME}/x", "/usr/lib/x"]))
    published = {item.path for item in publish.pack([model], "someone/tiny").items}
    assert published == {"config.json", "README.md", "manifest.json", *foreign}


# Folders of private files; documents may name other paths, such as /path/to/python.
PRIVATE = re.compile(r"/(?:home|root|Users|work|tmp|mnt|media|scratch|workspace|private)/|[A-Za-z]:[\\/]")
REGISTRIES = re.compile(
    r"\b(?:[\w-]+\.)*(?:artifactory|nexus|devpi|pypi|pythonhosted|npmjs|proxy\.golang|codeartifact)\.[a-z]{2,}\b", re.I
)


def tracked() -> list[Path]:
    """Return the text files tracked by git; skip outside a checkout."""
    try:
        command = ["git", "-C", str(ROOT), "ls-files", "-z"]
        listed = subprocess.run(command, capture_output=True, check=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no git checkout here: {error}")
    files = [ROOT / os.fsdecode(name) for name in listed.split(b"\0") if name]
    return [file for file in files if file.is_file() and file.suffix != ".safetensors"]


def test_no_tracked_file_contains_an_absolute_path() -> None:
    violations = []
    for file in tracked():
        text = file.read_text(encoding="utf-8")
        for path in ABSOLUTE_PATH.finditer(text):
            # Recorded measurements (.json) must not contain any absolute path.
            if file.suffix == ".json" or PRIVATE.match(path[0]):
                violations.append(f"{file.relative_to(ROOT)}: {path[0]}")
        violations += [f"{file.relative_to(ROOT)}: {host[0]}" for host in REGISTRIES.finditer(text)]
    assert not violations, "\n".join(violations)
