"""Token selection of a sparse layer, before its attention: write index keys, select tokens, narrow the view.

Legend: N tokens of a step, F features of an index key, S sequences, K selected tokens, X elements of a row that begins
with the queries of all heads.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
from torch import Tensor

from mlaforge.engine.cache.view import query_token_view, select_view, selected_bounds
from mlaforge.engine.execution.attention_probe import AttentionProbe
from mlaforge.modeling.token_index_mla import SparseLayer
from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.host_view import host_view
from mlaforge.ops.paged_rows import PagedRows
from mlaforge.ops.row_formats.coded import Coded
from mlaforge.ops.token_selection import SELECT_TOKENS, WRITE_INDEX, TokenIndex

# In a table of positions for all sequences, those of one begin at multiples of this: the chunk size of the kernels.
ROW_ALIGNMENT = 256


# Number of tokens that a step reads of each sequence of a view.
Counts = tuple[int, ...]


class Selections:
    """Selections of a step in progress: layers without an index read what the last layer with one selected.

    Sparse layers share one view, so what depends on it is computed once per step.
    """

    def __init__(self) -> None:
        self._view: CacheView | None = None
        self._counts: dict[int, Counts | None] = {}
        self._selected: dict[Counts, tuple[Tensor, Tensor]] = {}
        self._bounds: dict[tuple[Counts, bool], tuple[Tensor, Tensor]] = {}

    def query_tokens(self, view: CacheView) -> CacheView:
        """The step's view for selection: each generated token has a selection of its own, that of decoding it alone."""
        if self._view is None:
            self._view = query_token_view(view)
        return self._view

    def counts(self, view: CacheView, topk: int) -> Counts | None:
        """Number of tokens per sequence of `query_tokens` that a sparse layer with this budget reads; None if all.
        Bounds in a captured step."""
        if topk not in self._counts:
            lengths = host_view(view).visible_lengths or (view.max_seq_len,) * len(view.queries)
            counts = tuple(
                min(length, topk) if sparse else length for length, sparse in zip(lengths, view.selecting, strict=True)
            ) if any(view.selecting) else lengths  # fmt: skip
            self._counts[topk] = None if counts == lengths else counts
        return self._counts[topk]

    def set(self, counts: Counts, slots_SK: Tensor, positions_SK: Tensor) -> None:
        """Store the selection of a layer with an index, for itself and the layers after it."""
        self._selected[counts] = slots_SK, positions_SK

    def get(self, counts: Counts) -> tuple[Tensor, Tensor]:
        """Return slots and positions, int32 [S, K], of the last layer with an index."""
        return self._selected[counts]

    def view(self, tokens_view: CacheView, counts: Counts, by_sequence: bool) -> CacheView:
        """Return the view of the tokens that the last layer with an index selected."""
        selected, key = self._selected[counts], (counts, by_sequence)
        if key not in self._bounds:
            stride = selected[0].shape[1] if by_sequence else 0
            self._bounds[key] = selected_bounds(tokens_view, counts, stride)
        return select_view(tokens_view, *selected, counts, by_sequence, self._bounds[key])


class Indexer:
    """The indexer of a layer, built from its SparseLayer.

    order            with it, keys and queries come after RoPE, their dimensions in this order
    reads_positions  attention looks up the positions of rows, as the layout `latent` does
    """

    def __init__(
        self, sparse: SparseLayer, heads: int, rows: PagedRows, halves: Tensor | None, sinks: Tensor | None,
        order: Tensor | None = None, reads_positions: bool = False,
    ):  # fmt: skip
        pattern, self.topk, self.reads_positions = sparse.sparsity, sparse.topk, reads_positions
        self.index = None
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
        self.example, self.keys = torch.empty(0, 1, dtype=rows.dtype, device=rows.device), rows.index
        self.write = WRITE_INDEX.bind(self.example, self.index, None, rows.index)
        self.select = SELECT_TOKENS.bind(self.example, self.index, None, rows.index)

    def __call__(
        self, features_NF: Tensor | None, q_NX: Tensor, rotation_N1P: Tensor, rows: PagedRows, view: CacheView,
        selections: Selections, probe: AttentionProbe | None = None,
    ) -> CacheView:  # fmt: skip
        """Return the view of what this step's tokens read.

        features_NF  input of the index keys; only layers with an index need it
        probe        records what the index selects, even where the step reads more
        """
        if self.index is not None:
            assert rows.index is not None and features_NF is not None
            self.write(features_NF, self.index, rotation_N1P, rows.index, view.slots_N)
        tokens_view = selections.query_tokens(view)
        counts = selections.counts(tokens_view, self.topk)
        probe_counts, probed = None, []
        if probe is not None:
            stops = list(itertools.accumulate(view.queries))
            token_stops = list(itertools.accumulate(tokens_view.queries))
            # The last query token of each probed sequence.
            probed = [token_stops.index(stops[s]) for s in probe.sequences]
            probe_counts = self._probe_counts(tokens_view, counts, probed)
        if self.index is not None:
            assert rows.index is not None
            alignment = ROW_ALIGNMENT if self.reads_positions else 1
            for topk in {topk for topk in (counts, probe_counts) if topk is not None}:
                selections.set(
                    topk, *self.select(q_NX, self.index, rotation_N1P, rows.index, tokens_view, topk, alignment)
                )
        if probe is not None and probe_counts is not None:
            positions_SK = selections.get(probe_counts)[1]
            probe.layers.append([positions_SK[s, : probe_counts[s]] for s in probed])
        if counts is None:
            return view
        return selections.view(tokens_view, counts, self.reads_positions)

    def capturable(self, view: CacheView) -> bool:
        """Whether a CUDA graph can capture the selection of a step with this view."""
        if self.index is None:
            return True
        x, keys, rotation = self.example, self.keys, self.example.new_empty(0, 1, 0, dtype=torch.complex64)
        counts = (1,) * len(view.queries)
        # Nodes of a tree become sequences (engine/cache/view.py).
        view = dataclasses.replace(view, tree_Tn=None)
        return WRITE_INDEX.capturable(x, self.index, rotation, keys, view.slots_N) and SELECT_TOKENS.capturable(
            x, self.index, rotation, keys, view, counts, 1
        )

    def _probe_counts(self, view: CacheView, counts: Counts | None, sequences: list[int]) -> Counts:
        """Tokens to select for the probed sequences: as many as the step reads of each sequence, else of the probed
        only."""
        lengths = host_view(view).visible_lengths
        probed = {s: min(lengths[s], self.topk) for s in sequences}
        if counts is not None and all(counts[s] == count for s, count in probed.items()):
            return counts
        return tuple(probed.get(s, length) for s, length in enumerate(lengths))


def make_indexer(attention: Any, heads: int, rows: PagedRows, sinks: Tensor | None, **options: Any) -> Indexer | None:
    """Return the indexer of a decoder layer's attention module; None where the layer is dense."""
    sparse, halves = getattr(attention, "sparse", None), None
    if sparse is None:
        return None
    if isinstance(rows.format, Coded) and not attention.qk_norm:
        halves = rows.format.code.halves(rows.packed.device).float()
    return Indexer(sparse, heads, rows, halves, sinks, **options)
