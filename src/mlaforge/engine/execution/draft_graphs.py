"""CUDA graphs of a draft head's chains: all drafted tokens of a step in one replay, because launches take longer than
the head's kernels.

Legend: S sequences, padded to a bucket, K drafted tokens of each, C hidden size of the head, B columns of a block
table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from mlaforge.engine.execution.batch import Batch
from mlaforge.engine.execution.bucket import MIN_LENGTH, bucket_of, columns_of
from mlaforge.engine.execution.graphs import Capture
from mlaforge.ops.cache_view import CacheView


@dataclasses.dataclass(frozen=True)
class Chains:
    """Inputs of a step's chains, which a replay reads.

    out_SC      the head's output at the newest row of each sequence
    computed_S  int64: tokens of each sequence, which is the position of the next row
    view        of the head's cache group, with the blocks that the rows of all drafted tokens read
    """

    out_SC: Tensor
    computed_S: Tensor
    view: CacheView

    def batch(self, token_ids_S: Tensor, depth: int) -> Batch:
        """The batch of the row of the newest of `depth` drafted tokens, from numbers on the device."""
        view, size = self.view, self.view.block_size
        position_S = self.computed_S + depth - 1
        row_S = position_S - view.first_S
        block_S1 = view.block_table_SB.gather(1, (row_S // size)[:, None])
        at = dataclasses.replace(
            view, seq_lens_S=(position_S + 1).int(), slots_N=block_S1[:, 0].long() * size + row_S % size
        )
        return Batch(token_ids_S, position_S, view.query_start_S1[:-1].long(), (at,))


# From the inputs, the number of tokens, and a state that a captured graph would not follow, to drafts [2, K, S].
Draft = Callable[[Chains, int, tuple[bool, str]], Tensor]


class DraftGraphs:
    """The graphs of `draft`, by the numbers that its launches depend on.

    scratch  the scratch block of the head's cache group
    """

    def __init__(self, draft: Draft, capture: Capture, scratch: int, max_num_seqs: int):
        self._draft, self._capture, self._scratch, self._max_num_seqs = draft, capture, scratch, max_num_seqs
        self._graphs: dict[tuple[Hashable, ...], tuple[Chains, Callable[[], None], Tensor]] = {}

    def __call__(self, out_SC: Tensor, view: CacheView, count: int, state: tuple[bool, str]) -> Tensor:
        """Return what `draft` returns, [2, K, S], valid until the next call. view: of the rows of each sequence's
        drafted tokens but the last, which has none."""
        S, K = len(out_SC), count
        sequences, longest = bucket_of(S, self._max_num_seqs), max(MIN_LENGTH, 1 << (view.max_seq_len - 1).bit_length())
        columns = columns_of(view, longest)
        key = sequences, K, longest, columns, state
        if key not in self._graphs:
            chains = self._blank(out_SC, view, sequences, longest, columns)
            self._fill(chains, out_SC, view, K)
            replay, drafted = self._capture(lambda: self._draft(chains, K, state))
            self._graphs[key] = chains, replay, drafted
        chains, replay, drafted = self._graphs[key]
        self._fill(chains, out_SC, view, K)
        replay()
        return drafted[:, :, :S]

    def _blank(self, out_SC: Tensor, view: CacheView, sequences: int, longest: int, columns: int) -> Chains:
        device = out_SC.device
        static = dataclasses.replace(
            view, block_table_SB=torch.zeros(sequences, columns, dtype=torch.int32, device=device),
            first_S=torch.zeros(sequences, dtype=torch.int32, device=device),
            query_start_S1=torch.arange(sequences + 1, dtype=torch.int32, device=device), max_query=1,
            max_seq_len=longest,
            queries=(1,) * sequences, generating=(True,) * sequences, selecting=(True,) * sequences,
            runs=(), lengths=(),
        )  # fmt: skip
        computed = torch.zeros(sequences, dtype=torch.int64, device=device)
        return Chains(out_SC.new_zeros(sequences, out_SC.shape[1]), computed, static)

    def _fill(self, chains: Chains, out_SC: Tensor, view: CacheView, count: int) -> None:
        """Rows of padding sequences go to the scratch block."""
        S, B = view.block_table_SB.shape
        chains.out_SC[:S].copy_(out_SC)
        chains.computed_S[S:].zero_()
        chains.view.first_S[S:].zero_()
        chains.view.first_S[:S].copy_(view.first_S)
        torch.sub(view.seq_lens_S, count - 1, out=chains.computed_S[:S])
        chains.view.block_table_SB.fill_(self._scratch)
        chains.view.block_table_SB[:S, :B].copy_(view.block_table_SB)
