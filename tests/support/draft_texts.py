"""Texts for the objectives of draft heads: random documents in packed rows, with random states of a target."""

import torch

from mlaforge.data.packing import first_fit
from mlaforge.drafting.objective import States

# Document lengths and prompt lengths in tokens; packed into two rows of 40, the second with padding.
DOCUMENTS = [(17, 6), (20, 11), (14, 2), (3, 1), (12, 9)]


def documents(seed=0, vocabulary=260):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randint(0, vocabulary, (n,), generator=generator).tolist(), prompt_length)
        for n, prompt_length in DOCUMENTS
    ]


def inputs(draft_vocab_size, captured, seed=0):
    """Return rows, random states of so many captured numbers, an embedding, and a language model head."""
    rows, generator = first_fit(documents(), 40), torch.Generator().manual_seed(seed + 1)
    sizes = (rows.ids.numel(), captured), (rows.ids.numel(), 64), (260, 64), (draft_vocab_size, 64)
    first, final, embedding, target_head = (torch.randn(size, generator=generator) for size in sizes)
    return rows, States(first, final), embedding, target_head
