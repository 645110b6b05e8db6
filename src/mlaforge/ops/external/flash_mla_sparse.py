"""FlashMLA's sparse decoding (github.com/deepseek-ai/FlashMLA): absorbed MLA over rows of 656 bytes
(ops/row_formats/fp8_ds_mla.py). Every query token is a sequence whose indices are the slots that it sees, of a
selection or of all tokens; -1 fills them up. Returns a natural lse, +inf for a query token that sees nothing.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.external import arguments
from mlaforge.ops.external.attention_library import PerView
from mlaforge.ops.external.library import FLASH_MLA, needs_gpu
from mlaforge.ops.gpu_properties import capability_name, gpu_properties
from mlaforge.ops.paged_rows import PagedRows
from mlaforge.ops.row_formats.format import RowFormat
from mlaforge.ops.row_formats.fp8_ds_mla import Fp8DsMla

# Rows of a page, and the multiple of the number of indices.
PAGE, TOPK = 64, 64
# Numbers of query heads; others are filled up with zeros.
HEADS = (64, 128)


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
        if rows.slots % PAGE:
            return f"{rows.slots} slots are not a multiple of {PAGE}: use block_size {PAGE}"
        if view.tree_Tn is not None or not view.lengths:
            return "it does not compute trees and captured steps"
        return self.refusal(rows.format, q_NHW.shape[1], q_NHW.dtype, gpu_properties(q_NHW.device).capability) or True

    def refusal(
        self, format: RowFormat, heads: int, dtype: torch.dtype, capability: tuple[int, int]
    ) -> str | None:  # fmt: skip
        """Return the reason why the kernel does not compute such queries over such rows, or None."""
        if not isinstance(format, Fp8DsMla):
            return f"rows must be fp8_ds_mla, they are {format.name}"
        if heads > HEADS[-1]:
            return f"the sparse kernel has at most {HEADS[-1]} query heads, not {heads}"
        if dtype != torch.bfloat16:
            return f"queries must be bfloat16, they are {dtype}"
        if capability[0] not in (9, 10):
            return f"it is for compute capability 9.0 and 10.0, this GPU has {capability_name(capability)}"
        return None

    def run(self, q_NHW: Tensor, rows: PagedRows, rank: int, view: CacheView, scale: float) -> tuple[Tensor, Tensor]:
        """As ops.packed_latent_attention without sinks, for inputs that are supported."""
        flash_mla = FLASH_MLA.load()
        H = q_NHW.shape[1]
        missing = next(heads for heads in HEADS if heads >= H) - H
        tokens = self.plans.get(view, "tokens", lambda: arguments.QueryTokens.of(view))
        slots_NK = self.plans.get(view, "slots", lambda: tokens.slots(view, TOPK))
        metadata = self.plans.get(view, H, lambda: flash_mla.get_mla_metadata()[0])
        out, lse = flash_mla.flash_mla_with_kvcache(
            F.pad(arguments.zero_columns(q_NHW, rank), (0, 0, 0, missing))[:, None],
            arguments.pages(rows.packed, PAGE)[:, :, None], None, None,
            arguments.RANK, metadata, softmax_scale=scale, is_fp8_kvcache=True, indices=slots_NK[:, None],
        )  # fmt: skip
        return arguments.empty_rows(out[:, 0, :H, :rank], lse[:, :H, 0], tokens.seen_N)
