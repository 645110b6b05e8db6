"""What a step drafts: the mode and the length with the most tokens per second, by measurement.

A mode is a drafter: chains of a head or of prompt lookup, its trees, or its chains after sparse-view steps. Plain
decoding is a chain of length 0.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence as Items

import numpy as np

from mlaforge.engine.request.sequence import Sequence
from mlaforge.engine.speculation.drafter import Drafter
from mlaforge.engine.speculation.lookup import PromptLookupDrafter

# Behind each constant: tokens per second relative to the best fixed choice at half of the value, at the value, and at
# twice the value, in a simulation (research/policy_constants.py).
# Weight of a new measurement of a step's time.
TIME_WEIGHT = 0.1  # 0.924, 0.922, 0.916
# Of so many first steps with a number of rows the fastest counts; as many plain steps come before any draft.
FIRST_STEPS = 2  # 0.917, 0.922, 0.920
# Every so many decisions one token more than the best choice or, alternately, plain decoding is tried.
EXPLORE_EVERY = 64  # 0.920, 0.922, 0.918
# A mode is tried for a step in every other text, and when so many tokens were generated in other modes: the first
# number since it was the fastest, twice as many with every trial, at most the second number. A trial is a noisy
# measurement: without early retrials the simulation scores 0.928, but documents are decoded at 0.93 of the speed.
FIRST_RETRY_TOKENS = 16  # 0.913, 0.922, 0.920
RETRY_TOKENS = 256  # 0.899, 0.922, 0.928
# Tokens as which earlier texts' measurements of modes weigh at most.
EARLIER_TOKENS = 8  # 0.919, 0.922, 0.915
# Tokens after which a measurement of a mode weighs half.
HALF_LIFE_TOKENS = 32  # 0.915, 0.922, 0.920


@dataclasses.dataclass(frozen=True)
class Decision:
    """What a step drafts for each decoding sequence that allows speculation.

    drafter           the mode's drafter; None: no draft
    length            tokens on a draft's longest path
    min_probability   a draft ends before a path that is less likely
    lookup            longest draft by prompt lookup, which goes before the drafter's
    """

    drafter: Drafter | None = None
    length: int = 0
    min_probability: float = 0.0
    lookup: int = 0

    def room(self, sequence: Sequence) -> int:
        """Most tokens of a draft by the drafter."""
        return self.drafter.room(sequence, self.length) if self.drafter is not None and self.length else 0

    def tokens(self, sequence: Sequence) -> int:
        """Drafted tokens for which the cache reserves room."""
        if self.drafter is None or not sequence.request.params.speculate:
            return 0
        # One position remains for the target's own token.
        return max(0, min(max(self.room(sequence), self.lookup), sequence.stopping.remaining_tokens - 1))


@dataclasses.dataclass
class _Mode:
    """Measurements of a mode. `tokens` and `seconds` decay with a half-life; `unused` tokens were generated in other
    modes since its last use; after `retry` of them it is tried."""

    tokens: float = 0.0
    seconds: float = 0.0
    unused: float = math.inf
    retry: float = FIRST_RETRY_TOKENS


class Policy:
    """Decides for each step.

    The length of a chain follows from the measured acceptance of its drafter and from the time of a step, modelled as a
    function of its rows, drafted tokens that a drafter cut as unlikely included. An unmeasured number of rows is
    assumed to cost what fewer rows cost, so that it is tried. A mode counts by the tokens per second of its steps.
    Measurements are separate by the power of two of the cached tokens, and those of modes by the number of decoding
    sequences.

    modes        drafters, the one of chains first
    max_tokens   longest chain
    adaptive     decide by measurement; otherwise the last mode that applies, at full length
    lookup       drafts before each mode's own; None for none. `lookup_tokens`: its longest draft.
    """

    def __init__(
        self, modes: Items[Drafter], max_tokens: int, adaptive: bool, lookup: PromptLookupDrafter | None = None,
        lookup_tokens: int = 0,
    ):  # fmt: skip
        self.modes, self.max_tokens, self.adaptive = list(modes), max_tokens, adaptive
        self.lookup, self.lookup_tokens = lookup, lookup_tokens if lookup else 0
        # By the power of two of cached tokens, then by rows: seconds, and the number of measured steps.
        self._times: dict[int, dict[int, tuple[float, int]]] = {}
        self._times_now: dict[int, tuple[float, int]] = {}
        self._modes: dict[tuple[int, int], dict[str, _Mode]] = {}
        self._modes_now: dict[str, _Mode] = {}
        self._single: int | None = None
        self._decisions = 0

    def resume(self, policy: Policy) -> None:
        """Go on with another policy's measurements of times."""
        self._times, self._modes = policy._times, policy._modes

    def decide(self, running: Items[Sequence], waiting: bool) -> Decision:
        """Decide for the step that starts now with the sequences `running`; `waiting`: others may join it."""
        decoding = [sequence for sequence in running if sequence.decoding]
        active, cached = len(decoding), sum(sequence.computed for sequence in decoding)
        alone = active == len(running) == 1 and not waiting
        modes = [mode for mode in self.modes if mode.applies(decoding, alone)]
        if not self.adaptive or not active:
            return Decision(modes[-1], self.max_tokens, 0.0, self._choose_lookup(0.0))
        self._enter(active, cached, decoding[0].number if active == 1 else None)
        mode = self._choose_mode(modes)
        length = self.choose_length(active) if mode is modes[0] else self.max_tokens
        min_probability = self.min_probability(active, max(length, 1)) if mode is modes[0] else 0.0
        return Decision(mode, length, min_probability, self._choose_lookup(min_probability))

    def _enter(self, active: int, cached: int, single: int | None) -> None:
        """Select the measurements of so many decoding sequences and cached tokens. `single`: number of the only one;
        where it is another than before, its text differs, so earlier measurements count less."""
        magnitude = cached.bit_length()
        self._times_now = self._times.setdefault(magnitude, {})
        self._modes_now = self._modes.setdefault((active, magnitude), {})
        if single in (None, self._single):
            return
        if self._single is not None:
            self.modes[0].acceptance.discount()
        self._single = single
        for mode in self._modes_now.values():
            weight = min(1.0, EARLIER_TOKENS / max(mode.tokens, 1.0))
            mode.tokens, mode.seconds = weight * mode.tokens, weight * mode.seconds
            mode.unused, mode.retry = math.inf, FIRST_RETRY_TOKENS

    def _choose_mode(self, modes: list[Drafter]) -> Drafter:
        """The fastest mode, the first of equals, or one that is to be tried."""
        if len(modes) == 1:
            return modes[0]
        measured = [self._modes_now.setdefault(mode.name, _Mode()) for mode in modes]
        for mode, entry in zip(modes, measured, strict=True):
            if entry.unused >= entry.retry:
                if entry.unused < math.inf:
                    entry.retry = min(2 * entry.retry, RETRY_TOKENS)
                return mode
        rates = [entry.tokens / entry.seconds for entry in measured]
        fastest = rates.index(max(rates))
        measured[fastest].retry = FIRST_RETRY_TOKENS
        return modes[fastest]

    def _choose_lookup(self, min_probability: float) -> int:
        """Longest draft by prompt lookup before a mode's own."""
        if self.lookup is None:
            return 0
        paths = self.lookup.confident_acceptance.paths(self.lookup_tokens)
        return sum(path >= min_probability for path in paths)

    def choose_length(self, active: int) -> int:
        """Tokens of a chain for each of `active` decoding sequences."""
        if self._times_now.get(active, (0.0, 0))[1] < FIRST_STEPS:
            return 0
        self._decisions += 1
        explore_longer = self._decisions % (2 * EXPLORE_EVERY) == 0
        if self._decisions % EXPLORE_EVERY == 0 and not explore_longer:
            return 0
        tokens, best, best_rate = 1.0, 0, 1.0 / self.step_seconds(active)
        for count, probability in enumerate(self.modes[0].acceptance.paths(self.max_tokens), start=1):
            tokens += probability
            rate = tokens / self.step_seconds(active * (1 + count))
            if rate > best_rate:
                best, best_rate = count, rate
        # Measurements age while a choice is not used: it is tried again now and then.
        return min(self.max_tokens, best + 1) if explore_longer else best

    def min_probability(self, active: int, count: int) -> float:
        """Acceptance probability above which a drafted token pays for its time, with `count` tokens drafted for each of
        `active` sequences: added time per token over time per generated token. 0 before any measurement."""
        if not self._times_now:
            return 0.0
        tokens = 1.0 + sum(self.modes[0].acceptance.paths(count))
        seconds = self.step_seconds(active * (1 + count))
        return max(0.0, (seconds - self.step_seconds(active)) / count * tokens / seconds)

    def step_seconds(self, rows: int) -> float:
        """Seconds of a decoding step of `rows` rows, interpolated between measurements; beyond them the nearest."""
        if rows in self._times_now:
            return self._times_now[rows][0]
        timed = sorted(self._times_now)
        return float(np.interp(rows, timed, [self._times_now[count][0] for count in timed]))

    def record(self, decision: Decision, tokens: int, rows: int, seconds: float) -> None:
        """Add a step in which all sequences were decoding and generated `tokens` tokens. rows: of the target's pass,
        budgets of drafts included."""
        if not self.adaptive or decision.drafter is None:
            return
        for mode in self._modes_now.values():
            mode.unused += tokens
        if (used := self._modes_now.get(decision.drafter.name)) is not None:
            decay = 0.5 ** (tokens / HALF_LIFE_TOKENS)
            used.tokens, used.seconds = decay * used.tokens + tokens, decay * used.seconds + seconds
            used.unused = 0.0
        if decision.drafter is not self.modes[0]:
            return
        mean, steps = self._times_now.get(rows, (seconds, 0))
        # The first steps may be slow for unrelated reasons.
        mean = min(mean, seconds) if steps < FIRST_STEPS else mean + TIME_WEIGHT * (min(seconds, 2 * mean) - mean)
        self._times_now[rows] = mean, steps + 1
