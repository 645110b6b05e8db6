"""What attention of a sparse layer does before it attends: its index keys are written, its view is narrowed.

Legend: N tokens of a step, F features of an index key, X numbers of a row that begins with the queries of all heads.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mlaforge.engine.execution.batch import AttentionProbe
from mlaforge.modeling.token_index_mla import SparseLayer
from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.paged_rows import PagedRows
from mlaforge.ops.row_format import Coded
from mlaforge.ops.token_selection import TokenIndex, narrowed

# What the last layer with an index chose in a step, for layers behind it that have none: slots and positions of so many
# tokens of each sequence.
Chosen = dict[tuple[int, ...], tuple[Tensor, Tensor]]
# Sequences' rows begin at multiples of this where one table of positions serves all: chunks of the kernels.
APART = 256


class SparseReading:
    """Made of a layer's SparseLayer; `turned` says that it is given keys and queries after RoPE, their dimensions in
    `order`. `angles`: positions of rows are looked up, as the layout `latent` does."""

    def __init__(
        self, sparse: SparseLayer, heads: int, halves: Tensor | None, sinks: Tensor | None,
        order: Tensor | None = None, angles: bool = False,
    ):  # fmt: skip
        pattern, self.topk, self.angles = sparse.sparsity, sparse.topk, angles
        self.window, self.index = pattern.window, None
        if sparse.index is None:
            return
        own = sparse.index
        key, query = own.key.weight.detach().float(), own.query.detach().float()
        if order is not None:
            key = key.unflatten(1, (-1, len(order)))[..., order].flatten(1)
            query = query[..., order]
        self.index = TokenIndex(
            key.contiguous(), own.key.bias.detach().float(), query.contiguous(), own.frequency, heads, halves,
            order is not None, None if sinks is None else sinks.detach().float(), pattern.sink, pattern.window,
            pattern.stride, sparse.topk,
        )  # fmt: skip

    def __call__(
        self, features_NF: Tensor | None, q_NX: Tensor, rotation_N1P: Tensor, rows: PagedRows, view: CacheView,
        chosen: Chosen, probe: AttentionProbe | None = None,
    ) -> CacheView:  # fmt: skip
        """The view of what this step's tokens read. Features are of layers with an index alone; `chosen` goes from
        layer to layer. To `probe` is told what the index chooses, though the step may read more."""
        if self.index is not None:
            assert rows.index is not None and features_NF is not None
            self.index.write(rows.index, features_NF, rotation_N1P, view.slots_N)
        counts = view.selected_counts(self.topk, self.window)
        told = None if probe is None else self._told(view, counts, probe.sequences)
        if self.index is not None:
            assert rows.index is not None
            apart = APART if self.angles else 1
            for asked in {each for each in (counts, told) if each is not None}:
                chosen[asked] = self.index.choose(rows.index, q_NX, rotation_N1P, view, asked, apart)
        if probe is not None and told is not None:
            positions_SK = chosen[told][1]
            probe.layers.append([positions_SK[s, : told[s]] for s in probe.sequences])
        return view if counts is None else narrowed(view, *chosen[counts], counts, self.angles)

    def _told(self, view: CacheView, counts: tuple[int, ...] | None, wanted: list[int]) -> tuple[int, ...]:
        """How many tokens are chosen for those sequences: as the step reads them, or of these alone."""
        own = {s: min(view.lengths[s], self.topk) for s in wanted}
        if counts is not None and all(counts[s] == count for s, count in own.items()):
            return counts
        return tuple(own.get(s, length) for s, length in enumerate(view.lengths))


def reading(attention: Any, heads: int, rows: PagedRows, sinks: Tensor | None, **more: Any) -> SparseReading | None:
    """Of a decoder layer's attention module; None where it is dense."""
    sparse, halves = getattr(attention, "sparse", None), None
    if sparse is None:
        return None
    if isinstance(rows.format, Coded) and not attention.qk_norm:
        halves = rows.format.code.halves(rows.packed.device).float()
    return SparseReading(sparse, heads, halves, sinks, **more)
