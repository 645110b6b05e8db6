"""Text that repeats itself: what small models fall into, and what neither heads nor calibration learn from."""

from __future__ import annotations

from collections.abc import Sequence

# Text is in a loop where of the runs of four tokens in some STRETCH of it fewer than LOOP are distinct ones, ...
STRETCH, LOOP = 128, 0.4
# ... or where of its lines, if they are LINES or more, fewer than this share are: those with a letter or a digit.
LINES, DISTINCT_LINES = 8, 0.5
# The end of a text that goes round so often, over at least so many tokens, is no refrain and no list.
TURNS, LEAST = 3, 24


def distinct_share(token_ids: Sequence[int]) -> float | None:
    """Share of the runs of four tokens that are different ones; None of fewer than four tokens."""
    runs = [tuple(token_ids[at : at + 4]) for at in range(len(token_ids) - 3)]
    return len(set(runs)) / len(runs) if runs else None


def loop(token_ids: Sequence[int], text: str) -> str:
    """How a text repeats itself, in words; "" where it does not."""
    for end in range(len(token_ids), 0, -STRETCH // 2):
        share = distinct_share(token_ids[max(0, end - STRETCH) : end])
        if share is not None and share < LOOP:
            return "few distinct runs of tokens"
    lines = [line.strip() for line in text.splitlines() if any(map(str.isalnum, line))]
    if len(lines) >= LINES and len(set(lines)) < DISTINCT_LINES * len(lines):
        return "repeated lines"
    return ""


def repeats_from(token_ids: Sequence[int]) -> int | None:
    """The number, counted from 1, of the first token that only repeats what stood before it, where the text ends in a
    loop: the same tokens again and again up to its end. None where it does not."""
    n, found = len(token_ids), None
    for period in range(1, n // TURNS + 1):
        same = 0
        while same + period < n and token_ids[n - 1 - same] == token_ids[n - 1 - same - period]:
            same += 1
        # `same` tokens repeat those a period before them.
        if same + period >= max(TURNS * period, LEAST):
            found = min(n - same + 1, found or n)
    return found
