"""vLLM's Triton kernels (github.com/vllm-project/vllm), its fallbacks on GPUs without other kernels: absorbed MLA of
any rank, and grouped-query attention with windows. Every query token is a sequence of its own, so that a step of
several reads the cache as often.

The kernel of absorbed MLA returns a natural lse. That of grouped-query attention returns none: it is the logarithm of
the sum over the parts that the kernel writes for its second pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.external import arguments
from mlaforge.ops.external.attention_library import AttentionCase, AttentionLibrary, PerView, ampere_refusal
from mlaforge.ops.external.library import VLLM
from mlaforge.runtime import UserError

# Parts of a sequence that are attended side by side; tokens that are worth a part.
SPLITS, SPLIT_TOKENS, SEGMENTS = 16, 512, 16
# The kernel reads the block table up to the end of a tile of at most so many tokens.
TILE = 64


class Vllm(AttentionLibrary):
    """Both kinds of attention."""

    library = VLLM

    def __init__(self) -> None:
        self.plans = PerView()

    def refusal(self, case: AttentionCase) -> str | None:
        if (reason := ampere_refusal(case)) is not None:
            return reason
        if case.latent:
            fp8 = case.rows == torch.float8_e4m3fn and case.capability >= (8, 9)
            return None if case.rows == case.dtype or fp8 else f"it does not read rows of {case.rows} here"
        if case.rows != case.dtype:
            return f"rows must be {case.dtype} as the queries, they are {case.rows}"
        if case.key != case.value:
            return f"keys and values must have one width, these have {case.key} and {case.value}"
        if case.heads % case.kv_heads:
            return f"{case.heads} query heads are not a multiple of {case.kv_heads} KV heads"
        return None

    def attend(
        self, q_NHD: Tensor, k_LGD: Tensor, v_LGV: Tensor, view: CacheView, scale: float
    ) -> tuple[Tensor, Tensor]:
        tokens = self.plans.get(view, "tokens", lambda: arguments.QueryTokens.of(view))
        table_NB = self.plans.get(view, "table", lambda: tokens.block_table(view, -(-TILE // view.block_size)))
        lengths_N = self.plans.get(view, "lengths", lambda: tokens.seen_N.clamp_min(0))
        cache = arguments.pages(k_LGD, view.block_size), arguments.pages(v_LGV, view.block_size)
        latent = AttentionCase.of(q_NHD, k_LGD, v_LGV, view).latent
        attend = self._latents if latent else self._heads
        out, lse = attend(q_NHD, cache, table_NB, lengths_N, view, scale)
        return arguments.empty_rows(out, lse, tokens.seen_N)

    def _latents(
        self, q_NHD: Tensor, cache: tuple[Tensor, Tensor], table_NB: Tensor, lengths_N: Tensor, view: CacheView,
        scale: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        kernels, (k, v) = self.library.load("v1.attention.ops.triton_decode_attention"), cache
        (N, H, _), V = q_NHD.shape, v.shape[3]
        splits = min(SPLITS, -(-max(1, *view.lengths) // SPLIT_TOKENS))
        out, lse = q_NHD.new_empty(N, H, V), torch.empty(N, H, device=q_NHD.device)
        parts = torch.empty(N, H, splits, V + 1, device=q_NHD.device)
        kernels.decode_attention_fwd(
            q_NHD, k, v, out, lse, table_NB, lengths_N, parts, splits, scale, view.block_size, is_mla=True
        )
        return out, lse

    def _heads(
        self, q_NHD: Tensor, cache: tuple[Tensor, Tensor], table_NB: Tensor, lengths_N: Tensor, view: CacheView,
        scale: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        kernels, (k, v) = self.library.load("v1.attention.ops.triton_unified_attention"), cache
        if kernels.is_batch_invariant:
            raise UserError("vllm: VLLM_BATCH_INVARIANT selects a kernel that returns no lse; unset it")
        (N, H, D), device = q_NHD.shape, q_NHD.device
        out = torch.empty_like(q_NHD)
        parts = torch.empty(N, H, SEGMENTS, 1 << (D - 1).bit_length(), device=device)
        # The kernel leaves parts beyond a sequence's end unwritten.
        largest_NHS = torch.full((N, H, SEGMENTS), -torch.inf, device=device)
        sum_NHS = torch.ones(N, H, SEGMENTS, device=device)
        kernels.unified_attention(
            q_NHD, k, v, out, torch.arange(N + 1, dtype=torch.int32, device=device), 1, lengths_N, max(view.lengths),
            scale, True, (-1 if view.window is None else view.window - 1, 0), table_NB, 0, None, None, None,
            seq_threshold_3D=N, num_par_softmax_segments=SEGMENTS, softmax_segm_output=parts,
            softmax_segm_max=largest_NHS, softmax_segm_expsum=sum_NHS,
        )  # fmt: skip
        return out, (largest_NHS + sum_NHS.log()).logsumexp(-1)
