"""`demo`: the whole chain on a real model, from nothing to a report. A second run reuses what is finished."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from mlaforge import convert, demo_model, generate
from mlaforge.artifact import Manifest
from mlaforge.options import ConvertConfig, DemoConfig, GenerateConfig
from mlaforge.report import write_report
from mlaforge.runtime import log


def run(folder: Path, config: DemoConfig) -> dict[str, Any]:
    """Converts the demo's model in both layouts at half the cache, talks with it, and writes FOLDER/report.html."""
    source = demo_model.fetch()
    made: dict[str, Manifest] = {}
    # Both layouts are made from the same moments.
    calibrated = folder / ".calibration"
    for layout in ("latent", "latent_rope"):
        log(f"converting SmolLM2-135M-Instruct to {layout} at half the cache")
        settings = ConvertConfig(
            layout=layout, nsamples=config.nsamples, eval_windows=config.eval_windows, device="cpu"
        )
        out = folder / f"smollm2-{layout}-50"
        made[layout] = convert.run(str(source), out, settings, overwrite=True, calibrated=calibrated)
    shutil.rmtree(calibrated, ignore_errors=True)
    talk = folder / "talk"
    said = generate.run(
        str(source),
        talk,
        GenerateConfig(prompt=config.prompt, against=str(folder / "smollm2-latent-50"), chat=True, device="cpu"),
        overwrite=True,
    )
    report = folder / "report.html"
    write_report(folder, report)
    return {"conversions": made, "talk": said, "report": report}
