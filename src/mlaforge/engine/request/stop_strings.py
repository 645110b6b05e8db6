"""Search for stop strings in a text that grows."""

from __future__ import annotations

from collections.abc import Sequence


def find_stop(text: str, stops: Sequence[str], after: int) -> tuple[int, int, str] | None:
    """Return (start, end, stop string) of the first complete stop string among those that end after `after`.

    Of several that end at one place, return the longest: a scan letter by letter would stop there.
    """
    matches: list[tuple[int, int, str]] = []
    for stop in stops:
        start = text.find(stop, max(0, after - len(stop) + 1))
        if start >= 0:
            matches.append((start, start + len(stop), stop))
    return min(matches, key=lambda match: (match[1], match[0])) if matches else None


def partial_stop_length(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that is a beginning of a stop string, but not a complete one."""
    for length in range(min(len(text), max(map(len, stops), default=1) - 1), 0, -1):
        end = text[-length:]
        if any(len(stop) > length and stop.startswith(end) for stop in stops):
            return length
    return 0
