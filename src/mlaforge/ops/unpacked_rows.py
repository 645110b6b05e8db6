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


# Codes beyond 256 and rotary keys are rounded to bf16, which Triton's interpreter truncates to.
OP = Op("unpack_rows", reference, tolerance=(1e-6, 1e-2))
OP.register_triton("unpacked_rows_triton", "unpack_rows")
