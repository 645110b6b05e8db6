"""Stages of `verify-gpu` by priority: names, modules, time limits. Imports neither torch nor CUDA."""

from __future__ import annotations

import dataclasses

PACKAGE = "mlaforge.gpu_verification"
# Length of a full run. The limits below add up to more, as stages mostly end before their limits.
FULL_SECONDS = 480.0


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage. module: has a function `cases(context)` that yields the stage's cases. limit: seconds in a run of
    FULL_SECONDS; a shorter run scales it. runs_kernels: the stage needs the GPU, or Triton's interpreter on a twin."""

    name: str
    module: str
    limit: float
    description: str
    runs_kernels: bool = True


STAGES = (
    Stage("probe", f"{PACKAGE}.probe", 40, "versions, memory and matrix speed, device limits"),
    Stage("compile", f"{PACKAGE}.compilation", 110, "every Triton kernel compiled: registers, spills", False),
    Stage("correctness", f"{PACKAGE}.correctness", 110, "kernels against fp64 references"),
    Stage("attention", f"{PACKAGE}.attention", 90, "paged attention against the memory and compute roofline"),
    Stage("experts", f"{PACKAGE}.experts", 40, "MXFP4 experts part by part"),
    Stage("operations", f"{PACKAGE}.layer_operations", 20, "norms, gates, rotation, absorbed products, routing"),
    Stage("external", f"{PACKAGE}.external", 60, "installed kernels of other libraries, beside this package's"),
    Stage("engine", f"{PACKAGE}.engine_steps", 90, "the engine on 4 layers of 20B's sizes"),
    Stage("model", f"{PACKAGE}.full_model", 90, "tokens per second of all 24 layers"),
    Stage("transformers", f"{PACKAGE}.transformers_ratio", 80, "transformers on the same 4 layers"),
    Stage("converted", f"{PACKAGE}.converted_models", 90, "converted models: steps and memory of a prompt"),
    Stage("verification", f"{PACKAGE}.verification", 90, "speculative verification, drafting, token selection"),
    Stage("tests", f"{PACKAGE}.gpu_tests", 150, "tests with the marker gpu"),
)
NAMES = tuple(stage.name for stage in STAGES)
