"""Results of `bench` and `gate` in the report: reading, plots, recommended settings and deviations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlaforge.rendering.page import interval
from mlaforge.report.recommendations import COMMANDS, RULES
from mlaforge.report.report import summarise, write_report
from support import recorded
from support.recorded import case, gates, kernels, put, scenario


def settings(folder: Path, *cases: dict[str, Any], **changes: Any) -> dict[str, list[tuple[str, str]]]:
    """setting -> (where, value) of the recommendations from these cases."""
    put(folder, single=scenario(list(cases), **changes))
    return {s["setting"]: [(row["where"], row["value"]) for row in s["found"]] for s in summarise(folder)["settings"]}


def deviations(folder: Path) -> str:
    return "\n".join(f"{d['where']}: {d['what']}" for d in summarise(folder)["deviations"])


@pytest.mark.parametrize(("n", "quantile"), [(4, 3.1824), (8, 2.3646), (16, 2.1314), (1000, 1.9623)])
def test_intervals_are_students(n: int, quantile: float) -> None:
    ends = interval(5.0, 2.0, n)
    assert ends is not None and ends[1] - 5.0 == pytest.approx(5.0 - ends[0]) == pytest.approx(2 * quantile, rel=0.01)
    assert interval(5.0, 2.0, 3) is None


def test_perplexity_ratio_has_an_interval(tmp_path: Path) -> None:
    conversion = recorded.conversion("latent", 1.05)
    conversion.metrics |= {"log_ratio_stderr": 0.01, "windows": 8}
    recorded.save(conversion, tmp_path / "a")
    ends = summarise(tmp_path)["conversions"][0]["ratio_interval"]
    assert ends == [pytest.approx(1.05 * 2.718281828 ** (0.01 * sign * 2.3646), rel=1e-4) for sign in (-1, 1)]


def test_convert_records_the_standard_error_of_the_ratio(converted: Any) -> None:
    """The standard error is that of the windows' differences, smaller than that of the windows."""
    out = converted("llama", "latent")
    conversion = summarise(out)["conversions"][0]
    assert conversion["metrics"]["windows"] == 4 and 0 < conversion["metrics"]["log_ratio_stderr"] < 1
    assert conversion["ratio_interval"][0] < conversion["metrics"]["ratio"] < conversion["ratio_interval"][1]


def test_page_shows_all_results(tmp_path: Path) -> None:
    put(tmp_path, single=scenario(recorded.cases()), gates=gates(), kernels=kernels())
    write_report(tmp_path, tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    # Against context, against batch, against drafts, acceptance, memory; the kernels' roofline.
    assert page.count("<svg") == 6
    for text in (
        "Throughput against context, batch 1", "Throughput against batch, context 512", "Acceptance by position",
        "Throughput against drafted tokens, 4,096 tokens × 1", "Peak memory", "Kernels under the roofline", "rooflines",
        "✓ pass", "✗ fail", "– missing", "micro gates green 2 times in a row of 3", "15 GB/s, 60 GFLOP/s",
        "does not fit: the cache holds 4,096 of 8,320 tokens; change --cache-fraction 0.9", "58.8 – 61.2",
    ):  # fmt: skip
        assert text in page, text
    numbers = json.loads((tmp_path / "r.json").read_text())
    assert numbers["results"]["scenario"][0]["cases"][0]["tokens_per_second"]["median"] == 60.0


def test_partial_verification_is_a_separate_series(tmp_path: Path) -> None:
    """With its share of retained tokens next to the acceptance length, and a separate line in every plot."""
    by_context = [
        case("m", "gqa", context, speed, drafts, **changes)
        for context in (512, 4096)
        for speed, drafts, changes in ((50.0, 0, {}), (60.0, 2, {}), (70.0, 3, {}), (90.0, 3, {"specpv": "lossless"}))
    ]
    put(tmp_path, single=scenario(by_context, name="large-context"))
    write_report(tmp_path, tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    for text in (
        "62 % kept",
        "ngram, specpv",
        "3 by ngram, specpv",
        "drafted tokens are verified with a part of the cache first",
    ):
        assert text in page, text
    assert page.count("62 % kept") == 2 and page.count("MiB read<") == 2
    recommended = next(s for s in summarise(tmp_path)["settings"] if s["setting"] == "drafts")["found"]
    assert {row["value"] for row in recommended} == {"3, specpv"}
    assert "3, specpv: 90.0, 3: 70.0, 2: 60.0, 0: 50.0 tokens/s" in recommended[0]["because"]
    # Full verification if there is no difference.
    assert settings(tmp_path, *by_context[:3], case("m", "gqa", 512, 70.5, 3, specpv="lossless"))["drafts"] == [
        ("test machine, m, 512 tokens × 1", "3")
    ]
    put(tmp_path, single=scenario(by_context[:3]))
    write_report(tmp_path, tmp_path / "r.html")
    assert "specpv" not in (tmp_path / "r.html").read_text()


def test_only_the_latest_run_of_each_scenario_counts(tmp_path: Path) -> None:
    slow, fast = (
        [case("m", "gqa", 512, speed, drafts) for speed, drafts in ((10.0, 0), (5.0, 3))],
        case("m", "gqa", 512, 30.0, 3),
    )
    run = tmp_path / "results"
    for name, time, cases in (
        ("20260101-000000", "2026-01-01", slow),
        ("20260102-000000", "2026-01-02", [slow[0], fast]),
    ):
        (run / name).mkdir(parents=True)
        (run / name / "single.json").write_text(json.dumps(scenario(cases, time=time)))
    report = summarise(tmp_path)
    assert len(report["results"]["scenario"]) == 2 and len(report["scenarios"]) == 1
    assert next(s for s in report["settings"] if s["setting"] == "drafts")["found"][0]["value"] == "3"


def test_recommends_the_smallest_cache_within_the_upper_end(tmp_path: Path) -> None:
    # 1.045 with an interval beyond 1.05 is rejected; without an interval the value itself counts.
    for name, ratio, cached, error in (("a", 1.02, 0.6, 0.001), ("b", 1.045, 0.5, 0.01), ("c", 1.2, 0.3, 0.001)):
        conversion = recorded.conversion("latent", ratio)
        conversion.metrics |= {"log_ratio_stderr": error, "windows": 8}
        conversion.metrics["cache"]["fraction"] = cached
        recorded.save(conversion, tmp_path / name)
    assert settings(tmp_path)["cache"] == [("Tiny-135M, latent", "60 %")]
    bare = recorded.conversion("latent", 1.045)
    bare.metrics["cache"]["fraction"] = 0.4
    recorded.save(bare, tmp_path / "d")
    assert settings(tmp_path)["cache"] == [("Tiny-135M, latent", "40 %")]
    assert "d: the perplexity ratio has no confidence interval" in deviations(tmp_path)


def test_recommends_the_fewest_drafts_among_overlapping_ones(tmp_path: Path) -> None:
    where = "test machine, m, 512 tokens × 1"
    plain = case("m", "gqa", 512, 50.0)
    assert settings(tmp_path, plain, case("m", "gqa", 512, 60.0, 2), case("m", "gqa", 512, 61.0, 4))["drafts"] == [
        (where, "2")
    ]
    assert settings(tmp_path, plain, case("m", "gqa", 512, 60.0, 2), case("m", "gqa", 512, 70.0, 4))["drafts"] == [
        (where, "4")
    ]
    assert settings(tmp_path, plain, case("m", "gqa", 512, 51.0, 2))["drafts"] == [(where, "0")]


def test_oracles_and_imports_are_ignored(tmp_path: Path) -> None:
    elsewhere = {"file": "x.json", "device": "another machine", "commit": "1", "time": "now"}
    recommended = settings(
        tmp_path, case("m", "gqa", 512, 50.0), case("m", "gqa", 512, 150.0, 4, draft="replay"),
        case("m", "gqa", 512, 250.0, 2, imported=elsewhere), case("m", "gqa", 512, 250.0, 3, engine="peer"),
    )  # fmt: skip
    assert recommended["drafts"] == []
    text = deviations(tmp_path)
    assert "an upper bound of any drafter, not a claim" in text and "imported, measured on another machine" in text


def test_recommended_layout_by_context(tmp_path: Path) -> None:
    recommended = settings(
        tmp_path,
        case("big", "gqa", 512, 60.0), case("small", "latent", 512, 50.0),
        case("big", "gqa", 8192, 30.0), case("small", "latent", 8192, 40.0),
        # Overlapping repetitions: the smaller cache.
        case("big", "gqa", 2048, 45.5), case("small", "latent", 2048, 45.0),
    )  # fmt: skip
    assert recommended["layout"] == [
        ("test machine, 512 tokens × 1", "gqa (big)"), ("test machine, 8,192 tokens × 1", "latent (small)"),
        ("test machine, 2,048 tokens × 1", "latent (small)"),
    ]  # fmt: skip


def test_batch_and_context(tmp_path: Path) -> None:
    limit = {"what": "no room", "change": "--cache-fraction 0.9"}
    recommended = settings(
        tmp_path,
        *(case("m", "gqa", 512, speed, batch=batch) for batch, speed in ((1, 50.0), (4, 96.0), (16, 100.0))),
        case("m", "gqa", 4096, 1.0, status="capacity", limit=limit, tokens_per_second=None),
    )  # fmt: skip
    assert recommended["batch"] == [("test machine, m, 512 tokens", "4")]
    assert ("test machine, m, batch 1, cache fraction 0.75", "512 tokens") in recommended["context"]
    assert "4096x1 k0: no room; --cache-fraction 0.9" in deviations(tmp_path)


def test_settings_without_measurements_name_the_command(tmp_path: Path) -> None:
    put(tmp_path, single=scenario([]))
    for setting in summarise(tmp_path)["settings"]:
        assert setting["found"] == [] and setting["command"] == COMMANDS[setting["setting"]]
        assert setting["rule"] == RULES[setting["setting"]]


def test_deviations(tmp_path: Path) -> None:
    perf = [
        {"name": "deterministic", "passed": False, "value": 0, "allowed": 0, "detail": "2 of 3 differ"},
        {"name": "cache_integrity", "passed": True, "value": 0, "allowed": 0, "detail": "fine"},
    ]
    off = {"bytes": 200, "planned_bytes": 100}
    cases = [
        case("a", "gqa", 512, 1.0, cache=off), case("b", "gqa", 512, 1.0, roofline={"fraction": 1.3}),
        case("c", "gqa", 512, 1.0, distinct_4_grams=0.1), case("d", "gqa", 512, 1.0),
    ]  # fmt: skip
    put(tmp_path, single=scenario(cases, perf=perf, dirty=True, forced=True), gates=gates(device="other machine"))
    text = deviations(tmp_path)
    for expected in (
        "a gqa 512x1 k0: the cache used 200 B, planned were 100 B", "b gqa 512x1 k0: 1.30 of the roofline",
        "c gqa 512x1 k0: only 10 % of the answers", "invariant deterministic: 2 of 3 differ", "was forced",
        "1 results were measured with uncommitted changes", "several devices: other machine, test machine",
        "gate much faster: fail", "gate unseen: missing", "micro gates green 2 times in a row, 3 are needed",
    ):  # fmt: skip
        assert expected in text, expected
    assert "d gqa" not in text and "cache_integrity" not in text and "gate faster" not in text


@pytest.mark.parametrize(
    "body",
    ["", "[]", '{"kind": "scenario"', '{"kind": "scenario", "schema": 2}', '{"kind": "else", "schema": 1}', "\x00"],
)
def test_files_that_are_not_results_are_unreadable(tmp_path: Path, body: str) -> None:
    put(tmp_path, single=scenario([]))
    (tmp_path / "results" / "20260830-120000" / "odd.json").write_text(body)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "config.json").write_text("{")
    report = write_report(tmp_path, tmp_path / "r.html")
    assert report["unreadable"] == ["results/20260830-120000/odd.json"]
    assert "results/20260830-120000/odd.json: cannot be read" in deviations(tmp_path)


def test_missing_numbers_are_not_measured(tmp_path: Path) -> None:
    bare = {"kind": "scenario", "schema": 1, "cases": [{}, 3, {"status": "ok"}, {"status": "ok", "batch": True}]}
    nulls = case("m", "latent", 512, 1.0, **dict.fromkeys(("speedup", "cache", "roofline", "peak_memory")))
    wild = case("m", "latent", 2048, 1.0, tokens_per_second={"median": float("inf")}, ms_per_token="?")
    files = {"baseline": bare, "single": scenario([nulls, wild], roof=None)}
    put(tmp_path, **files, gates={"kind": "gates", "schema": 1, "gates": [{}]}, kernels=scenario([], kind="kernels"),
        conversion={"kind": "conversion", "schema": 1, "texts": {"t": {}}, "rows": [{}]})  # fmt: skip
    write_report(tmp_path, tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert "<svg" not in page and page.count("not measured") > 10
    assert ">None<" not in page and "nan" not in page.lower().split()


def test_text_of_results_is_escaped(tmp_path: Path) -> None:
    odd = "<script>$x_1$ & 'm'"
    cases = [case(odd, odd, context, 10.0) for context in (512, 1024)]
    put(tmp_path, single=scenario(cases, description=odd, device=odd), gates=gates(device=odd))
    write_report(tmp_path, tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert "<script" not in page and page.count("&lt;script") > 5
