"""Writing and reading of coded rows.

Legend: N rows, W elements of a row, U units of a cache, B bytes of a unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mlaforge.ops.dispatch import Op
from mlaforge.ops.row_formats.format import RowFormat


def unpack_reference(rows_UB: Tensor, format: RowFormat, units_N: Tensor) -> Tensor:
    """Return the rows at some units of a format, [N, W]."""
    return format.read(rows_UB, units_N)


def pack_reference(row_NW: Tensor, format: RowFormat, rows_UB: Tensor, units_N: Tensor) -> None:
    """Encode rows and write them to some units."""
    format.write(rows_UB, units_N, row_NW)


def _written(inputs: Sequence[Any], outputs: None) -> Sequence[Tensor]:
    _, format, rows_UB, units_N = inputs
    return (format.read(rows_UB, units_N).float(),)


# Codes beyond 256 and rotary keys are rounded to bf16, which Triton's interpreter truncates to.
UNPACK_ROWS = Op("unpack_rows", unpack_reference, tolerance=(1e-6, 1e-2))
UNPACK_ROWS.register_triton("coded_rows_triton", "unpack_rows")
PACK_ROWS = Op("pack_rows", pack_reference, mutates=(2,), observe=_written, tolerance=(1e-6, 1e-2))
PACK_ROWS.register_triton("coded_rows_triton", "pack_rows", "pack_supports")
