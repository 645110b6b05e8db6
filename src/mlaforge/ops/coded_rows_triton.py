"""Coded rows (modeling/coded_rows_mla.py) from and to numbers, in Triton: all rows of a step in one launch. A program
decodes a row, a coordinate per lane, from tables of where the parts of its code are, or encodes one, a word per lane,
from tables of the coordinates that are in it. Instructions limit both. Not measured on a GPU yet.

Legend: N rows, R coordinates of a latent, E elements of a rotary key, W = R + E, P planes.
"""

# Triton reads annotations of kernels: only constexpr is allowed.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlaforge.modeling.coded_layout_mla import PLANES, CodedLayout
from mlaforge.modeling.coded_rows_mla import CodedRows, word_fields
from mlaforge.ops.row_formats.coded import Coded
from mlaforge.ops.row_formats.format import RowFormat
from mlaforge.runtime import uploaded


@triton.jit
def unpack_kernel(
    rows, units, fields, halves, out, row_bytes,
    R: tl.constexpr, E: tl.constexpr, PLANES: tl.constexpr, SCALE_AT: tl.constexpr, ROPE_AT: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Grid (N,): out [N, R + E]. fields [PLANES, 4, R]: the byte that holds a part of a coordinate's code (-1: none),
    its first bit there, its mask, and its first bit in the code. halves [R]: subtracted from the code."""
    n, r = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_R)
    live = r < R
    row = rows + tl.load(units + n) * row_bytes
    code = -tl.load(halves + r, mask=live, other=0)
    for plane in tl.static_range(PLANES):
        field = fields + plane * 4 * R + r
        byte = tl.load(field, mask=live, other=-1)
        bits = tl.load(row + byte, mask=byte >= 0, other=0).to(tl.int32)
        part = (bits >> tl.load(field + R, mask=live, other=0)) & tl.load(field + 2 * R, mask=live, other=0)
        code += part << tl.load(field + 3 * R, mask=live, other=0)
    tl.store(out + n * (R + E) + r, code.to(tl.float32).to(out.dtype.element_ty), mask=live)
    if E > 0:
        e = tl.arange(0, BLOCK_E)
        bits = tl.load(row + SCALE_AT).to(tl.int32) | (tl.load(row + SCALE_AT + 1).to(tl.int32) << 8)
        scale = (bits << 16).to(tl.float32, bitcast=True)
        number = tl.load(row + ROPE_AT + e, mask=e < E, other=0).to(tl.int8, bitcast=True).to(tl.float32)
        tl.store(out + n * (R + E) + R + e, (number * scale).to(out.dtype.element_ty), mask=e < E)


@functools.cache  # without a limit: captured steps read the tables
def field_table(counts: tuple[int, ...], rope_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the kernel's `fields`, int32 [P, 4, R], and `halves`, int32 [R]."""
    layout = CodedLayout(counts, rope_dim)
    table = torch.zeros(len(PLANES), 4, layout.rank, dtype=torch.int32)
    table[:, 0] = -1
    for part in layout.segments:
        byte, bit = word_fields(part)
        columns = table[PLANES.index(part.bits), :, part.first : part.first + part.coordinates]
        columns[0], columns[1] = byte + part.offset, bit
        columns[2], columns[3] = (1 << part.bits) - 1, part.shift
    halves = CodedRows(counts, rope_dim).halves(torch.device("cpu"))
    return uploaded(table, device), uploaded(halves, device)


def supports(rows_UB: Tensor, format: RowFormat, units_N: Tensor) -> Literal[True] | str:
    """Return True, or the reason why the kernel cannot read rows of a format."""
    return True if isinstance(format, Coded) else f"it does not read rows in {format.name}"


def make_launch(rows_UB: Tensor, format: Coded, units_N: Tensor) -> tuple[tuple[int], dict[str, Any]]:
    """Return the grid and the arguments. Allocates `out`, bf16 [N, W]."""
    layout = format.layout
    fields, halves = field_table(format.counts, format.rope_dim, rows_UB.device)
    arguments = {
        "rows": rows_UB, "units": units_N, "fields": fields, "halves": halves,
        "out": torch.empty(len(units_N), format.width, dtype=torch.bfloat16, device=rows_UB.device),
        "row_bytes": layout.row_bytes, "R": layout.rank, "E": format.rope_dim, "PLANES": len(PLANES),
        "SCALE_AT": layout.scale_at, "ROPE_AT": layout.rope_at, "BLOCK_R": triton.next_power_of_2(layout.rank),
        "BLOCK_E": triton.next_power_of_2(max(1, format.rope_dim)),
    }  # fmt: skip
    return (len(units_N),), arguments


def unpack_rows(rows_UB: Tensor, format: Coded, units_N: Tensor) -> Tensor:
    """ops/coded_rows.py's function."""
    grid, arguments = make_launch(rows_UB, format, units_N)
    out: Tensor = arguments["out"]
    if grid[0]:
        with torch.cuda.device_of(rows_UB):
            unpack_kernel[grid](**arguments, num_warps=4)
    return out


@triton.jit
def pack_kernel(
    x, units, places, halves, out, x_row, row_words, WORDS: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Grid (N,): latents [N, R] to the words out[units], int32 [U, row_words]. places [1 + 32, WORDS]: bits of a code
    in a word's plane, and up to 32 codes in the word: coordinate * 1024 + (first bit in the word) * 32 + (first bit in
    the code), -1 for none."""
    n, w = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_W)
    live = w < WORDS
    bits = tl.load(places + w, mask=live, other=1)
    words = tl.zeros([BLOCK_W], tl.int32)
    for i in tl.static_range(32):
        place = tl.load(places + (1 + i) * WORDS + w, mask=live, other=-1)
        inside = place >= 0
        number = tl.load(x + n * x_row + (place >> 10), mask=inside, other=0.0).to(tl.float32)
        half = tl.load(halves + (place >> 10), mask=inside, other=1)
        # To the nearest integer, ties to even; what no code represents is 0.
        number = tl.where(number == number, tl.maximum(tl.minimum(number, 4096.0), -4096.0), 0.0)
        # First to bf16, by its bits, because the interpreter's conversion truncates.
        bits_of = number.to(tl.int32, bitcast=True)
        number = ((bits_of + 32767 + ((bits_of >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
        code = ((number + 12582912.0) - 12582912.0).to(tl.int32)
        code = tl.maximum(tl.minimum(code, half - 1), -half) + half
        part = ((code >> (place & 31)) & ((1 << bits) - 1)) << ((place >> 5) & 31)
        words |= tl.where(inside, part, 0)
    tl.store(out + tl.load(units + n) * row_words + w, words, mask=live)


@functools.cache  # without a limit: captured steps read the tables
def place_table(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the kernel's `places`, int32."""
    layout = CodedLayout(counts)
    table = torch.full((33, layout.row_bytes // 4), -1, dtype=torch.int32)
    table[0] = 1
    for part in layout.segments:
        byte, bit = word_fields(part)
        word, first = (part.offset + byte) // 4, (part.offset + byte) % 4 * 8 + bit
        coordinate = part.first + torch.arange(part.coordinates, dtype=torch.int32)
        table[0, word] = part.bits
        table[1 + first // part.bits, word] = coordinate * 1024 + first * 32 + part.shift
    return uploaded(table, device)


def pack_supports(row_NW: Tensor, format: RowFormat, *others: Any) -> Literal[True] | str:
    """Return True, or the reason why the kernel cannot write rows of a format."""
    if not isinstance(format, Coded) or format.rope_dim:
        return f"it does not write rows in {format.name}" + (" with rotary keys" if isinstance(format, Coded) else "")
    return True if row_NW.stride(1) == 1 else "rows must be contiguous"


def pack_launch(
    row_NW: Tensor, format: Coded, rows_UB: Tensor, units_N: Tensor
) -> tuple[tuple[int], dict[str, Any]]:  # fmt: skip
    """Return the grid and the arguments of a write."""
    words = format.layout.row_bytes // 4
    arguments = {
        "x": row_NW, "units": units_N, "places": place_table(format.counts, rows_UB.device),
        "halves": field_table(format.counts, 0, rows_UB.device)[1], "out": rows_UB.view(torch.int32),
        "x_row": row_NW.stride(0), "row_words": rows_UB.stride(0) // 4, "WORDS": words,
        "BLOCK_W": triton.next_power_of_2(words),
    }  # fmt: skip
    return (len(units_N),), arguments


def pack_rows(row_NW: Tensor, format: Coded, rows_UB: Tensor, units_N: Tensor) -> None:
    """ops/coded_rows.py's function."""
    grid, arguments = pack_launch(row_NW, format, rows_UB, units_N)
    if grid[0]:
        with torch.cuda.device_of(rows_UB):
            pack_kernel[grid](**arguments, num_warps=4)
