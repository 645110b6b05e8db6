"""The tokens of all sequences of a step, as one batch for the model.

Legend: N tokens of the step one after another, S sequences.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from mlaforge.engine.cache.view import Tables, make_views
from mlaforge.engine.execution.attention_probe import AttentionProbe
from mlaforge.ops.cache_view import CacheView
from mlaforge.runtime import on_device


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Tokens [start, stop) of a sequence that this step computes; `seq` is its number in the block tables.

    tree        with it, the last rows up to `stop` are a tree of drafted tokens; it has a row per token, as in
                CacheView.tree_Tn, and the chunk is the only one of its step
    generating  whether the tokens were generated, as opposed to prompt tokens
    dense       whether generated tokens read everything where the model is sparse
    """

    seq: int
    token_ids: Sequence[int]
    start: int
    stop: int
    tree: list[list[int]] | None = None
    generating: bool = False
    dense: bool = False

    @property
    def positions(self) -> Iterable[int]:
        """Position of each token; branches of a tree share positions."""
        if self.tree is None:
            return range(self.start, self.stop)
        return (self.stop - len(row) + max(row) for row in self.tree)


@dataclasses.dataclass(frozen=True)
class Batch:
    """views         one per cache group
    last_S        the last row of each chunk
    sparse_views  where a step reads a part of the cache: the views of the layers with full attention, in their order
    probe         records the attention of some sequences
    """

    token_ids_N: Tensor
    positions_N: Tensor
    last_S: Tensor
    views: tuple[CacheView, ...]
    sparse_views: tuple[CacheView, ...] = ()
    probe: AttentionProbe | None = None

    def layer_views(self, groups: Sequence[int]) -> list[CacheView]:
        """Return the view of each layer; `groups` are the numbers of their cache groups."""
        views = [self.views[group] for group in groups]
        if not self.sparse_views:
            return views
        sparse_views = iter(self.sparse_views)
        return [next(sparse_views) if view.window is None else view for view in views]


def make_batch(
    chunks: Sequence[Chunk], tables: Tables, device: torch.device, groups: Sequence[int] | None = None
) -> Batch:
    """Return the batch of these chunks: tokens, positions, and views of every cache group, or of those in `groups`."""
    token_ids: list[int] = []
    positions: list[int] = []
    last_rows: list[int] = []
    for chunk in chunks:
        token_ids += chunk.token_ids[chunk.start : chunk.stop]
        positions += chunk.positions
        last_rows.append(len(positions) - 1)
    tree = next((chunk.tree for chunk in chunks if chunk.tree is not None), None)
    return Batch(
        on_device(token_ids, torch.int64, device),
        on_device(positions, torch.int64, device),
        on_device(last_rows, torch.int64, device),
        make_views(
            [(chunk.seq, chunk.start, chunk.stop) for chunk in chunks],
            tables,
            device,
            groups,
            tree,
            [chunk.generating for chunk in chunks],
            [chunk.generating and not chunk.dense for chunk in chunks],
        ),
    )
