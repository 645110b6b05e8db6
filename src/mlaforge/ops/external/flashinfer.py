"""FlashInfer (github.com/flashinfer-ai/flashinfer): absorbed MLA and grouped-query attention over pages of any size,
so selections too; any numbers of query tokens; windows of grouped-query attention.

A plan belongs to a view and is shared by its layers; making it reads lengths on the host, so that no CUDA graph can
capture a step. MLA returns a natural lse on request, grouped-query attention one to base 2.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import torch
from torch import Tensor

from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.external import arguments
from mlaforge.ops.external.attention_library import AttentionCase, AttentionLibrary, PerView, ampere_refusal
from mlaforge.ops.external.library import FLASHINFER
from mlaforge.runtime import on_device

# Bytes of the workspace that the library recommends.
WORKSPACE = 128 << 20
HEAD_DIMS = (64, 128, 256)


@functools.cache
def workspace(device: torch.device) -> Tensor:
    """Return the memory for partial results of a device."""
    return torch.empty(WORKSPACE, dtype=torch.uint8, device=device)


class FlashInfer(AttentionLibrary):
    """Both kinds of attention."""

    library = FLASHINFER

    def __init__(self) -> None:
        self.plans = PerView()

    def refusal(self, case: AttentionCase) -> str | None:
        if (reason := ampere_refusal(case)) is not None:
            return reason
        if case.latent:
            fp8 = case.rows == torch.float8_e4m3fn and case.dtype == torch.bfloat16
            if case.rows != case.dtype and not (fp8 and case.capability[0] == 9):
                return f"rows of {case.rows} need bfloat16 queries and compute capability 9.0, or must be {case.dtype}"
            return arguments.latent_refusal(case.key, case.value)
        if case.rows != case.dtype:
            return f"rows must be {case.dtype} as the queries, they are {case.rows}"
        if case.key != case.value or case.key not in HEAD_DIMS:
            return f"heads must have {', '.join(map(str, HEAD_DIMS))} elements, these have {case.key} and {case.value}"
        if case.heads % case.kv_heads:
            return f"{case.heads} query heads are not a multiple of {case.kv_heads} KV heads"
        return None

    def attend(
        self, q_NHD: Tensor, k_LGD: Tensor, v_LGV: Tensor, view: CacheView, scale: float
    ) -> tuple[Tensor, Tensor]:
        latent = AttentionCase.of(q_NHD, k_LGD, v_LGV, view).latent
        out, lse = (self._latents if latent else self._heads)(q_NHD, k_LGD, v_LGV, view, scale)
        tokens = self.plans.get(view, "tokens", lambda: arguments.QueryTokens.of(view))
        return arguments.empty_rows(out, lse, tokens.seen_N)

    def _latents(
        self, q_NHD: Tensor, k_LGD: Tensor, v_LGV: Tensor, view: CacheView, scale: float
    ) -> tuple[Tensor, Tensor]:
        rank, R = v_LGV.shape[2], arguments.RANK
        q, (cache, table) = arguments.zero_columns(q_NHD, rank), arguments.wide_latents(k_LGD, rank, view)
        cache = cache[:, :, 0]
        key = (q.shape[1], scale, q.dtype, cache.dtype, rank)
        wrapper = self.plans.get(view, key, lambda: self._plan_latents(q, cache, table, view, scale))
        # Rows in fp8 are casts of 16-bit ones, without a scale.
        scales = {"ckv_scale": 1.0, "kpe_scale": 1.0} if cache.dtype == torch.float8_e4m3fn else {}
        out, lse = wrapper.run(
            q[..., :R], q[..., R:], cache[..., :R], cache[..., R:], return_lse=True, return_lse_base_on_e=True, **scales
        )
        return out[..., :rank], lse

    def _plan_latents(self, q: Tensor, cache: Tensor, table: Tensor, view: CacheView, scale: float) -> Any:
        wrapper = self.library.load("mla").BatchMLAPagedAttentionWrapper(workspace(q.device))
        query_start, page_start, page_numbers, _ = _tables(view, table)
        wrapper.plan(
            query_start, page_start, page_numbers, _int32(view.lengths, q.device), q.shape[1], arguments.RANK,
            arguments.ROPE, view.block_size, True, scale, q.dtype, cache.dtype,
        )  # fmt: skip
        return wrapper

    def _heads(
        self, q_NHD: Tensor, k_LGD: Tensor, v_LGV: Tensor, view: CacheView, scale: float
    ) -> tuple[Tensor, Tensor]:
        (_, H, D), G = q_NHD.shape, k_LGD.shape[1]
        key = (H, G, D, scale, q_NHD.dtype)
        wrapper = self.plans.get(view, key, lambda: self._plan_heads(q_NHD, G, view, scale))
        cache = arguments.pages(k_LGD, view.block_size), arguments.pages(v_LGV, view.block_size)
        out, lse = wrapper.run(q_NHD, cache, return_lse=True)
        return out, lse * math.log(2)

    def _plan_heads(self, q_NHD: Tensor, kv_heads: int, view: CacheView, scale: float) -> Any:
        wrapper = self.library.load().BatchPrefillWithPagedKVCacheWrapper(workspace(q_NHD.device), "NHD")
        query_start, page_start, page_numbers, last_page = _tables(view, view.block_table_SB)
        wrapper.plan(
            query_start, page_start, page_numbers, last_page, q_NHD.shape[1], kv_heads, q_NHD.shape[2], view.block_size,
            causal=True, sm_scale=scale, window_left=-1 if view.window is None else view.window - 1,
            q_data_type=q_NHD.dtype, kv_data_type=q_NHD.dtype,
        )  # fmt: skip
        return wrapper


def _int32(values: Any, device: torch.device) -> Tensor:
    return on_device(list(values), torch.int32, device)


def _tables(view: CacheView, table_SB: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return, in int32: first query token and first page of each sequence, with the ends [S + 1]; page numbers of all
    sequences, concatenated; tokens in the last page of each [S]."""
    device, size = table_SB.device, view.block_size
    counts = [-(-length // size) for length in view.lengths]
    starts = [0, *itertools.accumulate(counts)]
    sequence = torch.repeat_interleave(_int32(counts, device).long(), output_size=starts[-1])
    column = torch.arange(starts[-1], device=device) - _int32(starts[:-1], device)[sequence]
    last = [length - max(count - 1, 0) * size for length, count in zip(view.lengths, counts, strict=True)]
    page_start, last_page = _int32(starts, device), _int32(last, device)
    return view.query_start_S1, page_start, table_SB[sequence, column], last_page
