"""FlashMLA's sparse decoding (github.com/deepseek-ai/FlashMLA): absorbed MLA over rows of 656 bytes
(ops/row_formats/fp8_ds_mla.py). Every query token is a sequence whose indices are the slots that it sees, of a
selection or of all tokens; -1 fills them up. Returns a natural lse, +inf for a query token that sees nothing.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.external import arguments
from mlaforge.ops.external.attention_library import PerView
from mlaforge.ops.external.library import FLASH_MLA, needs_gpu
from mlaforge.ops.gpu_properties import gpu_properties
from mlaforge.ops.paged_rows import PagedRows
from mlaforge.ops.row_formats.fp8_ds_mla import Fp8DsMla

# Rows of a page, and the multiple of the number of indices.
PAGE, TOPK = 64, 64


class FlashMlaSparse:
    """An implementation of ops.packed_latent_attention."""

    def __init__(self) -> None:
        self.plans = PerView()

    def supports(
        self, q_NHW: Tensor, rows: PagedRows, rank: int, view: CacheView, *others: Any
    ) -> Literal[True] | str:  # fmt: skip
        """Return True, or the reason why FlashMLA cannot compute these inputs here."""
        if reason := FLASH_MLA.missing() or needs_gpu(q_NHW.device):
            return reason
        if not isinstance(rows.format, Fp8DsMla):
            return f"rows must be fp8_ds_mla, they are {rows.format.name}"
        if rows.slots % PAGE:
            return f"{rows.slots} slots are not a multiple of {PAGE}: use block_size {PAGE}"
        if view.tree_Tn is not None or not view.lengths:
            return "it does not compute trees and captured steps"
        return sparse_refusal(q_NHW.shape[1], q_NHW.dtype, gpu_properties(q_NHW.device).capability) or True

    def run(self, q_NHW: Tensor, rows: PagedRows, rank: int, view: CacheView, scale: float) -> tuple[Tensor, Tensor]:
        """As ops.packed_latent_attention without sinks, for inputs that are supported."""
        flash_mla = FLASH_MLA.load()
        H, tokens = q_NHW.shape[1], self.plans.get(view, "tokens", lambda: arguments.QueryTokens.of(view))
        slots_NK = self.plans.get(view, "slots", lambda: tokens.slots(view, TOPK))
        metadata = self.plans.get(view, H, lambda: flash_mla.get_mla_metadata()[0])
        out, lse = flash_mla.flash_mla_with_kvcache(
            arguments.zero_columns(q_NHW, rank)[:, None], arguments.pages(rows.packed, PAGE)[:, :, None], None, None,
            arguments.RANK, metadata, softmax_scale=scale, is_fp8_kvcache=True, indices=slots_NK[:, None],
        )  # fmt: skip
        return arguments.empty_rows(out[:, 0, :, :rank], lse[..., 0], tokens.seen_N)


def sparse_refusal(heads: int, dtype: torch.dtype, capability: tuple[int, int]) -> str | None:
    """Return the reason why the sparse kernel does not compute such queries, or None."""
    if heads not in (64, 128):
        return f"the sparse kernel has 64 or 128 query heads, not {heads}"
    if dtype != torch.bfloat16:
        return f"queries must be bfloat16, they are {dtype}"
    if capability[0] not in (9, 10):
        return (
            f"the sparse kernel is for compute capability 9.0 and 10.0, this GPU has {'.'.join(map(str, capability))}"
        )
    return None
