"""Context parallelism on a CPU: vLLM 0.32's CPU worker asserts against it in one kernel and has none of another; these
are the two, in torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.triton_utils.dispatcher import KernelOverride
from vllm.v1.attention.ops import dcp
from vllm.v1.worker.block_table import ComputeSlotMappingKernel

from mlaforge.vllm_plugin.shards import corrected


def register() -> None:
    """Replace the kernels in this process, a worker."""
    # vLLM's register_kernels fails once numba is imported, which n-grams do.
    ComputeSlotMappingKernel.kernel = KernelOverride(ComputeSlotMappingKernel.kernel, _slots)
    dcp.correct_attn_out = _corrected


def _slots(
    num_tokens: int, max_num_tokens: int, starts_S1: Tensor, positions_N: Tensor, table_SB: Tensor, stride: int,
    slots: Tensor, block_size: int, ranks: int, rank: int, interleave: int, none: int, tile: int,
) -> None:  # fmt: skip
    """Write the slot of each token, `none` for those of other ranks and for padding."""
    assert interleave == 1, interleave
    starts = starts_S1.long()
    sequence_N = torch.arange(len(starts) - 1).repeat_interleave(starts.diff())
    at_N = positions_N[: len(sequence_N)]
    block_N = table_SB[sequence_N, at_N // (block_size * ranks)].long()
    slot_N = block_N * block_size + at_N // ranks % block_size
    slots.fill_(none)
    slots[: len(at_N)] = torch.where(at_N % ranks == rank, slot_N, none)


def _corrected(out_NHD: Tensor, lses_nNH: Tensor, rank: int, *others: Any, **options: Any) -> tuple[Tensor, Tensor]:
    return corrected(out_NHD, lses_nNH, rank)
