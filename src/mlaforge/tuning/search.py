"""Search for the fastest of some configurations: successive halving on medians of interleaved measurements.

A configuration replaces the default only if it is faster by MARGIN twice: in the last round, and in a repetition of it
with these two alone, in which it must also win most pairs of calls: on a busy machine medians differ by chance.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

from mlaforge.ops.tuned import Configuration

# Repetitions of the rounds, after each of which the faster half goes on.
REPEATS = (3, 10, 30)
LEAST_REPEATS = (3, 3, 5)
MARGIN = 1.03
# Share of the pairs of calls in which a configuration must be faster than the default.
MOST_PAIRS = 0.75

# Seconds of one call with a configuration.
Measure = Callable[[Configuration], float]


@dataclasses.dataclass(frozen=True)
class Choice:
    """The configuration to use ({}: the default), its seconds and the default's, and the calls measured."""

    configuration: Configuration
    seconds: float
    default_seconds: float
    calls: int


def search(
    candidates: Sequence[Configuration], measure: Measure, budget: float = float("inf"), margin: float = MARGIN
) -> Choice:
    """Return the choice among `candidates`, of which the first is the default. budget: seconds; rounds of slow
    measurements have fewer repetitions."""
    default, *rest = range(len(candidates))
    start, calls = time.monotonic(), 0

    def timed(indices: Sequence[int], repeats: int) -> dict[int, list[float]]:
        nonlocal calls
        times: dict[int, list[float]] = {i: [] for i in indices}
        for repeat in range(repeats):
            # Alternating order: neither goes always first.
            for i in indices if repeat % 2 else reversed(indices):
                times[i].append(measure(candidates[i]))
                calls += 1
        return times

    # The first call touches the memory. A measurement takes longer than the call that it times: all copies are read.
    measure(candidates[default])
    begun = time.monotonic()
    once = measure(candidates[default])
    taken_once = time.monotonic() - begun
    calls += 2
    if not rest:
        return Choice({}, once, once, calls)
    planned = REPEATS if taken_once * _calls(len(candidates), REPEATS) < budget else LEAST_REPEATS
    running = [default, *rest]
    for repeats in planned:
        taken = {i: statistics.median(values) for i, values in timed(running, repeats).items()}
        last = repeats
        if time.monotonic() - start > budget:
            break
        fastest = sorted(running[1:], key=taken.__getitem__)
        running = [default, *fastest[: max(1, (len(running) + 1) // 2 - 1)]]
    best = min(running[1:], key=taken.__getitem__)
    if taken[default] > margin * taken[best]:
        again = timed([default, best], last)
        pairs = list(zip(again[default], again[best], strict=True))
        slow, fast = (statistics.median(times) for times in zip(*pairs, strict=True))
        won = sum(ours < theirs for theirs, ours in pairs)
        if slow > margin * fast and won >= MOST_PAIRS * len(pairs):
            return Choice(candidates[best], fast, slow, calls)
    return Choice({}, taken[default], taken[default], calls)


def _calls(candidates: int, repeats: Sequence[int]) -> int:
    """Calls of all rounds, with the repetition of the last."""
    total = 0
    for count in repeats:
        total += candidates * count
        candidates = max(2, (candidates + 1) // 2)
    return total + 2 * repeats[-1]
