"""Distributed training under torchrun: FSDP2 shards parameters, gradients and moments over all processes, all of which
write checkpoints (torch's distributed checkpoint, in its safetensors format, never pickle)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed


@dataclasses.dataclass(frozen=True)
class Group:
    """The processes of a run, and the device of this one."""

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this process writes and talks."""
        return self.rank == 0

    def wait(self) -> None:
        """Returns when every process has come here."""
        if self.world > 1:
            distributed.barrier()

    def from_first(self, words: str | None) -> str | None:
        """The first process's `words`, to every process when all have come here."""
        message = [words]
        if self.world > 1:
            distributed.broadcast_object_list(message)
        return message[0]


def join(device: torch.device) -> Group:
    """The group that torchrun started this process in, or a group of one."""
    if not distributed.is_torchelastic_launched():
        return Group(0, 1, device)
    if not distributed.is_initialized():
        distributed.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", distributed.get_node_local_rank())
        torch.cuda.set_device(device)
    return Group(distributed.get_rank(), distributed.get_world_size(), device)


def leave() -> None:
    """Ends the group that `join` came into."""
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def shard(objective: Any, group: Group, dtype: torch.dtype) -> None:
    """Shards an Objective's `parts` in place, layer by layer; what they compute is in `dtype`, what is kept in fp32.

    A 4-bit teacher stays whole: its packed weights cannot be split.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(group.device.type, (group.world,))
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


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be sharded; every process has to ask."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach()


def spread(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor on the device of `like`, sharded if that is."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    tensor = tensor.to(like.device)
    return distribute_tensor(tensor, like.device_mesh, like.placements) if isinstance(like, DTensor) else tensor


def save(folder: Path, state: dict[str, Tensor]) -> None:
    """Writes a state, of which every process holds its shards, into `folder`."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint import HuggingFaceStorageWriter

    checkpoint.save(state, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))


def load(folder: Path, state: dict[str, Tensor]) -> None:
    """Fills the tensors of `state`, sharded over any number of processes, with what `save` wrote."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    checkpoint.load(state, storage_reader=HuggingFaceStorageReader(str(folder)))
