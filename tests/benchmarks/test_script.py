"""Shared code of the measurements: rows that resume, tables, and evaluation text without tuned passages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import script
from mlaforge.bench.results import Results, add_table, read_table
from mlaforge.data import corpus, overlap
from mlaforge.runtime import UserError


def test_interrupted_runs_resume(tmp_path: Path) -> None:
    out, keys, measured = tmp_path / "out.json", [{"way": way, "seed": 0} for way in "abc"], []

    def run(stop: str | None = None, resume: bool = True, **facts: Any) -> dict[str, Any]:
        results = Results(out, [], resume, **facts)
        results.once("original", lambda: measured.append("original") or 2.0)
        for key in results.missing(keys):
            if key["way"] == stop:
                break
            measured.append(key["way"])
            results.add({**key, "ppl": 1.0})
        return json.loads(out.read_text())

    run(stop="b", settings={"windows": 8})
    whole = run(settings={"windows": 8})
    assert measured == ["original", "a", "b", "c"] and [row["way"] for row in whole["rows"]] == ["a", "b", "c"]
    assert whole["original"] == 2.0 and whole["environment"]["mlaforge"]
    # Other settings, or no resumption, measure everything again.
    assert run(stop="a", settings={"windows": 9})["rows"] == []
    assert run(stop="b", resume=False, settings={"windows": 9})["rows"] == [{"way": "a", "seed": 0, "ppl": 1.0}]


def test_windows_that_repeat_tuned_text_are_dropped() -> None:
    ids = torch.arange(4 * 64).view(4, 64)
    tuned = overlap.passages(corpus.Windows(ids[1:2], "tuned"))
    texts = {"wiki": corpus.Windows(ids, "wiki"), "code": corpus.Windows(ids[2:], "code")}
    remaining = script.without_repeats(texts, tuned)
    assert remaining["wiki"].ids.tolist() == ids[[0, 2, 3]].tolist()
    assert remaining["code"].ids.tolist() == ids[2:].tolist()


def test_tables_are_made_of_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    """Measured, or of rows that exist; in one file beside other tables, a line per row, rounded."""
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "tables.json"
    add_table(out, "other", {"rows": [{"a": 1}]})

    def measure(options: Any) -> Results:
        results = Results(options.raw, [], context=8)
        for number in options.numbers:
            results.add({"number": number, "runs": [number] * 9})
        return results

    def run(*words: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["x", "--out", str(out), "--data", "../shared", *words])
        arguments = script.parser("", "unused.json", "a table")
        arguments.add_argument("--numbers", type=float, nargs="*", default=[1 / 3, 2.0])
        script.run(arguments, measure, lambda body: [{"third": r["number"]} for r in body["rows"]], str)
        return read_table(out, "a table")

    table = run()
    assert table["rows"] == [{"third": 0.33333333}, {"third": 2.0}] and table["context"] == 8
    assert table["environment"]["mlaforge"] and table["command"].endswith("--out tables.json --data ../shared")
    assert capsys.readouterr().out.strip() == str(table["rows"])
    assert '   {"third": 2.0}\n' in out.read_text()
    raw = tmp_path / "runs" / "measurements" / "a-table.json"
    assert json.loads(raw.read_text())["rows"][0]["runs"] == [1 / 3] * 9
    raw.rename(tmp_path / "kept.json")
    assert run("--summarize", "kept.json") == table and not raw.exists()
    assert run("--numbers", "7")["rows"] == [{"third": 7.0}] and read_table(out, "other") == {"rows": [{"a": 1}]}


@pytest.mark.parametrize("text", ['{"rows": [1]}', "[]", "{", '{"a": {"rows": 1}}'])
def test_another_file_is_not_overwritten(text: str, tmp_path: Path) -> None:
    (path := tmp_path / "tables.json").write_text(text)
    with pytest.raises(UserError, match="not a file of tables"):
        add_table(path, "a", {"rows": []})
    assert path.read_text() == text


TABLES = [path for folder in ("benchmarks", "research") for path in sorted((script.ROOT / folder).glob("*.json"))]


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.name)
def test_committed_tables_are_short_and_say_where_they_are_from(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= 200 and max(map(len, lines)) < 800
    for name, table in json.loads(path.read_text()).items():
        assert table["rows"] and all(isinstance(row, dict) for row in table["rows"]), name
        assert {"environment", "command"} & table.keys() or name == "load", name


def test_all_committed_json_is_short() -> None:
    assert len(TABLES) <= 15
    files = subprocess.run(["git", "ls-files", "*.json"], cwd=script.ROOT, capture_output=True, text=True, check=False)
    if files.returncode:
        pytest.skip("no repository")
    assert sum(len((script.ROOT / name).read_text().splitlines()) for name in files.stdout.split("\n") if name) <= 3500
