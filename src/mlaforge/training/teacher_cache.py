"""On-disk cache of a teacher's targets, for text that is read more than once, and for a teacher that does not fit into
memory beside the student."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mlaforge.data.packing import Phase, Rows
from mlaforge.runtime import progress
from mlaforge.tensor_store import TensorStore
from mlaforge.training.forward import final_states
from mlaforge.training.kl_loss import HiddenTargets, TopKTargets, top_k

# Rows per shard.
SHARD_ROWS = 32

CachedTensors = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class TeacherCache:
    """Cached targets by phase and row.

    compute: teacher and one row -> the tensors [tokens, ...] to cache. targets: concatenated tensors of several rows ->
    the targets of the loss.
    """

    store: TensorStore
    compute: Callable[[Any, Rows], CachedTensors]
    targets: Callable[[CachedTensors], Any]

    @torch.no_grad()
    def fill(self, teacher: Any, phases: tuple[Phase, ...], rank: int, world_size: int) -> None:
        """Compute the missing shards; each process computes its share."""
        shards = [(number, start) for number, phase in enumerate(phases)
                  for start in range(0, len(phase.rows), SHARD_ROWS)]  # fmt: skip
        for number, start in progress(shards[rank::world_size], "run the teacher", len(shards[rank::world_size])):
            name, rows = f"teacher-{number}-{start // SHARD_ROWS:06d}", phases[number].rows
            if name in self.store:
                continue
            cached: CachedTensors = {}
            for row in range(start, min(start + SHARD_ROWS, len(rows))):
                tensors = self.compute(teacher, rows.take(torch.tensor([row])).to(teacher.device))
                cached |= {f"{row}.{key}": tensor for key, tensor in tensors.items()}
            self.store[name] = cached

    def __call__(self, phase: int, rows: Rows) -> Any:
        """Return the targets of rows of a phase, on the rows' device."""
        by_row: list[CachedTensors] = []
        for row in rows.number.tolist():
            part = self.store.part(f"teacher-{phase}-{row // SHARD_ROWS:06d}", f"{row}.")
            by_row.append({key.split(".")[1]: tensor for key, tensor in part.items()})
        return self.targets({key: torch.cat([part[key] for part in by_row]).to(rows.ids.device) for key in by_row[0]})


def final_states_cache(store: TensorStore, head: Tensor) -> TeacherCache:
    """Return a cache of final hidden states, from which `head` computes the full logits."""
    return TeacherCache(
        store,
        lambda teacher, rows: {"hidden": final_states(teacher, rows)},
        lambda cached: HiddenTargets(cached["hidden"], head),
    )


def top_k_cache(store: TensorStore, k: int, temperature: float) -> TeacherCache:
    """Return a cache of the k largest logits and the logsumexp at `temperature`."""

    def compute(teacher: Any, rows: Rows) -> CachedTensors:
        largest = top_k(final_states(teacher, rows), teacher.lm_head.weight, k, temperature)
        return {"logits": largest.logits_NK, "tokens": largest.tokens_NK, "lse": largest.lse_N}

    return TeacherCache(store, compute, lambda cached: TopKTargets(cached["logits"], cached["tokens"], cached["lse"]))
