"""The start of the Markov correction against the mean logits of every token, by numpy's SVD."""

import numpy as np
import pytest
import torch

from mlaforge.drafting.initialize import Text
from mlaforge.drafting.markov import PRIOR, initialize_markov, with_markov
from support import block_heads
from support.draft_texts import inputs


def changes(head, rows, states, target_head):
    """What each draft token changes of the logits on average, [V, V], and how often it occurs [V]."""
    ids, finals = rows.ids.flatten().tolist(), states.final.double()
    by_token = [finals[[i for i, token in enumerate(ids) if token == one]] for one in head.target_ids.tolist()]
    mean = torch.cat(by_token).mean(0)
    shrunk = [(part - mean).sum(0) / (len(part) + PRIOR) for part in by_token]
    return (torch.stack(shrunk) @ target_head.double().T).numpy(), np.array([len(part) for part in by_token])


@pytest.mark.parametrize("rank", [3, 64])
def test_the_start_is_the_best_table_of_its_rank(rank):
    """Of the mean logits, weighed by how often a token occurs; a wider rank than the table's holds it exactly."""
    head = with_markov(block_heads.make(), rank)
    rows, states, embedding, target_head = inputs(head.config.draft_vocab_size, head.fc.in_features)
    initialize_markov(head, Text(rows, lambda part: states, embedding, 1e-6), target_head)
    table = (head.markov_embed.weight @ head.markov_head.weight.T).detach().double().numpy()
    expected, counts = changes(head, rows, states, target_head)
    weights = np.sqrt(counts)[:, None]
    left = np.linalg.norm(weights * (table - expected))
    assert left == pytest.approx(np.linalg.norm(np.linalg.svd(weights * expected)[1][rank:]), rel=1e-3, abs=1e-3)
    assert np.linalg.norm(weights * expected) > 10
