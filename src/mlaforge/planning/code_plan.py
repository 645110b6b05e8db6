"""Plans with coded rows (modeling/coded_layout_mla.py): the sizes that fit, and an estimate of the code."""

from __future__ import annotations

import functools
import math

from mlaforge.families.spec import ModelSpec
from mlaforge.modeling.coded_layout_mla import ALIGNMENT, GROUP, CodedLayout
from mlaforge.planning.plan import SMALLER_KEY, LayerPlan, Plan, make_plan, rank_limit, select_layers
from mlaforge.runtime import UserError

# Difference in bits between the first and last coordinate of a coded layer if all were coded (measured on SmolLM2).
BITS_FALL = 11.6
LARGEST_CODE = 11


@functools.lru_cache
def expected_code(coordinates: int, row_bytes: int, rope_dim: int = 0) -> tuple[int, ...]:
    """Estimate of LayerPlan.code: rows of at most `row_bytes` for at most `coordinates` coordinates. Calibration
    replaces the number of retained coordinates and their bits."""
    groups = [min(GROUP, coordinates // 8 * 8 - first) for first in range(0, coordinates // 8 * 8, GROUP)]
    widths = [0] * len(groups)

    def code() -> tuple[int, ...]:
        sizes = [sum(n for n, width in zip(groups, widths, strict=True) if width > bit) for bit in range(max(widths))]
        return tuple(sizes)

    while True:
        for group in sorted(range(len(groups)), key=lambda i: (widths[i] + BITS_FALL * i / len(groups), i)):
            widths[group] += 1
            if widths[group] <= LARGEST_CODE and CodedLayout(code(), rope_dim).row_bytes <= row_bytes:
                break
            widths[group] -= 1
        else:
            return code()


def coded_shape(
    spec: ModelSpec, bits: float, layout: str, layers: str = "all", qk_rope_head_dim: int | None = None
) -> Plan:
    """Plan at the budget whose rotary key fits rows of `bits` bits per element; the key itself has 8 per element. The
    final ranks follow from the bits. Raise UserError for too few bits."""
    rotary = (qk_rope_head_dim or 2) if layout == "latent_rope" else 0
    shortest = CodedLayout((8,), rotary).row_bytes
    for i in sorted(select_layers(spec, layers)):
        cached = spec.layers[i].cached
        if bits * cached < 8 * shortest:
            minimum = math.ceil(800 * shortest / cached) / 100
            raise UserError(
                f"bits = {bits:g} of layer {i}'s {cached} cached elements are {bits * cached / 8:g} bytes, and the "
                f"shortest row has {shortest}; " + (f"use at least {minimum:g}" if minimum <= 8 else SMALLER_KEY)
            )
    budget = min(bits / 8, 0.99)
    plan = make_plan(spec, budget, layout, layers, None, qk_rope_head_dim)
    rotary = max(layer.qk_rope_head_dim for layer in plan.layers)
    if qk_rope_head_dim is None and rotary > ALIGNMENT and rotary % ALIGNMENT:
        plan = make_plan(spec, budget, layout, layers, None, rotary // ALIGNMENT * ALIGNMENT)
    return plan


def coded_plan(spec: ModelSpec, bits: float, layout: str, layers: str, qk_rope_head_dim: int | None = None) -> Plan:
    """make_plan with coded rows of `bits` bits in the mean per element that GQA caches."""
    plan = coded_shape(spec, bits, layout, layers, qk_rope_head_dim)
    chosen = list(plan.layers)
    for i in plan.converted:
        rotary, layer = chosen[i].qk_rope_head_dim, spec.layers[i]
        code = expected_code(rank_limit(spec, layer, layout), int(bits * layer.cached) // 8, rotary)
        chosen[i] = LayerPlan(layout, code[0], rotary, code)
    return Plan(spec, tuple(chosen), "coded")
