"""Successive halving: the default stays unless a candidate is faster twice, and bad defaults are replaced."""

import random

from hypothesis import given
from hypothesis import strategies as st

from mlaforge.tuning.search import MARGIN, REPEATS, search


class Clock:
    """Measures a candidate {"x": i} as the i-th of some times, with noise."""

    def __init__(self, times, noise=0.0, seed=0):
        self.times, self.noise, self.random, self.calls = times, noise, random.Random(seed), []

    def __call__(self, configuration):
        at = configuration.get("x", 0)
        self.calls.append(at)
        return self.times[at] * (1 + self.noise * self.random.random())


def candidates(count):
    return [{}, *({"x": i} for i in range(1, count))]


@given(st.lists(st.floats(1.0, 10.0), min_size=1, max_size=16))
def test_without_noise_the_best_replaces_a_default_that_is_slower_by_the_margin(times):
    clock = Clock(times)
    choice = search(candidates(len(times)), clock)
    best = min(times)
    if times[0] > MARGIN * best:
        assert times[choice.configuration["x"]] == best == choice.seconds and choice.default_seconds == times[0]
    else:
        assert choice.configuration == {} and choice.seconds == choice.default_seconds == times[0]
    assert choice.calls == len(clock.calls)


@given(st.integers(0, 50))
def test_a_slow_default_is_replaced_under_noise(seed):
    choice = search(candidates(8), Clock([2.0, 1.5, 1.6, 1.0, 1.4, 1.8, 1.9, 1.5], noise=0.3, seed=seed))
    assert choice.configuration == {"x": 3} and choice.default_seconds > 1.5 * choice.seconds


def test_noise_alone_replaces_no_default():
    """Of 100 searches among equal candidates."""
    replaced = sum(
        bool(search(candidates(10), Clock([1.0] * 10, noise=0.1, seed=seed)).configuration) for seed in range(100)
    )
    assert replaced == 0


def test_a_candidate_that_is_faster_once_only_is_refused():
    """The repetition of the last round contradicts it."""
    first = sum(REPEATS) * 2 + 2

    def measure(configuration):
        measure.calls += 1
        return 0.5 if configuration and measure.calls <= first else 1.0

    measure.calls = 0
    assert search(candidates(2), measure).configuration == {}
    assert measure.calls == first + 2 * REPEATS[-1]


def test_the_slower_half_is_dropped_after_each_round():
    clock = Clock([1.0, *(2.0 + i for i in range(9))])
    search(candidates(10), clock)
    counts = [clock.calls.count(i) for i in range(10)]
    assert counts[0] == 2 + sum(REPEATS) and counts[1] == sum(REPEATS)
    assert counts[9] == REPEATS[0] and sorted(counts[1:], reverse=True) == counts[1:]


def test_a_spent_budget_ends_a_search_after_its_round():
    clock = Clock([2.0, 1.0, 3.0])
    choice = search(candidates(3), clock, budget=0.0)
    # Confirmed all the same.
    assert choice.configuration == {"x": 1} and len(clock.calls) < 30


def test_noise_of_a_busy_machine_replaces_no_default():
    """Calls take once or three times as long, by chance: of 200 searches among equal candidates."""
    replaced = 0
    for seed in range(200):
        draw = random.Random(seed)
        choice = search(candidates(8), lambda configuration, draw=draw: draw.choice([1.0, 3.0]))
        replaced += bool(choice.configuration)
    assert replaced <= 2
