"""Speculation's bookkeeping: how many tokens are drafted for whom, what became of them, and what that cost in time."""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import time
from collections.abc import Callable
from collections.abc import Sequence as Several
from typing import Any

from mlaforge.engine.request.sequence import Sequence
from mlaforge.engine.speculation.drafter import Draft, Drafter, TreeDrafter

# Weight of a new measurement in a running mean: of times, and of drafts, which are right or not, and so need many.
RECENT, RECENT_DRAFT = 0.1, 0.02
# One decision in so many tries a token more than what seems best, and one in so many times that, plain decoding.
TRY_AGAIN = 64
# A drafted token is believed to be accepted so often before anything was measured, as if that had been measured on so
# many.
PRIOR, PRIOR_DRAFTS = 0.7, 4

DEFINITIONS = {
    "steps": "pairs of a decoding sequence and a step, drafted for or not; the step that ends a prompt is none",
    "drafted": "drafted tokens; of a tree those of its longest path",
    "tree_tokens": "drafted tokens in trees, all branches",
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

    def since(self, before: SpeculationStats) -> SpeculationStats:
        """What was counted after `before` was copied; the least and most active slots are of the whole time."""
        changes: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            now, then = getattr(self, field.name), getattr(before, field.name)
            if field.name not in ("num_speculative_tokens", "active_min", "active_max"):
                changes[field.name] = (
                    [a - b for a, b in zip(now, then, strict=True)] if type(now) is list else now - then
                )
        return dataclasses.replace(self, **changes)

    def block(self) -> dict[str, Any]:
        """`eagle_speculation`, as it is written into results; its `definitions` say what the numbers are."""
        other = self.seconds - self.draft_seconds - self.verify_seconds
        return {
            "num_speculative_tokens": self.num_speculative_tokens,
            "steps": self.steps,
            "drafted": self.drafted,
            "tree_tokens": self.tree_tokens,
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

    def count_engine_step(self, active: int, seconds: float, draft_seconds: float, verify_seconds: float) -> None:
        self.active_min = min(self.active_min, active) if self.engine_steps else active
        self.active_max = max(self.active_max, active)
        self.engine_steps += 1
        self.seconds += seconds
        self.draft_seconds += draft_seconds
        self.verify_seconds += verify_seconds


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


class Pace:
    """How many tokens to draft, from the measured time of steps and acceptance: whatever makes most tokens a second.

    A step's time is taken to depend on its rows alone, those included that a drafter was asked for and thought too
    unlikely. What was not measured is first taken to cost what fewer rows cost, so that it is tried; plain decoding is
    measured first, so that there is something to compare with. With `tree` the choice is between a tree of so many
    tokens, `most` deep, and none.
    """

    def __init__(self, most: int, tree: int = 0):
        self.most, self.tree = most, tree
        # Of tokens asked for whose predecessors were accepted, by position: how many are.
        self.acceptance, self._seen = [PRIOR] * most, [PRIOR_DRAFTS] * most
        self.seconds: dict[int, float] = {}
        self._decisions = 0

    def choose(self, active: int) -> int:
        """Tokens to draft for each of `active` decoding sequences."""
        if active not in self.seconds:
            return 0
        self._decisions += 1
        if self._decisions % TRY_AGAIN**2 == 0:
            return 0
        tokens = likely = 1.0
        best, rate = 0, 1.0 / self.expected(active)
        for count, accepted in enumerate(self.acceptance, start=1):
            likely *= accepted
            tokens += likely
            if self.tree and count < self.most:
                continue
            seconds = self.expected(1 + self.tree if self.tree else active * (1 + count))
            if tokens / seconds > rate:
                best, rate = count, tokens / seconds
        # Times and acceptance are as of when they were last seen.
        if not self.tree:
            return best if self._decisions % TRY_AGAIN else min(self.most, best + 1)
        # A tree costs as much as several steps, and is tried that much less often.
        return best if self._decisions % math.ceil(TRY_AGAIN * seconds / self.expected(active)) else self.most

    def least(self, active: int, count: int) -> float:
        """How likely a drafted token must be to pay for itself where `count` are drafted for each of `active`
        sequences: the time that it adds over the time that a token takes."""
        tokens = 1.0 + sum(itertools.accumulate(self.acceptance[:count], operator.mul))
        seconds = self.expected(active * (1 + count))
        return max(0.0, (seconds - self.expected(active)) / count * tokens / seconds)

    def expected(self, rows: int) -> float:
        """Seconds of a decoding step of so many rows, between the neighbours that were measured."""
        if rows in self.seconds:
            return self.seconds[rows]
        below = max((r for r in self.seconds if r < rows), default=None)
        above = min((r for r in self.seconds if r > rows), default=None)
        if below is None or above is None:
            nearest = above if below is None else below
            assert nearest is not None, "no step has been timed"
            return self.seconds[nearest]
        share = (rows - below) / (above - below)
        return (1 - share) * self.seconds[below] + share * self.seconds[above]

    def took(self, rows: int, seconds: float) -> None:
        """A step of decoding sequences alone took so long."""
        known = self.seconds.get(rows)
        # One step may be slow for reasons of its own.
        self.seconds[rows] = seconds if known is None else known + RECENT * (min(seconds, 2 * known) - known)

    def saw(self, asked: int, accepted: int) -> None:
        """What became of one draft of at most so many tokens."""
        for position in range(min(asked, accepted + 1)):
            self._seen[position] += 1
            weight = max(RECENT_DRAFT, 1 / self._seen[position])
            self.acceptance[position] += weight * ((position < accepted) - self.acceptance[position])


class Speculation:
    """An engine's drafter and how it is used: `counts` and `propose` before a step, `verified` after it.

    `most` tokens are drafted per sequence and step, fewer where `adaptive` measurement says so, by what drafts cost and
    how likely the drafter thinks them; where one sequence runs alone a tree of `tree` tokens that is so deep, if that
    is not 0.
    """

    def __init__(self, drafter: Drafter, most: int, adaptive: bool, max_model_len: int, tree: int = 0):
        self.drafter, self.most, self.max_model_len, self.tree = drafter, most, max_model_len, tree
        assert not tree or isinstance(drafter, TreeDrafter)
        self.pace = Pace(most) if adaptive else None
        # Of trees acceptance and times are others.
        self.tree_pace = Pace(most, tree) if adaptive and tree else None
        self.stats = SpeculationStats(most)
        # When the step under way began, had its drafts, and had its tokens; whether it may have a tree.
        self._times: list[float] = []
        self._branching = False
        self._count, self._least = 0, 0.0
        # How many tokens were asked for, for whom there was a draft.
        self._asked: dict[Sequence, int] = {}

    def counts(self, running: Several[Sequence], waiting: bool = False) -> Callable[[Sequence], int]:
        """How many tokens to draft for each decoding sequence in the step that begins now; `waiting`: others may join
        it."""
        self._times = [time.perf_counter()]
        active = sum(sequence.decoding for sequence in running)
        self._branching = bool(self.tree) and active == len(running) == 1 and not waiting
        pace = self._pace()
        self._count = self.most if pace is None or not active else pace.choose(active)
        self._least = pace.least(active, self._count) if pace is not None and active and self._count else 0.0

        def of(sequence: Sequence) -> int:
            depth = self._depth(sequence)
            return self.tree if depth and self._branching else depth

        return of

    def _pace(self) -> Pace | None:
        return self.tree_pace if self._branching else self.pace

    def _depth(self, sequence: Sequence) -> int:
        """How many drafted tokens in a row the sequence has use for."""
        params, length = sequence.request.params, len(sequence.token_ids)
        if not params.speculate:
            return 0
        # The target's own token comes on top.
        room = self.max_model_len - length - 1
        if params.max_tokens is not None:
            room = min(room, params.max_tokens - sequence.state.generated - 1)
        return max(0, min(self._count, room))

    def propose(self, chunks: list[tuple[Sequence, int]]) -> list[tuple[Sequence, int]]:
        """Fills the positions that were reserved beyond the sequences' tokens; returns the chunks cut to what came."""
        self._asked = {}
        asked = [(s, upto - len(s.token_ids)) for s, upto in chunks if upto > len(s.token_ids)]
        if asked:
            for (sequence, count), draft in zip(asked, self._drafts(asked), strict=True):
                sequence.draft = draft if draft is not None and draft.token_ids else None
                assert len(sequence.drafted) <= count
                if draft is not None:
                    self._asked[sequence] = draft.length if self._branching else count
        self._times.append(time.perf_counter())
        return [(s, min(upto, len(s.token_ids) + len(s.drafted))) for s, upto in chunks]

    def _drafts(self, asked: list[tuple[Sequence, int]]) -> list[Draft | None]:
        if not self._branching:
            return self.drafter.propose(asked, self._least)
        assert isinstance(self.drafter, TreeDrafter)
        ((sequence, count),) = asked
        return [self.drafter.propose_tree(sequence, count, min(count, self._depth(sequence)))]

    def verified(self, decoded: Several[tuple[Sequence, list[int]]]) -> None:
        """The decoding sequences of the step and the tokens that it made of them."""
        self._times.append(time.perf_counter())
        pace = self._pace()
        for sequence, tokens in decoded:
            if sequence.request.params.speculate:
                draft, accepted = sequence.draft, len(sequence.accepted)
                drafted = 0 if draft is None else draft.length
                self.stats.count(drafted, accepted, len(tokens))
                if draft is not None and draft.parents is not None:
                    self.stats.tree_tokens += len(draft.token_ids)
                # Where the text ended among the drafted tokens, the rest was not judged.
                if pace is not None and (accepted == drafted or accepted < len(tokens)):
                    pace.saw(self._asked.get(sequence, 0), accepted)

    def ended(self, decoding: int, speculating: int, rows: int | None) -> None:
        """The step is over. `speculating` of the `decoding` sequences may be drafted for; `rows` are those computed,
        None where the step computed anything but decoding sequences."""
        began, drafted, verified = self._times
        seconds = time.perf_counter() - began
        if speculating:
            self.stats.count_engine_step(speculating, seconds, drafted - began, verified - drafted)
        pace = self._pace()
        if pace is not None and rows is not None and decoding == speculating:
            pace.took(rows if self._branching else decoding + sum(self._asked.values()), seconds)
