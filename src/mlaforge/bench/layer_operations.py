"""The small operations of a layer, which memory and launches limit: norm, gate, rotation and the write to the cache,
both ends of the absorbed form, the routing of experts, and writing and reading of coded rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mlaforge.ops.absorbed_latents import ABSORB_AND_STORE, UP_PROJECT_VALUES, AbsorbedWeights
from mlaforge.ops.coded_rows import PACK_ROWS, UNPACK_ROWS
from mlaforge.ops.dispatch import prefers_triton
from mlaforge.ops.elementwise import ADD_RMS_NORM, SILU_MUL
from mlaforge.ops.expert_routing import route as experts_by_token
from mlaforge.ops.mxfp4 import BIAS
from mlaforge.ops.paged_rows import PagedRows
from mlaforge.ops.rope_and_store import OP as ROPE_AND_STORE
from mlaforge.ops.row_formats.coded import Coded
from mlaforge.ops.row_formats.plain import Plain

# Query heads, KV heads, head_dim, hidden size, intermediate size, latent rank, rotary elements, experts, per token.
SIZES, SMALL_SIZES = (64, 8, 64, 2880, 14336, 512, 64, 32, 4), (4, 2, 16, 96, 128, 64, 8, 6, 2)

# From an implementation's name (None: the dispatched one) to the tensors that an operation returns or writes.
Run = Callable[[str | None], list[Tensor]]


def operations(N: int, dtype: torch.dtype, device: torch.device, small: bool = False) -> dict[str, tuple[int, Run]]:
    """Operations on N tokens: the least bytes that they read and write, and what runs them."""
    H, G, D, C, I, R, E, experts, K = SMALL_SIZES if small else SIZES  # noqa: E741

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
    # Four bits on average.
    code = Coded((R,) * 3 + (R // 2,) * 2 + (R // 4,))
    coded = torch.randint(0, 256, (N, code.unit_bytes), dtype=torch.uint8, device=device)
    uncoded = (torch.randn(N, R, device=device) * code.code.halves(device) / 2).to(dtype)

    def empty_rows(width: int) -> PagedRows:
        rows = PagedRows.empty(Plain(width, str(dtype).removeprefix("torch.")), N, dtype, device)
        rows.packed.zero_()
        return rows

    def store(implementation: str | None) -> list[Tensor]:
        rotated, rows = qkv.clone(), empty_rows(2 * G * D)
        ROPE_AND_STORE(rotated, rotation[..., : D // 2], rows, slots, H + G, D, implementation=implementation)
        return [rotated, rows.packed]

    def pack(implementation: str | None) -> list[Tensor]:
        packed = torch.zeros_like(coded)
        PACK_ROWS(uncoded, code, packed, slots, implementation=implementation)
        return [packed.float()]

    def absorb(implementation: str | None) -> list[Tensor]:
        rows = empty_rows(R + E)
        inputs = (q_kv, rotation, weights, rows, slots, 0.1)
        queries, shift = ABSORB_AND_STORE(*inputs, implementation=implementation)
        return [queries, shift, rows.packed]

    def route(implementation: str | None) -> list[Tensor]:
        if implementation == "triton" or (implementation is None and prefers_triton(device)):
            from mlaforge.ops import mxfp4_experts_triton

            return [*mxfp4_experts_triton.route_logits(logits, K)]
        best, chosen = logits.topk(K)
        return [*experts_by_token(chosen, experts), best.softmax(-1)]

    def op(op: Any, *inputs: Any) -> Run:
        def run(implementation: str | None) -> list[Tensor]:
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
        "pack coded rows": (coded.numel() + N * R * item, pack),
        "unpack coded rows": (coded.numel() + 2 * N * R, op(UNPACK_ROWS, coded, code, slots)),
    }  # fmt: skip


def experts_inputs(
    tokens: int, sizes: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> tuple[Any, ...]:
    """Random inputs of mxfp4_experts. sizes: E experts, K experts per token, hidden size C, intermediate size I."""
    E, K, C, I = sizes  # noqa: E741

    def packed(outputs: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        blocks = torch.randint(0, 256, (E, outputs, width // 32, 16), dtype=torch.uint8, device=device)
        low = BIAS - 2 - width.bit_length() // 2
        scales = torch.randint(low, low + 2, blocks.shape[:-1], dtype=torch.uint8, device=device)
        return blocks, scales, torch.randn(E, outputs, device=device).to(dtype)

    x = torch.randn(tokens, C, device=device).to(dtype)
    best, chosen = torch.randn(tokens, E, device=device).topk(K)
    weights = best.softmax(-1).to(dtype)
    return x, chosen, weights, *packed(2 * I, C), *packed(C, I), 1.702, 7.0
