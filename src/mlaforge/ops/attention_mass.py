"""Attention mass of a step's last query tokens: per cached token, the softmax weights summed over all heads.

On a CPU the attention kernel records it while it attends to rows of keys and values (`attention_with_mass`); otherwise
a kernel reads the keys a second time (ops/cpu/attention/attention_mass.h).

Legend: N query tokens of all sequences, concatenated; H query heads, G KV heads, J = H / G, D key dimensions, L rows of
a sequence, W elements of a cached row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mlaforge import runtime
from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.native import kernels
from mlaforge.ops.paged_rows import PagedRows, native_reads, native_rows


def last_query_row(view: CacheView, sequence: int) -> int:
    """Return the row, among the step's N, of a sequence's last query token."""
    return sum(view.queries[: sequence + 1]) - 1


def probe_attention_mass(
    q_NHD: Tensor, rows: PagedRows, kv_heads: int, view: CacheView, scale: float, sequences: Sequence[int]
) -> list[Tensor]:
    """Return the attention mass [L], fp32, of the last query token of each of `sequences`. The view must have no
    window, and a cached row must begin with its keys."""
    lengths = [view.lengths[s] for s in sequences]
    last = [last_query_row(view, s) for s in sequences]
    native = kernels() if native_reads(rows) else None
    if native is not None:
        table, seq_lens = view.block_table_SB[list(sequences)], view.seq_lens_S[list(sequences)]
        mass = native.attention_mass(q_NHD[last], *native_rows(rows), kv_heads, table, seq_lens, view.block_size, scale)
        return [mass_L[:length] for mass_L, length in zip(mass, lengths, strict=True)]
    D = q_NHD.shape[2]
    rows_LW, decoded_view = rows.decode(view)
    attention_mass = []
    for s, row in zip(sequences, last, strict=True):
        k_GDL = decoded_view.sequence(s, rows_LW)[0][0, :, : kv_heads * D].unflatten(1, (kv_heads, D)).permute(1, 2, 0)
        logits_GJL = (q_NHD[row].view(kv_heads, -1, D).to(k_GDL.dtype) @ k_GDL).float() * scale
        attention_mass.append(logits_GJL.softmax(-1).sum((0, 1)))
    return attention_mass


def attention_with_mass(
    q_NHD: Tensor, rows: PagedRows, kv_heads: int, view: CacheView, scale: float, sequences: Sequence[int]
) -> tuple[Tensor, Tensor, list[Tensor]] | None:
    """Return (out, lse) of ops.paged_attention and the result of `probe_attention_mass`, from one pass over rows
    [keys, values]. Return None if no fused kernel supports the inputs, or if $MLAFORGE_OPS selects an implementation.
    The view must have no window."""
    native = kernels() if native_reads(rows) and q_NHD.dtype == torch.bfloat16 else None
    if native is None or runtime.ops_choice():
        return None
    D = q_NHD.shape[2]
    table = (view.block_table_SB, view.seq_lens_S, view.first_S, view.query_start_S1, view.block_size)
    out, lse, mass = native.decode_with_mass(
        q_NHD, *native_rows(rows), kv_heads, D, kv_heads * D, *table, 0, scale, view.tree_Tn, sequences
    )
    lengths = [view.lengths[s] for s in sequences]
    return out, lse, [mass_L[:length] for mass_L, length in zip(mass, lengths, strict=True)]


def top_tokens(attention_mass: Sequence[Tensor], first: int, last: int, count: int) -> Tensor:
    """Return, per layer, the `count` positions in [first, last) with the largest attention mass: int64 [layers, count],
    ascending. `attention_mass` has one [L] per layer."""
    candidates = torch.stack([mass[first:last] for mass in attention_mass])
    return candidates.topk(min(count, candidates.shape[1]), dim=1).indices.sort(dim=1).values + first
