"""Parametrisation of tests by all pairs of values: most faults take one value or two to show."""

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest


def cover(sizes: Sequence[int], more: int = 0) -> set[tuple[int, ...]]:
    """Return rows with a number below each of `sizes`, in which any two columns have all pairs of numbers, and `more`
    random rows. Greedy: the next row is the one with the most missing pairs."""
    rows = list(itertools.product(*map(range, sizes)))
    # Shuffled, because the first of equal candidates is taken: neighbours differ in one number only.
    random.Random(0).shuffle(rows)
    pairs = {row: set(itertools.combinations(enumerate(row), 2)) for row in rows}
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        chosen.append(max(rows, key=lambda row: len(pairs[row] & missing)))
        missing -= pairs[chosen[-1]]
    return {*chosen, *[row for row in rows if row not in chosen][:more]}


def pairwise(axes: Mapping[str, Sequence[Any] | Mapping[str, Any]], more: int = 4) -> pytest.MarkDecorator:
    """Parametrise a test by the product of `axes`, which is slow but for a cover of its pairs and `more` random rows.

    axes: argument name, or several with commas -> values, or ids and values.
    """
    labelled = [axis if isinstance(axis, Mapping) else {str(value): value for value in axis} for axis in axes.values()]
    fast = cover([len(axis) for axis in labelled], more)
    parameters = []
    for row in itertools.product(*(range(len(axis)) for axis in labelled)):
        (*ids,) = (list(axis)[i] for axis, i in zip(labelled, row, strict=True))
        values = []
        for names, axis, id in zip(axes, labelled, ids, strict=True):
            values += axis[id] if "," in names else [axis[id]]
        marks = () if row in fast else pytest.mark.slow
        parameters.append(pytest.param(*values, id="-".join(ids), marks=marks))
    return pytest.mark.parametrize(",".join(axes), parameters)
