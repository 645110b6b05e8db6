"""Shared code of the benchmarks: resumption of interrupted runs, and evaluation text without tuned passages."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from mlaforge.data import corpus, overlap

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    import rows

    return rows


def test_interrupted_runs_resume(rows: Any, tmp_path: Path) -> None:
    out, keys, measured = tmp_path / "out.json", [{"way": way, "seed": 0} for way in "abc"], []

    def run(stop: str | None = None, resume: bool = True, **facts: Any) -> dict[str, Any]:
        results = rows.Results(out, [], resume, **facts)
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


def test_windows_that_repeat_tuned_text_are_dropped(rows: Any) -> None:
    ids = torch.arange(4 * 64).view(4, 64)
    tuned = overlap.passages(corpus.Windows(ids[1:2], "tuned"))
    texts = {"wiki": corpus.Windows(ids, "wiki"), "code": corpus.Windows(ids[2:], "code")}
    remaining = rows.without_repeats(texts, tuned)
    assert remaining["wiki"].ids.tolist() == ids[[0, 2, 3]].tolist()
    assert remaining["code"].ids.tolist() == ids[2:].tolist()


def test_command_contains_no_local_folders(rows: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    words = [str(tmp_path / "benchmarks" / "a.py"), "--data", "../shared", f"--out={tmp_path}/b.json", "/some/where/c"]
    monkeypatch.setattr(sys, "argv", words)
    assert rows.command() == "python benchmarks/a.py --data ../shared --out=b.json c"
