"""Shapes that graphs are captured for, and a step's batch filled up to such a shape.

Rows that fill up belong to no sequence. They see nothing (their length is 0) and write to the scratch block of each
cache group: one that no pool hands out and no table but theirs names, so that nobody ever reads it.

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

# More query tokens per sequence than decoding and its verification have: such steps are limited by arithmetic, and the
# host is ahead of the device without a graph.
MOST_QUERIES = 8
# Lengths up to here share a graph.
LEAST_LENGTH = 256


def bucket_of(sequences: int, most: int) -> int:
    """The least of 1, 2, 4, 8, 16, 24, 32, ... and `most` that is no less than `sequences` (of 1 to `most`)."""
    assert 1 <= sequences <= most, f"{sequences} of {most}"
    return min(most, 1 << (sequences - 1).bit_length() if sequences <= 8 else -(-sequences // 8) * 8)


@dataclasses.dataclass(frozen=True)
class Bucket:
    """All host numbers that launches of a uniform step follow from: S, T, what its lengths are rounded up to, and the
    columns of the block table of every cache group."""

    sequences: int
    queries: int
    longest: int
    columns: tuple[int, ...]

    @classmethod
    def of(cls, batch: Batch, most: int) -> Bucket | None:
        """The bucket of a batch of up to `most` sequences; None where it is larger, has sequences with different
        numbers of query tokens, too many of these, or a tree."""
        queries = batch.views[0].queries
        if batch.views[0].tree_Tn is not None:
            return None
        if len(queries) > most or queries[0] > MOST_QUERIES or len(set(queries)) > 1:
            return None
        longest = max(LEAST_LENGTH, 1 << (batch.views[0].max_seq_len - 1).bit_length())
        columns = tuple(_columns(view, longest) for view in batch.views)
        return cls(bucket_of(len(queries), most), queries[0], longest, columns)


def _columns(view: CacheView, longest: int) -> int:
    """What a table of `longest` tokens takes, behind a window no more than that can keep; never less than it has."""
    if view.window is not None:
        # A window may begin at the end of a block and end at the beginning of another.
        longest = min(longest, view.window + view.max_query + 2 * view.block_size)
    return max(view.block_table_SB.shape[1], -(-longest // view.block_size))


def blank(bucket: Bucket, like: Batch) -> Batch:
    """Tensors of the bucket's shape for `fill`, on the device of `like` and with its windows."""
    S, T = bucket.sequences, bucket.queries
    device = like.token_ids_N.device
    shared: dict[str, Any] = {
        "seq_lens_S": torch.zeros(S, dtype=torch.int32, device=device),
        "query_start_S1": torch.arange(0, S * T + 1, T, dtype=torch.int32, device=device),
        "max_query": T,
        "max_seq_len": bucket.longest,
        "queries": (T,) * S,
        # Of the sequences' own numbers: what goes through a graph must not need them.
        "runs": (),
        "lengths": (),
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


def fill(static: Batch, batch: Batch, scratch: Sequence[int]) -> None:
    """Overwrites all that `static` (of `blank`) held with `batch`, its rows first, and fills up with rows that see
    nothing. `scratch` is the scratch block of every cache group."""
    _copy_padded(static.token_ids_N, batch.token_ids_N, 0)
    _copy_padded(static.positions_N, batch.positions_N, 0)
    # One tensor serves all groups, in `static` as in what make_batch makes.
    _copy_padded(static.views[0].seq_lens_S, batch.views[0].seq_lens_S, 0)
    for into, view, block in zip(static.views, batch.views, scratch, strict=True):
        _copy_padded(into.block_table_SB, view.block_table_SB, block)
        _copy_padded(into.first_S, view.first_S, 0)
        _copy_padded(into.slots_N, view.slots_N, block * view.block_size)


def _copy_padded(into: Tensor, part: Tensor, rest: int) -> None:
    if into.shape != part.shape:
        into.fill_(rest)
    into[tuple(map(slice, part.shape))].copy_(part)


def padded(batch: Batch, bucket: Bucket, scratch: Sequence[int]) -> Batch:
    """`batch` in the shape of its bucket: the first rows compute and write what they do in `batch`."""
    static = blank(bucket, batch)
    fill(static, batch, scratch)
    return static
