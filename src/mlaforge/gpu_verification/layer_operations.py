"""Stage operations: the small operations of a layer, which memory and launches limit, and their results: norm, gate,
rotation and the write to the cache, both ends of the absorbed form, and the routing of experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from mlaforge.gpu_verification.case import Case, Outcome, Prediction
from mlaforge.gpu_verification.context import Context
from mlaforge.ops.absorbed_latents import ABSORB_AND_STORE, UP_PROJECT_VALUES, AbsorbedWeights
from mlaforge.ops.elementwise import ADD_RMS_NORM, SILU_MUL
from mlaforge.ops.paged_rows import PagedRows
from mlaforge.ops.rope_and_store import OP as ROPE_AND_STORE
from mlaforge.ops.row_formats.plain import Plain
from mlaforge.planning.kernel_time import LAUNCH, MEMORY_LATENCY

TOKENS, TWIN_TOKENS = (1, 64, 2048), (3,)
# Query heads, KV heads, head_dim, hidden size, intermediate size, latent rank, rotary elements, experts, per token.
SIZES, TWIN_SIZES = (64, 8, 64, 2880, 14336, 512, 64, 32, 4), (4, 2, 16, 96, 128, 64, 8, 6, 2)
# Loads that depend on each other: a slot or the first half of a row, then a row.
LATENCY = LAUNCH + 2 * MEMORY_LATENCY

# From an implementation's name to the tensors that an operation returns or writes.
Run = Callable[[str], list[Tensor]]


def operations(context: Context, N: int) -> dict[str, tuple[int, Run]]:
    """Operations on N tokens: the least bytes that they read and write, and what runs them."""
    H, G, D, C, I, R, E, experts, K = TWIN_SIZES if context.twin else SIZES  # noqa: E741
    dtype, device = context.dtype, context.device

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    x, residual, weight = random(N, C), random(N, C), random(C)
    gate_up, qkv, q_kv = random(N, 2 * I), random(N, (H + 2 * G) * D), random(N, H * (D + E) + R + E)
    angle = torch.randn(N, 1, max(D, E) // 2, device=device)
    rotation, slots = torch.polar(torch.ones_like(angle), angle), torch.randperm(N, device=device)
    w_uk, w_uv = (random(2 * G * D, R) / R**0.5).view(G, 2 * D, R).split(D, dim=1)
    pairs = torch.arange(E // 2, device=device)
    weights = AbsorbedWeights(w_uk, w_uv, random(G, D), random(G, D), random(H), pairs)
    latents, lse = random(N, H, R), torch.randn(N, H, device=device)
    logits, item = random(N, experts), dtype.itemsize

    def empty_rows(width: int) -> PagedRows:
        rows = PagedRows.empty(Plain(width, str(dtype).removeprefix("torch.")), N, dtype, device)
        rows.packed.zero_()
        return rows

    def store(implementation: str) -> list[Tensor]:
        rotated, rows = qkv.clone(), empty_rows(2 * G * D)
        ROPE_AND_STORE(rotated, rotation[..., : D // 2], rows, slots, H + G, D, implementation=implementation)
        return [rotated, rows.packed]

    def absorb(implementation: str) -> list[Tensor]:
        rows = empty_rows(R + E)
        inputs = (q_kv, rotation, weights, rows, slots, 0.1)
        queries, shift = ABSORB_AND_STORE(*inputs, implementation=implementation)
        return [queries, shift, rows.packed]

    def route(implementation: str) -> list[Tensor]:
        from mlaforge.ops import mxfp4_experts_triton as mixture

        if implementation == "triton":
            return [*mixture.route_logits(logits, K)]
        best, chosen = logits.topk(K)
        return [*mixture.route(chosen, experts), best.softmax(-1)]

    def op(op: Any, *inputs: Any) -> Run:
        def run(implementation: str) -> list[Tensor]:
            outputs = op(*inputs, implementation=implementation)
            return [outputs] if isinstance(outputs, Tensor) else list(outputs)

        return run

    weight_bytes = G * D * R * item
    return {
        "norm of a sum": (4 * x.numel() * item, op(ADD_RMS_NORM, x, residual, weight, 1e-5)),
        "gate": (3 * N * I * item, op(SILU_MUL, gate_up)),
        "rope and store": ((2 * qkv.numel() + 2 * N * G * D) * item, store),
        "absorb and store": (weight_bytes + (2 * q_kv.numel() + N * H * R) * item, absorb),
        "up-project": (
            weight_bytes + (latents.numel() + N * H * D) * item, op(UP_PROJECT_VALUES, latents, lse, lse, weights)
        ),
        "routing": (logits.numel() * item + 16 * N * K, route),
    }  # fmt: skip


def cases(context: Context) -> Iterator[Case]:
    """The stage's cases: times."""
    for N in TWIN_TOKENS if context.twin else TOKENS:
        for name, (minimum, run) in operations(context, N).items():
            # Cloning and clearing of what is written over count too: at most twice the bytes, and a launch each.
            predicted = 2 * minimum / context.roof.bandwidth + 2 * LATENCY
            yield Case(
                f"{name}, {N} tokens", Prediction(predicted * 1e6, "us"), functools.partial(measure, context, run)
            )


def measure(context: Context, run: Run) -> Outcome:
    """Time of an operation."""
    return Outcome(context.seconds(functools.partial(run, "triton")) * 1e6)
