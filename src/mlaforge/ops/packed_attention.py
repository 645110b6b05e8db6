"""Grouped-query attention of a step's query tokens over rows that are packed (ops/row_format.py): attention over what
they decode to, to the bit, whoever computes it; but for int8, which compiled kernels read in whole numbers.

Legend: N query tokens, H query heads, G key heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.check import load
from mlaforge.ops.dispatch import Op
from mlaforge.ops.native import kernels
from mlaforge.ops.paged_attention import paged_attention
from mlaforge.ops.paged_rows import PagedRows
from mlaforge.ops.row_format import numbered


def packed_attention(
    q_NHD: Tensor, rows: PagedRows, view: CacheView, scale: float, implementation: str | None = None
) -> tuple[Tensor, Tensor]:
    """As ops/paged_attention.py; a row is the keys of all heads and then their values, each D numbers."""
    parts = rows.packed, rows.whole, tuple(rows.format.numbers)
    out, lse = OP(q_NHD, *parts, view, scale, implementation=implementation)
    return out, lse


def reference(
    q_NHD: Tensor, packed: Tensor, whole: Tensor | None, numbers: Sequence[int], view: CacheView, scale: float
) -> tuple[Tensor, Tensor]:
    """Decodes all that the step reads. A layer's rows are what PagedRows has of them, and RowFormat.numbers."""
    rows = PagedRows(numbered(numbers, packed), packed, q_NHD.dtype, whole)
    rows_LW, gathered = rows.numbers(view)
    k_LGD, v_LGD = rows_LW.view(len(rows_LW), 2, -1, q_NHD.shape[2]).unbind(1)
    return paged_attention(q_NHD, k_LGD, v_LGD, gathered, scale)


def _native(
    q_NHD: Tensor, packed: Tensor, whole: Tensor | None, numbers: Sequence[int], view: CacheView, scale: float
) -> tuple[Tensor, Tensor]:
    native = kernels()
    assert native is not None
    D = q_NHD.shape[2]
    G = numbered(numbers, packed).width // (2 * D)
    table, window = (view.block_table_SB, view.seq_lens_S, view.first_S, view.query_start_S1), view.window or 0
    out, lse = native.decode(
        q_NHD, packed, whole, numbers, G, D, G * D, *table, view.block_size, window, scale, view.tree_Tn
    )
    return out, lse


def _native_supports(
    q_NHD: Tensor, packed: Tensor, whole: Tensor | None, numbers: Sequence[int], view: CacheView, scale: float
) -> Literal[True] | str:
    if q_NHD.device.type != "cpu":
        return f"it reads host memory, these are on {q_NHD.device.type}"
    if q_NHD.dtype != torch.bfloat16:
        return f"it is for bfloat16, these are {q_NHD.dtype}"
    if packed.dtype != torch.uint8:
        return f"it reads no {packed.dtype}"
    return True if kernels() is not None else "it is not compiled"


OP = Op("packed_attention", reference)
OP.register("native", _native, _native_supports, device_type="cpu", quiet=True)


def replay(path: Path, implementation: str | None = None, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """As that of ops/paged_attention.py."""
    out, lse = OP(*load(path, {4: CacheView}, device), implementation=implementation)
    return out, lse
