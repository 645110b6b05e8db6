"""The length of drafts: a fixed one, or one chosen by the measured time of steps and acceptance."""

from __future__ import annotations

import dataclasses
import time
from collections import abc

from mlaforge.engine.request.sequence import Sequence
from mlaforge.engine.speculation.partial import PartialVerification
from mlaforge.engine.speculation.policy import EXPLORE_EVERY, TIME_WEIGHT, DraftPolicy

# Steps after which either way's pace is known.
PACE_STEPS = 4


class Pace:
    """Whether partial verification makes more tokens a second than decoding without it, by the number of sequences that
    decode: both are measured as they are used, both tried anew for a sequence that runs alone, and the slower one now
    and then."""

    def __init__(self) -> None:
        # Steps, tokens and seconds of either way, older ones counting less.
        self._made: dict[tuple[int, bool], tuple[int, float, float]] = {}
        self._alone: int | None = None
        self._decisions = 0

    def choose(self, active: int, alone: int | None = None) -> bool:
        """Whether to judge by a part of the cache first; `alone` is the number of a sequence that runs alone."""
        self._decisions += 1
        if alone not in (None, self._alone):
            self._alone = alone
            for way in (False, True):
                # Another text: what the last one was like is a guess.
                self._made[active, way] = (0, *self._made.get((active, way), (0, 0.0, 0.0))[1:])
        rates = {}
        for partial in (False, True):
            steps, tokens, seconds = self._made.get((active, partial), (0, 0.0, 0.0))
            if steps < PACE_STEPS:
                return partial
            rates[partial] = tokens / seconds
        faster = rates[True] > rates[False]
        return faster if self._decisions % EXPLORE_EVERY else not faster

    def record(self, active: int, partial: bool, tokens: int, seconds: float) -> None:
        """A step of decoding sequences alone made so many tokens."""
        steps, before, took = self._made.get((active, partial), (0, 0.0, 0.0))
        left = 1 - TIME_WEIGHT
        self._made[active, partial] = steps + 1, left * before + tokens, left * took + seconds


@dataclasses.dataclass(frozen=True)
class Decision:
    """What a step drafts for each decoding sequence that wants it: `count` tokens in a row, or as many as `counts` says
    of it, ended before a path less likely than `min_probability`; where `tree` is not 0 a tree of so many tokens,
    `count` deep, for the only sequence there is. `policy` decided it and is to learn from it; None where nothing is
    measured. `partial`: whether drafted tokens are judged by a part of the cache first; None where there was no choice.
    `began` is when the step did (time.perf_counter())."""

    count: int
    min_probability: float = 0.0
    tree: int = 0
    policy: DraftPolicy | None = None
    partial: bool | None = None
    began: float = 0.0
    counts: abc.Mapping[Sequence, int] = dataclasses.field(default_factory=dict)

    def depth(self, sequence: Sequence) -> int:
        """How many drafted tokens in a row the sequence has use for."""
        if not sequence.request.params.speculate:
            return 0
        # The target's own token comes on top.
        return max(0, min(self.counts.get(sequence, self.count), sequence.stopping.room - 1))

    def tokens(self, sequence: Sequence) -> int:
        """How many drafted tokens the sequence is to have room for."""
        depth = self.depth(sequence)
        return self.tree if depth and self.tree else depth


# What a step without a drafter drafts.
NO_DRAFT = Decision(0)


class Controller:
    """Decides step by step: `most` tokens per sequence, fewer where `adaptive` measurement says so; where one sequence
    runs alone a tree of `tree` tokens that is so deep, if that is not 0."""

    def __init__(self, most: int, adaptive: bool, tree: int = 0, partial: PartialVerification | None = None):
        self.most, self.tree, self.partial = most, tree, partial
        self.policy = DraftPolicy(most) if adaptive else None
        self.pace = Pace() if adaptive and partial else None
        # Of trees acceptance and times are others.
        self.tree_policy = DraftPolicy(most, tree) if adaptive and tree else None

    @property
    def longest(self) -> int:
        """Tokens of a draft at the most."""
        return max(self.most, self.partial.pattern.max_pending if self.partial else 0)

    def decide(self, running: abc.Sequence[Sequence], waiting: bool) -> Decision:
        """For the step that begins now with these sequences; `waiting`: others may join it."""
        began = time.perf_counter()
        active = sum(sequence.decoding for sequence in running)
        partial = None
        if self.partial is not None and any(s.decoding and self.partial.applies(s) for s in running):
            alone = next(s.number for s in running if s.decoding) if active == 1 else None
            partial = self.pace is None or self.pace.choose(active, alone)
            if partial:
                # No more room than may be used: what is reserved is taken from others.
                counts = {sequence: self.partial.wanted(sequence) for sequence in running if sequence.decoding}
                return Decision(self.most, partial=True, began=began, counts=counts)
        tree = self.tree if active == len(running) == 1 and not waiting else 0
        policy = self.tree_policy if tree else self.policy
        if policy is None or not active:
            return Decision(self.most, 0.0, tree, policy, partial, began)
        count = policy.choose(active)
        likely = policy.min_probability(active, count) if count else 0.0
        return Decision(count, likely, tree, policy, partial, began)
