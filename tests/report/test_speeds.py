"""Speeds in the report: the measurement that counts for each context and model."""

from pathlib import Path

from mlaforge.report.card import about, choose, model_card
from mlaforge.report.config import CardConfig
from mlaforge.report.report import summarise, write_report
from support import recorded
from support.html_page import Page


def folder(tmp_path: Path, **more: object) -> Path:
    """An original and its conversion, measured at several contexts."""
    conversion = recorded.conversion("latent", 1.02)
    conversion.metrics |= {"log_ratio_stderr": 0.001, "windows": 8}
    conversion.metrics["cache"] |= more
    recorded.save(conversion, tmp_path / "tiny-latent")
    cases = [
        recorded.case(model, layout, context, speed, **changes)
        for model, layout, factor in (("models/Tiny-135M", "gqa", 1.0), ("tiny-latent", "latent", 0.5))
        for context, speed, changes in (
            (100, 60.0, {}), (2000, 50.0, {}), (3000, 45.0, {}), (8000, 40.0, {}),
            # Not plain decoding of one request by mlaforge on this machine.
            (2048, 99.0, {"drafts": 3}), (2048, 99.0, {"batch": 4}), (2048, 99.0, {"engine": "transformers"}),
            (2048, 99.0, {"imported": {"device": "other"}}),
        )
        for speed in [speed * factor]
    ]  # fmt: skip
    recorded.put(tmp_path, speed=recorded.scenario(cases, "speed"))
    return tmp_path


def test_nearest_plain_measurement_counts(tmp_path: Path) -> None:
    report = summarise(folder(tmp_path))
    assert report["conversions"][0]["speed"] == {
        "100": {"gqa": 60.0, "mla": 30.0}, "2K": {"gqa": 50.0, "mla": 25.0}, "8K": {"gqa": 40.0, "mla": 20.0},
    }  # fmt: skip
    write_report(tmp_path, tmp_path / "r.html")
    page = Page((tmp_path / "r.html").read_text())
    assert "tokens/s by context" in page.text and "→ 25.0" in page.text
    card = model_card(about(report, choose(report, None)), CardConfig())
    assert "| 2K | 50.0 | 25.0 |" in card and "| 8K | 40.0 | 20.0 |" in card


def test_generate_fills_in_short_contexts(tmp_path: Path) -> None:
    conversion = recorded.conversion("latent", 1.02)
    recorded.save(conversion, tmp_path / "tiny-latent")
    talk = recorded.talk("one", "two", "drafted")
    names = ("models/Tiny-135M", "tiny-latent", "tiny-latent")
    for run, name, speed in zip(talk.metrics["runs"], names, (20.0, 15.0, 70.0), strict=True):
        run |= {"model": name, "tokens_per_second": speed}
    talk.metrics["runs"][2]["eagle_speculation"] = {"mean_acceptance_length": 3.0}
    recorded.save(talk, tmp_path / "talk")
    speed = summarise(tmp_path)["conversions"][0]["speed"]
    assert speed["100"] == {"gqa": 20.0, "mla": 15.0} and speed["2K"] == {"gqa": None, "mla": None}
    # Results of `bench` take precedence at any distance.
    recorded.put(tmp_path, speed=recorded.scenario([recorded.case("tiny-latent", "latent", 180, 33.0)]))
    assert summarise(tmp_path)["conversions"][0]["speed"]["100"] == {"gqa": 20.0, "mla": 33.0}


def test_models_are_shown_by_short_names(tmp_path: Path) -> None:
    conversion = recorded.conversion("latent", 1.02)
    conversion.inputs["model"]["path"] = "Tiny-135M.Q4_1-b179c9523d0e"
    recorded.save(conversion, tmp_path / "a" / "smollm2-latent-50")
    write_report(tmp_path, tmp_path / "r.html")
    page = Page((tmp_path / "r.html").read_text())
    assert "Tiny-135M.Q4_1, latent, 50 % of the cache" in page.text
    # The digest is shown under Provenance only.
    assert page.text.index("b179c9523d0e") > page.text.index("Provenance")


def test_loops_are_reported(tmp_path: Path) -> None:
    talk = recorded.talk("The sky is blue. The sky is blue. The sky is blue.")
    talk.metrics["runs"][0]["repeats_from"] = 7
    recorded.save(talk, tmp_path / "talk")
    write_report(tmp_path, tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert "repeats itself from token 7" in page and "the answer of model-0 repeats itself from token 7" in page


def test_contexts_are_limited_to_the_model_s_maximum(tmp_path: Path) -> None:
    short = summarise(folder(tmp_path / "short", positions=8192))
    assert short["longest"] == "8K" and list(short["conversions"][0]["context_bytes"]) == ["8K"]
    assert [card["title"] for card in short["cards"]][-1] == "One sequence of 8K tokens"
    tiny = summarise(folder(tmp_path / "tiny", positions=512))
    assert tiny["longest"] == "8K"
    assert summarise(folder(tmp_path / "any"))["longest"] == "128K"


def test_recommendation_names_the_upper_end_of_an_interval(tmp_path: Path) -> None:
    conversion = recorded.conversion("latent", 1.1)
    conversion.metrics |= {"log_ratio_stderr": 0.01, "windows": 8}
    recorded.save(conversion, tmp_path / "dear")
    row = next(s for s in summarise(tmp_path)["settings"] if s["setting"] == "cache")["found"][0]
    assert row["because"] == "the best is dear: ×1.100, upper end of its interval ×1.126"
    conversion.metrics |= {"ratio": 1.01}
    recorded.save(conversion, tmp_path / "cheap")
    row = next(s for s in summarise(tmp_path)["settings"] if s["setting"] == "cache")["found"][0]
    assert row["because"] == "cheap: ×1.010 (95 % interval ×0.986 to ×1.034)"
