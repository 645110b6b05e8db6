"""Products of a step of an EAGLE-3 head on GPT-OSS-120B, which reading of the weights limits: gate and up projections
of an intermediate size of 17,280 on 3 and on 5 rows, the fusion of three captured states, and the head over a draft
vocabulary of 32,000.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from mlaforge.bench.layer_operations import Run
from mlaforge.engine.execution.linear import BITS, PackedLinear
from mlaforge.ops.linear import reference_int8
from mlaforge.ops.rounded_weights import packed8

# Tag and rows -> outputs and inputs.
PRODUCTS = {
    ("draft_ffn", 3): (34_560, 2_880), ("draft_ffn", 5): (34_560, 2_880), ("draft_fc", 1): (2_880, 8_640),
    ("draft_lm_head_smallvoc", 3): (32_000, 2_880),
}  # fmt: skip
SMALL = dict.fromkeys(PRODUCTS, (96, 64))
# Bytes of weights among which calls take turns.
COLD = 128 << 20


def products(dtype: torch.dtype, device: torch.device, small: bool = False) -> dict[str, tuple[int, int, Run]]:
    """Products by name: rows, the least bytes that one reads and writes, and what runs it. On a CPU heads have int8
    weights too."""
    name = str(dtype).removeprefix("torch.")
    formats = [name, "int8"] if device.type == "cpu" and dtype == torch.bfloat16 else [name]
    cases = {}
    for ((tag, rows), (N, K)), format in itertools.product((SMALL if small else PRODUCTS).items(), formats):
        x = torch.randn(rows, K, device=device).to(dtype)
        weight = torch.randn(N, K, device=device).to(dtype)
        least = int(N * K * BITS[format] / 8) + (x.numel() + rows * N) * dtype.itemsize
        cases[f"{tag} {rows} x {N} x {K} {format}"] = rows, least, _run(x, weight, format, small)
    return cases


def _run(x: Tensor, weight: Tensor, format: str, small: bool) -> Run:
    size = int(weight.numel() * BITS[format] / 8)
    copies = [PackedLinear(weight, None, format) for _ in range(1 if small else max(1, COLD // size))]
    turn = itertools.cycle(copies)

    def run(implementation: str | None) -> list[Tensor]:
        if implementation != "reference":
            return [next(turn)(x)]
        if format == "int8":
            return [reference_int8(x, *packed8(weight.contiguous()), len(weight), None, None)]
        return [(x.float() @ weight.float().T).to(x.dtype)]

    return run
