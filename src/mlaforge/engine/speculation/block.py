"""Block drafter (DFlash, arXiv:2602.06036) on the paged cache: all tokens of a draft from one pass of its head.

The keys and values that the head makes of the target's states form a cache group that shares the sequences' block
tables, as for EAGLE-3 heads. Row i depends on the states at position i alone, so that a found prefix is exact, and
nothing else is remembered of a sequence. The rows of a block are written to the room reserved for verification and are
overwritten afterwards.

Legend: N rows, S sequences, K drafted tokens, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Protocol

import torch
from torch import Tensor

from mlaforge.engine.config import MAX_DRAFT_TOKENS
from mlaforge.engine.execution.batch import Batch, Chunk
from mlaforge.engine.execution.block_head import MASK, PagedBlockHead
from mlaforge.engine.execution.model import EngineModel
from mlaforge.engine.execution.nvtx import span
from mlaforge.engine.request.sequence import Sequence
from mlaforge.engine.speculation.draft_sampling import (
    DraftRows,
    DraftToken,
    cut,
    read_drafts,
    sample_drafts,
    sample_places,
)
from mlaforge.engine.speculation.drafter import Draft, Drafter
from mlaforge.modeling.block_head import BlockHead
from mlaforge.ops.paged_rows import PagedRows


class Watcher(Protocol):
    """Sees how drafts come about."""

    def filled(self, sequence: Sequence, token_ids: list[int]) -> None:
        """Called with the drafted tokens after every pass."""

    def verified(self, sequence: Sequence, draft: Draft, accepted: int) -> None:
        """Called after the target accepted the first `accepted` tokens of a draft."""


class BlockDrafter(Drafter):
    """Drafts a chain per sequence, greedily for greedy requests, otherwise each token sampled from the distribution of
    its place, which depends on no other token of the block, or, with a Markov correction, on the one before.

    head        the draft head; it takes dtype, device, weight format and embedding from `model`
    rows        the cache of its layers
    make_batch  builds batches on the head's cache group

    The host waits for the device once per pass. The probability of a path is the product of the highest probabilities
    of its places.

    denoise_steps   passes per draft, experimental: later ones fill the less likely places of greedy requests again, in
                    view of the likelier tokens
    watcher         sees every pass and every verified draft
    """

    parallel_drafting = True

    def __init__(
        self, head: BlockHead, model: EngineModel, rows: Items[PagedRows], make_batch: Callable[[list[Chunk]], Batch]
    ):
        self.model, self.boundaries, self._make_batch = model, head.config.boundaries, make_batch
        self.longest = min(head.config.block_size - 1, MAX_DRAFT_TOKENS)
        self.target_ids = head.target_ids.to(model.device)
        self.head = PagedBlockHead(head, model, rows)
        self.denoise_steps = 1
        self.watcher: Watcher | None = None

    @torch.inference_mode()
    def observe(self, starts: Items[tuple[Sequence, int]], states_NS: Tensor) -> None:
        """As Drafter.observe."""
        chunks = [Chunk(s.number, s.token_ids, start, s.computed) for s, start in starts]
        with span("DRAFT_OBSERVE", self.model.device):
            self.head.store(states_NS, self._make_batch(chunks))

    @torch.inference_mode()
    def propose(self, budgets: Items[tuple[Sequence, int]], min_probability: float) -> list[Draft | None]:
        """As Drafter.propose."""
        assert self.longest is not None
        chunks, blocks, sequences = [], [], [sequence for sequence, _ in budgets]
        for sequence, count in budgets:
            assert len(sequence.token_ids) == sequence.computed + 1, "a block begins with the newest token"
            blocks.append([sequence.token_ids[-1], *[MASK] * min(count, self.longest)])
            stop = sequence.computed + len(blocks[-1])
            chunks.append(Chunk(sequence.number, range(stop), sequence.computed, stop))
        probabilities = bool(min_probability) or self.denoise_steps > 1
        with span("DRAFT", self.model.device):
            filled = self._fill(sequences, blocks, self._make_batch(chunks), probabilities)
            # A sampled token's distribution may not depend on the tokens after it.
            greedy = [i for i, sequence in enumerate(sequences) if sequence.request.params.greedy]
            for step in range(1, self.denoise_steps if greedy else 1):
                likely = {i: likeliest_places(filled[i], step / self.denoise_steps) for i in greedy}
                for i, chosen in likely.items():
                    blocks[i][1:] = [MASK if place is None else place.token_id for place in chosen]
                batch = self._make_batch([chunks[i] for i in greedy])
                again = self._fill([sequences[i] for i in greedy], [blocks[i] for i in greedy], batch, True)
                for i, places in zip(greedy, again, strict=True):
                    filled[i] = [old or new for old, new in zip(likely[i], places, strict=True)]
        return [cut(places, min_probability) for places in filled]

    def _fill(
        self, sequences: Items[Sequence], blocks: list[list[int]], batch: Batch, probabilities: bool
    ) -> list[list[DraftToken]]:
        """Run the head on blocks; return what stands at the places of each, with probabilities on demand, else 1."""

        def sample(logits_RV: Tensor, rows: list[Sequence]) -> DraftRows:
            return sample_drafts(logits_RV, rows, self.target_ids, self.model.spec.vocab_size, probabilities)

        logits_RV, row = self.head(blocks, batch), itertools.count()
        places = [(s, [next(row) for _ in block[1:]]) for s, block in zip(sequences, blocks, strict=True)]
        drafted = read_drafts(sample_places(logits_RV, places, self.head.markov, sample))
        if self.watcher is not None:
            for sequence in sequences:
                self.watcher.filled(sequence, [place.token_id for place in drafted[sequence]])
        return [drafted[sequence] for sequence in sequences]

    def record(self, sequence: Sequence, draft: Draft, budget: int, accepted: int) -> None:
        """As Drafter.record."""
        super().record(sequence, draft, budget, accepted)
        if self.watcher is not None:
            self.watcher.verified(sequence, draft, accepted)


def likeliest_places(places: list[DraftToken], share: float) -> list[DraftToken | None]:
    """Return a share of the places, at least one, the likeliest, and None for the others."""
    count = max(1, round(share * len(places)))
    order = sorted(range(len(places)), key=lambda i: -places[i].probability)
    return [place if i in order[:count] else None for i, place in enumerate(places)]
