"""The forms that a cache can have: what `plan` weighs against each other, and what each typically loses.

A typical loss is measured, not computed: nats per token, the mean over encyclopedia, Python source and mathematics, on
SmolLM2-135M-Instruct calibrated on 65,536 tokens of encyclopedia (benchmarks/kv_cache.json for rows that are rounded,
benchmarks/conversion.json for ranks; a test compares). Another model loses more or less: `diagnose` measures
its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mlaforge.families.spec import ModelSpec
from mlaforge.planning.plan import Plan, coded_plan, make_plan, unconverted

MEASURED_ON = "SmolLM2-135M-Instruct"


@dataclass(frozen=True)
class Form:
    """One form: the original with rows `stored` so, or a conversion to a `layout` with plain rows of a `budget` or
    coded ones of so many `bits`. `loss`: its typical one. `on`: where the engine reads such rows without decoding all
    of them first."""

    stored: str
    loss: float
    layout: str = "gqa"
    budget: float | None = None
    bits: float | None = None
    on: tuple[str, ...] = ("cpu", "gpu")

    def plan(self, spec: ModelSpec, layers: str) -> Plan:
        """Raises UserError where the model cannot have it."""
        if self.layout == "gqa":
            return unconverted(spec, self.stored)
        if self.bits is not None:
            return coded_plan(spec, self.bits, self.layout, layers)
        assert self.budget is not None
        return make_plan(spec, self.budget, self.layout, layers, stored=self.stored)

    @property
    def advice(self) -> str:
        """What to do, as a sentence begins, with the option that does it."""
        if self.layout == "gqa":
            bits = {"int8": 8, "fp8": 8, "int4": 4}.get(self.stored)
            kept = f" with an {bits}-bit cache" if bits == 8 else f" with a {bits}-bit cache" if bits else " as it is"
            return f"Keep the original{kept}" + (f" (--kv-cache-dtype {self.stored})" if bits else "")
        if self.bits is not None:
            option = f"--bits {self.bits:g}" + (f" --layout {self.layout}" if self.layout != "latent" else "")
            return f"Convert to {self.layout} with coded rows (mlaforge convert {option})"
        option = f"--layout {self.layout} --budget {self.budget:g}"
        return f"Convert to {self.layout} with plain rows (mlaforge convert {option})"

    @property
    def percent(self) -> float:
        """What the typical loss adds to perplexity, in per cent."""
        return 100 * math.expm1(self.loss)


FORMS = (
    Form("bf16", 0.0),
    Form("int8", 0.0017, on=("cpu",)),
    Form("fp8", 0.0129, on=("gpu",)),
    Form("int4", 0.0114, on=("cpu",)),
    Form("bf16", 0.0075, "latent", budget=0.75),
    Form("bf16", 0.0923, "latent", budget=0.5),
    Form("bf16", 0.3030, "latent", budget=0.375),
    Form("bf16", 0.0782, "latent_rope", budget=0.75),
    Form("bf16", 0.3345, "latent_rope", budget=0.5),
    Form("coded", 0.0045, "latent", bits=4.0, on=("cpu",)),
    Form("coded", 0.0184, "latent", bits=3.0, on=("cpu",)),
    Form("coded", 0.0723, "latent", bits=2.0, on=("cpu",)),
    Form("coded", 0.0836, "latent_rope", bits=4.0, on=("cpu",)),
)
