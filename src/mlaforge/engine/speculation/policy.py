"""How many tokens to draft, from what drafts and steps were measured to give and to cost."""

from __future__ import annotations

import itertools
import math
import operator

# Weight of a new measurement in a running mean: of times, and of acceptance, which is yes or no, and so needs many.
TIME_WEIGHT, ACCEPTANCE_WEIGHT = 0.1, 0.02
# Exploration: one decision in so many tries a token more than what seems best, and one in so many times that, plain
# decoding.
EXPLORE_EVERY = 64
# A drafted token is believed to be accepted so often before anything was measured, as if that had been measured on so
# many.
PRIOR, PRIOR_DRAFTS = 0.7, 4


class DraftPolicy:
    """How many tokens to draft, from the measured time of steps and acceptance: whatever makes most tokens a second.

    A step's time is taken to depend on its rows alone, those included that a drafter might have drafted and thought too
    unlikely. What was not measured is first taken to cost what fewer rows cost, so that it is tried; plain decoding is
    measured first, so that there is something to compare with. With `tree` the choice is between a tree of so many
    tokens, `most` deep, and none.
    """

    def __init__(self, most: int, tree: int = 0):
        self.most, self.tree = most, tree
        # Of drafted tokens whose predecessors were accepted, by position: how many are.
        self.acceptance, self._observations = [PRIOR] * most, [PRIOR_DRAFTS] * most
        self.seconds: dict[int, float] = {}
        self._decisions = 0

    def choose(self, active: int) -> int:
        """Tokens to draft for each of `active` decoding sequences."""
        if active not in self.seconds:
            return 0
        self._decisions += 1
        if self._decisions % EXPLORE_EVERY**2 == 0:
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
            return best if self._decisions % EXPLORE_EVERY else min(self.most, best + 1)
        # A tree costs as much as several steps, and is tried that much less often.
        return best if self._decisions % math.ceil(EXPLORE_EVERY * seconds / self.expected(active)) else self.most

    def min_probability(self, active: int, count: int) -> float:
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

    def record_time(self, rows: int, seconds: float) -> None:
        """A step of decoding sequences alone took so long."""
        known = self.seconds.get(rows)
        # One step may be slow for reasons of its own.
        self.seconds[rows] = seconds if known is None else known + TIME_WEIGHT * (min(seconds, 2 * known) - known)

    def record_acceptance(self, budget: int, accepted: int) -> None:
        """How many tokens of one draft of at most `budget` were accepted."""
        for position in range(min(budget, accepted + 1)):
            self._observations[position] += 1
            weight = max(ACCEPTANCE_WEIGHT, 1 / self._observations[position])
            self.acceptance[position] += weight * ((position < accepted) - self.acceptance[position])
