"""The front is drawn from what is committed, all of it, in both themes."""

import sys

import pytest

from mlaforge.bench.results import read_table
from research import front_picture as picture


def test_every_measured_row_is_a_point():
    lines = picture.points()
    for row in picture.rows_of("front"):
        drawn = [p["ratio"] for p in lines.get(row["form"], []) if p["bytes"] == row["bytes_ratio"]]
        # The unrounded cache is what the others stand beside, and a check of the simulation is no form of its own.
        assert (row["ratio"] in drawn) is not (row["form"] == "gqa" or "whole" in row["stored"]), row
    # What stands beside another code's measurements was read in the same number of tokens.
    files = ("front", "kv_cache", "conversion")
    own, *others = [read_table(*picture.TABLES[name])["tokens"] for name in files]
    assert all(other[text] == own[text] for other in others for text in picture.TEXTS)


def test_an_axis_shows_what_is_lost():
    assert picture.height(1.0) == picture.height(0.9998) == picture.height(1.001) < picture.height(1.0011)
    assert picture.height(1.1) - picture.height(1.01) == pytest.approx(1)


def test_both_themes_are_drawn(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["front_picture.py", "--folder", str(tmp_path)])
    picture.main()
    names = {f"{name}-{theme}.svg" for name in ("front", "speed") for theme in picture.THEMES}
    assert {path.name for path in tmp_path.iterdir()} == names
    for name in names:
        svg, colors = (tmp_path / name).read_text(), picture.THEMES[name.partition("-")[2].removesuffix(".svg")]
        assert "#0000" not in svg and colors[picture.INK] in svg and colors[picture.CODED] in svg


def test_speeds_are_those_of_one_run_with_its_bytes(monkeypatch):
    for machine in picture.MACHINES:
        rows = [r for r in picture.rows_of(machine) if r["case"] == "8000x1" and "cache_bytes" in r]
        drawn = picture.speeds(machine)
        assert {r["peer"]: r["tokens_per_second"] for r in rows} == {peer: speed for peer, (_, speed) in drawn.items()}
        assert drawn["original"][0] == 1 and drawn["original, int8 rows"][0] == 0.515625
    counted = [
        {"case": "8000x1", "peer": peer, "tokens_per_second": 9.0, "cache_bytes": size}
        for peer, size in (("original", 200), ("original, sparse", 210), ("latent, 4 bits, sparse", 66))
    ]
    rows_of = picture.rows_of
    monkeypatch.setattr(picture, "rows_of", lambda name: counted if name == "amx" else rows_of(name))
    assert [x for x, _ in picture.speeds("amx").values()] == [1, 1.05, 0.33]
