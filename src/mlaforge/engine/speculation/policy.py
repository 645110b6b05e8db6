"""How many tokens to draft, from what drafts and steps were measured to give and to cost."""

from __future__ import annotations

import itertools
import math
import operator

# Weight of a new measurement in a running mean: of times, and of acceptance, which is yes or no, and so needs many.
TIME_WEIGHT, ACCEPTANCE_WEIGHT = 0.1, 0.02
# Exploration: one decision in so many tries a token more than what seems best or, in turn with that, plain decoding.
EXPLORE_EVERY = 64
# A drafted token is believed to be accepted so often before anything was measured, as if that had been measured on so
# many.
PRIOR, PRIOR_DRAFTS = 0.7, 4
# First steps of so many rows, of which the fastest counts; so many are plain decoding before anything is drafted.
FIRST_STEPS = 2


class Acceptance:
    """Of drafted tokens whose predecessors were accepted, by position: how many are."""

    def __init__(self, most: int):
        self.shares, self._observations = [PRIOR] * most, [PRIOR_DRAFTS] * most

    def paths(self, count: int) -> list[float]:
        """How likely the first token of a draft is accepted, the first two, ... the first `count`."""
        return list(itertools.accumulate(self.shares[:count], operator.mul))

    def doubt(self) -> None:
        """Another text: what was measured is half of a guess."""
        self.shares = [(share + PRIOR) / 2 for share in self.shares]
        self._observations = [PRIOR_DRAFTS] * len(self.shares)

    def record(self, budget: int, accepted: int) -> None:
        """How many tokens of one draft of at most `budget` were accepted."""
        for position in range(min(budget, accepted + 1)):
            self._observations[position] += 1
            weight = max(ACCEPTANCE_WEIGHT, 1 / self._observations[position])
            self.shares[position] += weight * ((position < accepted) - self.shares[position])


class DraftPolicy:
    """How many tokens to draft, from the measured time of steps and acceptance: whatever makes most tokens a second.

    A step's time is taken to depend on its rows, those included that a drafter might have drafted and thought too
    unlikely, and on the magnitude of what the cache holds, a power of two. What was not measured is first taken to cost
    what fewer rows cost, so that it is tried; plain decoding is measured first, twice, so that there is something to
    compare with. For a text that runs alone acceptance begins half way between what is usual and what was last. With
    `tree` the choice is between a tree of so many tokens, `most` deep, and none.
    """

    def __init__(self, most: int, tree: int = 0):
        self.most, self.tree = most, tree
        self.acceptance = Acceptance(most)
        # By magnitude, then by rows: seconds, and how many steps they are of.
        self._times: dict[int, dict[int, tuple[float, int]]] = {}
        self._now = self._times.setdefault(0, {})
        self._alone: int | None = None
        self._decisions = 0

    def choose(self, active: int, cached: int = 0, alone: int | None = None) -> int:
        """Tokens to draft for each of `active` decoding sequences, of which so many tokens are in the cache; `alone` is
        the number of one that runs alone. What is asked and told until the next choice is of these."""
        self.look(cached)
        if alone not in (None, self._alone):
            if self._alone is not None:
                self.acceptance.doubt()
            self._alone = alone
        if self._now.get(active, (0.0, 0))[1] < FIRST_STEPS:
            return 0
        self._decisions += 1
        explore, more = self._decisions % EXPLORE_EVERY == 0, self._decisions % (2 * EXPLORE_EVERY) == 0
        if explore and not more:
            return 0
        tokens, best, rate = 1.0, 0, 1.0 / self.expected(active)
        for count, likely in enumerate(self.acceptance.paths(self.most), start=1):
            tokens += likely
            if self.tree and count < self.most:
                continue
            seconds = self.expected(1 + self.tree if self.tree else active * (1 + count))
            if tokens / seconds > rate:
                best, rate = count, tokens / seconds
        # Times and acceptance are as of when they were last seen.
        if not self.tree:
            return min(self.most, best + 1) if more else best
        # A tree costs as much as several steps, and is tried that much less often.
        return best if self._decisions % math.ceil(EXPLORE_EVERY * seconds / self.expected(active)) else self.most

    def look(self, cached: int) -> None:
        """What is asked and told from now on is of so many tokens in the cache."""
        self._now = self._times.setdefault(cached.bit_length(), {})

    def min_probability(self, active: int, count: int) -> float:
        """How likely a drafted token must be to pay for itself where `count` are drafted for each of `active`
        sequences: the time that it adds over the time that a token takes. 0 before anything was timed."""
        if not self._now:
            return 0.0
        tokens = 1.0 + sum(self.acceptance.paths(count))
        seconds = self.expected(active * (1 + count))
        return max(0.0, (seconds - self.expected(active)) / count * tokens / seconds)

    def expected(self, rows: int) -> float:
        """Seconds of a decoding step of so many rows, between the neighbours that were measured."""
        if rows in self._now:
            return self._now[rows][0]
        below = max((r for r in self._now if r < rows), default=None)
        above = min((r for r in self._now if r > rows), default=None)
        if below is None or above is None:
            nearest = above if below is None else below
            assert nearest is not None, "no step has been timed"
            return self._now[nearest][0]
        share = (rows - below) / (above - below)
        return (1 - share) * self._now[below][0] + share * self._now[above][0]

    def record_time(self, rows: int, seconds: float) -> None:
        """A step of decoding sequences alone took so long."""
        known, steps = self._now.get(rows, (seconds, 0))
        # One step may be slow for reasons of its own, the first most of all.
        if steps < FIRST_STEPS:
            known = min(known, seconds)
        else:
            known += TIME_WEIGHT * (min(seconds, 2 * known) - known)
        self._now[rows] = known, steps + 1
