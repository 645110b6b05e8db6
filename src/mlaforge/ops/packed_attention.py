"""Attention over packed rows (ops/row_formats/): bitwise equal to attention over the decoded rows in every
implementation, except for int8, which compiled kernels multiply as integers, and for other libraries' kernels.

Legend: N query tokens, H query heads, G KV heads, D head_dim, W elements of a latent row, R latent rank.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.dispatch import Op
from mlaforge.ops.external.flash_mla_sparse import FlashMlaSparse
from mlaforge.ops.native import kernel, supports_bfloat16
from mlaforge.ops.paged_attention import apply_sinks, paged_attention
from mlaforge.ops.paged_rows import PagedRows, native_rows, native_supports


def packed_attention(
    q_NHD: Tensor, rows: PagedRows, view: CacheView, scale: float, sinks_H: Tensor | None = None,
    implementation: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As ops.paged_attention, which attends where rows are read in place; a row is the keys of all heads, then their
    values, D elements each."""
    if rows.direct:
        k_LGD, v_LGD = rows.packed.view(len(rows.packed), 2, -1, q_NHD.shape[2]).unbind(1)
        return paged_attention(q_NHD, k_LGD, v_LGD, view, scale, sinks_H, implementation=implementation)
    out, lse = OP(q_NHD, rows, view, scale, sinks_H, implementation=implementation)
    return out, lse


def packed_latent_attention(
    q_NHW: Tensor, rows: PagedRows, rank: int, view: CacheView, scale: float, sinks_H: Tensor | None = None,
    implementation: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As ops.paged_attention of absorbed MLA, which attends where rows are read in place; the first `rank` elements of
    a row are the value."""
    if rows.direct:
        rows_L1W = rows.packed[:, None]
        return paged_attention(
            q_NHW, rows_L1W, rows_L1W[..., :rank], view, scale, sinks_H, implementation=implementation
        )
    out, lse = LATENTS(q_NHW, rows, rank, view, scale, sinks_H, implementation=implementation)
    return out, lse


def reference(
    q_NHD: Tensor, rows: PagedRows, view: CacheView, scale: float, sinks_H: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Decode all rows that the step reads."""
    rows_LW, gathered = rows.decode(view)
    k_LGD, v_LGD = rows_LW.view(len(rows_LW), 2, -1, q_NHD.shape[2]).unbind(1)
    return paged_attention(q_NHD, k_LGD, v_LGD, gathered, scale, sinks_H)


def latents_reference(
    q_NHW: Tensor, rows: PagedRows, rank: int, view: CacheView, scale: float, sinks_H: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Decode all rows that the step reads."""
    rows_LW, gathered = rows.decode(view)
    rows_L1W = rows_LW[:, None]
    return paged_attention(q_NHW, rows_L1W, rows_L1W[..., :rank], gathered, scale, sinks_H)


def _flash_mla(
    q_NHW: Tensor, rows: PagedRows, rank: int, view: CacheView, scale: float, sinks_H: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    out, lse = FLASH_MLA_SPARSE.run(q_NHW, rows, rank, view, scale)
    return apply_sinks(out, lse, sinks_H), lse


def _native(
    q_NHD: Tensor, rows: PagedRows, view: CacheView, scale: float, sinks_H: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    D = q_NHD.shape[2]
    G = rows.format.width // (2 * D)
    table, window = (view.block_table_SB, view.seq_lens_S, view.first_S, view.query_start_S1), view.window or 0
    out, lse = kernel("decode")(
        q_NHD, *native_rows(rows), G, D, G * D, *table, view.block_size, window, scale, view.tree_Tn
    )
    return apply_sinks(out, lse, sinks_H), lse


def _native_supports(q_NHD: Tensor, rows: PagedRows, *others: Any) -> Literal[True] | str:
    reason = supports_bfloat16(q_NHD)
    return native_supports(rows) if reason is True else reason


# Kernels multiply int8 codes as integers, with queries in 8 bits where tiles do.
OP = Op("packed_attention", reference, tolerance=(3e-2, 3e-2))
OP.register_native(_native_supports, _native)
OP.register_triton("paged_attention_triton", "attend_int8", "int8_supports")
FLASH_MLA_SPARSE = FlashMlaSparse()
LATENTS = Op("packed_latent_attention", latents_reference, tolerance=(3e-2, 3e-2))
LATENTS.register("flash_mla", _flash_mla, FLASH_MLA_SPARSE.supports, device_type="cuda", on_request=True)
