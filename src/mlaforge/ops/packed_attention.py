"""Grouped-query attention over packed rows (ops/row_formats/): bitwise equal to attention over the decoded rows in
every implementation, except for int8, which compiled kernels multiply as integers.

Legend: N query tokens, H query heads, G KV heads, D head_dim.
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
from mlaforge.ops.row_formats import format_from_descriptor


def packed_attention(
    q_NHD: Tensor, rows: PagedRows, view: CacheView, scale: float, implementation: str | None = None
) -> tuple[Tensor, Tensor]:
    """As ops.paged_attention; a row is the keys of all heads, then their values, D elements each."""
    storage = rows.packed, rows.unquantized, tuple(rows.format.descriptor)
    out, lse = OP(q_NHD, *storage, view, scale, implementation=implementation)
    return out, lse


def reference(
    q_NHD: Tensor, packed: Tensor, unquantized: Tensor | None, descriptor: Sequence[int], view: CacheView, scale: float
) -> tuple[Tensor, Tensor]:
    """Decode all rows that the step reads. Arguments: the fields of PagedRows, and RowFormat.descriptor."""
    rows = PagedRows(format_from_descriptor(descriptor, packed), packed, q_NHD.dtype, unquantized)
    rows_LW, gathered = rows.decode(view)
    k_LGD, v_LGD = rows_LW.view(len(rows_LW), 2, -1, q_NHD.shape[2]).unbind(1)
    return paged_attention(q_NHD, k_LGD, v_LGD, gathered, scale)


def _native(
    q_NHD: Tensor, packed: Tensor, unquantized: Tensor | None, descriptor: Sequence[int], view: CacheView, scale: float
) -> tuple[Tensor, Tensor]:
    native = kernels()
    assert native is not None
    D = q_NHD.shape[2]
    G = format_from_descriptor(descriptor, packed).width // (2 * D)
    table, window = (view.block_table_SB, view.seq_lens_S, view.first_S, view.query_start_S1), view.window or 0
    out, lse = native.decode(
        q_NHD, packed, unquantized, descriptor, G, D, G * D, *table, view.block_size, window, scale, view.tree_Tn
    )
    return out, lse


def _native_supports(
    q_NHD: Tensor, packed: Tensor, unquantized: Tensor | None, descriptor: Sequence[int], view: CacheView, scale: float
) -> Literal[True] | str:
    if q_NHD.device.type != "cpu":
        return f"it needs CPU tensors, the inputs are on {q_NHD.device.type}"
    if q_NHD.dtype != torch.bfloat16:
        return f"it supports bfloat16, queries are {q_NHD.dtype}"
    if packed.dtype != torch.uint8:
        return f"it does not support rows of {packed.dtype}"
    return True if kernels() is not None else "it is not compiled"


OP = Op("packed_attention", reference)
OP.register("native", _native, _native_supports, device_type="cpu", quiet=True)


def replay(path: Path, implementation: str | None = None, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """As `replay` of ops/paged_attention.py."""
    out, lse = OP(*load(path, {4: CacheView}, device), implementation=implementation)
    return out, lse
