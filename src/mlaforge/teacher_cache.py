"""What a teacher says about the healing text, computed once and kept in safetensors shards: for text that is read more
than once, and for a teacher that does not fit beside the student."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from mlaforge.distill import final_states
from mlaforge.kl import Hidden, Targets, TopK, top_k
from mlaforge.packing import Phase, Rows
from mlaforge.runtime import progress
from mlaforge.spill import Spill

# Rows of one shard.
SHARD = 32


@dataclasses.dataclass(frozen=True)
class TeacherCache:
    """Targets by phase and row. `k` = 0 keeps final hidden states (all logits follow from them, with `head`), else
    the k largest logits and their normaliser at `temperature`."""

    spill: Spill
    head: Tensor
    k: int
    temperature: float

    @torch.no_grad()
    def fill(self, teacher: Any, phases: tuple[Phase, ...], rank: int, world: int) -> None:
        """Computes what is missing, each process its share of the shards."""
        shards = [(n, at) for n, phase in enumerate(phases) for at in range(0, len(phase.rows), SHARD)]
        for number, at in progress(shards[rank::world], "run the teacher", len(shards[rank::world])):
            name = f"teacher-{number}-{at // SHARD:06d}"
            if name in self.spill:
                continue
            kept: dict[str, Tensor] = {}
            for row in range(at, min(at + SHARD, len(phases[number].rows))):
                states = final_states(teacher, phases[number].rows.take(torch.tensor([row])).to(teacher.device))
                if self.k:
                    found = top_k(states, teacher.lm_head.weight, self.k, self.temperature)
                    parts = {"logits": found.logits_NK, "tokens": found.tokens_NK, "lse": found.lse_N}
                else:
                    parts = {"hidden": states}
                kept |= {f"{row}.{key}": tensor for key, tensor in parts.items()}
            self.spill[name] = kept

    def __call__(self, number: int, rows: Rows) -> Targets:
        """The targets of rows of a phase, on the rows' device."""
        found: list[dict[str, Tensor]] = []
        for row in rows.number.tolist():
            part = self.spill.part(f"teacher-{number}-{row // SHARD:06d}", f"{row}.")
            found.append({key.split(".")[1]: tensor for key, tensor in part.items()})
        joined = {key: torch.cat([part[key] for part in found]).to(rows.ids.device) for key in found[0]}
        if self.k:
            return TopK(joined["logits"], joined["tokens"], joined["lse"])
        return Hidden(joined["hidden"], self.head)
