"""Draft tokens from the logits of a draft head: the likeliest for greedy requests, else sampled.

Legend: R rows of logits, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch
from torch import Tensor

from mlaforge.engine.request.sequence import Sequence
from mlaforge.engine.sampling.sampler import likeliest


def sample_distribution(distribution_V: Tensor, generator: torch.Generator) -> Tensor:
    """Sample a token of a distribution [V], int64 []. The same draw as torch.multinomial, which first validates the
    distribution: on a GPU the host would wait for that."""
    return (distribution_V / torch.empty_like(distribution_V).exponential_(generator=generator)).argmax()


def sample_drafts(
    logits_RV: Tensor, sequences: Items[Sequence], target_ids: Tensor, vocabulary: int
) -> tuple[Tensor, list[Tensor | None]]:
    """Return a draft token for each row, of the sequence beside it, as target ids, int64 [R], and the distribution over
    the target's vocabulary, of this size, of each that was sampled. target_ids: of the draft tokens, [V]."""
    tokens_R = likeliest(logits_RV)
    qs: list[Tensor | None] = [None] * len(sequences)
    for i, sequence in enumerate(sequences):
        params = sequence.request.params
        if not params.greedy:
            distribution_V = (logits_RV[i].float() / params.temperature).softmax(-1)
            tokens_R[i] = sample_distribution(distribution_V, sequence.state.generator)
            qs[i] = distribution_V.new_zeros(vocabulary).index_copy_(0, target_ids, distribution_V)
    return target_ids[tokens_R], qs
