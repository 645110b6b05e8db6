"""Loops at the end of a text: found where they begin, and only there."""

from hypothesis import given
from hypothesis import strategies as st

from mlaforge.synthesis.repetition import LEAST, TURNS, repeats_from

WORDS = list(range(100, 130))


def test_a_loop_is_told_from_its_second_turn() -> None:
    # 30 different tokens, then six again and again: the second turn begins at token 37.
    assert repeats_from(WORDS + [1, 2, 3, 4, 5, 6] * 5) == 37
    # A turn that is cut off by the end counts as far as it goes.
    assert repeats_from(WORDS + [1, 2, 3, 4, 5, 6] * 4 + [1, 2]) == 37
    assert repeats_from(WORDS + [7] * 40) == 32
    assert repeats_from([7] * 40) == 2


def test_what_is_no_loop() -> None:
    assert repeats_from([]) is None and repeats_from(WORDS) is None
    # Too few turns, too few tokens, and a refrain that ended.
    assert repeats_from(WORDS + WORDS) is None
    assert repeats_from([*WORDS, *[1, 2] * 5]) is None
    assert repeats_from([1, 2, 3] * 10 + WORDS) is None


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_whatever_goes_before_a_loop_is_found(before: list[int], turn: list[int]) -> None:
    turns = max(TURNS, -(-LEAST // len(turn))) + 1
    ids = before + turn * turns
    found = repeats_from(ids)
    assert found is not None and found <= len(before) + len(turn) + 1
    # What is said to repeat does: with some period every token from there on is that of a period before.
    periods = range(1, len(ids) // TURNS + 1)
    assert any(all(ids[n] == ids[n - p] for n in range(found - 1, len(ids))) for p in periods if p < found)
