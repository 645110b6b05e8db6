"""The Markov correction of heads that draft several tokens in one pass: a head without one gets one, and its start.

The start says what a token changes on average: the mean final state of the target at the token, less the mean at all
tokens, times the language model head, reduced to the rank that keeps most of these logits over the text.

Legend: V draft vocabulary, C hidden size of the target, R rank.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from mlaforge.drafting.initialize import MAX_POSITIONS, Text
from mlaforge.drafting.lookup_init import BATCH_TOKENS

# Occurrences of a token at which its own mean weighs as much as the mean of all tokens.
PRIOR = 4.0


def with_markov(head: Any, rank: int) -> Any:
    """Return a head with a Markov correction of this rank, initially zero; the same head if it has one, or for rank
    0."""
    if head.config.markov_rank or not rank:
        return head
    wider = type(head)(dataclasses.replace(head.config, markov_rank=rank))
    wider.load_state_dict({**wider.state_dict(), **head.state_dict()})
    return wider


@torch.no_grad()
def initialize_markov(head: Any, text: Text, target_head: Tensor) -> None:
    """Initialise a head's Markov correction. target_head [V, C]: as in initialize_head."""
    sums_VC, counts_V = token_sums(head.draft_ids().to(target_head.device), text, target_head)
    mean_C = sums_VC.sum(0) / counts_V.sum()
    changes_VC = (sums_VC - counts_V[:, None] * mean_C) / (counts_V + PRIOR)[:, None]
    weights = target_head.double().cpu()
    # Changes times root are as long as the logits that they cause.
    root = torch.linalg.cholesky(weights.mT @ weights)
    scaled_VC = changes_VC @ root
    moments = scaled_VC.mT @ (counts_V[:, None] * scaled_VC)
    directions = torch.linalg.eigh(moments).eigenvectors.flip(1)[:, : head.config.markov_rank]
    embedded_VR = scaled_VC @ directions
    size = embedded_VR.square().mean().sqrt()
    head.markov_embed.weight[:, : directions.shape[1]] = embedded_VR / size
    head.markov_head.weight[:, : directions.shape[1]] = (
        weights @ torch.linalg.solve_triangular(root.mT, directions, upper=True) * size
    )


def token_sums(draft_ids: Tensor, text: Text, target_head: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of the target's final states at each draft token, [V, C], and their numbers [V], fp64 on the CPU,
    over the first MAX_POSITIONS positions."""
    V, C = target_head.shape
    sums, counts = torch.zeros(V, C).double(), torch.zeros(V).double()
    seen = 0
    for indices in torch.arange(len(text.rows)).split(max(1, BATCH_TOKENS // text.rows.ids.shape[1])):
        part = text.rows.take(indices).to(target_head.device)
        tokens = draft_ids[part.ids.flatten()]
        states, tokens = (x[tokens >= 0].cpu() for x in (text.states(part).final, tokens))
        sums.index_add_(0, tokens, states.double())
        counts.index_add_(0, tokens, torch.ones(len(tokens)).double())
        seen += part.ids.numel()
        if seen >= MAX_POSITIONS:
            break
    return sums, counts
