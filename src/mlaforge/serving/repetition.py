"""Whether a text has fallen into a loop: what greedy decoding does where a model has nothing more to say."""

from __future__ import annotations

from collections.abc import Sequence

# A loop has gone round so often, over at least so many tokens: a refrain or a list is none.
TURNS, LEAST = 3, 24


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
