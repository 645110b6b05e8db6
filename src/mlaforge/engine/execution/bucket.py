"""Shapes that CUDA graphs are captured for, and padding of a step's batch to such a shape.

A smaller tree is padded with the text before it: nodes in a row, which end with the root's predecessor.

Padding rows write to the scratch block of each cache group, which no pool allocates and no other table names, so that
no query reads it. A sequence with fewer query tokens than the bucket has padding rows before them, which see cached
rows at most; padding sequences see nothing (their length is 0).

Legend: S sequences, T query tokens of each, N = S * T, B columns of a block table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mlaforge.engine.execution.batch import Batch
from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.work_list import refill
from mlaforge.runtime import on_device

# Query tokens per sequence of captured steps: decoding, and verification of up to 8 drafts. Arithmetic limits steps
# with more, so that the host is ahead of the device without a graph.
QUERIES: tuple[int, ...] = (1, 2, 3, 4, 5, 9)
# Nodes of a tree of drafted tokens.
NODES = (16, 32, 64)
# Lengths up to here share a graph.
MIN_LENGTH = 256


def bucket_of(sequences: int, max_sequences: int) -> int:
    """Return the smallest of 1, 2, 4, 8, 16, 24, 32, ... and `max_sequences` that is at least `sequences`."""
    assert 1 <= sequences <= max_sequences, f"{sequences} of {max_sequences}"
    return min(max_sequences, 1 << (sequences - 1).bit_length() if sequences <= 8 else -(-sequences // 8) * 8)


@dataclasses.dataclass(frozen=True)
class Bucket:
    """All host numbers that the launches of a uniform step depend on: S, T, the length that its lengths are rounded up
    to, the columns of the block table of every cache group, whether its tokens are parts of prompts, and whether they
    read selections where the model is sparse. tree: they are a tree of drafted tokens of one sequence."""

    sequences: int
    queries: int
    longest: int
    columns: tuple[int, ...]
    prompts: bool = False
    selecting: bool = False
    tree: bool = False

    @classmethod
    def of(cls, batch: Batch, max_sequences: int) -> Bucket | None:
        """Return the bucket of a batch. None where it has more than `max_sequences` sequences, prompts beside other
        sequences, dense requests beside sparse ones, too many query tokens of a sequence, or a tree that is not padded
        by the text before it."""
        view, classes = batch.views[0], QUERIES
        queries, prompts = view.queries, view.prompts
        selecting = view.selecting or (False,) * len(queries)
        if len(set(prompts)) > 1 or len(set(selecting)) > 1 or len(queries) > max_sequences:
            return None
        if view.tree_Tn is not None:
            classes = tuple(count for count in NODES if count <= min(one.lengths[0] for one in batch.views))
            if view.tree_Tn.shape[0] != view.tree_Tn.shape[1]:
                return None
        if not classes or max(queries) > classes[-1]:
            return None
        longest = max(MIN_LENGTH, 1 << (view.max_seq_len - 1).bit_length())
        columns = tuple(columns_of(one, longest) for one in batch.views)
        most = next(count for count in classes if count >= max(queries))
        sequences = bucket_of(len(queries), max_sequences)
        return cls(sequences, most, longest, columns, prompts[0], selecting[0], view.tree_Tn is not None)

    def rows(self, batch: Batch) -> Tensor | slice:
        """Return the rows of a batch's tokens in a batch of this shape: the last ones of each sequence."""
        queries, T = batch.views[0].queries, self.queries
        if all(count == T for count in queries):
            return slice(len(queries) * T)
        rows = [row for s, count in enumerate(queries) for row in range((s + 1) * T - count, (s + 1) * T)]
        return on_device(rows, torch.int64, batch.token_ids_N.device)


def columns_of(view: CacheView, longest: int) -> int:
    """Columns that a table of `longest` tokens takes, with a window no more than the window can keep; never fewer than
    the view has."""
    if view.window is not None:
        # A window may begin at the end of a block and end at the beginning of another block.
        longest = min(longest, view.window + view.max_query + 2 * view.block_size)
    return max(view.block_table_SB.shape[1], -(-longest // view.block_size))


def blank(bucket: Bucket, like: Batch) -> Batch:
    """Allocate a batch of the bucket's shape for `fill`, on the device of `like` and with its windows."""
    S, T = bucket.sequences, bucket.queries
    device = like.token_ids_N.device
    shared: dict[str, Any] = {
        "seq_lens_S": torch.zeros(S, dtype=torch.int32, device=device),
        "query_start_S1": torch.arange(0, S * T + 1, T, dtype=torch.int32, device=device),
        "max_query": T,
        "max_seq_len": bucket.longest,
        "queries": (T,) * S,
        # Host numbers of the sequences, which a captured step must not need.
        "runs": (),
        "lengths": (),
        "generating": (not bucket.prompts,) * S,
        "selecting": (bucket.selecting,) * S,
        "tree_Tn": torch.zeros(T, T, dtype=torch.int32, device=device) if bucket.tree else None,
    }
    views = tuple(
        dataclasses.replace(
            view,
            block_table_SB=torch.zeros(S, columns, dtype=torch.int32, device=device),
            first_S=torch.zeros(S, dtype=torch.int32, device=device),
            slots_N=torch.zeros(S * T, dtype=torch.int64, device=device),
            **shared,
        )
        for view, columns in zip(like.views, bucket.columns, strict=True)
    )
    ids, positions = torch.zeros(2, S * T, dtype=torch.int64, device=device)
    return Batch(ids, positions, torch.arange(T - 1, S * T, T, device=device), views)


def fill(static: Batch, batch: Batch, rows: Tensor | slice, scratch: Sequence[int]) -> None:
    """Overwrite `static`, a batch from `blank`, with `batch` and padding. `rows`: of the tokens (Bucket.rows);
    `scratch`: the scratch block of every cache group."""
    _copy_to(static.token_ids_N, rows, batch.token_ids_N, 0)
    _copy_to(static.positions_N, rows, batch.positions_N, 0)
    tree_Tn = batch.views[0].tree_Tn
    if tree_Tn is not None and static.views[0].tree_Tn is not None:
        _fill_tree(static.views[0].tree_Tn, tree_Tn)
    # All groups share one tensor, as in make_batch.
    _copy_padded(static.views[0].seq_lens_S, batch.views[0].seq_lens_S, 0)
    for target, view, block in zip(static.views, batch.views, scratch, strict=True):
        _copy_padded(target.block_table_SB, view.block_table_SB, block)
        _copy_padded(target.first_S, view.first_S, 0)
        _copy_to(target.slots_N, rows, view.slots_N, block * view.block_size)
        refill(target, view.lengths)


def _fill_tree(target_Tn: Tensor, tree_nn: Tensor) -> None:
    """Write a tree behind a chain of the tokens before it."""
    T, n = len(target_Tn), len(tree_nn)
    at_T = torch.arange(T, device=target_Tn.device, dtype=torch.int32)
    # A node's position in the chain and, of the tree's nodes, behind it.
    position_T = at_T.clone()
    position_T[T - n :] = T - n + tree_nn.amax(1)
    distance_TT = position_T[:, None] - at_T
    target_Tn.copy_(torch.where((distance_TT >= 0) & (at_T < T - n), distance_TT, -1))
    target_Tn[T - n :, T - n :] = tree_nn


def _copy_padded(target: Tensor, source: Tensor, padding: int) -> None:
    if target.shape != source.shape:
        target.fill_(padding)
    target[tuple(map(slice, source.shape))].copy_(source)


def _copy_to(target: Tensor, rows: Tensor | slice, source: Tensor, padding: int) -> None:
    if target.shape != source.shape:
        target.fill_(padding)
    if isinstance(rows, slice):
        target[rows].copy_(source)
    else:
        target.index_copy_(0, rows, source)


def padded(batch: Batch, bucket: Bucket, scratch: Sequence[int]) -> Batch:
    """Return `batch` padded to the shape of its bucket: its tokens' rows compute and write what they do in `batch`."""
    static = blank(bucket, batch)
    fill(static, batch, bucket.rows(batch), scratch)
    return static
