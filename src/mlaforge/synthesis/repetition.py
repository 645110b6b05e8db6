"""Detection of repetitive text: small models degenerate into it, and it is useless for draft heads and calibration."""

from __future__ import annotations

from collections.abc import Sequence

# Text is repetitive if in some window of LOOP_WINDOW tokens the share of distinct 4-grams is below this ratio, ...
LOOP_WINDOW, MIN_DISTINCT_RATIO = 128, 0.4
# ... or if it has at least MIN_LINES lines with a letter or digit and the share of distinct ones is below this ratio.
MIN_LINES, MIN_DISTINCT_LINES = 8, 0.5
# A loop at the end of a text has at least so many periods and tokens; less may be a refrain or a list.
MIN_PERIODS, MIN_LOOP_TOKENS = 3, 24


def distinct_ngram_ratio(token_ids: Sequence[int]) -> float | None:
    """Return the share of distinct 4-grams among all 4-grams (distinct-n); None for fewer than four tokens."""
    ngrams = [tuple(token_ids[i : i + 4]) for i in range(len(token_ids) - 3)]
    return len(set(ngrams)) / len(ngrams) if ngrams else None


def repetition_reason(token_ids: Sequence[int], text: str) -> str:
    """Return why a text counts as repetitive, or "" if it does not."""
    for end in range(len(token_ids), 0, -LOOP_WINDOW // 2):
        share = distinct_ngram_ratio(token_ids[max(0, end - LOOP_WINDOW) : end])
        if share is not None and share < MIN_DISTINCT_RATIO:
            return "few distinct runs of tokens"
    lines = [line.strip() for line in text.splitlines() if any(map(str.isalnum, line))]
    if len(lines) >= MIN_LINES and len(set(lines)) < MIN_DISTINCT_LINES * len(lines):
        return "repeated lines"
    return ""


def repeats_from(token_ids: Sequence[int]) -> int | None:
    """Return the 1-based position of the first repeated token of a loop that lasts to the end of the text, else None.

    A loop is the same sequence of tokens over and over.
    """
    n, loop_start = len(token_ids), None
    for period in range(1, n // MIN_PERIODS + 1):
        matching = 0
        while matching + period < n and token_ids[n - 1 - matching] == token_ids[n - 1 - matching - period]:
            matching += 1
        # The last `matching` tokens equal those one period before them.
        if matching + period >= max(MIN_PERIODS * period, MIN_LOOP_TOKENS):
            loop_start = min(n - matching + 1, loop_start or n)
    return loop_start
