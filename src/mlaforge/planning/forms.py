"""The forms that a cache can have: what `plan` weighs against each other, and what each typically loses.

A typical loss is measured, not computed: nats per token, the mean over encyclopedia, Python source and mathematics, on
SmolLM2-135M-Instruct calibrated on 65,536 tokens of encyclopedia (benchmarks/kv_cache.json for rows that are rounded,
benchmarks/conversion.json for ranks; a test compares). What a selection loses beside is the mean over positions 4K to
8K of eight documents of three kinds (benchmarks/sparsity.json). Another model loses more or less: `diagnose` measures
its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mlaforge.families.spec import ModelSpec
from mlaforge.planning.plan import Plan, coded_plan, make_plan, sparse, unconverted

MEASURED_ON = "SmolLM2-135M-Instruct"
# Tokens of the windows that selections were measured in.
SELECTED_FROM = 8192


@dataclass(frozen=True)
class Form:
    """One form: the original with rows `stored` so, or a conversion to a `layout` with plain rows of a `budget` or
    coded ones of so many `bits`. `loss`: its typical one. `on`: where the engine reads such rows without decoding all
    of them first. `one_of`: a generated token reads one of so many tokens, as many at shorter contexts as at the one
    that was measured; 0: all."""

    stored: str
    loss: float
    layout: str = "gqa"
    budget: float | None = None
    bits: float | None = None
    on: tuple[str, ...] = ("cpu", "gpu")
    one_of: int = 0

    def topk(self, context: int) -> int:
        """Tokens that a generated token reads; 0: all."""
        return max(SELECTED_FROM, context) // self.one_of if self.one_of else 0

    def plan(self, spec: ModelSpec, layers: str, context: int) -> Plan:
        """Raises UserError where the model cannot have it."""
        plan = self._dense(spec, layers)
        return sparse(plan, self.topk(context)) if self.one_of else plan

    def _dense(self, spec: ModelSpec, layers: str) -> Plan:
        if self.layout == "gqa":
            return unconverted(spec, self.stored)
        if self.bits is not None:
            return coded_plan(spec, self.bits, self.layout, layers)
        assert self.budget is not None
        return make_plan(spec, self.budget, self.layout, layers, stored=self.stored)

    def advice(self, context: int) -> str:
        """What to do, as a sentence begins, with the options that do it."""
        selects = f"mlaforge sparsify --topk {self.topk(context)}" if self.one_of else ""
        if self.layout == "gqa":
            bits = {"int8": 8, "fp8": 8, "int4": 4}.get(self.stored)
            kept = f" with an {bits}-bit cache" if bits == 8 else f" with a {bits}-bit cache" if bits else " as it is"
            options = [selects] if selects else []
            options += [f"--kv-cache-dtype {self.stored}"] if bits else []
            said = f"Sparsify the original{kept if bits else ''}" if selects else f"Keep the original{kept}"
            return said + (f" ({', '.join(options)})" if options else "")
        if self.bits is not None:
            rows = "coded"
            option = f"--bits {self.bits:g}" + (f" --layout {self.layout}" if self.layout != "latent" else "")
        else:
            rows, option = "plain", f"--layout {self.layout} --budget {self.budget:g}"
        said = f"Convert to {self.layout} with {rows} rows" + (" and sparsify" if selects else "")
        return f"{said} ({', '.join(filter(None, (f'mlaforge convert {option}', selects)))})"

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
    Form("bf16", 0.0061, one_of=8),
    Form("bf16", 0.0171, one_of=16),
    Form("int8", 0.0017 + 0.0061, one_of=8, on=("cpu",)),
    Form("bf16", 0.0923 + 0.0055, "latent", budget=0.5, one_of=8),
    Form("coded", 0.0045 + 0.0058, "latent", bits=4.0, one_of=8, on=("cpu",)),
)
