"""Weights of latent attention, layout `latent`, in the form that a GPU's kernels multiply.

Legend: H query heads, G KV heads, D key and V value dimensions, R latent rank, K columns of the rows that are
multiplied.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mlaforge.modeling.latent_attention_mla import LatentAttention
from mlaforge.ops.integer_rows import IntegerColumns, in_columns, integer_columns, rounded_weight
from mlaforge.ops.paged_rows import PagedRows
from mlaforge.ops.row_formats.coded import Coded


@dataclasses.dataclass(frozen=True)
class GpuLatentWeights:
    """w_uk [G, D, K] and w_uv [G, V, K]; key biases b_k [G D] and b_v [G, V]; sinks [H] or None; q_norm and k_norm [D]
    or None, with `eps`.

    Of plain rows K is R, the weights are views of kv_b_proj, and `columns` is None. Coded rows are multiplied as
    integers: w_uk is int8 with an fp32 scale of each output in `scales` [G, D], w_uv fp16, and key_bias [G, D] and
    value_bias [G, V], fp32, count the integers' offset too.
    """

    w_uk: Tensor
    w_uv: Tensor
    b_k: Tensor
    b_v: Tensor
    key_bias: Tensor
    value_bias: Tensor
    sinks: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    scales: Tensor | None = None
    columns: IntegerColumns | None = None

    @classmethod
    def of(cls, attention: LatentAttention, rows: PagedRows) -> GpuLatentWeights:
        """Return the weights of a layer's module whose cache is `rows`."""
        parts = [part.detach() for part in attention.up_projections()]
        sinks = attention.sinks.detach() if attention.config.mla_sinks else None
        norms: list[Any] = [attention.q_norm, attention.k_norm] if attention.qk_norm else []
        q_norm, k_norm = [norm.weight.detach() for norm in norms] or [None, None]
        return cls.make(parts, rows, sinks, q_norm, k_norm, norms[0].eps if norms else 0.0)

    @classmethod
    def make(
        cls, parts: Sequence[Tensor], rows: PagedRows, sinks: Tensor | None = None, q_norm: Tensor | None = None,
        k_norm: Tensor | None = None, eps: float = 0.0,
    ) -> GpuLatentWeights:  # fmt: skip
        """Return the weights for rows of a format. parts: W_uk [G, D, R], W_uv [G, V, R] and their biases."""
        w_uk, w_uv, b_k, b_v = parts
        others: dict[str, Any] = {
            "b_k": b_k.flatten(), "b_v": b_v.contiguous(), "sinks": sinks, "q_norm": q_norm, "k_norm": k_norm,
            "eps": eps,
        }  # fmt: skip
        if not isinstance(rows.format, Coded):
            return cls(
                w_uk, w_uv, key_bias=b_k.float().contiguous(), value_bias=b_v.float().contiguous(), **others
            )  # fmt: skip
        columns = integer_columns(rows.format.counts)
        offset_R = columns.offset.to(w_uk.device)
        rounded, scales = rounded_weight(w_uk, columns)
        factor_K = torch.ones(columns.width, device=w_uk.device)
        factor_K[: columns.wide] = 256.0
        # W_uk without the order of columns: those of low bytes, behind those of high ones, are all coordinates.
        plain = _by_coordinate(rounded, columns) * scales[..., None]
        return cls(
            rounded, (in_columns(w_uv.float(), columns) * factor_K).half(), scales=scales, columns=columns,
            key_bias=b_k.float() + plain @ offset_R, value_bias=b_v.float() + w_uv.float() @ offset_R, **others,
        )  # fmt: skip

    def up_projections(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return W_uk [G D, rank], as rounded as kernels multiply it, and W_uv [G, V, rank] in fp32."""
        if self.columns is None or self.scales is None:
            return self.w_uk.flatten(0, 1).float(), self.w_uv.float()
        w_uk = _by_coordinate(self.w_uk, self.columns) * self.scales[..., None]
        return w_uk.flatten(0, 1), _by_coordinate(self.w_uv, self.columns)


def _by_coordinate(w_XK: Tensor, columns: IntegerColumns) -> Tensor:
    """Return a weight [..., R] in fp32 from its columns of low bytes."""
    at = columns.coordinates[columns.wide :].to(w_XK.device)
    low = w_XK[..., columns.wide :].float()
    order = torch.argsort(torch.where(at < 0, len(at) + torch.arange(len(at), device=at.device), at))
    return low[..., order[: len(columns.offset)]]
