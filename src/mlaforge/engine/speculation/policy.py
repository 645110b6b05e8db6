"""Number of tokens to draft, from the measured acceptance of drafts and the measured time of steps."""

from __future__ import annotations

import itertools
import math
import operator

# Weight of a new measurement in a running mean: of step times, and of acceptance, which is a yes or no and needs more.
TIME_WEIGHT, ACCEPTANCE_WEIGHT = 0.1, 0.02
# Every EXPLORE_EVERY decisions, one token more than the best choice or, alternately, plain decoding is tried.
EXPLORE_EVERY = 64
# Prior acceptance of a drafted token, weighed like PRIOR_DRAFTS measurements.
PRIOR, PRIOR_DRAFTS = 0.7, 4
# Of the first FIRST_STEPS steps with a number of rows the fastest counts; as many plain steps come before any draft.
FIRST_STEPS = 2


class Acceptance:
    """Share of drafted tokens that are accepted, by position, given that the tokens before were accepted."""

    def __init__(self, max_tokens: int):
        self.shares, self._observations = [PRIOR] * max_tokens, [PRIOR_DRAFTS] * max_tokens

    def paths(self, count: int) -> list[float]:
        """Probabilities that the first 1, 2, ..., `count` tokens of a draft are all accepted."""
        return list(itertools.accumulate(self.shares[:count], operator.mul))

    def discount(self) -> None:
        """Move the shares half way back to the prior: another text begins."""
        self.shares = [(share + PRIOR) / 2 for share in self.shares]
        self._observations = [PRIOR_DRAFTS] * len(self.shares)

    def record(self, budget: int, accepted: int) -> None:
        """Add a draft of at most `budget` tokens, the first `accepted` of which were accepted."""
        for position in range(min(budget, accepted + 1)):
            self._observations[position] += 1
            weight = max(ACCEPTANCE_WEIGHT, 1 / self._observations[position])
            self.shares[position] += weight * ((position < accepted) - self.shares[position])


class DraftPolicy:
    """Chooses the number of drafted tokens that maximises tokens per second.

    The time of a step is modelled as a function of its rows, drafted tokens that a drafter cut as unlikely included,
    and of the power of two of the cached tokens. An unmeasured number of rows is assumed to cost what fewer rows cost,
    so that it is tried. Plain decoding is measured first, as the reference.

    `max_tokens`: longest chain. `tree`: if not 0, the choice is between a tree of `tree` tokens, `max_tokens` deep,
    and none.
    """

    def __init__(self, max_tokens: int, tree: int = 0):
        self.max_tokens, self.tree = max_tokens, tree
        self.acceptance = Acceptance(max_tokens)
        # By the power of two of cached tokens, then by rows: seconds, and the number of measured steps.
        self._times: dict[int, dict[int, tuple[float, int]]] = {}
        self._times_now = self._times.setdefault(0, {})
        self._single: int | None = None
        self._decisions = 0

    def choose(self, active: int, cached: int = 0, single: int | None = None) -> int:
        """Tokens to draft for each of `active` decoding sequences with `cached` tokens in total.

        `single`: number of the sequence where only one runs; acceptance is discounted when it changes. Recorded times
        belong to this `cached` until the next call."""
        self.set_cached(cached)
        if single not in (None, self._single):
            if self._single is not None:
                self.acceptance.discount()
            self._single = single
        if self._times_now.get(active, (0.0, 0))[1] < FIRST_STEPS:
            return 0
        self._decisions += 1
        explore = self._decisions % EXPLORE_EVERY == 0
        explore_longer = self._decisions % (2 * EXPLORE_EVERY) == 0
        if explore and not explore_longer:
            return 0
        tokens, best, best_rate = 1.0, 0, 1.0 / self.step_seconds(active)
        for count, probability in enumerate(self.acceptance.paths(self.max_tokens), start=1):
            tokens += probability
            if self.tree and count < self.max_tokens:
                continue
            seconds = self.step_seconds(1 + self.tree if self.tree else active * (1 + count))
            if tokens / seconds > best_rate:
                best, best_rate = count, tokens / seconds
        # Measurements age while a choice is not used: it is tried again now and then.
        if not self.tree:
            return min(self.max_tokens, best + 1) if explore_longer else best
        # A tree costs as much as several steps and is tried that much less often.
        every = math.ceil(EXPLORE_EVERY * seconds / self.step_seconds(active))
        return best if self._decisions % every else self.max_tokens

    def set_cached(self, cached: int) -> None:
        """Select the step times measured with about `cached` cached tokens."""
        self._times_now = self._times.setdefault(cached.bit_length(), {})

    def min_probability(self, active: int, count: int) -> float:
        """Acceptance probability above which a drafted token pays for its time, with `count` tokens drafted for each of
        `active` sequences: added time per token over time per generated token. 0 before any measurement."""
        if not self._times_now:
            return 0.0
        tokens = 1.0 + sum(self.acceptance.paths(count))
        seconds = self.step_seconds(active * (1 + count))
        return max(0.0, (seconds - self.step_seconds(active)) / count * tokens / seconds)

    def step_seconds(self, rows: int) -> float:
        """Seconds of a decoding step of `rows` rows, interpolated between measurements."""
        if rows in self._times_now:
            return self._times_now[rows][0]
        below = max((r for r in self._times_now if r < rows), default=None)
        above = min((r for r in self._times_now if r > rows), default=None)
        if below is None or above is None:
            nearest = above if below is None else below
            assert nearest is not None, "no step has been timed"
            return self._times_now[nearest][0]
        share = (rows - below) / (above - below)
        return (1 - share) * self._times_now[below][0] + share * self._times_now[above][0]

    def record_time(self, rows: int, seconds: float) -> None:
        """Add the time of a step in which all sequences were decoding."""
        mean, steps = self._times_now.get(rows, (seconds, 0))
        # The first steps may be slow for unrelated reasons.
        if steps < FIRST_STEPS:
            mean = min(mean, seconds)
        else:
            mean += TIME_WEIGHT * (min(seconds, 2 * mean) - mean)
        self._times_now[rows] = mean, steps + 1
