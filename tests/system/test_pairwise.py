"""The cover of pairs by which kernels' tests are chosen."""

import itertools

from support.pairwise import cover, pairwise


def test_every_pair_is_covered_by_few_rows():
    rows = cover([5, 4, 4, 3], more=2)
    assert len(rows) < 30
    for a, b in itertools.combinations(range(4), 2):
        assert {(row[a], row[b]) for row in rows} == {
            *itertools.product(range([5, 4, 4, 3][a]), range([5, 4, 4, 3][b]))
        }


def test_the_rest_of_the_product_is_slow():
    (names, parameters) = pairwise({"a,b": {"x": (1, 2), "y": (3, 4)}, "c": [5, 6], "d": [7, 8]}, more=1).args
    assert names == "a,b,c,d" and len(parameters) == 8
    assert parameters[0].values == (1, 2, 5, 7) and parameters[0].id == "x-5-7"
    assert sum(not parameter.marks for parameter in parameters) == 5
