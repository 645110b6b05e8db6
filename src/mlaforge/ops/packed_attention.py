"""Grouped-query attention of a step's query tokens over rows that are packed (ops/row_format.py): attention over what
they decode to, to the bit, whoever computes it.

Legend: N query tokens, H query heads, G key heads, D head_dim.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.dispatch import Op
from mlaforge.ops.native import kernels
from mlaforge.ops.paged_attention import paged_attention
from mlaforge.ops.paged_rows import PagedRows, native_reads, native_rows


def packed_attention(
    q_NHD: Tensor, rows: PagedRows, view: CacheView, scale: float, implementation: str | None = None
) -> tuple[Tensor, Tensor]:
    """As ops/paged_attention.py; a row is the keys of all heads and then their values, each D numbers."""
    out, lse = OP(q_NHD, rows, view, scale, implementation=implementation)
    return out, lse


def reference(q_NHD: Tensor, rows: PagedRows, view: CacheView, scale: float) -> tuple[Tensor, Tensor]:
    """Decodes all that the step reads."""
    rows_LW, gathered = rows.numbers(view)
    k_LGD, v_LGD = rows_LW.view(len(rows_LW), 2, -1, q_NHD.shape[2]).unbind(1)
    return paged_attention(q_NHD, k_LGD, v_LGD, gathered, scale)


def _native(q_NHD: Tensor, rows: PagedRows, view: CacheView, scale: float) -> tuple[Tensor, Tensor]:
    native = kernels()
    assert native is not None
    D = q_NHD.shape[2]
    G = rows.format.width // (2 * D)
    table, window = (view.block_table_SB, view.seq_lens_S, view.first_S, view.query_start_S1), view.window or 0
    out, lse = native.decode(
        q_NHD, *native_rows(rows), G, D, G * D, *table, view.block_size, window, scale, view.tree_Tn
    )
    return out, lse


def _native_supports(q_NHD: Tensor, rows: PagedRows, view: CacheView, scale: float) -> Literal[True] | str:
    if q_NHD.dtype != torch.bfloat16:
        return f"it is for bfloat16, these are {q_NHD.dtype}"
    if rows.packed.dtype != torch.uint8:
        return f"it reads no {rows.packed.dtype}"
    return True if native_reads(rows) else "it is not compiled"


OP = Op("packed_attention", reference)
OP.register("native", _native, _native_supports, device_type="cpu", quiet=True)
