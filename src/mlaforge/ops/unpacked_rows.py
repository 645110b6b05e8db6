"""Rows of a layer's cache as numbers: what attention over decompressed or decoded rows reads.

Legend: N rows, W elements of a row.
"""

from __future__ import annotations

from torch import Tensor

from mlaforge.ops.dispatch import Op
from mlaforge.ops.row_formats.format import RowFormat


def reference(rows_UB: Tensor, format: RowFormat, units_N: Tensor) -> Tensor:
    """Return the rows at some units of a format, [N, W]."""
    return format.read(rows_UB, units_N)


OP = Op("unpack_rows", reference)
OP.register_triton("unpacked_rows_triton", "unpack_rows")
