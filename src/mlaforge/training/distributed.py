"""Distributed training under torchrun: FSDP2 shards parameters, gradients and optimiser moments over all processes.

All processes write checkpoints (torch.distributed.checkpoint in its safetensors format, never pickle).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed


@dataclasses.dataclass(frozen=True)
class ProcessGroup:
    """Rank and device of this process, and the number of processes."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main_process(self) -> bool:
        """Whether this process has rank 0, the only one that writes files and log lines."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.world_size > 1:
            distributed.barrier()

    def broadcast(self, message: str | None) -> str | None:
        """Return the message of rank 0 on every process."""
        messages = [message]
        if self.world_size > 1:
            distributed.broadcast_object_list(messages)
        return messages[0]


def init_process_group(device: torch.device) -> ProcessGroup:
    """Join the group of torchrun, or that of this process (Ray Train initialises one), or return a group of one
    process. device: moved to the local rank's GPU."""
    if not distributed.is_initialized():
        if not distributed.is_torchelastic_launched():
            return ProcessGroup(0, 1, device)
        distributed.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", distributed.get_node_local_rank())
        torch.cuda.set_device(device)
    return ProcessGroup(distributed.get_rank(), distributed.get_world_size(), device)


def destroy_process_group() -> None:
    """Leave the group of `init_process_group`, if there is one."""
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def shard(objective: Any, group: ProcessGroup, dtype: torch.dtype) -> None:
    """Shard an Objective's `parts` in place, layer by layer; compute in `dtype`, store and reduce in fp32.

    A 4-bit teacher is replicated: its packed weights cannot be sharded.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(group.device.type, (group.world_size,))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    packed: set[Any] = set()
    for part, layers in objective.parts():
        if any(not p.is_floating_point() for p in part.parameters()):
            packed |= set(part.parameters())
            continue
        for layer in layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(objective, mesh=mesh, mp_policy=policy, ignored_params=packed)
    register_fsdp_forward_method(objective, "validate")


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor of a tensor that may be sharded. Collective: all processes must call it."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach()


def distribute(tensor: Tensor, like: Tensor) -> Tensor:
    """Move a full tensor to the device of `like`, and shard it as `like` is sharded."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    tensor = tensor.to(like.device)
    return distribute_tensor(tensor, like.device_mesh, like.placements) if isinstance(like, DTensor) else tensor


def save(folder: Path, state: dict[str, Tensor]) -> None:
    """Write a state dict into `folder`, each process its shards."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint import HuggingFaceStorageWriter

    checkpoint.save(state, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))


def load(folder: Path, state: dict[str, Tensor]) -> None:
    """Load what `save` wrote into the tensors of `state`, for any number of processes."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    checkpoint.load(state, storage_reader=HuggingFaceStorageReader(str(folder)))
