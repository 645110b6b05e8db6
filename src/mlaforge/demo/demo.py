"""`demo`: all stages on a real model, from the download to a report. A second run reuses finished artifacts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlaforge.conversion import convert
from mlaforge.conversion.config import ConvertConfig
from mlaforge.demo import model as demo_model
from mlaforge.demo.config import DemoConfig
from mlaforge.planning import report as planning
from mlaforge.planning.config import PlanConfig
from mlaforge.report.report import write_report
from mlaforge.runtime import log
from mlaforge.serving import generate
from mlaforge.serving.config import GenerateConfig

CONVERTED = "smollm2-latent-4-bits"


def run(folder: Path, config: DemoConfig) -> Iterator[tuple[str, Any]]:
    """Yield (name, result) of every stage as it finishes: "plan" (a PlanReport for this machine), "answer" of the
    original (its manifest), "conversion" (its manifest), "answer" of the converted model without and with a draft head,
    and "report" (the page's path)."""
    source = demo_model.fetch()
    yield "plan", planning.run(str(source), PlanConfig(context="2k", batch=1, gpu="cpu"))
    chat = GenerateConfig(prompt=config.prompt, chat=True, device="cpu", temperature=0.0, generation_config="none")
    yield "answer", generate.run(str(source), folder / "talk-original", chat, overwrite=True)

    log("converting: every pass over the layers shows its remaining time; the backward pass takes longest")
    # In the dtype of serving, so that the bytes of plain and coded rows are comparable.
    settings = ConvertConfig(nsamples=config.nsamples, eval_windows=config.eval_windows, dtype="bfloat16", device="cpu")
    converted = folder / CONVERTED
    yield "conversion", convert.run(str(source), converted, settings, overwrite=True)

    yield "answer", generate.run(str(converted), folder / "talk-converted", chat, overwrite=True)
    # Coded rows change the model so little that the head of the original predicts the converted model's tokens.
    drafted = dataclasses.replace(chat, speculative=str(demo_model.head("original")))
    yield "answer", generate.run(str(converted), folder / "talk-drafted", drafted, overwrite=True)
    write_report(folder, folder / "report.html")
    yield "report", folder / "report.html"
