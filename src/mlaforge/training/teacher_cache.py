"""The teacher cache: a teacher's targets on disk, computed once: for text that is read more than once, and for a
teacher that does not fit beside the student."""

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
from mlaforge.training.kl_loss import Hidden, TopK, top_k

# Rows of one shard.
SHARD = 32

Kept = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class TeacherCache:
    """Targets by phase and row. `compute` makes the tensors [tokens, ...] that are kept of a teacher's row, `targets`
    what the loss takes, of those of several rows joined."""

    store: TensorStore
    compute: Callable[[Any, Rows], Kept]
    targets: Callable[[Kept], Any]

    @torch.no_grad()
    def fill(self, teacher: Any, phases: tuple[Phase, ...], rank: int, world: int) -> None:
        """Computes what is missing, each process its share of the shards."""
        shards = [(n, at) for n, phase in enumerate(phases) for at in range(0, len(phase.rows), SHARD)]
        for number, at in progress(shards[rank::world], "run the teacher", len(shards[rank::world])):
            name = f"teacher-{number}-{at // SHARD:06d}"
            if name in self.store:
                continue
            kept: Kept = {}
            for row in range(at, min(at + SHARD, len(phases[number].rows))):
                parts = self.compute(teacher, phases[number].rows.take(torch.tensor([row])).to(teacher.device))
                kept |= {f"{row}.{key}": tensor for key, tensor in parts.items()}
            self.store[name] = kept

    def __call__(self, number: int, rows: Rows) -> Any:
        """The targets of rows of a phase, on the rows' device."""
        by_row: list[Kept] = []
        for row in rows.number.tolist():
            part = self.store.part(f"teacher-{number}-{row // SHARD:06d}", f"{row}.")
            by_row.append({key.split(".")[1]: tensor for key, tensor in part.items()})
        return self.targets({key: torch.cat([part[key] for part in by_row]).to(rows.ids.device) for key in by_row[0]})


def final_states_cache(store: TensorStore, head: Tensor) -> TeacherCache:
    """Keeps final hidden states: all logits follow from them, with `head`."""
    return TeacherCache(
        store,
        lambda teacher, rows: {"hidden": final_states(teacher, rows)},
        lambda kept: Hidden(kept["hidden"], head),
    )


def top_k_cache(store: TensorStore, k: int, temperature: float) -> TeacherCache:
    """Keeps the k largest logits and their normaliser at `temperature`."""

    def compute(teacher: Any, rows: Rows) -> Kept:
        largest = top_k(final_states(teacher, rows), teacher.lm_head.weight, k, temperature)
        return {"logits": largest.logits_NK, "tokens": largest.tokens_NK, "lse": largest.lse_N}

    return TeacherCache(store, compute, lambda kept: TopK(kept["logits"], kept["tokens"], kept["lse"]))
