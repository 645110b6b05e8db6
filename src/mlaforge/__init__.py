"""mlaforge: convert grouped-query attention into multi-head latent attention, and prove what it cost.

    from mlaforge import LLM, convert
    convert("MODEL", "OUT", budget=0.5)
    llm = LLM("OUT")

The names in `__all__` are the public API; everything else is private and may move. They are imported lazily (PEP 562),
so that importing this package does not import torch.
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
_MODULES = {
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
    if name not in _MODULES:
        raise AttributeError(f"module 'mlaforge' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"mlaforge.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
