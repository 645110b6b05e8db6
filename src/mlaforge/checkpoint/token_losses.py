"""Cross-entropy loss and perplexity of a causal LM on windows of tokens, streamed layer by layer.

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
    """Return the mean loss of every window of token ids [N, T], in nats per token, fp64 [N]. `what` labels the progress
    bar."""
    return head_losses(stream, stream.last_states(windows, what), windows)


@torch.no_grad()
def head_losses(stream: LayerStream, hidden: list[Tensor], windows: Tensor) -> Tensor:
    """Return the `window_losses` from the last layer's outputs [1, T, C]."""
    with stream.head() as (norm, head):
        means = [losses(norm, head, h[0], ids).double().mean().cpu() for h, ids in zip(hidden, windows, strict=True)]
    return torch.stack(means)


@torch.no_grad()
def losses(norm: Any, head: Tensor, hidden_TC: Tensor, ids_T: Tensor) -> Tensor:
    """Return the per-token loss in nats, [T-1] fp32, from the last layer's output on one window."""
    hidden, targets = norm(hidden_TC[:-1]), ids_T[1:].to(hidden_TC.device)
    return torch.cat([
        nn.functional.cross_entropy((rows @ head.T).float(), labels, reduction="none")
        for rows, labels in zip(hidden.split(HEAD_ROWS), targets.split(HEAD_ROWS), strict=True)
    ])  # fmt: skip


def perplexity(losses: Tensor) -> float:
    """Return exp of the mean over windows of one length; infinity or NaN for such losses."""
    mean = float(losses.mean())
    return math.exp(mean) if not mean > 700.0 else math.inf


def standard_error(losses: Tensor) -> float | None:
    """Return the standard error of the mean over windows [N], because tokens of one window are not independent; None
    for a single window."""
    return float(losses.std() / len(losses) ** 0.5) if len(losses) > 1 else None
