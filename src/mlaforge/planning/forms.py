"""Forms of the cache that `plan` compares, with their typical losses.

A typical loss is measured, in nats per token: the mean over encyclopedia, Python source and mathematics, on
SmolLM2-135M-Instruct calibrated on 65,536 tokens of encyclopedia (benchmarks/kv_cache.json for rounded rows,
benchmarks/conversion.json for ranks; a test compares them). The additional loss of a selection is the mean over
positions 4K to 8K of eight documents of three kinds (benchmarks/sparsity.json). Other models differ: `diagnose`
measures them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mlaforge.families.spec import ModelSpec
from mlaforge.ops.row_formats import row_format
from mlaforge.planning.code_plan import coded_plan
from mlaforge.planning.plan import Plan, make_plan, unconverted
from mlaforge.planning.selection import sparse

MEASURED_ON = "SmolLM2-135M-Instruct"
# Length of the windows in which selections were measured.
SELECTED_FROM = 8192


@dataclass(frozen=True)
class Form:
    """One form of the cache: the original with rows stored as `stored`, or a conversion to `layout` with plain rows of
    a `budget` or coded rows of `bits`.

    loss: typical loss, nats per token. devices: where the engine reads such rows without decoding all of them first.
    selection_ratio: a generated token reads one of this many tokens, and at contexts shorter than the measured one as
    many as there. reads: or so many at every context. 0 and 0: it reads all.
    """

    stored: str
    loss: float
    layout: str = "gqa"
    budget: float | None = None
    bits: float | None = None
    devices: tuple[str, ...] = ("cpu", "gpu")
    selection_ratio: int = 0
    reads: int = 0

    @property
    def sparse(self) -> bool:
        """Whether a generated token reads a selection."""
        return bool(self.selection_ratio or self.reads)

    def topk(self, context: int) -> int:
        """Tokens that a generated token reads; 0: all."""
        return max(SELECTED_FROM, context) // self.selection_ratio if self.selection_ratio else self.reads

    def plan(self, spec: ModelSpec, layers: str, context: int) -> Plan:
        """The form as a plan for a model. Raise UserError if the model does not support it."""
        plan = self._dense(spec, layers)
        return sparse(plan, self.topk(context)) if self.sparse else plan

    def _dense(self, spec: ModelSpec, layers: str) -> Plan:
        if self.layout == "gqa":
            return unconverted(spec, self.stored)
        if self.bits is not None:
            return coded_plan(spec, self.bits, self.layout, layers)
        assert self.budget is not None
        return make_plan(spec, self.budget, self.layout, layers, stored=self.stored)

    def advice(self, context: int) -> str:
        """First clause of the recommendation, with the commands or options that apply the form."""
        sparsify = f"mlaforge sparsify --topk {self.topk(context)}" if self.sparse else ""
        if self.layout == "gqa":
            element = row_format(self.stored, (64, 64)).parts[0].bits
            bits = element if element <= 8 else None
            cache = f" with an {bits}-bit cache" if bits == 8 else f" with a {bits}-bit cache" if bits else " as it is"
            options = [sparsify] if sparsify else []
            options += [f"--kv-cache-dtype {self.stored}"] if bits else []
            action = f"Sparsify the original{cache if bits else ''}" if sparsify else f"Keep the original{cache}"
            return action + (f" ({', '.join(options)})" if options else "")
        if self.bits is not None:
            rows = "coded"
            option = f"--bits {self.bits:g}" + (f" --layout {self.layout}" if self.layout != "latent" else "")
        else:
            rows, option = "plain", f"--layout {self.layout} --budget {self.budget:g}"
        read = f"--topk {self.topk(context)}" if self.sparse else "--dense"
        action = f"Convert to {self.layout} with {rows} rows" + (", read sparsely" if self.sparse else "")
        return f"{action} (mlaforge convert {option} {read})"

    @property
    def percent(self) -> float:
        """Increase of perplexity by the typical loss, in per cent."""
        return 100 * math.expm1(self.loss)


FORMS = (
    Form("bf16", 0.0),
    Form("int8", 0.0004),
    Form("fp8", 0.0140, devices=("gpu",)),
    Form("int4", 0.0118, devices=("cpu",)),
    Form("bf16", 0.0075, "latent", budget=0.75),
    Form("bf16", 0.0923, "latent", budget=0.5),
    Form("bf16", 0.3030, "latent", budget=0.375),
    Form("bf16", 0.0782, "latent_rope", budget=0.75),
    Form("bf16", 0.3345, "latent_rope", budget=0.5),
    Form("coded", 0.0074, "latent", bits=4.0),
    Form("coded", 0.0213, "latent", bits=3.0),
    Form("coded", 0.0903, "latent", bits=2.0),
    Form("coded", 0.0834, "latent_rope", bits=4.0, devices=("cpu",)),
    Form("bf16", 0.0061, selection_ratio=8),
    Form("bf16", 0.0171, selection_ratio=16),
    Form("bf16", 0.0061, reads=1024),
    Form("int8", 0.0004 + 0.0061, selection_ratio=8),
    Form("bf16", 0.0923 + 0.0055, "latent", budget=0.5, selection_ratio=8),
    Form("coded", 0.0074 + 0.0058, "latent", bits=4.0, selection_ratio=8),
    Form("coded", 0.0074 + 0.0058, "latent", bits=4.0, reads=1024),
    Form("coded", 0.0074 + 0.0016, "latent", bits=4.0, reads=2048),
)
