"""Token selection on several tensor parallel ranks: a layer's heads select together.

A token's score is the mean over heads, so ranks average theirs, and every rank selects the same tokens. An index key is
on every rank. Where it is a map of all heads' keys, a rank has the features of its KV heads, and ranks add up.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from vllm.distributed.communication_op import tensor_model_parallel_all_reduce

from mlaforge.ops.token_selection import select_reference, write_reference


def _sum(x: Tensor) -> Tensor:
    total: Tensor = tensor_model_parallel_all_reduce(x.contiguous())
    return total


def select_together(indexer: Any, ranks: int, by_head: bool) -> None:
    """Make an Indexer select with all ranks. by_head: index keys are maps of the keys of heads."""

    def mean(scores: Tensor) -> Tensor:
        # What the pattern always reads stays infinite.
        return _sum(scores / ranks)

    indexer.select = functools.partial(select_reference, merge=mean)
    if by_head:
        indexer.write = functools.partial(write_reference, merge=_sum)
