"""Draft tokens from the logits of a draft head: the likeliest for greedy requests, else sampled.

Legend: R rows of logits, K drafted tokens of a sequence, V draft vocabulary or, of q, the target's.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from mlaforge.engine.request.sequence import Sequence
from mlaforge.engine.sampling.sampler import likeliest
from mlaforge.engine.speculation.drafter import Draft
from mlaforge.runtime import on_device


@dataclasses.dataclass(frozen=True)
class DraftToken:
    """A drafted token, the head's highest probability in its place, and the distribution [V] that it was sampled from;
    None: it is the likeliest."""

    token_id: int
    probability: float
    q_V: Tensor | None


@dataclasses.dataclass(frozen=True)
class DraftRows:
    """Drafted tokens on the device, each of the sequence beside it: target ids, int64 [R]; the head's highest
    probabilities, fp64 [R], 1 where nobody asks for them; the distribution [V] of each token that was sampled."""

    sequences: Items[Sequence]
    token_ids_R: Tensor
    probability_R: Tensor
    qs: list[Tensor | None]


def highest_probability(logits_RV: Tensor) -> Tensor:
    """Return the probability of each row's likeliest token, fp64 [R]; NaN where logits are not finite."""
    return logits_RV.float().softmax(-1).amax(-1).double()


def sample_distribution(distribution_V: Tensor, generator: torch.Generator) -> Tensor:
    """Sample a token of a distribution [V], int64 []. The same draw as torch.multinomial, which first validates the
    distribution: on a GPU the host would wait for that."""
    return (distribution_V / torch.empty_like(distribution_V).exponential_(generator=generator)).argmax()


def sample_drafts(
    logits_RV: Tensor, sequences: Items[Sequence], target_ids: Tensor, vocabulary: int, probabilities: bool
) -> DraftRows:
    """Return a draft token for each row, of the sequence beside it, with probabilities or not. target_ids: of the
    draft tokens, [V]. vocabulary: size of the target's."""
    tokens_R = likeliest(logits_RV)
    qs: list[Tensor | None] = [None] * len(sequences)
    for i, sequence in enumerate(sequences):
        params = sequence.request.params
        if not params.greedy:
            distribution_V = (logits_RV[i].float() / params.temperature).softmax(-1)
            tokens_R[i] = sample_distribution(distribution_V, sequence.state.generator)
            qs[i] = distribution_V.new_zeros(vocabulary).index_copy_(0, target_ids, distribution_V)
    ones_R = torch.ones(len(tokens_R), dtype=torch.float64, device=tokens_R.device)
    return DraftRows(sequences, target_ids[tokens_R], highest_probability(logits_RV) if probabilities else ones_R, qs)


def sample_places(
    logits_RV: Tensor, places: Items[tuple[Sequence, Items[int]]], markov: Callable[[Tensor], Tensor] | None,
    sample: Callable[[Tensor, list[Sequence]], DraftRows],
) -> list[DraftRows]:  # fmt: skip
    """Return the draft tokens of one pass. With `markov`, which returns the logits that tokens add to the places after
    them, they are sampled place by place.

    places: the rows of each sequence. sample: as sample_drafts."""
    if markov is None:
        sequence_of = {row: sequence for sequence, rows in places for row in rows}
        return [sample(logits_RV, [sequence_of[row] for row in range(len(logits_RV))])]
    # Sequences with more places first: those that have a place at some depth are the first ones.
    places = sorted(places, key=lambda item: -len(item[1]))
    parts: list[DraftRows] = []
    for depth in range(len(places[0][1])):
        active = [(sequence, rows[depth]) for sequence, rows in places if len(rows) > depth]
        logits_SV = logits_RV.index_select(0, on_device([row for _, row in active], torch.int64, logits_RV.device))
        if parts:
            logits_SV = logits_SV + markov(parts[-1].token_ids_R[: len(active)])
        parts.append(sample(logits_SV, [sequence for sequence, _ in active]))
    return parts


def read_drafts(parts: Items[DraftRows]) -> dict[Sequence, list[DraftToken]]:
    """Return the drafted tokens of each sequence in the order of its rows. The host waits for the device once."""
    # In fp64, which represents every token id exactly.
    token_ids_R = torch.cat([rows.token_ids_R for rows in parts]).double()
    columns = torch.stack((token_ids_R, torch.cat([rows.probability_R for rows in parts]))).tolist()
    drafted: dict[Sequence, list[DraftToken]] = {}
    rows_of = itertools.chain.from_iterable(zip(rows.sequences, rows.qs, strict=True) for rows in parts)
    for (sequence, q_V), token, probability in zip(rows_of, *columns, strict=True):
        drafted.setdefault(sequence, []).append(DraftToken(int(token), probability, q_V))
    return drafted


def cut(tokens: Items[DraftToken], min_probability: float) -> Draft:
    """Return the draft before the first token whose path, the product of the probabilities up to it, is less likely
    than `min_probability`."""
    paths = itertools.accumulate((token.probability for token in tokens), operator.mul)
    # Probabilities fall along a path; NaN, where the head's logits are not finite, is below any.
    tokens = tokens[: sum(path >= min_probability for path in paths)]
    sampled = [token.q_V for token in tokens if token.q_V is not None]
    return Draft([token.token_id for token in tokens], torch.stack(sampled) if sampled else None)
