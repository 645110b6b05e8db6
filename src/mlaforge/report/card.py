"""`card`: Hugging Face model card of one checkpoint, and technical report of the whole folder, in Markdown.

Both contain only numbers of the report's JSON; missing measurements are named.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from mlaforge.artifact import Manifest, finished, writing
from mlaforge.config import nearest
from mlaforge.rendering.page import at, jinja_page, number
from mlaforge.report.bench_results import dicts, measured
from mlaforge.report.config import CardConfig
from mlaforge.report.deviations import WATCHED
from mlaforge.report.report import summarise
from mlaforge.runtime import UserError

CARD, TECHNICAL, NUMBERS = "README.md", "technical_report.md", "report.json"
TAGS = ["mla", "multi-head-latent-attention", "kv-cache", "mlaforge"]


def run(folder: Path, out: Path, config: CardConfig, overwrite: bool = False) -> Manifest:
    """Write README.md (the card of one model), technical_report.md and report.json (of everything below `folder`) into
    the new directory `out`.

    Raise UserError if the folder has no converted model, or several of which none is named or canonical.
    """
    report = summarise(folder)
    record = choose(report, config.model)
    numbers = json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False)
    manifest = Manifest(
        "card",
        config=dataclasses.asdict(config),
        inputs={
            "model": {"name": record["name"], "fingerprint": record["fingerprint"]},
            "report": {"sha256": hashlib.sha256(numbers.encode()).hexdigest()},
        },
    )
    if existing := finished(out, manifest, overwrite):
        return existing
    facts = about(report, record)
    with writing(out, manifest) as partial:
        (partial / CARD).write_text(model_card(facts, config), encoding="utf-8")
        technical = jinja_page("technical_report.md.jinja").render(report, at=at, watched=WATCHED, measured=measured)
        (partial / TECHNICAL).write_text(technical, encoding="utf-8")
        (partial / NUMBERS).write_text(numbers + "\n", encoding="utf-8")
    return manifest


def choose(report: dict[str, Any], name: str | None) -> dict[str, Any]:
    """Conversion or healing of the card: the named one, the only one, or the only canonical one."""
    records = {record["name"]: record for record in report["conversions"] + report["healings"]}
    if not records:
        raise UserError(f"{report['folder']} contains no converted model; `mlaforge convert MODEL OUT` creates one")
    if name is not None:
        if name not in records:
            raise UserError(f"model {name!r} must be one of {', '.join(records)}{nearest(name, records)}")
        return dict(records[name])
    canonical = [record for record in records.values() if record["canonical"]]
    for candidates in (list(records.values()), canonical):
        if len(candidates) == 1:
            return dict(candidates[0])
    raise UserError(f"{report['folder']} contains several models: give --model, one of {', '.join(records)}")


def about(report: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    """Content of the card of one model: its record, its conversion, and all measurements of it.

    Other artifacts refer to a model by its path, of which the last part is compared.
    """
    name = Path(record["name"]).name
    healed = record["stage"] == "heal"
    student = Path(str(at(record, "inputs", "student", "path") or "")).name
    conversion = next((c for c in report["conversions"] if Path(c["name"]).name == (student if healed else name)), None)

    def about_model(records: list[dict[str, Any]], *keys: str) -> list[dict[str, Any]]:
        return [other for other in records if Path(str(at(other, *keys) or "")).name == name]

    comparisons = about_model(report["acceptances"], "inputs", "student", "path")
    cases = [{**c, "device": body.get("device")} for body in report["scenarios"] for c in measured(body["cases"])]
    return {
        "name": name,
        "record": record,
        "healed": healed,
        "conversion": conversion,
        "original": str(at(record, "inputs", "teacher", "path") if healed else at(record, "inputs", "model", "path")),
        "evaluations": (evaluations := about_model(report["evaluations"], "inputs", "model", "path")),
        "long": any((number(evaluation, "config", "seqlen") or 0) >= 8192 for evaluation in evaluations),
        "diverging": about_model(report["diverging"], "inputs", "model", "path"),
        # Contexts with a measurement.
        "speed": {label: sides for label, sides in (conversion or {}).get("speed", {}).items() if any(sides.values())},
        "criteria": [criterion for comparison in comparisons for criterion in comparison["criteria"]],
        # Replayed drafts are an upper bound, not a result of the model.
        "cases": [case for case in about_model(cases, "model") if case["draft"] != "replay"],
        "settings": [
            {**setting, "found": [row for row in setting["found"] if name in row["where"] or name in row["value"]]}
            for setting in report["settings"]
        ],
        "deviations": [
            deviation for deviation in report["deviations"]
            if name in (Path(deviation["where"]).name, *deviation["what"].replace(":", " ").split())
            or (conversion and deviation["where"] == conversion["name"])
        ],
    }  # fmt: skip


def model_card(facts: dict[str, Any], config: CardConfig) -> str:
    """README.md: YAML front matter for the hub, and the text."""
    from huggingface_hub import ModelCardData

    results = _eval_results(facts)
    data = ModelCardData(
        model_name=facts["name"], license=config.license, base_model=config.base_model, library_name="transformers",
        pipeline_tag="text-generation", tags=TAGS, eval_results=results or None,
    )  # fmt: skip
    body = jinja_page("card.md.jinja").render(facts, at=at, config=config)
    return f"---\n{data.to_yaml()}\n---\n{body}"


def _eval_results(facts: dict[str, Any]) -> list[Any]:
    """Measured perplexities and criteria in the format of the hub's model-index."""
    from huggingface_hub import EvalResult

    def result(text: str, metric: str, value: float, name: str) -> Any:
        kind = Path(text).name or "text"
        return EvalResult(
            task_type="text-generation", dataset_type=kind, dataset_name=kind, metric_type=metric, metric_value=value,
            metric_name=name,
        )  # fmt: skip

    results, conversion = [], facts["conversion"]
    if conversion and not facts["healed"] and (ppl := number(conversion, "metrics", "mla_ppl")) is not None:
        text = str(at(conversion, "inputs", "evaluation", "source"))
        ratio = number(conversion, "metrics", "ratio")
        results.append(result(text, "perplexity", ppl, f"perplexity ({ratio:.4f} times the original's)"))
    for evaluation in facts["evaluations"]:
        if (ppl := number(evaluation, "metrics", "ppl")) is not None:
            results.append(result(str(at(evaluation, "inputs", "text", "source")), "perplexity", ppl, "perplexity"))
    for criterion in dicts(facts["criteria"]):
        if (value := number(criterion, "student")) is not None:
            results.append(result("criteria", str(criterion.get("name")), value, f"{criterion.get('name')} (student)"))
    return results
