"""Coded rows as the bytes that tensor cores multiply (integer_rows.py), in Triton: the rows that a step reads, of all
sequences, in one launch. A program decodes a few rows, four columns per lane: one shift and one mask per plane extract
their codes. Not measured on a GPU yet.

Legend: S sequences, L most rows of a sequence, K columns of a row.
"""

# Triton reads annotations of kernels: only constexpr is allowed.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlaforge.ops.attention_program_triton import slots_of
from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.integer_rows import integer_columns
from mlaforge.ops.row_formats.coded import Coded
from mlaforge.runtime import uploaded

# Rows of a program.
ROWS = 8


@triton.jit
def _plane(rows, live, words, w, inside, PLANE: tl.constexpr, BITS: tl.constexpr, WORDS: tl.constexpr):
    """Return the codes of a plane in their places, four to a number."""
    entry = words + (2 + 2 * PLANE) * WORDS + w
    byte = tl.load(entry, mask=inside, other=-1)
    place = tl.load(entry + WORDS, mask=inside, other=0)
    mask = live[:, None] & (byte >= 0)[None, :]
    packed = tl.load(rows[:, None] + (byte // 4)[None, :], mask=mask, other=0)
    codes: tl.constexpr = -1 if BITS == 8 else 0x01010101 * ((1 << BITS) - 1)
    return ((packed >> (place & 31)[None, :]) & codes) << (place >> 5)[None, :]


@triton.jit(do_not_specialize=["most", "table_row"], do_not_specialize_on_alignment=["table", "seq_lens", "firsts"])
def integers_kernel(
    rows, words, table, seq_lens, firsts, out, row_words, most, table_row,
    WORDS: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows, S): row i of sequence s to out[s * most + i], int32 [S L, WORDS], from rows [., row_words]
    at its slot. words: IntegerColumns.words."""
    s = tl.program_id(1)
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    count = tl.load(seq_lens + s) - tl.load(firsts + s)
    if tl.program_id(0) * ROWS >= count:
        return
    live = i < count
    w = tl.arange(0, BLOCK_W)
    inside = w < WORDS
    row = rows + slots_of(table + s.to(tl.int64) * table_row, i, live, BLOCK_SIZE) * row_words
    total = tl.load(words + w, mask=inside, other=0)[None, :]
    total += _plane(row, live, words, w, inside, 0, 8, WORDS)
    total += _plane(row, live, words, w, inside, 1, 4, WORDS)
    total += _plane(row, live, words, w, inside, 2, 2, WORDS)
    total += _plane(row, live, words, w, inside, 3, 1, WORDS)
    total = total ^ tl.load(words + WORDS + w, mask=inside, other=0)[None, :]
    to = out + (s.to(tl.int64) * most + i)[:, None] * WORDS + w[None, :]
    tl.store(to, total, mask=live[:, None] & inside[None, :])


@functools.cache  # without a limit: captured steps read the tables
def _words(counts: tuple[int, ...], device: torch.device) -> Tensor:
    return uploaded(integer_columns(counts).words, device)


def make_launch(
    rows_UB: Tensor, format: Coded, view: CacheView, most: int, out: Tensor
) -> tuple[tuple[int, int], dict[str, Any]]:
    """Return the grid and the arguments. out: int8, at least [S * most, K], for the rows of the tables of a view."""
    arguments = {
        "rows": rows_UB.view(torch.int32), "words": _words(format.counts, rows_UB.device),
        "table": view.block_table_SB, "seq_lens": view.seq_lens_S, "firsts": view.first_S,
        "out": out.view(torch.int32), "row_words": rows_UB.shape[1] // 4, "most": most,
        "table_row": view.block_table_SB.stride(0), "WORDS": out.shape[1] // 4,
        "BLOCK_W": triton.next_power_of_2(out.shape[1] // 4), "BLOCK_SIZE": view.block_size, "ROWS": ROWS,
    }  # fmt: skip
    return (triton.cdiv(most, ROWS), len(view.seq_lens_S)), arguments
