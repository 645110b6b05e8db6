"""The stages of `verify-gpu` in the order of their value: names, modules, time limits. Imports no torch and no CUDA."""

from __future__ import annotations

import dataclasses

PACKAGE = "mlaforge.gpu_verification"
# The run that the limits below add up to more than: stages mostly end before their limits.
FULL_SECONDS = 480.0


@dataclasses.dataclass(frozen=True)
class Stage:
    """`module` has a function `cases(context)` that lists the stage's cases. `limit` is in seconds of a run of
    FULL_SECONDS; a shorter run scales it. `runs_kernels`: it needs the GPU, or on a twin Triton's interpreter."""

    name: str
    module: str
    limit: float
    description: str
    runs_kernels: bool = True


STAGES = (
    Stage("probe", f"{PACKAGE}.probe", 40, "versions, memory and matrix speed, device limits"),
    Stage("compile", f"{PACKAGE}.compilation", 110, "every Triton kernel compiled: registers, spills", False),
    Stage("correctness", f"{PACKAGE}.correctness", 110, "kernels against fp64 references"),
    Stage("attention", f"{PACKAGE}.attention", 90, "paged attention against the memory and compute roof"),
    Stage("experts", f"{PACKAGE}.experts", 40, "MXFP4 experts part by part"),
    Stage("engine", f"{PACKAGE}.engine_steps", 90, "the engine on 4 layers of 20B's sizes"),
    Stage("model", f"{PACKAGE}.full_model", 90, "tokens per second of all 24 layers"),
    Stage("transformers", f"{PACKAGE}.transformers_ratio", 80, "transformers on the same 4 layers"),
    Stage("converted", f"{PACKAGE}.converted_models", 90, "converted models: steps and memory of a prompt"),
    Stage("verification", f"{PACKAGE}.verification", 90, "speculative verification, drafting, token selection"),
    Stage("tests", f"{PACKAGE}.gpu_tests", 150, "the tests with the marker gpu"),
)
NAMES = tuple(stage.name for stage in STAGES)
