"""Contiguity of blocks."""

import itertools


def runs(blocks):
    """Return the number of runs of consecutive block numbers in a table."""
    return 1 + sum(b != a + 1 for a, b in itertools.pairwise(blocks))
