"""mlaforge: convert grouped-query attention into multi-head latent attention, and prove what it cost.

    from mlaforge import LLM, convert
    convert("MODEL", "OUT", budget=0.5)
    llm = LLM("OUT")

The names of `__all__` are the public API; everything else is private and may move. Importing this package is light on
purpose: a name loads what it needs, torch among it, when it is first used (PEP 562).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlaforge.calibration.calibrate import calibrate
    from mlaforge.checkpoint.loading import load_model
    from mlaforge.conversion.convert import convert
    from mlaforge.diagnosis.diagnose import diagnose
    from mlaforge.engine.llm import LLM
    from mlaforge.engine.request.output import RequestOutput
    from mlaforge.engine.sampling.params import SamplingParams
    from mlaforge.evaluation.perplexity import evaluate
    from mlaforge.healing.heal import heal
    from mlaforge.planning.report import plan
    from mlaforge.sparsity.sparsify import sparsify

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "RequestOutput",
    "SamplingParams",
    "calibrate",
    "convert",
    "diagnose",
    "evaluate",
    "heal",
    "load_model",
    "plan",
    "sparsify",
]
_HOME = {
    "LLM": "engine.llm",
    "RequestOutput": "engine.request.output",
    "SamplingParams": "engine.sampling.params",
    "calibrate": "calibration.calibrate",
    "convert": "conversion.convert",
    "diagnose": "diagnosis.diagnose",
    "evaluate": "evaluation.perplexity",
    "heal": "healing.heal",
    "load_model": "checkpoint.loading",
    "plan": "planning.report",
    "sparsify": "sparsity.sparsify",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'mlaforge' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"mlaforge.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
