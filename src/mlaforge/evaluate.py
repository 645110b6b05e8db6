"""Perplexity on token windows: the number that says what a conversion cost."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

# Rows of logits held at once (each is as long as the vocabulary).
HEAD_ROWS = 512


@torch.no_grad()
def negative_log_likelihood(model: Any, ids: Tensor) -> Tensor:
    """Per-token loss in nats, [T-1] fp32, of one window of token ids [T] under a transformers causal LM."""
    ids = ids.to(model.device)
    hidden = model.model(ids[None], use_cache=False).last_hidden_state[0, :-1]
    head = model.get_output_embeddings()
    losses = [
        torch.nn.functional.cross_entropy(head(rows).float(), targets, reduction="none")
        for rows, targets in zip(hidden.split(HEAD_ROWS), ids[1:].split(HEAD_ROWS), strict=True)
    ]
    return torch.cat(losses)


def perplexity(model: Any, windows: Iterable[Tensor]) -> float:
    """exp of the mean loss over all predicted tokens of windows [T] each; NaN or infinity is returned as it is."""
    total, count = 0.0, 0
    for ids in windows:
        losses = negative_log_likelihood(model, ids)
        total += float(losses.double().sum())
        count += losses.numel()
    mean = total / count
    return math.exp(mean) if mean < 700 else math.inf
