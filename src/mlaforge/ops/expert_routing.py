"""Grouping of (token, expert) pairs by expert, in torch.

Legend: N tokens, E experts, K experts per token, P = N K pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor


def route(topk_ids_NK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return (token, expert) pairs sorted by expert, int64 [P], and the offsets of the experts' pairs, int32 [E +
    1]."""
    sorted_P, order_P = topk_ids_NK.flatten().sort(stable=True)
    experts = torch.arange(num_experts + 1, device=topk_ids_NK.device)
    return order_P, torch.searchsorted(sorted_P, experts, out_int32=True)
