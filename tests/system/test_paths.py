"""Where things lie on somebody's machine stands in no record, in nothing that is published and in no file of ours."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from mlaforge.artifact import ABSOLUTE, Manifest, record_name, record_names, record_place, record_text, writing
from mlaforge.calibration.sources import Source, names
from mlaforge.evaluation import perplexity
from mlaforge.evaluation.config import EvalConfig
from mlaforge.healing.config import HealConfig
from mlaforge.report import publish
from mlaforge.runtime import UserError
from support.recorded import MACHINE

ROOT = Path(__file__).parents[2]
# Written in parts, so that this file may be searched too.
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


@pytest.mark.parametrize("text", PLACES)
def test_a_place_is_seen(text: str) -> None:
    assert ABSOLUTE.search(text)
    assert not ABSOLUTE.search(record_text(text))


@pytest.mark.parametrize("text", DRIVES)
def test_a_drive_is_seen(text: str) -> None:
    assert ABSOLUTE.search(text)


@pytest.mark.parametrize("text", HARMLESS)
def test_what_only_has_slashes_is_none(text: str) -> None:
    assert not ABSOLUTE.search(text)
    assert record_text(text) == text


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    for name in ("a.txt", "models/a.txt"):
        (tmp_path / name).write_text("a")
    monkeypatch.chdir(tmp_path)
    every = (tmp_path / "models" / "tiny", "models/tiny", "./models/tiny/", f"../{tmp_path.name}/models/tiny")
    assert {record_name(place) for place in every} == {"tiny"}
    assert record_name(".") == tmp_path.name
    config = HealConfig(text=f"a.txt, {tmp_path}/models/a.txt,embedded")
    assert record_names(config, "text", "swa_text") == {"text": ["a.txt", "a.txt", "embedded"], "swa_text": None}
    # What is not here is no place.
    assert record_name("org/name") == "org/name" and record_name("embedded") == "embedded"
    assert record_place(tmp_path / "models" / "tiny") == "models/tiny" and record_place("../other/x") == "x"
    sources = [
        Source.parse(place) for place in ("a.txt", str(tmp_path / "models" / "a.txt"), f"rfc:{tmp_path}", "embedded")
    ]
    assert list(names(sources).values()) == ["a.txt", "a.txt (2)", f"rfc:{tmp_path.name}", "embedded"]


def test_nothing_is_done_twice_wherever_the_user_stands(
    tiny_models: dict[str, Path], evaluation_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same model and text by other words are the same; another model or text of the same name is not."""
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


@pytest.mark.parametrize("name", ["manifest.json", "plan.json", "README.md", "notes.yaml"])
@pytest.mark.parametrize("text", PLACES + DRIVES)
def test_what_says_where_it_lay_is_not_published(name: str, text: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    metrics = {"note": text} if name == "manifest.json" else {}
    with writing(model, Manifest("convert", {}, {}, metrics, environment=MACHINE)) as partial:
        (partial / "config.json").write_text("{}")
        (partial / name).write_text(text)
    with pytest.raises(UserError, match="a path of this machine") as refused:
        publish.pack([model], "someone/tiny")
    assert str(model / name) in str(refused.value) and "\n" not in str(refused.value)


def test_what_only_has_slashes_is_published(tmp_path: Path) -> None:
    """And what is not ours may hold anything: a vocabulary, a licence, the text of a calibration set."""
    model = tmp_path / "model"
    foreign = ("tokenizer.json", "vocab.json", "merges.txt", "LICENSE.txt", "swa.jsonl")
    with writing(model, Manifest("convert", {}, {}, environment=MACHINE)) as partial:
        (partial / "config.json").write_text(json.dumps(HARMLESS))
        (partial / "README.md").write_text("\n".join(HARMLESS))
        for name in foreign:
            (partial / name).write_text(json.dumps([f"{HOME}/x", "/usr/lib/x"]))
    published = {item.path for item in publish.pack([model], "someone/tiny").items}
    assert published == {"config.json", "README.md", "manifest.json", *foreign}


# Where people keep their files; elsewhere documents may name a place, such as /path/to/python.
OWN = re.compile(r"/(?:home|root|Users|work|tmp|mnt|media|scratch|workspace|private)/|[A-Za-z]:[\\/]")
REGISTRIES = re.compile(
    r"\b(?:[\w-]+\.)*(?:artifactory|nexus|devpi|pypi|pythonhosted|npmjs|proxy\.golang|codeartifact)\.[a-z]{2,}\b", re.I
)


def tracked() -> list[Path]:
    """The text files that git has; skips where this is no checkout."""
    try:
        command = ["git", "-C", str(ROOT), "ls-files", "-z"]
        listed = subprocess.run(command, capture_output=True, check=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no git checkout here: {error}")
    files = [ROOT / os.fsdecode(name) for name in listed.split(b"\0") if name]
    return [file for file in files if file.is_file() and file.suffix != ".safetensors"]


def test_no_file_of_ours_says_where_something_lies() -> None:
    seen = []
    for file in tracked():
        text = file.read_text(encoding="utf-8")
        for place in ABSOLUTE.finditer(text):
            # What was measured is recorded by machines, which have no places to speak of.
            if file.suffix == ".json" or OWN.match(place[0]):
                seen.append(f"{file.relative_to(ROOT)}: {place[0]}")
        seen += [f"{file.relative_to(ROOT)}: {host[0]}" for host in REGISTRIES.finditer(text)]
    assert not seen, "\n".join(seen)
