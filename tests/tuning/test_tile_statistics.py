"""Statistics of tiles against a count over the whole mask, program by program."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mlaforge.ops.work_list import pieces
from mlaforge.tuning.tile_statistics import TileStatistics, Tiling, cpu_tiling, of_launch, tile_statistics
from support.paged_steps import SHAPES, make_step, needs_triton


def brute_force(view_mask, lengths, queries, tiling, window, highest_of):
    """Count tiles as the kernel loops over them: view_mask(s) is bool [T, L]."""
    total = by_span = executed = by_mask = 0
    numbers = pieces(lengths, tiling.programs) if tiling.programs is not None else None
    for s, (L, T) in enumerate(zip(lengths, queries, strict=True)):
        mask = view_mask(s).repeat_interleave(tiling.group, dim=0)
        for tile in range(-(-T * tiling.group // tiling.rows)):
            rows = mask[tile * tiling.rows : (tile + 1) * tiling.rows]
            first, last = (
                tile * tiling.rows // tiling.group,
                min((tile + 1) * tiling.rows - 1, T * tiling.group - 1) // tiling.group,
            )
            low, high = highest_of(L, T, first, last)
            if numbers is None:
                lo = max(0, low - window + 1) if window else 0
                lo = lo // tiling.positions * tiling.positions if tiling.aligned else lo
                total, by_span = total + -(-lo // tiling.positions), by_span + -(-lo // tiling.positions)
                rest = len(range(lo, L, tiling.positions)) - len(range(lo, high + 1, tiling.positions))
                total, by_span = total + rest, by_span + rest
                per = math.ceil(math.ceil((high + 1 - lo) / tiling.splits) / tiling.positions) * tiling.positions
                spans = [(lo + i * per, min(lo + (i + 1) * per, high + 1)) for i in range(tiling.splits)]
            else:
                entries = [numbers[i : i + 4] for i in range(0, len(numbers) - 2 * len(lengths), 4)]
                spans = []
                for owner, begin, end, _ in entries:
                    if owner == s:
                        stop = max(begin, min(end, high + 1))
                        spans.append((begin, stop))
                        rest = len(range(begin, end, tiling.positions)) - len(range(begin, stop, tiling.positions))
                        total, by_span = total + rest, by_span + rest
            for begin, end in spans:
                at = begin
                while at < end:
                    seen = rows[:, at : min(at + tiling.positions, end)]
                    executed, total, by_mask = executed + 1, total + 1, by_mask + (not bool(seen.any()))
                    at += tiling.positions
    return TileStatistics(*(tiling.kv_heads * number for number in (total, by_span, executed, by_mask)))


tilings = st.builds(
    Tiling, rows=st.sampled_from([1, 4, 16, 64]), positions=st.sampled_from([16, 32, 64]), group=st.integers(1, 9),
    kv_heads=st.integers(1, 3), splits=st.integers(1, 5), aligned=st.booleans(),
)  # fmt: skip


@given(
    st.lists(st.tuples(st.integers(1, 200), st.integers(1, 40)), min_size=1, max_size=4), tilings,
    st.none() | st.integers(1, 90), st.none() | st.integers(1, 7),
)  # fmt: skip
def test_text_against_the_mask(sequences, tiling, window, programs):
    lengths = [max(length, T) for length, T in sequences]
    queries = [T for _, T in sequences]
    if programs is not None and window is None:
        tiling = dataclasses.replace(tiling, splits=1, programs=programs, aligned=False)

    def mask(s):
        at = torch.arange(lengths[s])
        distance = at[-queries[s] :, None] - at
        return (distance >= 0) & (distance < (window or lengths[s]))

    def bounds(L, T, first, last):
        return L - T + first, L - T + last

    statistics = tile_statistics(lengths, queries, tiling, window)
    assert statistics == brute_force(mask, lengths, queries, tiling, window, bounds)
    assert statistics.total == statistics.empty_by_span + statistics.executed
    if tiling.programs is None and not tiling.aligned:
        assert not statistics.empty_by_mask


@st.composite
def trees(draw):
    """Distances [T, n] of a random forest of n nodes, whose tokens are all query tokens."""
    n = draw(st.integers(1, 20))
    parents = [draw(st.integers(-1, node - 1)) for node in range(n)]
    rows = []
    for node in range(n):
        row, at, distance = [-1] * n, node, 0
        while at >= 0:
            row[at], at, distance = distance, parents[at], distance + 1
        rows.append(row)
    return rows


@given(trees(), st.integers(0, 150), tilings, st.none() | st.integers(1, 60))
def test_trees_against_the_mask(tree, text, tiling, window):
    n = len(tree)
    L, tree_Tn = text + n, torch.tensor(tree)
    position = text + tree_Tn.amax(1, keepdim=True)
    distance = torch.cat((position - torch.arange(text), tree_Tn), dim=1)
    mask = (distance >= 0) & (distance < (window or L))
    tiling = dataclasses.replace(tiling, aligned=False)
    statistics = tile_statistics([L], [n], tiling, window, tree)
    assert statistics == brute_force(lambda s: mask, [L], [n], tiling, window, lambda L, T, first, last: (text, L - 1))


def test_a_tree_of_branches_has_tiles_that_no_query_sees():
    """Four branches of 16 nodes: a tile of one branch's queries sees no other branch."""
    tree = [
        [row % 16 - node % 16 if node // 16 == row // 16 and node <= row else -1 for node in range(64)]
        for row in range(64)
    ]
    statistics = tile_statistics([64 + 64], [64], Tiling(16, 16, 1, 2), tree=tree)
    assert statistics == TileStatistics(total=64, empty_by_span=0, executed=64, empty_by_mask=24)


def test_the_compiled_kernels_skip_what_a_prompt_does_not_see():
    statistics = tile_statistics([1024], [512], cpu_tiling(8, 8))
    assert statistics == TileStatistics(total=256, empty_by_span=32, executed=224, empty_by_mask=0)


@needs_triton
@pytest.mark.parametrize("window", [None, 9])
def test_a_launch_gives_its_tiling_from_host_numbers(window):
    from mlaforge.ops import paged_attention_triton as attention

    step = make_step(SHAPES["group-3"], [(70, 2), (23, 1)], window=window)
    launch = attention.make_launch(*step.inputs)
    tiling = of_launch(launch, step.view)
    assert (tiling.programs is None) == (window is not None) and tiling.kv_heads == 2 and tiling.group == 3
    statistics = tile_statistics(step.view.lengths, step.view.queries, tiling, window)
    assert 0 < statistics.executed <= statistics.total
