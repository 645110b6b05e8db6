"""Random inputs of latent attention, layout `latent`, with weights as a GPU's kernels take them.

Legend: H query heads, G KV heads, D key and value dimensions, R latent rank, S sequences, T query tokens and P cached
tokens of each, L slots.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.latent_weights_gpu import GpuLatentWeights
from mlaforge.ops.paged_rows import PagedRows
from mlaforge.ops.row_formats.coded import Coded
from mlaforge.ops.row_formats.plain import Plain

BLOCK = 16
# Tokens of a sequence that the reference can read: longer ones are for timing.
LONGEST_REFERENCE = 4096


@dataclasses.dataclass(frozen=True)
class LatentSizes:
    """code: counts of coded rows (modeling/coded_rows_mla.py), or the rank of plain ones."""

    heads: int
    kv_heads: int
    head_dim: int
    code: tuple[int, ...] | int


def latent_inputs(
    sizes: LatentSizes, S: int, P: int, T: int, dtype: torch.dtype, device: torch.device, topk: int = 0
) -> tuple[Any, ...]:
    """Return inputs of ops/latent_attention.py's `latent`, with learned sinks. topk: each sequence reads so many
    random rows of its own instead of all."""
    H, G, D = sizes.heads, sizes.kv_heads, sizes.head_dim
    format: Plain | Coded = (
        Plain(sizes.code, str(dtype).removeprefix("torch.")) if isinstance(sizes.code, int) else Coded(sizes.code)
    )
    R, columns = format.width, -(-P // BLOCK)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device)

    # A coordinate's unit is its share of the code's range.
    unit = format.code.halves(device) / 3 if isinstance(format, Coded) else torch.ones(R, device=device)
    weight, bias = (random(G, 2 * D, R) / R**0.5 / unit).to(dtype), random(G, 2 * D).to(dtype)
    layer: Any = SimpleNamespace(
        config=SimpleNamespace(mla_sinks=True), qk_norm=False, sinks=random(H).to(dtype),
        up_projections=lambda: (weight[:, :D], weight[:, D:], bias[:, :D], bias[:, D:]),
    )  # fmt: skip
    slots = S * columns * BLOCK
    if isinstance(format, Coded):
        packed = torch.randint(0, 256, (slots, format.unit_bytes), dtype=torch.uint8, device=device)
    else:
        packed = torch.randn(slots, R, device=device, dtype=dtype)
    rows = PagedRows(format, packed, dtype)
    table = torch.randperm(S * columns, device=device, dtype=torch.int32).view(S, columns)
    last = torch.arange(P - T, P, device=device)
    new_slots = (table[:, last // BLOCK].long() * BLOCK + last % BLOCK).flatten()
    # Only the reference reads them, one sequence after another.
    sizes_of_blocks = [min(BLOCK, P - first) for first in range(0, P, BLOCK)]
    runs = tuple(
        tuple((block * BLOCK, size) for block, size in zip(blocks, sizes_of_blocks, strict=True))
        for blocks in (table.tolist() if P <= LONGEST_REFERENCE else [])
    )  # fmt: skip
    view = CacheView(
        table, torch.full((S,), P, dtype=torch.int32, device=device),
        torch.zeros(S, dtype=torch.int32, device=device),
        torch.arange(0, S * T + 1, T, dtype=torch.int32, device=device), new_slots, BLOCK, T, P, queries=(T,) * S,
        lengths=(P,) * S, runs=runs, generating=(True,) * S,
    )  # fmt: skip
    if topk:
        chosen = torch.stack([torch.randperm(P - 1, device=device)[: topk - 1].sort().values for _ in range(S)])
        positions = torch.cat((chosen, torch.full((S, 1), P - 1, device=device)), dim=1)
        selected = table.gather(1, positions // BLOCK).long() * BLOCK + positions % BLOCK
        first = torch.arange(S, dtype=torch.int32, device=device) * topk
        view = dataclasses.replace(
            view, block_table_SB=selected.int(), positions_SK=positions.int(), first_S=first, seq_lens_S=first + topk,
            counts=(topk,) * S, lengths=(topk,) * S, block_size=1, runs=(),
        )  # fmt: skip
    q_kv = torch.cat((random(S * T, H * D), random(S * T, R) * unit), dim=1).to(dtype)
    angle = torch.arange(P, device=device)[:, None] * torch.logspace(0, -4, D // 2, device=device)
    return q_kv, angle.cos(), angle.sin(), GpuLatentWeights.of(layer, rows), rows, view, D**-0.5
