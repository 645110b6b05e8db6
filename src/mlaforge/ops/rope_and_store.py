"""Norm and rotation of a step's queries and keys, and the write of its rows to the cache, in one op.

Legend: N tokens, W elements of a fused projection [q, k, v], P rotary pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mlaforge.ops.dispatch import Op
from mlaforge.ops.elementwise import rms_norm_reference
from mlaforge.ops.native import kernel
from mlaforge.ops.paged_rows import PagedRows, native_rows, native_supports, written_rows


def reference(
    qkv_NW: Tensor, rotation_N1P: Tensor, rows: PagedRows, slots_N: Tensor, heads: int, head_dim: int,
    norms: tuple[Tensor, Tensor, float] | None = None,
) -> None:  # fmt: skip
    """Rotate the first `heads` heads of qkv, in place, and write the last elements of each row, [k, v], to its slot.

    rotation_N1P: cos + i sin of every pair. A pair is two neighbours of a head (attention.interleaved).
    norms: weights [D] of RMS norms per head of the queries and of the keys, before rotation, and their epsilon.
    """
    norm_heads(qkv_NW, rows, heads, head_dim, norms)
    N, width = len(qkv_NW), heads * head_dim
    qk_NHD = qkv_NW[:, :width].view(N, heads, head_dim)
    rotated = torch.view_as_complex(qk_NHD.float().view(N, heads, -1, 2)) * rotation_N1P
    qk_NHD.copy_(torch.view_as_real(rotated).view(N, heads, head_dim))
    rows.write(slots_N, qkv_NW[:, -rows.format.width :])


def norm_heads(
    qkv_NW: Tensor, rows: PagedRows, heads: int, head_dim: int, norms: tuple[Tensor, Tensor, float] | None
) -> None:
    """Norm the queries and the keys of qkv, in place."""
    if norms is None:
        return
    *weights, eps = norms
    kv_heads = rows.format.width // (2 * head_dim)
    qk_NHD = qkv_NW[:, : heads * head_dim].view(len(qkv_NW), heads, head_dim)
    for part, weight_D in zip(qk_NHD.split([heads - kv_heads, kv_heads], dim=1), weights, strict=True):
        part.copy_(rms_norm_reference(part, weight_D, eps))


def _native(
    qkv_NW: Tensor, rotation_N1P: Tensor, rows: PagedRows, slots_N: Tensor, heads: int, head_dim: int,
    norms: tuple[Tensor, Tensor, float] | None = None,
) -> None:  # fmt: skip
    norm_heads(qkv_NW, rows, heads, head_dim, norms)
    kernel("rope_and_store")(qkv_NW, rotation_N1P, *native_rows(rows), slots_N, heads, head_dim)


def _observe(inputs: Sequence[Any], outputs: None) -> Sequence[Tensor]:
    qkv_NW, _, rows, slots_N, *_ = inputs
    return qkv_NW, written_rows(rows, slots_N)


OP = Op("rope_and_store", reference, mutates=(0, 2), observe=_observe)
OP.register_native(lambda qkv_NW, rotation_N1P, rows, *others: native_supports(rows), _native)
OP.register_triton("rope_and_store_triton", "rope_and_store")
