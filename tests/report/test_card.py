"""Model card and technical report: metadata for the hub, and only the numbers of the manifests."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from mlaforge.report import card
from mlaforge.report.config import CardConfig
from mlaforge.runtime import UserError
from support import recorded


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two conversions, one of them with all measurements."""
    folder = tmp_path_factory.mktemp("runs")
    conversion = recorded.conversion()
    conversion.metrics |= {"log_ratio_stderr": 0.004, "windows": 8}
    conversion.metrics |= {"sparse_ppl": 19.7, "sparse_ratio": 1.036, "sparse_log_ratio_stderr": 0.003}
    conversion.config["topk"] = 1024
    recorded.save(conversion, folder / "deep" / "tiny-latent")
    recorded.save(recorded.conversion("latent_rope", 1.27), folder / "tiny|rope")
    evaluation = recorded.evaluation(
        topk=1024, teacher_ppl=18.5, ratio=1.028, log_ratio_stderr=0.002, kl=0.0123, kl_p99=0.234, top1=0.9512
    )
    evaluation.config["seqlen"] = 8192
    evaluation.inputs["model"]["path"] = "elsewhere/tiny-latent"
    recorded.save(evaluation, folder / "eval")
    comparison = recorded.judged()
    comparison.inputs["student"]["path"] = "elsewhere/tiny-latent"
    recorded.save(comparison, folder / "judged")
    partial = recorded.case("tiny-latent", "latent", 4096, 61.0, 3, specpv="lossless")
    recorded.put(folder, single=recorded.scenario([*recorded.cases(), partial]), gates=recorded.gates())
    return folder


def write_card(folder: Path, out: Path, **options: Any) -> tuple[str, str]:
    card.run(folder, out, CardConfig(**options))
    return (out / card.CARD).read_text(), (out / card.TECHNICAL).read_text()


def test_card_metadata_is_valid_for_the_hub(runs: Path, tmp_path: Path) -> None:
    text, _ = write_card(
        runs, tmp_path / "card", model="deep/tiny-latent", license="apache-2.0", base_model="someone/Tiny-135M"
    )
    read = ModelCard(text).data
    assert read.license == "apache-2.0" and read.base_model == "someone/Tiny-135M"
    assert read.library_name == "transformers" and read.pipeline_tag == "text-generation" and "mla" in read.tags
    assert read.model_name == "tiny-latent"
    values = {(r.dataset_name, r.metric_type): r.metric_value for r in read.eval_results}
    # One perplexity of the conversion, one of its evaluation on the same text, two criteria.
    perplexities = [r.metric_value for r in read.eval_results if r.dataset_name == "wiki.test"]
    assert perplexities == [pytest.approx(19.0186 * 1.021), 19.0186]
    assert values["criteria", "kl"] == 0.05


def test_card_shows_the_measurements(runs: Path, tmp_path: Path) -> None:
    text, _ = write_card(runs, tmp_path / "card", model="deep/tiny-latent")
    for expected in (
        "| wiki.test, 2,048 tokens | 19.019 | 19.418 | ×1.021 | ×1.011 – ×1.031 |",
        "46.9 % of the original's", "84.1 MiB",
        "| the same, 1,024 tokens read per layer, as served | 19.019 | 19.700 | ×1.036 | ×1.029 – ×1.043 |",
        "| wiki.test, 8,192 tokens, 1,024 read | 18.500 | 19.019 | ×1.028 | ×1.023 – ×1.033 |",
        "| wiki.test, 8,192 tokens, 1,024 read | 0.0123 | 0.234 | 95.1 % |",
        "| kl | 0.05 | 0 | 0.05 | 0.02 | fail |", "has not passed",
        "| test machine | mlaforge | 4096 × 1 | none | 45.0 | 50 % |", "| 512 × 1 | 2 by ngram | 71.5 |",
        "| 4096 × 1 | 3 by ngram, specpv | 61.0 |",
        "No licence was given", "predicted loss 0.00738 nats per token, measured 0.0208",
        'from_pretrained("OWNER/tiny-latent", trust_remote_code=True)', "32,768 tokens",
    ):  # fmt: skip
        assert expected in text, expected
    assert "latent_rope" not in text and "None" not in text and "8,192 tokens is not measured" not in text
    assert "| gqa |" not in text and "Tiny-135M | 0 |" not in text


def tables(text: str) -> list[list[str]]:
    """Rows of every table, all with the same number of cells."""
    blocks = [block.splitlines() for block in re.findall(r"(?:^\|.*\|$\n?)+", text, re.MULTILINE)]
    for rows in blocks:
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1, rows
    return blocks


def test_technical_report_is_complete(runs: Path, tmp_path: Path) -> None:
    text, report = write_card(runs, tmp_path / "card", model="deep/tiny-latent")
    assert len(tables(text)) >= 4 and len(tables(report)) >= 5
    for expected in (
        "| tiny\\|rope | latent_rope |", "much faster", "104 112 120", "8,192 does not fit",
        "- healing curves: `mlaforge heal", "19.019", "min – max",
        "| 4096 × 1 | 3 ngram, specpv | 61.0 |", ", 62 % kept |",
        "| eval | 18.500 | ×1.028 | 0.0123 | 0.234 | 95.1 % |",
    ):  # fmt: skip
        assert expected in report, expected
    numbers = json.loads((tmp_path / "card" / card.NUMBERS).read_text())
    assert numbers["conversions"][0]["metrics"]["ratio"] == 1.021
    assert not re.search(r"^#+ .*\n#", report, re.MULTILINE), "a heading with nothing below it"


def test_choice_of_the_model(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="several models: give --model, one of deep/tiny-latent, "):
        write_card(runs, tmp_path / "card")
    with pytest.raises(UserError, match="did you mean 'deep/tiny-latent'"):
        write_card(runs, tmp_path / "card", model="tiny-latent")
    with pytest.raises(UserError, match="no converted model"):
        write_card(runs / "eval", tmp_path / "card")
    with pytest.raises(UserError, match="does not exist"):
        write_card(runs / "nowhere", tmp_path / "card")
    assert not (tmp_path / "card").exists()
    for name in ("one", "two"):
        conversion = recorded.conversion()
        conversion.canonical = name == "two"
        recorded.save(conversion, tmp_path / "several" / name)
    text, _ = write_card(tmp_path / "several", tmp_path / "card")
    assert "# two" in text and "It passed its acceptance criteria" in text


def test_card_of_a_healed_model_names_its_origin(tmp_path: Path) -> None:
    recorded.save(recorded.conversion(), tmp_path / "runs" / "here")
    healed = recorded.healing()
    healed.inputs["teacher"] = {"path": "models/Tiny-135M"}
    recorded.save(healed, tmp_path / "runs" / "healed")
    text, _ = write_card(tmp_path / "runs", tmp_path / "card", model="healed")
    assert "distilled from models/Tiny-135M over 8,192 tokens" in text
    assert "| held-out healing text | 20.000 | 20.500 | ×1.025 |" in text and ", before healing |" in text
    # The conversion's perplexity is not reported for the healed model.
    assert ModelCard(text).data.eval_results is None


def test_missing_numbers_are_not_measured(tmp_path: Path) -> None:
    bare = recorded.conversion()
    bare.metrics, bare.inputs = {}, {}
    recorded.save(bare, tmp_path / "runs" / "bare")
    text, report = write_card(tmp_path / "runs", tmp_path / "card")
    assert "not measured" in text and "Not measured." in text and "None" not in text + report
    tables(text), tables(report)


def test_names_are_escaped(tmp_path: Path) -> None:
    recorded.save(recorded.conversion(), tmp_path / "runs" / "a <script>*b* [c](d)")
    text, report = write_card(tmp_path / "runs", tmp_path / "card")
    assert "<script>" not in text.split("---", 2)[2] + report
    assert "&lt;script>\\*b\\* \\[c\\](d)" in report


def test_finished_card_is_reused(runs: Path, tmp_path: Path) -> None:
    config = CardConfig(model="deep/tiny-latent")
    first = card.run(runs, tmp_path / "card", config)
    before = (tmp_path / "card" / card.CARD).stat().st_mtime_ns
    assert card.run(runs, tmp_path / "card", config).fingerprint == first.fingerprint
    assert (tmp_path / "card" / card.CARD).stat().st_mtime_ns == before
    with pytest.raises(UserError, match="--overwrite"):
        card.run(runs, tmp_path / "card", CardConfig(model="deep/tiny-latent", license="mit"))
