"""What README.md, docs/start.md, docs/cli.md and docs/engine.md show runs as it stands, on a tiny model in place of
MODEL; README's table holds what benchmarks/ measured."""

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from mlaforge.bench.results import read_table
from mlaforge.cli.main import app
from support.serving import serving

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {name: (ROOT / name).read_text(encoding="utf-8")
         for name in ("README.md", "docs/start.md", "docs/cli.md", "docs/engine.md")}  # fmt: skip
# The verbs that each page shows, in its order.
VERBS = {
    "README.md": "convert generate serve",
    "docs/start.md": "plan convert eval chat",
    "docs/cli.md": "plan diagnose calibrate convert sparsify eval heal generate chat serve bench verify list report "
    "card publish env",
    "docs/engine.md": "generate generate chat serve",
}
# What a tiny model and text need beside the words of the text.
FEW = ["--dtype", "float32", "--cache-bytes", "1000000"]
MORE = {
    "diagnose": ["--seqlen", "64", "--windows", "3"],
    "calibrate": ["--window", "200", "--clusters", "4"],
    "convert": ["--seqlen", "64", "--eval-windows", "0"],
    "sparsify": ["--seqlen", "64", "--width", "16"],
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
    """What a server answers to the curl line of docs/cli.md: its path, header and body."""
    (line,) = commands(PAGES["docs/cli.md"], "curl")
    words = shlex.split(line)
    path = next(word for word in words if word.startswith("localhost:8000")).removeprefix("localhost:8000")
    header = words[words.index("-H") + 1].split(": ")
    answer = post(path, content=words[words.index("-d") + 1], headers=dict([header]))
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture(scope="module")
def run(tiny_models, calibration_file, evaluation_file, tmp_path_factory):
    """run(page) -> the folder in which all commands of a page succeeded; each page runs once, in its own folder."""
    done: dict[str, Path] = {}

    def served(engine, config):
        # In place of a server that would run until a signal: the same application, asked once.
        with serving(engine) as server:
            assert ask(server.post)["choices"][0]["finish_reason"]

    def page(name: str) -> Path:
        if name in done:
            return done[name]
        folder = done[name] = tmp_path_factory.mktemp("page")
        names = {
            "MODEL": str(tiny_models["llama"]),
            "OUT": str(folder / "results" / "out"),
            "OTHER_TEXT": str(evaluation_file),
            "TEXT": str(calibration_file),
            "SETS": str(folder / "sets"),
            "SPARSE": str(folder / "results" / "sparse"),
            "FOLDER": str(folder / "results"),
        }
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            patch.setattr("mlaforge.serving.server.run", served)
            for line in commands(PAGES[name]):
                words = [names.get(word, word) for word in shlex.split(line)[1:]]
                # Options may come twice: the last one counts.
                ended = CliRunner().invoke(app, words + MORE.get(words[0], []), input="Hi\n/new\nHo\n\n")
                assert ended.exit_code == 0, (line, ended.output, ended.exception)
        return folder

    return page


@pytest.mark.parametrize("name", VERBS)
def test_commands_run(name, run):
    assert [line.split()[1] for line in commands(PAGES[name])] == VERBS[name].split()
    run(name)


def test_the_report_is_there(run):
    assert (run("docs/cli.md") / "report.html").stat().st_size > 5000


def test_every_verb_has_its_line():
    listed = set(re.findall(r"^\| `([a-z-]+)` \|", PAGES["docs/cli.md"], re.MULTILINE))
    assert listed >= {*get_command(app).commands}


@pytest.mark.parametrize("code", [code for text in PAGES.values() for code in blocks(text, "python")])
def test_python_runs(code, run, capsys):
    """With OUT as the README's commands made it."""
    out = json.dumps(str(run("README.md") / "results" / "out"))
    exec(compile(code.replace('"OUT"', out), "<documentation>", "exec"), {})
    if "print(" in code:
        assert capsys.readouterr().out


def measured() -> dict[str, list[str]]:
    """README's table by benchmarks/*.json: form -> cache, ratios on WikiText and Python source, tokens/s
    with AMX and without, healed."""
    tables = {"kv_cache": "kv cache", "conversion": "conversion", "speed": "amx", "healing": "healing"}
    kv_cache, plain, amx, healing = (
        read_table(ROOT / "benchmarks" / f"{file}.json", table)["rows"] for file, table in tables.items()
    )
    vectors = read_table(ROOT / "benchmarks" / "speed.json", "avx512")["rows"]
    healed_ratios = {r["name"]: r["ratio"] for r in healing}

    def row(share: float, ratio: dict[str, float], peer: str, healed: str = "") -> list[str]:
        rates = [{r["peer"]: f"{r['tokens_per_second']:.1f}" for r in speed if r["case"] == "2048x1"}
                 for speed in (amx, vectors)]  # fmt: skip
        return [
            f"{share:.1%}".replace("%", " %").replace(".0 ", " "), f"{ratio['wiki']:.3f}", f"{ratio['code']:.3f}",
            *(each.get(peer, "not measured") for each in rates),
            f"{healed_ratios[healed][1]:.3f}" if healed else "–",
        ]  # fmt: skip

    cached = {(r["layout"], r["stored"]): r for r in kv_cache}
    halved = {r["layout"]: r["ratio"] for r in plain if (r["calibration"], r["budget"]) == ("wiki", 0.5)}
    stored = {
        "original": ("gqa", "bf16", "original"),
        "original, int8 cache": ("gqa", "int8", "original, int8 rows"),
        "`latent`, coded in 4 bits (the default)": ("latent", "4 bits", "latent, 4 bits"),
        "`latent`, coded in 3 bits": ("latent", "3 bits", "latent, 3 bits"),
    }
    return {
        form: row(cached[layout, kind]["bytes_ratio"], cached[layout, kind]["ratio"], peer)
        for form, (layout, kind, peer) in stored.items()
    } | {f"`{layout}`, 50 %": row(0.5, halved[layout], layout, f"{layout}-0.5") for layout in ("latent", "latent_rope")}


def test_the_table_holds_what_was_measured():
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGES["README.md"].splitlines()]
    forms = measured()
    shown = {row[0]: row[1:] for row in rows if row[0] in forms}
    assert shown == forms


def test_every_page_of_results_has_a_target():
    """docs/PAGE.md, which names a committed table, and `make bench-PAGE`; plan.md reads tables of other pages."""
    targets = set(re.findall(r"^bench-([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    table = re.compile(r"(?:benchmarks|research)/\w+\.json")
    assert targets == {path.stem for path in DOCS.glob("*.md") if table.search(path.read_text())} - {"plan"}


def make_targets(text: str) -> set[str]:
    return set(re.findall(r"^ +make ([a-z-]+)", text, re.MULTILINE))


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    assert make_targets(text) | set(re.findall(r"`make ([a-z-]+)", text)) <= targets


PATHS = set(
    re.findall(r"(?:docs|src|tests|benchmarks|research|examples)/[\w*/-]+(?:\.\w+)*", "\n".join(PAGES.values()))
)


def test_named_paths_exist():
    assert [path for path in sorted(PATHS) if not any(ROOT.glob(path))] == []
