"""The front is drawn from what is committed, all of it, in both themes."""

import json
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def picture(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    import front_picture

    return front_picture


def test_every_measured_row_is_a_point(picture):
    lines = picture.points()
    rows = json.loads((FOLDER / "front.json").read_text())["rows"]
    for row in rows:
        drawn = [p["ratio"] for p in lines.get(row["form"], []) if p["bytes"] == row["bytes_ratio"]]
        # The unrounded cache is what the others stand beside, and a check of the simulation is no form of its own.
        assert (row["ratio"] in drawn) is not (row["form"] == "gqa" or "whole" in row["stored"]), row
    # What stands beside another code's measurements was read in the same number of tokens.
    files = ("front", "kv_cache", "conversion")
    own, *others = [json.loads((FOLDER / f"{name}.json").read_text())["tokens"] for name in files]
    assert all(other[text] == own[text] for other in others for text in picture.TEXTS)


def test_an_axis_shows_what_is_lost(picture):
    assert picture.height(1.0) == picture.height(0.9998) == picture.height(1.001) < picture.height(1.0011)
    assert picture.height(1.1) - picture.height(1.01) == pytest.approx(1)


def test_both_themes_are_drawn(picture, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["front_picture.py", "--folder", str(tmp_path)])
    picture.main()
    assert {path.name for path in tmp_path.iterdir()} == {"front-light.svg", "front-dark.svg"}
    for theme, colors in picture.THEMES.items():
        svg = (tmp_path / f"front-{theme}.svg").read_text()
        assert "#0000" not in svg and colors[picture.INK] in svg and colors[picture.CODED] in svg
