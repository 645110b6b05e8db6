"""FlashMLA's dense decoding (github.com/deepseek-ai/FlashMLA): absorbed MLA over pages of 64 rows in bf16 or fp16, any
number of query tokens. Returns a natural lse, +inf for a query token that sees nothing.

Ranks under 512 and fewer than 64 rotary elements are widened by zeros, which copies the rows at every call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.external import arguments
from mlaforge.ops.external.attention_library import AttentionCase, AttentionLibrary, PerView
from mlaforge.ops.external.library import FLASH_MLA
from mlaforge.ops.gpu_properties import capability_name

# Rows of a page.
PAGE = 64


class FlashMla(AttentionLibrary):
    """An implementation of ops.paged_attention."""

    library = FLASH_MLA

    def __init__(self) -> None:
        self.plans = PerView()

    def refusal(self, case: AttentionCase) -> str | None:
        if not case.latent:
            return "it computes absorbed MLA, these are keys and values of heads"
        if case.capability[0] != 9:
            return f"the dense kernel is for compute capability 9.0, this GPU has {capability_name(case.capability)}"
        if case.dtype not in (torch.bfloat16, torch.float16) or case.rows != case.dtype:
            return f"queries and rows must both be bfloat16 or float16, they are {case.dtype} and {case.rows}"
        if case.page != PAGE:
            selected = "of a selection it reads fp8_ds_mla rows only"
            return selected if case.page == 1 else f"blocks must have {PAGE} tokens, not {case.page}"
        if case.window is not None:
            return "it has no sliding window"
        return arguments.latent_refusal(case.key, case.value)

    def attend(
        self, q_NHD: Tensor, k_LGD: Tensor, v_LGV: Tensor, view: CacheView, scale: float
    ) -> tuple[Tensor, Tensor]:
        flash_mla, rank = self.library.load(), v_LGV.shape[2]
        S, T, H = len(view.queries), max(view.queries), q_NHD.shape[1]
        rows_N = arguments.right_aligned(view)
        q = arguments.zero_columns(q_NHD, rank)
        if rows_N is not None:
            q = q.new_zeros(S * T, *q.shape[1:]).index_copy_(0, rows_N, q)
        cache, table = arguments.wide_latents(k_LGD, rank, view)
        lengths_S, seen_N = self.plans.get(view, "lengths", lambda: _lengths(view))
        metadata = self.plans.get(view, (H, T), lambda: flash_mla.get_mla_metadata()[0])
        out, lse = flash_mla.flash_mla_with_kvcache(
            q.view(S, T, H, -1), cache, table, lengths_S, arguments.RANK, metadata, softmax_scale=scale, causal=T > 1
        )
        out_XHV, lse_XH = out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)
        if rows_N is not None:
            out_XHV, lse_XH = out_XHV[rows_N], lse_XH[rows_N]
        return arguments.empty_rows(out_XHV[..., :rank], lse_XH, seen_N)


def _lengths(view: CacheView) -> tuple[Tensor, Tensor]:
    return arguments.cached_lengths(view), arguments.QueryTokens.of(view).seen_N
