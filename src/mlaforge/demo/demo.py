"""`demo`: the whole chain on a real model, from nothing to a report. A second run reuses what is finished."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

from mlaforge.artifact import Manifest
from mlaforge.conversion import convert
from mlaforge.conversion.config import ConvertConfig
from mlaforge.demo import model as demo_model
from mlaforge.demo.config import DemoConfig
from mlaforge.report.report import write_report
from mlaforge.runtime import log
from mlaforge.serving import generate
from mlaforge.serving.config import GenerateConfig


def run(folder: Path, config: DemoConfig) -> dict[str, Any]:
    """Converts the demo's model in both layouts at half the cache, talks with original and latent, then with the
    draft head of each, and writes FOLDER/report.html."""
    source = demo_model.fetch()
    conversions: dict[str, Manifest] = {}
    # Both layouts are made from the same moments.
    calibrated = folder / ".calibration"
    for layout in ("latent", "latent_rope"):
        log(f"converting SmolLM2-135M-Instruct to {layout} at half the cache")
        settings = ConvertConfig(
            layout=layout, nsamples=config.nsamples, eval_windows=config.eval_windows, device="cpu"
        )
        out = folder / f"smollm2-{layout}-50"
        conversions[layout] = convert.run(str(source), out, settings, overwrite=True, calibrated=calibrated)
    shutil.rmtree(calibrated, ignore_errors=True)
    converted = folder / "smollm2-latent-50"
    chat = GenerateConfig(prompt=config.prompt, chat=True, device="cpu")
    beside = dataclasses.replace(chat, against=str(converted))
    generations = [generate.run(str(source), folder / "talk", beside, overwrite=True)]
    for form, model in (("original", source), ("latent-50", converted)):
        with_head = dataclasses.replace(chat, speculative=str(demo_model.head(form)))
        generations.append(generate.run(str(model), folder / f"talk-{form}-drafted", with_head, overwrite=True))
    report = folder / "report.html"
    write_report(folder, report)
    return {"conversions": conversions, "generations": generations, "report": report}
