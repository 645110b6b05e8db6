"""Block drafter (DFlash, arXiv:2602.06036) on the paged cache: all tokens of a draft from one pass of its head.

The keys and values that the head makes of the target's states form a cache group that shares the sequences' block
tables, as for EAGLE-3 heads. Row i depends on the states at position i alone, so that a found prefix is exact, and
nothing else is remembered of a sequence. The rows of a block are written to the room reserved for verification and are
overwritten afterwards.

Legend: N rows, S sequences, K drafted tokens, V vocabulary.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from mlaforge.engine.config import MAX_DRAFT_TOKENS
from mlaforge.engine.execution.batch import Batch, Chunk
from mlaforge.engine.execution.block_head import PagedBlockHead
from mlaforge.engine.execution.model import EngineModel
from mlaforge.engine.execution.nvtx import span
from mlaforge.engine.request.sequence import Sequence
from mlaforge.engine.speculation.draft_sampling import sample_drafts
from mlaforge.engine.speculation.drafter import Draft, Drafter
from mlaforge.modeling.block_head import BlockHead
from mlaforge.ops.paged_rows import PagedRows
from mlaforge.runtime import on_device


class BlockDrafter(Drafter):
    """Drafts a chain per sequence, greedily for greedy requests, otherwise each token sampled from the distribution of
    its place, which does not depend on the tokens of the other places.

    head        the draft head; it takes dtype, device, weight format and embedding from `model`
    rows        the cache of its layers
    make_batch  builds batches on the head's cache group

    The host waits for the device once per step. The probability of a path is the product of the highest probabilities
    of its places."""

    def __init__(
        self, head: BlockHead, model: EngineModel, rows: Items[PagedRows], make_batch: Callable[[list[Chunk]], Batch]
    ):
        self.model, self.boundaries, self._make_batch = model, head.config.boundaries, make_batch
        self.longest = min(head.config.block_size - 1, MAX_DRAFT_TOKENS)
        self.target_ids = head.target_ids.to(model.device)
        self.head = PagedBlockHead(head, model, rows)

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
        sequences, places = [s for s, _ in budgets], [min(count, self.longest) for _, count in budgets]
        chunks, newest = [], []
        for sequence, count in zip(sequences, places, strict=True):
            assert len(sequence.token_ids) == sequence.computed + 1, "a block begins with the newest token"
            stop = sequence.computed + 1 + count
            chunks.append(Chunk(sequence.number, range(stop), sequence.computed, stop))
            newest.append(sequence.token_ids[-1])
        with span("DRAFT", self.model.device):
            ids_S = on_device(newest, torch.int64, self.model.device)
            logits_NV = self.head(ids_S, places, self._make_batch(chunks))
            of_rows = [s for s, count in zip(sequences, places, strict=True) for _ in range(count)]
            token_ids_N, qs = sample_drafts(logits_NV, of_rows, self.target_ids, self.model.spec.vocab_size)
            read = [token_ids_N.double()]
            if min_probability:
                # NaN where the head's logits are not finite.
                read.append(logits_NV.float().softmax(-1).amax(-1).double())
            # The host reads all at once, in fp64, which represents every token id exactly.
            token_ids, *probabilities = torch.stack(read).tolist()
        drafts: list[Draft | None] = []
        stop = 0
        for count in places:
            rows = slice(stop, stop := stop + count)
            if probabilities:
                paths = itertools.accumulate(probabilities[0][rows], operator.mul)
                rows = slice(rows.start, rows.start + sum(path >= min_probability for path in paths))
            ids = [int(token) for token in token_ids[rows]]
            sampled = [q_V for q_V in qs[rows] if q_V is not None]
            drafts.append(Draft(ids, torch.stack(sampled) if sampled else None))
        return drafts
