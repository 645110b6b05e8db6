"""The report: all numbers of the manifests and no others, in a self-contained page."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from mlaforge.artifact import Manifest
from mlaforge.modeling.coded_layout_mla import CodedLayout
from mlaforge.rendering.page import shown
from mlaforge.report import plots, report
from mlaforge.report.report import write_report
from mlaforge.runtime import UserError
from support.html_page import Page
from support.recorded import MACHINE, conversion, evaluation, healing, save, talk, training


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A page of all stages and both layouts, and the returned numbers."""
    folder = tmp_path_factory.mktemp("runs")
    save(conversion(), folder / "deep" / "tiny-latent")
    save(conversion("latent_rope", 1.2716), folder / "tiny-rope")
    save(evaluation(), folder / "eval")
    save(talk("The sky is <script>alert(1)</script> & blue.", "The sky is green."), folder / "talk")
    save(Manifest("gguf", {}, {}, environment=MACHINE), folder / "base")
    out = folder / "out" / "report.html"
    return out, write_report(folder, out)


@pytest.fixture(scope="module")
def page(written: tuple[Path, dict[str, Any]]) -> Page:
    return Page(written[0].read_text(encoding="utf-8"))


def test_page_is_self_contained(written: tuple[Path, dict[str, Any]], page: Page) -> None:
    html = written[0].read_text(encoding="utf-8")
    assert "http://" not in html and "https://" not in html
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert all(target.startswith(("#", "data:image/png")) for target in page.targets)
    assert set(re.findall(r"url\(([^)]*)", html)) <= {f"#{name}" for name in page.ids}


def test_drawings(written: tuple[Path, dict[str, Any]], page: Page) -> None:
    # Three of all conversions, four of each: cached elements, spectrum, predicted loss, wall time.
    assert len(page.paths) == 3 + 4 * 2
    assert min(page.paths) > 3
    assert len(set(page.ids)) == len(page.ids), "two drawings share an id, so one would use the other's parts"
    assert "log10 loss per direction" in page.text and "KV cache kept (% of GQA)" in page.text


def test_drawings_follow_the_theme(written: tuple[Path, dict[str, Any]]) -> None:
    html = written[0].read_text(encoding="utf-8")
    assert "prefers-color-scheme: dark" in html
    for name in re.findall(r"var\((--\w+)\)", html):
        assert html.count(f"{name}:") == 2, f"{name} is not set once for light and once for dark"
    assert not re.search("#0000[01][1-9a-f]", html), "a placeholder colour was left in a plot"


def test_numbers_of_the_manifests_are_shown(page: Page) -> None:
    for text in (
        "×1.021", "×1.272", "19.019", "19.418", "24.184", "19.984", "3,072",  # conversions
        "2.945", "0.031", "16,376",  # evaluation
        "15.5 tokens/s", "3.69 MiB", "84 tokens",  # generation
        "b2" * 32, "c3" * 32, "d4" * 32, "test machine", "Tiny-135M", "gguf", "39 s",  # provenance
    ):  # fmt: skip
        assert text in page.text, text
    assert page.text.count("not measured") == 2  # the wall times of `gguf` and `generate`


def test_verdict_names_each_layout(written: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    shares = [shown(c["metrics"]["cache"]["fraction"], "percent") for c in written[1]["conversions"]]
    assert written[1]["verdict"] == (
        f"latent: {shares[0]} of the cache, perplexity ×1.021; latent_rope: {shares[1]} of the cache, perplexity ×1.272"
    )
    alone = conversion()
    alone.metrics["cache"]["fraction"] = 0.5
    save(alone, tmp_path / "a")
    assert write_report(tmp_path, tmp_path / "r.html")["verdict"] == "50 % of the cache, perplexity ×1.021"


def test_json_has_the_same_numbers(written: tuple[Path, dict[str, Any]]) -> None:
    out, returned = written
    assert json.loads(out.with_suffix(".json").read_text(encoding="utf-8")) == returned
    conversions = {c["name"]: c for c in returned["conversions"]}
    for name, manifest in (
        ("deep/tiny-latent", conversion()), ("tiny-rope", conversion("latent_rope", 1.2716)),
    ):  # fmt: skip
        for section in ("config", "inputs", "metrics", "seconds"):
            assert conversions[name][section] == getattr(manifest, section)
        assert conversions[name]["fingerprint"] == manifest.fingerprint
    assert returned["evaluations"][0]["metrics"] == evaluation().metrics
    assert [a["stage"] for a in returned["artifacts"]] == ["gguf", "convert", "eval", "generate", "convert"]
    assert not {"convert", "eval", "generate"} & set(returned["missing"])


def test_window_bounds_the_cache_of_a_sequence(written: tuple[Path, dict[str, Any]]) -> None:
    # 384 elements of 2 bytes in four layers, layer 0 with a window of 128 tokens; the latents are 104, 112, 120.
    context = written[1]["conversions"][0]["context_bytes"]["8K"]
    assert context == {"gqa": 2 * 384 * (128 + 3 * 8192), "mla": 2 * (384 * 128 + (104 + 112 + 120) * 8192)}


def test_coded_rows_are_shown_with_their_bits(tmp_path: Path) -> None:
    """Layer 0 slides and stays GQA in bf16, so bytes differ by layer."""
    manifest = conversion()
    manifest.config |= {"bits": 2.5}
    for layer in manifest.metrics["layers"][1:]:
        layer["code"] = [layer["cached"], 16, 8]
    rows = [sum(CodedLayout((rank, 16, 8)).row_bytes for rank in (104, 112, 120)), 2 * 384]
    manifest.metrics["cache"] |= {"mla_bytes_per_token": sum(rows)}
    save(manifest, tmp_path / "a")
    save(conversion(), tmp_path / "b")
    coded, plain = write_report(tmp_path, tmp_path / "r.html")["conversions"]
    assert coded["context_bytes"]["8K"]["mla"] == 8192 * rows[0] + 128 * rows[1]
    assert coded["bits"] == pytest.approx(8 * rows[0] / (3 * 384)) and plain["bits"] is None
    page = Page((tmp_path / "r.html").read_text(encoding="utf-8"))
    assert f"{shown(coded['bits'], 'small')} bits" in page.text and page.text.count("Bits per coordinate") == 1
    assert "50 %" in page.text, "the other's budget"


def test_requested_rank_is_shown_as_a_share_of_the_cache(tmp_path: Path) -> None:
    """Manifests record the default budget even if a rank was requested."""
    manifest = conversion()
    manifest.config |= {"kv_lora_rank": 104}
    save(manifest, tmp_path / "a")
    (only,) = write_report(tmp_path, tmp_path / "r.html")["conversions"]
    rows = [layer for layer in manifest.metrics["layers"] if layer["layout"] != "gqa"]
    share = sum(row["cached"] for row in rows) / sum(row["gqa_cached"] for row in rows)
    assert only["kept"] == pytest.approx(share)
    text = Page((tmp_path / "r.html").read_text(encoding="utf-8")).text
    assert f"{shown(share, 'percent')} of the cache" in text and "50 % of the cache" not in text


def test_layout_is_read_from_the_layers(tmp_path: Path) -> None:
    # TransMLA's options imply latent_rope while `layout` has its default.
    manifest = conversion("latent_rope")
    manifest.config["layout"] = "latent"
    save(manifest, tmp_path / "a")
    assert write_report(tmp_path, tmp_path / "r.html")["conversions"][0]["layout"] == "latent_rope"


def test_text_is_escaped(written: tuple[Path, dict[str, Any]], page: Page, tmp_path: Path) -> None:
    html = written[0].read_text(encoding="utf-8")
    assert "<script" not in html and "script" not in page.tags
    assert "The sky is <script>alert(1)</script> & blue." in page.text
    # A folder's name goes through the drawings too, where matplotlib would take $...$ for mathematics.
    save(conversion(), tmp_path / "a <b>$x_2$ & 'c'")
    write_report(tmp_path, tmp_path / "r.html")
    odd = Page((tmp_path / "r.html").read_text(encoding="utf-8"))
    assert odd.text.count("a <b>$x_2$ & 'c'") == 8  # settings, table, drawing, 2 headings, 2 deviations, artifacts
    assert odd.tags.count("b") == 4  # the cards' numbers


@pytest.mark.parametrize(
    ("texts", "shared"),
    [
        (("one two three", "one two four"), 8),
        (("same", "same"), 4),
        (("the", "then"), 0),
        (("", "x"), 0),
        ((), 0),
    ],
)
def test_common_prefix_ends_at_a_word(texts: tuple[str, ...], shared: int, tmp_path: Path) -> None:
    save(talk(*texts), tmp_path / "talk")
    numbers = write_report(tmp_path, tmp_path / "r.html")["generations"][0]
    assert numbers["shared"] == shared
    html = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert html.count("<mark>") == sum(len(text) > shared for text in texts)


def test_empty_folder_names_what_is_missing(tmp_path: Path) -> None:
    numbers = write_report(tmp_path, tmp_path / "r.html")
    text = Page((tmp_path / "r.html").read_text(encoding="utf-8")).text
    assert set(numbers["missing"]) == set(report.PARTS)
    for what, command in report.PARTS.values():
        assert what in text and command in text
    assert numbers["conversions"] == numbers["artifacts"] == []


def test_undecided_settings_are_listed_at_the_end(written: tuple[Path, dict[str, Any]]) -> None:
    out, report = written
    text = out.read_text()
    undecided = [setting for setting in report["settings"] if not setting["found"]]
    assert undecided and len(undecided) < len(report["settings"])
    begins = text.index("<h2>Not measured</h2>")
    for setting in undecided:
        assert text.count(f"recommended {setting['setting']}<") == 1
        assert text.index(f"recommended {setting['setting']}<") > begins


def test_missing_numbers_are_not_measured(tmp_path: Path) -> None:
    bare, wild = conversion(), conversion()
    bare.metrics, bare.seconds = {}, {}
    wild.metrics |= {"mla_ppl": math.inf, "ratio": math.nan, "layers": "none", "cache": None}
    wild.inputs = {"model": None}
    save(bare, tmp_path / "bare")
    save(wild, tmp_path / "wild")
    empty = Manifest("eval", {}, {"model": "text"}, {"ppl": True, "nll": "x"}, environment=MACHINE)
    save(empty, tmp_path / "eval")
    save(Manifest("generate", {}, {}, {"runs": [{}, 3]}, environment=MACHINE), tmp_path / "talk")
    for name, text in (("cut", '{"stage": '), ("other", '{"icons": []}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(text)
    (tmp_path / "odd").mkdir()
    odd = '{"stage": "convert", "config": null, "inputs": 3, "metrics": [], "environment": null}'
    (tmp_path / "odd" / "manifest.json").write_text(odd)
    numbers = write_report(tmp_path, tmp_path / "r.html")
    page = Page((tmp_path / "r.html").read_text(encoding="utf-8"))
    assert numbers["unreadable"] == ["cut", "other"]
    assert numbers["verdict"].startswith("latent: cache not measured, perplexity not finite")
    assert "not finite" in page.text and page.text.count("not measured") > 20
    assert "nan" not in page.text.lower().split() and "None" not in page.text
    assert len(page.paths) == 1  # the wall time of `wild` is all that can be drawn


def test_unfinished_artifacts_are_left_out(tmp_path: Path) -> None:
    save(conversion(), tmp_path / "x" / ".tiny.partial")
    assert write_report(tmp_path, tmp_path / "r.html")["artifacts"] == []


def test_folder_may_be_an_artifact_itself(tmp_path: Path) -> None:
    save(conversion(), tmp_path / "tiny")
    assert write_report(tmp_path / "tiny", tmp_path / "r.html")["conversions"][0]["name"] == "tiny"


def test_same_folder_same_page(tmp_path: Path) -> None:
    save(conversion(layers=2), tmp_path / "tiny")
    pages = []
    for _ in range(2):
        write_report(tmp_path, tmp_path / "r.html")
        pages.append((tmp_path / "r.html").read_bytes())
    assert pages[0] == pages[1]


def test_failure_leaves_the_earlier_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "r.html"
    write_report(tmp_path, out)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    save(evaluation(), tmp_path / "eval")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report.os, "replace", full)
    with pytest.raises(UserError, match="No space left"):
        write_report(tmp_path, out)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


def test_report_without_matplotlib_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs matplotlib: pip install"):
        write_report(tmp_path, tmp_path / "report.html")


def test_user_errors(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for folder in ("nowhere", "file"):
        with pytest.raises(UserError, match="does not exist"):
            write_report(tmp_path / folder, tmp_path / "r.html")
    with pytest.raises(UserError, match=r"ends in \.html"):
        write_report(tmp_path, tmp_path / "r.json")
    with pytest.raises(UserError, match="cannot write"):
        write_report(tmp_path, tmp_path / "file" / "r.html")
    config = tmp_path / "config.json"
    config.write_text("{}")
    with pytest.raises(UserError, match=r"config\.json exists and is not a report"):
        write_report(tmp_path, tmp_path / "config.html")
    assert config.read_text() == "{}" and not (tmp_path / "config.html").exists()


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [
        (0.5, "percent", "50 %"),
        (0, "bytes", "0 B"),
        (1023, "bytes", "1023 B"),
        (1048000, "bytes", "1023 KiB"),
        (3 * 2**30, "bytes", "3 GiB"),
        (9.994, "seconds", "9.99 s"),
        (599, "seconds", "599 s"),
        (1434.2, "seconds", "24 min"),
        (None, "times", "not measured"),
        (True, "times", "not measured"),
        (report.NOT_FINITE, "times", "not finite"),
    ],
)
def test_shown(value: Any, form: str, text: str) -> None:
    assert shown(value, form) == text


def test_healings_are_drawn(tmp_path: Path) -> None:
    save(healing(), tmp_path / "a" / '"><script>x')
    save(Manifest("heal", {}, {}, metrics={"curve": ["?", {"kl": "?"}]}, environment=MACHINE), tmp_path / "b")
    save(Manifest("heal", {}, {}, metrics={"curve": 5}, environment=MACHINE), tmp_path / "c")
    numbers = write_report(tmp_path, tmp_path / "r.html")
    page = Page((tmp_path / "r.html").read_text(encoding="utf-8"))
    assert len(page.paths) == 2 and "script" not in page.tags
    for text in ("Healing", "23.000", "20.500", "20.000", "321.5", "8,192", "tokens seen (millions)", "steps"):
        assert text in page.text, text
    assert {"where": 'a/"><script>x', "what": "the validation KL was best at step 2 of 3; those weights were written"} \
        in numbers["deviations"]  # fmt: skip


def test_selections_are_drawn(tmp_path: Path) -> None:
    layers = [
        {"kind": "dense", "topk": None},
        {"kind": "full", "topk": 900, "kl": 0.004},
        {"kind": "shared", "topk": 900, "kl": 0.002},
    ]
    metrics = {"layers": layers, "cache": {"index_bytes_per_token": 32}}
    save(Manifest("sparsify", {"topk": 900}, {}, metrics=metrics, environment=MACHINE), tmp_path / "a")
    save(Manifest("sparsify", {}, {}, metrics={"layers": ["?", {"topk": "?"}]}, environment=MACHINE), tmp_path / "b")
    report = write_report(tmp_path, tmp_path / "report.html")
    assert [s["indexes"] for s in report["selections"]] == [1, 0]
    text = (tmp_path / "report.html").read_text()
    assert "Sparse attention: tokens read" in text and "Sparse attention: loss by layer" in text
    assert text.count("a: tokens that a generated token reads") == 1 and "b: tokens that" not in text


def test_trainings_of_heads_are_drawn(tmp_path: Path) -> None:
    """Three plots of a complete curve, fewer of incomplete ones."""
    save(training(), tmp_path / "a" / '"><script>x')
    partly = [{"tokens": 5, "acceptance": "?", "loss": "?"}, {"tokens": 9, "acceptance_length": 1.5}, {"loss": 3}, 7]
    save(Manifest("draft train", {}, {}, metrics={"curve": partly}, environment=MACHINE), tmp_path / "b")
    save(Manifest("draft train", {}, {}, metrics={"curve": None}, environment=MACHINE), tmp_path / "c")
    numbers = write_report(tmp_path, tmp_path / "r.html")
    assert [len(figures) for figures in plots.figures(numbers, [])["trainings"]] == [3, 1, 0]
    page = Page((tmp_path / "r.html").read_text(encoding="utf-8"))
    assert len(page.paths) == 4 and min(page.paths) > 3 and "script" not in page.tags
    for text in (
        "Draft heads", "models/Tiny-135M", "7,654,321", "2,345", "645.5", "1.200", "1.575", "4,096",
        "accepted, by drafted token", "tokens per step, 3 drafted",
    ):  # fmt: skip
        assert text in page.text, text
    assert "draft train" not in numbers["missing"]
