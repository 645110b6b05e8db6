"""What the README and docs/engine.md show runs as it stands, on a tiny model in place of MODEL."""

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mlaforge.cli.main import app
from support.serving import serving

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ENGINE = (ROOT / "docs" / "engine.md").read_text(encoding="utf-8")
# What a tiny model and text need beside the words of the text.
FEW = ["--dtype", "float32", "--cache-bytes", "1000000"]
MORE = {
    "diagnose": ["--seqlen", "64"],
    "calibrate": ["--window", "200", "--clusters", "4"],
    "convert": ["--seqlen", "64", "--eval-windows", "0"],
    "eval": ["--seqlen", "64"],
    "heal": ["--seqlen", "64", "--steps", "2", "--batch-tokens", "128"],
    "generate": ["--max-new-tokens", "8", *FEW],
    "chat": ["--max-new-tokens", "8", *FEW],
    "serve": FEW,
    "bench": [
        "--device", "cpu", "--context", "32", "--tokens", "2", "--rounds", "1", "--num-speculative-tokens", "0,2",
        "--cache-fraction", "0.001", "--dtype", "float32",
    ],
}  # fmt: skip


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def commands(text: str, program: str = "mlaforge") -> list[str]:
    lines = (line for block in blocks(text, "sh") for line in block.splitlines())
    return [line for line in lines if line.startswith(f"{program} ")]


def ask(post) -> dict:
    """What a server answers to the README's curl line: its path, header and body."""
    (line,) = commands(README, "curl")
    words = shlex.split(line)
    path = next(word for word in words if word.startswith("localhost:8000")).removeprefix("localhost:8000")
    header = words[words.index("-H") + 1].split(": ")
    answer = post(path, content=words[words.index("-d") + 1], headers=dict([header]))
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture(scope="module")
def run(tiny_models, calibration_file, evaluation_file, tmp_path_factory):
    """run(text) -> the verbs of its commands, which all must succeed; run.folder is where they ran."""
    folder = tmp_path_factory.mktemp("readme")
    names = {
        "MODEL": str(tiny_models["llama"]),
        "OUT": str(folder / "results" / "out"),
        "OTHER_TEXT": str(evaluation_file),
        "TEXT": str(calibration_file),
        "SETS": str(folder / "sets"),
        "FOLDER": str(folder / "results"),
    }

    def served(engine, config):
        # In place of a server that would run until a signal: the same application, asked once.
        with serving(engine) as server:
            assert ask(server.post)["choices"][0]["finish_reason"]

    def commands_of(text: str) -> list[str]:
        verbs = []
        for line in commands(text):
            words = [names.get(word, word) for word in shlex.split(line)[1:]]
            # Options may come twice: the last one counts.
            done = CliRunner().invoke(app, words + MORE.get(words[0], []), input="Hi\n/new\nHo\n\n")
            assert done.exit_code == 0, (line, done.output, done.exception)
            verbs.append(words[0])
        return verbs

    commands_of.folder = folder
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("mlaforge.serving.server.run", served)
        yield commands_of


@pytest.fixture(scope="module")
def shown(run):
    """The verbs of the README, in their order; afterwards OUT is there."""
    return run(README)


def test_commands_run(shown, run):
    verbs = [
        "plan",
        "diagnose",
        "calibrate",
        "convert",
        "eval",
        "heal",
        "generate",
        "chat",
        "serve",
        "bench",
        "verify",
        "list",
        "report",
        "card",
        "publish",
        "env",
    ]
    assert shown == verbs
    assert (run.folder / "report.html").stat().st_size > 5000


def test_the_engines_commands_run(run):
    assert run(ENGINE) == ["generate", "generate", "chat", "serve"]


@pytest.mark.parametrize("code", [*blocks(README, "python"), *blocks(ENGINE, "python")])
def test_python_runs(code, shown, run, capsys):
    """With OUT as the README's commands made it."""
    out = json.dumps(str(run.folder / "results" / "out"))
    exec(compile(code.replace('"OUT"', out), "<documentation>", "exec"), {})
    if "print(" in code:
        assert capsys.readouterr().out


def make_targets(text: str) -> set[str]:
    return set(re.findall(r"^ +make ([a-z-]+)", text, re.MULTILINE))


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`make ([a-z-]+)`", README + ENGINE))
    assert make_targets(README) | make_targets((ROOT / "CONTRIBUTING.md").read_text()) | named <= targets


PATHS = set(re.findall(r"(?:docs|src|tests|benchmarks)/[\w*/-]+(?:\.\w+)*", README + ENGINE))


@pytest.mark.parametrize("path", sorted(PATHS))
def test_named_paths_exist(path):
    assert any(ROOT.glob(path))
