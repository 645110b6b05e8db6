"""Attention mass of a step's last query tokens: per cached token, the softmax weights summed over all heads.

On a CPU the attention kernel records it while it attends to rows of keys and values (`attention_with_mass`); otherwise
a kernel reads the keys a second time (ops/cpu/attention/attention_mass.h).

Legend: N query tokens of all sequences, concatenated; H query heads, G KV heads, J = H / G, D key dimensions, L rows of
a sequence, W elements of a cached row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.dispatch import Op
from mlaforge.ops.host_view import host_view
from mlaforge.ops.native import kernel, supports_bfloat16
from mlaforge.ops.packed_attention import packed_attention
from mlaforge.ops.paged_rows import PagedRows, native_rows, native_supports


def last_query_row(view: CacheView, sequence: int) -> int:
    """Return the row, among the step's N, of a sequence's last query token."""
    return sum(view.queries[: sequence + 1]) - 1


def probe_attention_mass(
    q_NHD: Tensor, rows: PagedRows, kv_heads: int, view: CacheView, scale: float, sequences: Sequence[int]
) -> list[Tensor]:
    """Return the attention mass [L], fp32, of the last query token of each of `sequences`. The view must have no
    window, and a cached row must begin with its keys."""
    attention_mass: list[Tensor] = ATTENTION_MASS(q_NHD, rows, kv_heads, view, scale, sequences)
    return attention_mass


def attention_with_mass(
    q_NHD: Tensor, rows: PagedRows, kv_heads: int, view: CacheView, scale: float, sequences: Sequence[int]
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return (out, lse) of ops.packed_attention and the result of `probe_attention_mass`, of rows [keys, values]. The
    compiled kernel needs one pass over the keys for both. The view must have no window."""
    out, lse, attention_mass = ATTENTION_WITH_MASS(q_NHD, rows, kv_heads, view, scale, sequences)
    return out, lse, attention_mass


def reference(
    q_NHD: Tensor, rows: PagedRows, kv_heads: int, view: CacheView, scale: float, sequences: Sequence[int]
) -> list[Tensor]:
    """Multiply with all decoded keys in fp32, sequence by sequence."""
    D = q_NHD.shape[2]
    rows_LW, decoded_view = rows.decode(view)
    attention_mass = []
    for s in sequences:
        k_LW = host_view(decoded_view).sequence(s, rows_LW)[0][0, :, : kv_heads * D]
        k_GDL = k_LW.unflatten(1, (kv_heads, D)).permute(1, 2, 0)
        q_GJD = q_NHD[last_query_row(view, s)].view(kv_heads, -1, D)
        logits_GJL = q_GJD.float() @ k_GDL.float() * scale
        attention_mass.append(logits_GJL.softmax(-1).sum((0, 1)))
    return attention_mass


def _native(
    q_NHD: Tensor, rows: PagedRows, kv_heads: int, view: CacheView, scale: float, sequences: Sequence[int]
) -> list[Tensor]:
    last, s = [last_query_row(view, sequence) for sequence in sequences], list(sequences)
    mass = kernel("attention_mass")(
        q_NHD[last], *native_rows(rows), kv_heads, view.block_table_SB[s], view.seq_lens_S[s], view.block_size, scale
    )
    return [mass_L[: view.lengths[sequence]] for mass_L, sequence in zip(mass, sequences, strict=True)]


def reference_with_attention(
    q_NHD: Tensor, rows: PagedRows, kv_heads: int, view: CacheView, scale: float, sequences: Sequence[int]
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Attend, then compute the attention mass."""
    out, lse = packed_attention(q_NHD, rows, view, scale)
    return out, lse, probe_attention_mass(q_NHD, rows, kv_heads, view, scale, sequences)


def _native_with_attention(
    q_NHD: Tensor, rows: PagedRows, kv_heads: int, view: CacheView, scale: float, sequences: Sequence[int]
) -> tuple[Tensor, Tensor, list[Tensor]]:
    D = q_NHD.shape[2]
    table = (view.block_table_SB, view.seq_lens_S, view.first_S, view.query_start_S1, view.block_size)
    out, lse, mass = kernel("decode_with_mass")(
        q_NHD, *native_rows(rows), kv_heads, D, kv_heads * D, *table, 0, scale, view.tree_Tn, sequences
    )
    return out, lse, [mass_L[: view.lengths[s]] for mass_L, s in zip(mass, sequences, strict=True)]


def _supports_with_attention(q_NHD: Tensor, rows: PagedRows, *others: Any) -> Literal[True] | str:
    reason = supports_bfloat16(q_NHD)
    return native_supports(rows) if reason is True else reason


def _outputs(inputs: Sequence[Any], outputs: tuple[Tensor, Tensor, list[Tensor]]) -> Sequence[Tensor]:
    out, lse, attention_mass = outputs
    return out, lse, *attention_mass


ATTENTION_MASS = Op("attention_mass", reference)
ATTENTION_MASS.register_native(lambda q_NHD, rows, *others: native_supports(rows), _native)
ATTENTION_WITH_MASS = Op("attention_with_mass", reference_with_attention, observe=_outputs, tolerance=(3e-2, 3e-2))
ATTENTION_WITH_MASS.register_native(_supports_with_attention, _native_with_attention)


def top_tokens(attention_mass: Sequence[Tensor], first: int, last: int, count: int) -> Tensor:
    """Return, per layer, the `count` positions in [first, last) with the largest attention mass: int64 [layers, count],
    ascending. `attention_mass` has one [L] per layer."""
    candidates = torch.stack([mass[first:last] for mass in attention_mass])
    return candidates.topk(min(count, candidates.shape[1]), dim=1).indices.sort(dim=1).values + first
