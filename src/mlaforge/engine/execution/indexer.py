"""Token selection of a sparse layer, before its attention: write index keys, select tokens, narrow the view.

Legend: N tokens of a step, F features of an index key, S sequences, K selected tokens, X elements of a row that begins
with the queries of all heads.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mlaforge.engine.execution.batch import AttentionProbe
from mlaforge.modeling.token_index_mla import SparseLayer
from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.paged_rows import PagedRows
from mlaforge.ops.row_formats.coded import Coded
from mlaforge.ops.token_selection import TokenIndex, narrowed

# Slots and positions that the last layer with an index selected in a step, by the number of tokens of each sequence.
# Later layers without an index read them.
Selections = dict[tuple[int, ...], tuple[Tensor, Tensor]]
# In a table of positions for all sequences, those of one begin at multiples of this: the chunk size of the kernels.
ROW_ALIGNMENT = 256


class Indexer:
    """The indexer of a layer, built from its SparseLayer.

    order            with it, keys and queries come after RoPE, their dimensions in this order
    reads_positions  attention looks up the positions of rows, as the layout `latent` does
    """

    def __init__(
        self, sparse: SparseLayer, heads: int, halves: Tensor | None, sinks: Tensor | None,
        order: Tensor | None = None, reads_positions: bool = False,
    ):  # fmt: skip
        pattern, self.topk, self.reads_positions = sparse.sparsity, sparse.topk, reads_positions
        self.window, self.index = pattern.window, None
        if sparse.index is None:
            return
        index = sparse.index
        key, query = index.key.weight.detach().float(), index.query.detach().float()
        if order is not None:
            key = key.unflatten(1, (-1, len(order)))[..., order].flatten(1)
            query = query[..., order]
        self.index = TokenIndex(
            key.contiguous(), index.key.bias.detach().float(), query.contiguous(), index.frequency, heads, halves,
            order is not None, None if sinks is None else sinks.detach().float(), pattern.sink, pattern.window,
            pattern.stride, sparse.topk,
        )  # fmt: skip

    def __call__(
        self, features_NF: Tensor | None, q_NX: Tensor, rotation_N1P: Tensor, rows: PagedRows, view: CacheView,
        selections: Selections, probe: AttentionProbe | None = None,
    ) -> CacheView:  # fmt: skip
        """Return the view of what this step's tokens read.

        features_NF  input of the index keys; only layers with an index need it
        selections   selections of the step so far, passed from layer to layer
        probe        records what the index selects, even where the step reads more
        """
        if self.index is not None:
            assert rows.index is not None and features_NF is not None
            self.index.write(rows.index, features_NF, rotation_N1P, view.slots_N)
        counts = view.selected_counts(self.topk, self.window)
        probe_counts = None if probe is None else self._probe_counts(view, counts, probe.sequences)
        if self.index is not None:
            assert rows.index is not None
            alignment = ROW_ALIGNMENT if self.reads_positions else 1
            for topk in {topk for topk in (counts, probe_counts) if topk is not None}:
                selections[topk] = self.index.choose(rows.index, q_NX, rotation_N1P, view, topk, alignment)
        if probe is not None and probe_counts is not None:
            positions_SK = selections[probe_counts][1]
            probe.layers.append([positions_SK[s, : probe_counts[s]] for s in probe.sequences])
        return view if counts is None else narrowed(view, *selections[counts], counts, self.reads_positions)

    def _probe_counts(self, view: CacheView, counts: tuple[int, ...] | None, sequences: list[int]) -> tuple[int, ...]:
        """Tokens to select for the probed sequences: as many as the step reads of each sequence, else of the probed
        only."""
        probed = {s: min(view.lengths[s], self.topk) for s in sequences}
        if counts is not None and all(counts[s] == count for s, count in probed.items()):
            return counts
        return tuple(probed.get(s, length) for s, length in enumerate(view.lengths))


def make_indexer(attention: Any, heads: int, rows: PagedRows, sinks: Tensor | None, **options: Any) -> Indexer | None:
    """Return the indexer of a decoder layer's attention module; None where the layer is dense."""
    sparse, halves = getattr(attention, "sparse", None), None
    if sparse is None:
        return None
    if isinstance(rows.format, Coded) and not attention.qk_norm:
        halves = rows.format.code.halves(rows.packed.device).float()
    return Indexer(sparse, heads, halves, sinks, **options)
