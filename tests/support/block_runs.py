"""How contiguous blocks are."""

import itertools


def runs(blocks):
    """Into how many stretches of consecutive numbers a table falls."""
    return 1 + sum(b != a + 1 for a, b in itertools.pairwise(blocks))
