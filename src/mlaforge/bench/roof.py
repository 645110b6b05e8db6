"""Rooflines: what a machine could do at most, and the limit of a case under it.

A CPU's roof is measured at the start of a run (reading memory, a product in fp32), a GPU's is its datasheet's
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
    """The machine `name` of planning.costs.GPUS; `auto` is this one, None where its datasheet is not known."""
    if name != "auto":
        if name == "cpu":
            return machines.measured()
        if name not in GPUS:
            raise UserError(f"roof {name!r} must be auto, cpu or one of {', '.join(GPUS)}{nearest(name, GPUS)}")
        return GPUS[name]
    if device.type == "cpu":
        return machines.measured()
    if gpu := machines.of_device(torch.cuda.get_device_name(device)):
        return gpu
    log(f"no datasheet of {torch.cuda.get_device_name(device)} is known: no roof; see --roof")
    return None


def describe(gpu: Gpu | None) -> dict[str, Any] | None:
    """For results: bytes and FLOP per second."""
    if gpu is None:
        return None
    return {"name": gpu.name, "bandwidth": gpu.bandwidth, "flops": gpu.flops, "source": gpu.source}


def stored_in(plan: Plan, dtype: str) -> Plan:
    """`plan` with a cache as a model in `dtype` keeps it by itself: coded where a layer is."""
    plain = "fp32" if dtype == "float32" else "bf16"
    return dataclasses.replace(plan, stored="coded" if plan.stored == "coded" else plain, plain=plain)


def layout_of(plan: Plan) -> str:
    """The layout of the converted layers, gqa where none is, mixed where they differ."""
    kinds = {plan.layers[i].layout for i in plan.converted} or {"gqa"}
    return kinds.pop() if len(kinds) == 1 else "mixed"


def step_limits(plan: Plan, gpu: Gpu, dtype: str, context: int, batch: int, queries: int) -> dict[str, float]:
    """The least seconds of a decode step with weights in `dtype`, by what limits them."""
    spec = plan.spec
    # Experts that are stored in a format of their own stay in it.
    layers = tuple(
        dataclasses.replace(la, mlp_bits=BITS[dtype] if la.mlp_bits == spec.bits else la.mlp_bits) for la in spec.layers
    )
    own = dataclasses.replace(stored_in(plan, dtype), spec=dataclasses.replace(spec, bits=BITS[dtype], layers=layers))
    limits: dict[str, float] = {}
    for part, cost in decode_step(own, gpu, context, batch, queries).costs.items():
        limit = (CACHE_LIMITS if part == "attention" else WEIGHT_LIMITS)[gpu.bound(cost)]
        limits[limit] = limits.get(limit, 0.0) + gpu.seconds(cost)
    return limits


def step_seconds(plan: Plan, gpu: Gpu, dtype: str, context: int, batch: int, queries: int) -> tuple[float, str]:
    """The least time of a decode step with weights in `dtype`, and where most of it goes."""
    limits = step_limits(plan, gpu, dtype, context, batch, queries)
    return sum(limits.values()), max(limits, key=lambda name: limits[name])


def limit(
    plan: Plan, gpu: Gpu, dtype: str, context: int, batch: int, drafts: int, length: float | None
) -> dict[str, Any]:
    """The roofline of a case: tokens per second where a step makes `length` tokens of each sequence (None: one), what
    limits them, and the speed-up if all drafts were accepted and free."""
    plain, _ = step_seconds(plan, gpu, dtype, context, batch, 1)
    seconds, bottleneck = step_seconds(plan, gpu, dtype, context, batch, 1 + drafts)
    return {
        "tokens_per_second": batch * (length or 1.0) / seconds, "limit": bottleneck,
        "speedup_ceiling": (1 + drafts) * plain / seconds if drafts else None, "specpv_ceiling": None,
    }  # fmt: skip


def partial_limit(
    plan: Plan, gpu: Gpu, dtype: str, context: int, batch: int, drafts: int, view: SparseViewConfig, judged: str,
    block: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """As `limit`, for partial verification that made the steps which `block` (eagle_speculation) counts: a full step
    reads weights and all of the cache, a partial one weights in `judged` and a view. `specpv_ceiling` is the speed-up
    over the same drafts judged by all of the cache at once, if as many tokens were pending after as many partial steps,
    all of them were kept, and both ways accepted alike."""

    def turn(steps: float, pending: float) -> dict[str, float]:
        """Seconds of a full step that judges so many tokens and of the partial ones before it. Time rises with the
        tokens of a step at the least as the straight line does, so their mean, rounded down, is no slower."""
        whole = step_limits(plan, gpu, dtype, context, batch, 1 + int(pending))
        part = step_limits(plan, gpu, judged, min(context, view.num_tokens), batch, max(1, int(pending / steps)))
        return {name: whole.get(name, 0.0) + steps * part.get(name, 0.0) for name in {**whole, **part}}

    def seconds(queries: int) -> float:
        return sum(step_limits(plan, gpu, dtype, context, batch, queries).values())

    steps, pending = (block[key] / block["steps"] for key in ("partial_steps", "pending_tokens"))
    limits = turn(steps, pending)
    own = sum(limits.values())
    most = min(view.max_provisional, view.full_every * (1 + drafts))
    best = sum(turn(math.ceil(most / (1 + drafts)), most).values())
    return {
        "tokens_per_second": batch * block["mean_acceptance_length"] / own,
        "limit": max(limits, key=lambda name: limits[name]), "speedup_ceiling": (1 + most) * seconds(1) / best,
        "specpv_ceiling": (1 + pending) / own * seconds(1 + drafts) / (pending / steps),
    }  # fmt: skip
