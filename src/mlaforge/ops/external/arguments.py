"""Arguments and results of libraries' kernels, from and to this package's: pages, slots, padding, empty rows.

Legend: S sequences, N query tokens of all of them, concatenated, T query tokens of the longest, B columns of a block
table, K rows that a query token sees at most, L slots, H heads, W elements of a row, R latent rank, E rotary elements.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional as F

from mlaforge.ops.cache_view import CacheView
from mlaforge.runtime import on_device

# Libraries' absorbed MLA has a latent of 512 elements and 64 rotary ones.
RANK, ROPE = 512, 64


def pages(rows: Tensor, size: int) -> Tensor:
    """View rows [L, ...] as pages [L / size, size, ...]."""
    return rows.unflatten(0, (-1, size))


def cached_lengths(view: CacheView) -> Tensor:
    """Rows in each sequence's table, int32 [S]: windows and selections count them from `first_S`."""
    return view.seq_lens_S - view.first_S


def empty_rows(out_NHV: Tensor, lse_NH: Tensor, seen_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return a result in which query tokens that see nothing have out 0 and lse -inf, whatever the library writes.

    seen_N: rows that each query token sees.
    """
    empty_N = seen_N <= 0
    return out_NHV.masked_fill(empty_N[:, None, None], 0), lse_NH.float().masked_fill(empty_N[:, None], -torch.inf)


@dataclasses.dataclass(frozen=True)
class QueryTokens:
    """Every query token of a view as a sequence of its own, which ends with it.

    sequence_N: the sequence it is of, int64; seen_N: rows of the table up to its own, int32, 0 or less before the
    first.
    """

    sequence_N: Tensor
    seen_N: Tensor

    @classmethod
    def of(cls, view: CacheView) -> QueryTokens:
        """Number the query tokens of a view."""
        device = view.slots_N.device
        sequences = [s for s, T in enumerate(view.queries) for _ in range(T)]
        behind = [T - 1 - t for T in view.queries for t in range(T)]
        sequence_N = on_device(sequences, torch.int64, device)
        seen_N = cached_lengths(view)[sequence_N] - on_device(behind, torch.int32, device)
        return cls(sequence_N, seen_N)

    def block_table(self, view: CacheView, extra: int = 0) -> Tensor:
        """Return int32 [N, B + extra], contiguous; the extra columns are 0."""
        return F.pad(view.block_table_SB[self.sequence_N], (0, extra))

    def slots(self, view: CacheView, multiple: int) -> Tensor:
        """Return the slots of the rows that each query token sees, int32 [N, K], and -1 beyond them; K is a multiple of
        `multiple`. A slot is block * block_size + offset."""
        K = max(1, -(-max(view.lengths) // multiple)) * multiple
        at_K = torch.arange(K, dtype=torch.int32, device=self.seen_N.device)
        column_K = (at_K // view.block_size).clamp_max(view.block_table_SB.shape[1] - 1)
        slots_SK = view.block_table_SB[:, column_K] * view.block_size + at_K % view.block_size
        hidden_NK = at_K >= self.seen_N[:, None]
        if view.window is not None:
            hidden_NK |= at_K < self.seen_N[:, None] - view.window
        return slots_SK[self.sequence_N].masked_fill(hidden_NK, -1)


def right_aligned(view: CacheView) -> Tensor | None:
    """Return the row of each query token among S * T, int64 [N], where the T tokens of a sequence are aligned to its
    end, as causal kernels with T queries per sequence count. None if every sequence has T."""
    T = max(view.queries)
    if set(view.queries) == {T}:
        return None
    rows = [s * T + T - count + t for s, count in enumerate(view.queries) for t in range(count)]
    return on_device(rows, torch.int64, view.slots_N.device)


def zero_columns(x: Tensor, rank: int) -> Tensor:
    """Widen queries or rows [..., R + E] to 512 + 64 elements by zeros, which change no product of the two."""
    rope = x.shape[-1] - rank
    if (rank, rope) == (RANK, ROPE):
        return x
    return torch.cat((F.pad(x[..., :rank], (0, RANK - rank)), F.pad(x[..., rank:], (0, ROPE - rope))), dim=-1)


def wide_latents(k_L1W: Tensor, rank: int, view: CacheView) -> tuple[Tensor, Tensor]:
    """Return latent rows as pages [P, size, 1, 576], and the block table that addresses them.

    The cache itself where rows have 512 + 64 elements; otherwise a copy of all blocks of the table, widened.
    """
    paged, table = pages(k_L1W, view.block_size), view.block_table_SB
    if (rank, k_L1W.shape[2] - rank) == (RANK, ROPE):
        return paged, table
    copied = zero_columns(paged[table.flatten().long()], rank)
    return copied, torch.arange(table.numel(), dtype=torch.int32, device=table.device).view_as(table)


def latent_refusal(key: int, value: int) -> str | None:
    """Return the reason why latent rows do not fit into 512 + 64 elements, or None."""
    if value > RANK or key - value > ROPE:
        return f"rows of {value} + {key - value} elements do not fit into {RANK} + {ROPE}"
    return None
