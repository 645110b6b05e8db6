"""The README's commands run as they stand, on a tiny model in place of MODEL."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mlaforge.cli import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith("mlaforge ")]


def test_commands_run(tiny_models, calibration_file, evaluation_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {
        "MODEL": str(tiny_models["llama"]),
        "OUT": str(tmp_path / "results" / "out"),
        "OTHER_TEXT": str(evaluation_file),
        "TEXT": str(calibration_file),
        "FOLDER": str(tmp_path / "results"),
    }
    # What a tiny model and text need beside the README's words.
    more = {"convert": ["--seqlen", "64", "--eval-windows", "0"], "eval": ["--seqlen", "64"]}
    ran = []
    for line in commands():
        words = [names.get(word, word) for word in shlex.split(line)[1:]]
        done = CliRunner().invoke(app, words + more.get(words[0], []))
        assert done.exit_code == 0, (line, done.output, done.exception)
        ran.append(words[0])
    assert ran == ["plan", "convert", "eval", "generate", "report", "env"]
    assert (tmp_path / "report.html").stat().st_size > 5000


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^ +make ([a-z-]+)", README, re.MULTILINE)) <= targets


@pytest.mark.parametrize("path", sorted(set(re.findall(r"(?:docs|src|tests|benchmarks)/[\w./-]+", README))))
def test_named_paths_exist(path):
    assert (ROOT / path).exists()


def test_the_tree_names_every_module():
    tree = README[README.index("src/mlaforge/") :]
    for path in (ROOT / "src" / "mlaforge").glob("[a-z]*.py"):
        assert path.name in tree, path.name
