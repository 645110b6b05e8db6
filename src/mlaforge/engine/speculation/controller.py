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


# How a step drafts: tokens in a row, or none; a tree, or none; tokens that are judged by a part of the cache first.
CHAIN, TREE, PARTIAL = "chain", "tree", "partial"


class Pace:
    """Which way makes most tokens a second, by the number of sequences that decode: all are measured as they are used,
    all tried anew for a sequence that runs alone, and one of the slower ones now and then."""

    def __init__(self) -> None:
        # Steps, tokens and seconds of each way, older ones counting less.
        self._made: dict[tuple[int, str], tuple[int, float, float]] = {}
        self._alone: int | None = None
        self._decisions = 0

    def choose(self, active: int, ways: abc.Sequence[str], alone: int | None = None) -> str:
        """One of `ways`, of equals the first; `alone` is the number of a sequence that runs alone."""
        self._decisions += 1
        if alone not in (None, self._alone):
            self._alone = alone
            for (number, way), (_, tokens, seconds) in self._made.items():
                if number == active:
                    # Another text: what the last one was like is a guess.
                    self._made[number, way] = 0, tokens, seconds
        rates = {}
        for way in ways:
            steps, tokens, seconds = self._made.get((active, way), (0, 0.0, 0.0))
            if steps < PACE_STEPS:
                return way
            rates[way] = tokens / seconds
        fastest = max(ways, key=lambda way: rates[way])
        round, rest = divmod(self._decisions, EXPLORE_EVERY)
        others = [way for way in ways if way != fastest]
        return fastest if rest or not others else others[round % len(others)]

    def record(self, active: int, way: str, tokens: int, seconds: float) -> None:
        """A step of decoding sequences alone made so many tokens."""
        steps, before, took = self._made.get((active, way), (0, 0.0, 0.0))
        left = 1 - TIME_WEIGHT
        self._made[active, way] = steps + 1, left * before + tokens, left * took + seconds


@dataclasses.dataclass(frozen=True)
class Decision:
    """What a step drafts for each decoding sequence that wants it: `count` tokens in a row, or as many as `counts` says
    of it, ended before a path less likely than `min_probability`; where `tree` is not 0 a tree of so many tokens,
    `count` deep, for the only sequence there is. `partial`: whether drafted tokens are judged by a part of the cache
    first; None where there was no choice. `policy` decided the number of tokens and is to learn from it; None where
    nothing is measured. `way` was chosen by the pace, which is to learn from it; None where there was one way only.
    `began` is when the step did (time.perf_counter())."""

    count: int
    min_probability: float = 0.0
    tree: int = 0
    policy: DraftPolicy | None = None
    partial: bool | None = None
    began: float = 0.0
    counts: abc.Mapping[Sequence, int] = dataclasses.field(default_factory=dict)
    way: str | None = None

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
    runs alone a tree of `tree` tokens that is so deep, if that is not 0; with `partial` tokens that are judged by a
    part of the cache first. Without measurement the last of these that applies, else what is measured to be fastest."""

    def __init__(self, most: int, adaptive: bool, tree: int = 0, partial: PartialVerification | None = None):
        self.most, self.tree, self.partial = most, tree, partial
        self.policy = DraftPolicy(most) if adaptive else None
        self.pace = Pace() if adaptive and (partial or tree) else None
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
        ways = [CHAIN]
        if self.tree and active == len(running) == 1 and not waiting:
            ways.append(TREE)
        if self.partial is not None and any(s.decoding and self.partial.applies(s) for s in running):
            ways.append(PARTIAL)
        way, measured = ways[-1], None
        alone = next(s.number for s in running if s.decoding) if active == 1 else None
        if self.pace is not None and len(ways) > 1:
            way = measured = self.pace.choose(active, ways, alone)
        partial = way == PARTIAL if PARTIAL in ways else None
        if partial:
            assert self.partial is not None
            # No more room than may be used: what is reserved is taken from others.
            counts = {sequence: self.partial.wanted(sequence) for sequence in running if sequence.decoding}
            return Decision(self.most, partial=True, began=began, counts=counts, way=measured)
        tree, policy = (self.tree, self.tree_policy) if way == TREE else (0, self.policy)
        if policy is None or not active:
            return Decision(self.most, 0.0, tree, policy, partial, began, way=measured)
        count = policy.choose(active, sum(s.computed for s in running if s.decoding), alone)
        likely = policy.min_probability(active, count) if count else 0.0
        return Decision(count, likely, tree, policy, partial, began, way=measured)
