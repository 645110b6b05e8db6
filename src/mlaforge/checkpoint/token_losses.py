"""What a causal LM loses on windows of tokens, read one layer at a time: the number that says what was done to it.

Legend: N windows, T tokens, C hidden size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from mlaforge.checkpoint.layerwise import HEAD_ROWS, LayerStream


@torch.no_grad()
def window_losses(stream: LayerStream, windows: Tensor, what: str) -> Tensor:
    """Mean loss of every window of token ids [N, T], in nats per token, fp64 [N]. `what` names it to who watches."""
    return head_losses(stream, stream.last_states(windows, what), windows)


@torch.no_grad()
def head_losses(stream: LayerStream, hidden: list[Tensor], windows: Tensor) -> Tensor:
    """`window_losses` from the last layer's outputs [1, T, C]."""
    with stream.head() as (norm, head):
        each = [losses(norm, head, h[0], ids).double().mean().cpu() for h, ids in zip(hidden, windows, strict=True)]
    return torch.stack(each)


@torch.no_grad()
def losses(norm: Any, head: Tensor, hidden_TC: Tensor, ids_T: Tensor) -> Tensor:
    """Per-token loss in nats, [T-1] fp32, from the last layer's output on one window."""
    hidden, targets = norm(hidden_TC[:-1]), ids_T[1:].to(hidden_TC.device)
    return torch.cat([
        nn.functional.cross_entropy((rows @ head.T).float(), wanted, reduction="none")
        for rows, wanted in zip(hidden.split(HEAD_ROWS), targets.split(HEAD_ROWS), strict=True)
    ])  # fmt: skip


def perplexity(losses: Tensor) -> float:
    """exp of the mean over windows of one length; infinity or NaN where the losses are."""
    mean = float(losses.mean())
    return math.exp(mean) if not mean > 700.0 else math.inf


def standard_error(losses: Tensor) -> float | None:
    """Of the mean over windows [N], because tokens of one window are not independent; None of a single one."""
    return float(losses.std() / len(losses) ** 0.5) if len(losses) > 1 else None
