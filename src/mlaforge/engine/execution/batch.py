"""One step's tokens of all its sequences, laid out for the model.

Legend: N tokens of the step one after another, S sequences.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from mlaforge.engine.cache.view import Tables, make_views
from mlaforge.ops.cache_view import CacheView
from mlaforge.runtime import on_device


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Tokens [start, stop) of a sequence that this step computes; `seq` is its number in the block tables.

    `tree`: the last rows up to `stop` are a tree of drafted tokens, of which this has a row for each of the tokens, as
    CacheView.tree_Tn; then there is no other chunk. `generating`: the tokens are no prompt's.
    """

    seq: int
    token_ids: Sequence[int]
    start: int
    stop: int
    tree: list[list[int]] | None = None
    generating: bool = False

    @property
    def positions(self) -> Iterable[int]:
        """Where the tokens stand, branches of a tree side by side."""
        if self.tree is None:
            return range(self.start, self.stop)
        return (self.stop - len(row) + max(row) for row in self.tree)


@dataclasses.dataclass(frozen=True)
class AttentionProbe:
    """Records the attention of the last query token of some sequences of a step.

    `sequences` are their numbers in the step. `layers` gets one list per layer with full attention, one tensor per
    sequence: the attention mass of each token, [tokens] (ops/attention_mass.py), or, of a sparse layer, the positions
    that it selects, int32."""

    sequences: list[int]
    layers: list[list[Tensor]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Batch:
    """`views` has one entry per cache group. `last_S` is each chunk's last row among the N. `partial`: where only a
    part of the cache is read, the views of those layers that else see everything, one after another. `probe`:
    records where the attention of some sequences falls."""

    token_ids_N: Tensor
    positions_N: Tensor
    last_S: Tensor
    views: tuple[CacheView, ...]
    partial: tuple[CacheView, ...] = ()
    probe: AttentionProbe | None = None


def make_batch(
    chunks: Sequence[Chunk], tables: Tables, device: torch.device, groups: Sequence[int] | None = None
) -> Batch:
    """The chunks' tokens, positions, and what they see of every cache group, or of those named only."""
    token_ids: list[int] = []
    positions: list[int] = []
    lasts: list[int] = []
    for chunk in chunks:
        token_ids += chunk.token_ids[chunk.start : chunk.stop]
        positions += chunk.positions
        lasts.append(len(positions) - 1)
    tree = next((chunk.tree for chunk in chunks if chunk.tree is not None), None)
    return Batch(
        on_device(token_ids, torch.int64, device),
        on_device(positions, torch.int64, device),
        on_device(lasts, torch.int64, device),
        make_views(
            [(chunk.seq, chunk.start, chunk.stop) for chunk in chunks],
            tables,
            device,
            groups,
            tree,
            [chunk.generating for chunk in chunks],
        ),
    )
