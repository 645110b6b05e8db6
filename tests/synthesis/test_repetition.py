"""Loops at the end of a text are located at their first repeated token."""

from hypothesis import given
from hypothesis import strategies as st

from mlaforge.synthesis.repetition import MIN_LOOP_TOKENS, MIN_PERIODS, repeats_from

WORDS = list(range(100, 130))


def test_a_loop_is_located_at_its_second_period() -> None:
    # 30 different tokens, then a loop of six: its second period begins at token 37.
    assert repeats_from(WORDS + [1, 2, 3, 4, 5, 6] * 5) == 37
    # An incomplete last period counts.
    assert repeats_from(WORDS + [1, 2, 3, 4, 5, 6] * 4 + [1, 2]) == 37
    assert repeats_from(WORDS + [7] * 40) == 32
    assert repeats_from([7] * 40) == 2


def test_ignores_texts_that_do_not_end_in_a_loop() -> None:
    assert repeats_from([]) is None and repeats_from(WORDS) is None
    # Too few periods, too few tokens, and a loop before the end.
    assert repeats_from(WORDS + WORDS) is None
    assert repeats_from([*WORDS, *[1, 2] * 5]) is None
    assert repeats_from([1, 2, 3] * 10 + WORDS) is None


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_a_loop_is_found_after_any_prefix(prefix: list[int], period_ids: list[int]) -> None:
    count = max(MIN_PERIODS, -(-MIN_LOOP_TOKENS // len(period_ids))) + 1
    ids = prefix + period_ids * count
    start = repeats_from(ids)
    assert start is not None and start <= len(prefix) + len(period_ids) + 1
    # From `start` on, every token equals the one a period before, for some period.
    periods = range(1, len(ids) // MIN_PERIODS + 1)
    assert any(all(ids[n] == ids[n - p] for n in range(start - 1, len(ids))) for p in periods if p < start)
