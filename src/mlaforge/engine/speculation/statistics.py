"""Speculation statistics: how many drafted tokens were accepted, and their time: the block `eagle_speculation`."""

from __future__ import annotations

import dataclasses
from typing import Any

from mlaforge.engine.execution.step_bytes import StepBytes

DEFINITIONS = {
    "steps": "pairs of a decoding sequence and a step, drafted for or not; the step that ends a prompt is none",
    "drafted": "drafted tokens; of a tree those of its longest path",
    "tree_tokens": "drafted tokens in trees, all branches",
    "copied_tokens": "drafted tokens that were copied from the text, where their predecessors stood in it before",
    "partial_steps": "steps of a sequence that read a part of the cache; the full ones are among `steps`",
    "pending_tokens": "tokens that were agreed to in partial steps",
    "mean_pending_length": "pending tokens of a full step that judged any",
    "kept_share": "of the pending tokens, the share that a full step agreed to",
    "bytes_per_token": "bytes of weights and of the model's cache that full and partial steps read at the least, for "
    "each token that they made; of steps that nothing but decoding sequences was in; drafting is left out",
    "mean_acceptance_rate": "accepted drafts / drafted",
    "mean_acceptance_length": "tokens per step, the target's own (bonus) included: total_accepted_tokens / steps",
    "acceptance_per_position": "of the drafts that had a token j, the share whose first j tokens were all accepted",
    "share_of_length_2_or_more": "share of the steps that made at least 2 tokens",
    "total_accepted_tokens": "tokens that these steps made: accepted drafts and the target's own",
    "time_shares": "of the steps with a decoding sequence: drafting, target forward and verification, everything else",
    "active_slots": "decoding sequences per step of the engine, over the steps with any",
}


@dataclasses.dataclass
class SpeculationStats:
    """Counters since the start; `block` derives the rest. `drafted_at[j]` drafts had a token j, `accepted_at[j]` of
    them were accepted that far."""

    num_speculative_tokens: int
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0
    long_steps: int = 0
    tree_tokens: int = 0
    copied: int = 0
    partial_steps: int = 0
    pending: int = 0
    kept: int = 0
    judging_steps: int = 0
    # Of steps that nothing but decoding sequences was in: tokens that they made, and what they read.
    read_for: int = 0
    full_weight_bytes: float = 0.0
    full_cache_bytes: float = 0.0
    partial_weight_bytes: float = 0.0
    partial_cache_bytes: float = 0.0
    drafted_at: list[int] = dataclasses.field(default_factory=list)
    accepted_at: list[int] = dataclasses.field(default_factory=list)
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    seconds: float = 0.0
    engine_steps: int = 0
    active_min: int = 0
    active_max: int = 0

    def __post_init__(self) -> None:
        self.drafted_at = self.drafted_at or [0] * self.num_speculative_tokens
        self.accepted_at = self.accepted_at or [0] * self.num_speculative_tokens

    def copy(self) -> SpeculationStats:
        return dataclasses.replace(self, drafted_at=self.drafted_at.copy(), accepted_at=self.accepted_at.copy())

    def block(self) -> dict[str, Any]:
        """`eagle_speculation`, as it is written into results; its `definitions` say what the numbers are."""
        other = self.seconds - self.draft_seconds - self.verify_seconds
        return {
            "num_speculative_tokens": self.num_speculative_tokens,
            "steps": self.steps,
            "drafted": self.drafted,
            "tree_tokens": self.tree_tokens,
            "copied_tokens": self.copied,
            "partial_steps": self.partial_steps,
            "pending_tokens": self.pending,
            "mean_pending_length": _share(self.pending, self.judging_steps),
            "kept_share": _share(self.kept, self.pending),
            "bytes_per_token": self._bytes_per_token(),
            "accepted_drafts": self.accepted,
            "total_accepted_tokens": self.tokens,
            "mean_acceptance_rate": _share(self.accepted, self.drafted),
            "mean_acceptance_length": _share(self.tokens, self.steps),
            "acceptance_per_position": list(map(_share, self.accepted_at, self.drafted_at)),
            "share_of_length_2_or_more": _share(self.long_steps, self.steps),
            "time_shares": {
                "draft": _share(self.draft_seconds, self.seconds),
                "verify": _share(self.verify_seconds, self.seconds),
                "other": _share(other, self.seconds),
            },
            "active_slots": {
                "average": _share(self.steps, self.engine_steps), "min": self.active_min, "max": self.active_max,
            },
            "definitions": DEFINITIONS,
        }  # fmt: skip

    def _bytes_per_token(self) -> dict[str, Any]:
        full, partial = (
            {"weights": _share(weights, self.read_for), "cache": _share(cache, self.read_for)}
            for weights, cache in (
                (self.full_weight_bytes, self.full_cache_bytes), (self.partial_weight_bytes, self.partial_cache_bytes),
            )
        )  # fmt: skip
        whole = self.full_weight_bytes + self.full_cache_bytes + self.partial_weight_bytes + self.partial_cache_bytes
        return {"full": full, "partial": partial, "all": _share(whole, self.read_for)}

    def count(self, drafted: int, accepted: int, tokens: int) -> None:
        """One sequence's step."""
        self.steps += 1
        self.drafted += drafted
        self.accepted += accepted
        self.tokens += tokens
        self.long_steps += tokens >= 2
        for position in range(drafted):
            self.drafted_at[position] += 1
            self.accepted_at[position] += position < accepted

    def count_read(self, tokens: int, full: StepBytes, partial: StepBytes) -> None:
        """Decoding sequences alone made so many tokens in a full step and the partial ones before it."""
        self.read_for += tokens
        self.full_weight_bytes += full.weights
        self.full_cache_bytes += full.cache
        self.partial_weight_bytes += partial.weights
        self.partial_cache_bytes += partial.cache

    def count_engine_step(self, active: int, seconds: float, draft_seconds: float, verify_seconds: float) -> None:
        self.active_min = min(self.active_min, active) if self.engine_steps else active
        self.active_max = max(self.active_max, active)
        self.engine_steps += 1
        self.seconds += seconds
        self.draft_seconds += draft_seconds
        self.verify_seconds += verify_seconds


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
