"""Divergence of a model from its original: the two next-token distributions of every token of a text, compared.

Legend: T tokens, C hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mlaforge.checkpoint.layerwise import LayerStream
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.runtime import UserError
from mlaforge.training.kl_loss import compare

# Final states [T, C] of texts, and the weight of the LM head [V, C].
States = tuple[list[Tensor], Tensor]


def check_vocabularies(teacher: SourceModel, student: SourceModel) -> None:
    """Raise UserError for models whose distributions cannot be compared."""
    if student.config.get("vocab_size") != teacher.config.get("vocab_size"):
        raise UserError(f"{teacher} and {student} have different vocabularies; give the model it was converted from")


@torch.no_grad()
def final_states(stream: LayerStream, texts: Iterable[Tensor], what: str) -> States:
    """Return a model's states after the final norm for texts of token ids [T], and its head. `what` labels the progress
    bar."""
    hidden = stream.last_states(texts, what)
    with stream.head() as (norm, head):
        return [norm(states)[0] for states in hidden], head


def comparisons(student: States, teacher: States, texts: Iterable[Tensor]) -> list[Tensor]:
    """Return for each text of token ids [T] the student's loss, the teacher's loss, KL(teacher | student) and whether
    their most likely tokens are equal (0 or 1), per token but the first: fp32 [4, T-1] on the CPU, in nats."""
    parts = []
    for ids, a, b in zip(texts, student[0], teacher[0], strict=True):
        count = len(ids) - 1  # the last token has no successor
        values = compare((a[:count], student[1]), (b[:count], teacher[1]), ids[1:].to(a.device))
        parts.append(torch.stack([value.float() for value in values]).cpu())
    return parts


def percentile(kl: Tensor) -> float:
    """Return the 99th percentile of divergences per token, interpolated between the two nearest tokens."""
    return float(np.percentile(kl.double().numpy(), 99))


def summary(kl: Tensor, agrees: Tensor) -> dict[str, Any]:
    """Return the mean and the 99th percentile of divergences of tokens (nats), and the share of equal most likely
    tokens: `kl`, `kl_p99`, `top1`. kl, agrees: one value per token, any shape."""
    return {"kl": float(kl.double().mean()), "kl_p99": percentile(kl), "top1": float(agrees.double().mean())}
