"""Steps that are computed again, padded to the shape that a CUDA graph is captured for."""

from collections.abc import Callable
from typing import Any

import torch

from mlaforge.engine.engine import Engine
from mlaforge.engine.execution.batch import Batch
from mlaforge.engine.execution.bucket import Bucket, padded
from mlaforge.ops.token_selection import KEY_TILE


def eager_and_padded(engine: Engine, compared: Callable[[Batch, Bucket], bool], coded: bool) -> Any:
    """Return a runner that computes steps twice if `compared` says so, also padded, with NaN in every row that was not
    written: the same hidden states, and the same cache except for one slot of the scratch block."""
    cache, eager = engine.cache, engine.runner.eager
    for rows in cache.tensors:
        rows.fill_(torch.nan if rows.is_floating_point() else 0x55)

    def run(batch: Batch) -> torch.Tensor:
        before = [rows.clone() for rows in cache.tensors]
        want_NC = eager(batch)
        bucket = Bucket.of(batch, engine.config.max_num_seqs)
        if bucket is None or not compared(batch, bucket):
            return want_NC
        wrote = [rows.clone() for rows in cache.tensors]
        for rows, old in zip(cache.tensors, before, strict=True):
            rows.copy_(old)
        got_NC = eager(padded(batch, bucket, cache.scratch))
        # A product of more rows may sum in another order: an expert's here, any on another machine.
        # Sums over coded rows are rounded to fp16, and have other pieces.
        tolerance = {"rtol": 1e-2, "atol": 2e-3} if coded else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(got_NC[bucket.rows(batch)], want_NC, **tolerance)
        groups = [layer.group for layer, of in zip(cache.layers, cache.rows, strict=True) for _ in of.tensors]
        for rows, want, group in zip(cache.tensors, wrote, groups, strict=True):
            # Index keys are in tiles.
            scratch_row = cache.scratch[group] * cache.block_size // (KEY_TILE if rows.ndim == 3 else 1)
            torch.testing.assert_close(rows[:scratch_row], want[:scratch_row], rtol=1e-4, atol=1e-5, equal_nan=True)
            if rows.is_floating_point():
                assert torch.isnan(rows[scratch_row + 1 :]).all()
        return want_NC

    return run
