"""Rooflines: peak bandwidth and FLOP/s of a machine, and the resulting limit of a benchmark case.

A CPU's peaks are measured at the start of a run (reading memory, an fp32 matrix product), a GPU's are its datasheet's
(planning.costs.GPUS).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from mlaforge.config import nearest
from mlaforge.engine.execution.linear import BITS
from mlaforge.engine.speculation.sparse_view import SparseViewConfig
from mlaforge.planning import machines
from mlaforge.planning.costs import GPUS, Gpu
from mlaforge.planning.plan import Plan
from mlaforge.planning.roofline import CACHE_LIMITS, WEIGHT_LIMITS, decode_step
from mlaforge.runtime import UserError, log


def roof(name: str, device: torch.device) -> Gpu | None:
    """Peaks of the machine `name` in planning.costs.GPUS. `auto` is this machine; None if its datasheet is unknown.
    Raise UserError for an unknown name."""
    if name != "auto":
        if name == "cpu":
            return machines.cpu_peaks()
        if name not in GPUS:
            raise UserError(f"roof {name!r} must be auto, cpu or one of {', '.join(GPUS)}{nearest(name, GPUS)}")
        return GPUS[name]
    if device.type == "cpu":
        return machines.cpu_peaks()
    if gpu := machines.of_device(torch.cuda.get_device_name(device)):
        return gpu
    log(f"the datasheet of {torch.cuda.get_device_name(device)} is unknown: results have no roofline; see --roof")
    return None


def describe(gpu: Gpu | None) -> dict[str, Any] | None:
    """Peaks as results record them, in bytes and FLOP per second."""
    if gpu is None:
        return None
    return {"name": gpu.name, "bandwidth": gpu.bandwidth, "flops": gpu.flops, "source": gpu.source}


def stored_in(plan: Plan, dtype: str) -> Plan:
    """`plan` with the cache format that a model in `dtype` uses by default; coded and quantized rows stay."""
    plain = "fp32" if dtype == "float32" else "bf16"
    stored = plain if plan.stored in ("bf16", "fp32") else plan.stored
    return dataclasses.replace(plan, stored=stored, plain=plain)


def layout_of(plan: Plan) -> str:
    """Layout of the converted layers: `gqa` if there are none, `mixed` if they differ."""
    kinds = {plan.layers[i].layout for i in plan.converted} or {"gqa"}
    return kinds.pop() if len(kinds) == 1 else "mixed"


def step_limits(plan: Plan, gpu: Gpu, dtype: str, context: int, batch: int, queries: int) -> dict[str, float]:
    """Minimum seconds of a decode step with weights in `dtype`, by limiting resource."""
    spec = plan.spec
    # Experts with a separate storage format keep it.
    layers = tuple(
        dataclasses.replace(la, mlp_bits=BITS[dtype] if la.mlp_bits == spec.bits else la.mlp_bits) for la in spec.layers
    )
    resolved = dataclasses.replace(
        stored_in(plan, dtype), spec=dataclasses.replace(spec, bits=BITS[dtype], layers=layers)
    )
    limits: dict[str, float] = {}
    for part, cost in decode_step(resolved, gpu, context, batch, queries).costs.items():
        limit = (CACHE_LIMITS if part == "attention" else WEIGHT_LIMITS)[gpu.bound(cost)]
        limits[limit] = limits.get(limit, 0.0) + gpu.seconds(cost)
    return limits


def step_seconds(plan: Plan, gpu: Gpu, dtype: str, context: int, batch: int, queries: int) -> tuple[float, str]:
    """Minimum seconds of a decode step with weights in `dtype`, and the resource that takes most of them."""
    limits = step_limits(plan, gpu, dtype, context, batch, queries)
    return sum(limits.values()), max(limits, key=lambda name: limits[name])


def limit(
    plan: Plan, gpu: Gpu, dtype: str, context: int, batch: int, drafts: int, length: float | None
) -> dict[str, Any]:
    """Roofline of a case: tokens per second if a step yields `length` tokens per sequence (None: one), the limiting
    resource, and the speed-up if all drafts were accepted and cost nothing to propose."""
    plain, _ = step_seconds(plan, gpu, dtype, context, batch, 1)
    seconds, bottleneck = step_seconds(plan, gpu, dtype, context, batch, 1 + drafts)
    return {
        "tokens_per_second": batch * (length or 1.0) / seconds, "limit": bottleneck,
        "speedup_ceiling": (1 + drafts) * plain / seconds if drafts else None, "specpv_ceiling": None,
    }  # fmt: skip


def sparse_view_limit(
    plan: Plan, gpu: Gpu, dtype: str, context: int, batch: int, drafts: int, view: SparseViewConfig,
    view_dtype: str, block: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """`limit` for sparse-view verification with the step counts of `block` (eagle_speculation): a full step reads the
    weights and the full cache, a sparse-view step the weights in `view_dtype` and a view.

    specpv_ceiling: speed-up over verifying the same drafts with the full cache, if the same number of tokens were
    provisional after the same number of sparse-view steps, all were retained, and acceptance were equal.
    """

    def cycle(steps: float, provisional: float) -> dict[str, float]:
        """Seconds of a full step that verifies `provisional` tokens and of the `steps` sparse-view steps before
        it. Time grows at least linearly with the tokens of a step, so the mean, rounded down, is a lower bound."""
        full = step_limits(plan, gpu, dtype, context, batch, 1 + int(provisional))
        part = step_limits(
            plan, gpu, view_dtype, min(context, view.num_tokens), batch, max(1, int(provisional / steps))
        )
        return {name: full.get(name, 0.0) + steps * part.get(name, 0.0) for name in {**full, **part}}

    def seconds(queries: int) -> float:
        return sum(step_limits(plan, gpu, dtype, context, batch, queries).values())

    steps, provisional = (block[key] / block["steps"] for key in ("partial_steps", "pending_tokens"))
    limits = cycle(steps, provisional)
    cycle_seconds = sum(limits.values())
    max_provisional = min(view.max_provisional, view.full_every * (1 + drafts))
    best_seconds = sum(cycle(math.ceil(max_provisional / (1 + drafts)), max_provisional).values())
    return {
        "tokens_per_second": batch * block["mean_acceptance_length"] / cycle_seconds,
        "limit": max(limits, key=lambda name: limits[name]),
        "speedup_ceiling": (1 + max_provisional) * seconds(1) / best_seconds,
        "specpv_ceiling": (1 + provisional) / cycle_seconds * seconds(1 + drafts) / (provisional / steps),
    }  # fmt: skip
