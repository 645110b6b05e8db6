"""How many tokens a step drafts: as many as were asked for, or as many as measured times and acceptance say pay."""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import time
from collections.abc import Sequence as Several

from mlaforge.engine.request.sequence import Sequence

# Weight of a new measurement in a running mean: of times, and of drafts, which are right or not, and so need many.
RECENT, RECENT_DRAFT = 0.1, 0.02
# One decision in so many tries a token more than what seems best, and one in so many times that, plain decoding.
TRY_AGAIN = 64
# A drafted token is believed to be accepted so often before anything was measured, as if that had been measured on so
# many.
PRIOR, PRIOR_DRAFTS = 0.7, 4


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


@dataclasses.dataclass(frozen=True)
class Decision:
    """What a step drafts for each decoding sequence that wants it: `count` tokens in a row, ended before a path less
    likely than `least`; where `tree` is not 0 a tree of so many tokens, `count` deep, for the only sequence there is.
    `pace` is what it was decided by, and what is to learn from it; None where nothing is measured. `began` is when the
    step did (time.perf_counter())."""

    count: int
    least: float = 0.0
    tree: int = 0
    pace: Pace | None = None
    began: float = 0.0

    def depth(self, sequence: Sequence) -> int:
        """How many drafted tokens in a row the sequence has use for."""
        if not sequence.request.params.speculate:
            return 0
        # The target's own token comes on top.
        return max(0, min(self.count, sequence.stopping.room - 1))

    def tokens(self, sequence: Sequence) -> int:
        """How many drafted tokens the sequence is to have room for."""
        depth = self.depth(sequence)
        return self.tree if depth and self.tree else depth


# What a step without a drafter drafts.
NOTHING = Decision(0)


class Controller:
    """Decides step by step: `most` tokens per sequence, fewer where `adaptive` measurement says so; where one sequence
    runs alone a tree of `tree` tokens that is so deep, if that is not 0."""

    def __init__(self, most: int, adaptive: bool, tree: int = 0):
        self.most, self.tree = most, tree
        self.pace = Pace(most) if adaptive else None
        # Of trees acceptance and times are others.
        self.tree_pace = Pace(most, tree) if adaptive and tree else None

    def decide(self, running: Several[Sequence], waiting: bool) -> Decision:
        """For the step that begins now with these sequences; `waiting`: others may join it."""
        began = time.perf_counter()
        active = sum(sequence.decoding for sequence in running)
        tree = self.tree if active == len(running) == 1 and not waiting else 0
        pace = self.tree_pace if tree else self.pace
        if pace is None or not active:
            return Decision(self.most, 0.0, tree, pace, began)
        count = pace.choose(active)
        return Decision(count, pace.least(active, count) if count else 0.0, tree, pace, began)
