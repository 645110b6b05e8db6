"""Speculation statistics: acceptance, time and bytes; the block `eagle_speculation` of results."""

from __future__ import annotations

import dataclasses
from typing import Any

from mlaforge.engine.execution.step_bytes import StepBytes
from mlaforge.engine.speculation.drafter import Draft

DEFINITIONS = {
    "steps": "pairs of a decoding sequence and a step, with or without a draft; a prompt's last step does not count",
    "drafted": "drafted tokens; of a tree the tokens on its longest path",
    "tree_tokens": "drafted tokens in trees, all branches",
    "copied_tokens": "drafted tokens from prompt lookup before another drafter",
    "partial_steps": "sparse-view steps of a sequence; full steps are among `steps`",
    "pending_tokens": "provisional tokens: those that sparse-view steps accepted",
    "mean_pending_length": "provisional tokens per full step that verified any",
    "kept_share": "share of the provisional tokens that the full step accepted",
    "bytes_per_token": "least bytes of weights and of the model's cache that full and sparse-view steps read per "
    "generated token, over steps in which all sequences were decoding; drafting excluded",
    "mean_acceptance_rate": "accepted drafted tokens / drafted tokens",
    "mean_acceptance_length": "tokens per step, the target's own (bonus) token included: total_accepted_tokens / steps",
    "acceptance_per_position": "share of the drafts with a token j whose tokens up to j were all accepted",
    "share_of_length_2_or_more": "share of the steps that generated at least 2 tokens",
    "total_accepted_tokens": "tokens that these steps generated: accepted drafted tokens and the target's own",
    "time_shares": "shares of the steps with a decoding sequence: drafting; target forward and verification; the rest",
    "active_slots": "decoding sequences per engine step, over the steps with at least one",
}


@dataclasses.dataclass
class SpeculationStats:
    """Counters since the start; `block` derives ratios. `drafted_at[j]` drafts had a token j, of which `accepted_at[j]`
    were accepted up to j. `bytes_tokens` are the tokens of the steps that the byte counters cover: those in which all
    sequences were decoding."""

    num_speculative_tokens: int
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0
    long_steps: int = 0
    tree_tokens: int = 0
    lookup_tokens: int = 0
    sparse_steps: int = 0
    provisional: int = 0
    confirmed: int = 0
    full_steps: int = 0
    bytes_tokens: int = 0
    full_bytes: StepBytes = dataclasses.field(default_factory=StepBytes)
    sparse_bytes: StepBytes = dataclasses.field(default_factory=StepBytes)
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
        """The block `eagle_speculation` of results, with definitions of its keys."""
        other = self.seconds - self.draft_seconds - self.verify_seconds
        return {
            "num_speculative_tokens": self.num_speculative_tokens,
            "steps": self.steps,
            "drafted": self.drafted,
            "tree_tokens": self.tree_tokens,
            "copied_tokens": self.lookup_tokens,
            "partial_steps": self.sparse_steps,
            "pending_tokens": self.provisional,
            "mean_pending_length": _share(self.provisional, self.full_steps),
            "kept_share": _share(self.confirmed, self.provisional),
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
        total = self.full_bytes + self.sparse_bytes
        return {
            "full": {key: _share(count, self.bytes_tokens) for key, count in vars(self.full_bytes).items()},
            "partial": {key: _share(count, self.bytes_tokens) for key, count in vars(self.sparse_bytes).items()},
            "all": _share(total.weights + total.cache, self.bytes_tokens),
        }

    def count(self, draft: Draft, accepted: int, tokens: int) -> None:
        """Count the step of a sequence, with its draft, empty or not."""
        drafted = draft.depth
        self.steps += 1
        self.drafted += drafted
        self.accepted += accepted
        self.tokens += tokens
        self.long_steps += tokens >= 2
        self.tree_tokens += len(draft.token_ids) if draft.parents is not None else 0
        self.lookup_tokens += drafted if draft.copied else 0
        if draft.steps:
            self.sparse_steps += draft.steps
            self.full_steps += 1
            self.provisional += drafted
            self.confirmed += accepted
        for position in range(drafted):
            self.drafted_at[position] += 1
            self.accepted_at[position] += position < accepted

    def count_bytes(self, tokens: int, full: StepBytes, sparse: StepBytes) -> None:
        """Count a full step and the sparse-view steps before it, in which all sequences were decoding."""
        self.bytes_tokens += tokens
        self.full_bytes += full
        self.sparse_bytes += sparse

    def count_engine_step(self, active: int, seconds: float, draft_seconds: float, verify_seconds: float) -> None:
        self.active_min = min(self.active_min, active) if self.engine_steps else active
        self.active_max = max(self.active_max, active)
        self.engine_steps += 1
        self.seconds += seconds
        self.draft_seconds += draft_seconds
        self.verify_seconds += verify_seconds


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
