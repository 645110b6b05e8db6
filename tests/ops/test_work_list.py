"""Division of cached rows among programs: every row once, evenly, and the same number of entries."""

import heapq
import itertools

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from mlaforge.ops import work_list
from mlaforge.ops.gpu_properties import GpuProperties
from mlaforge.ops.paged_attention import paged_attention
from mlaforge.ops.work_list import MOST_PIECES, UNIT, entries, pieces
from support.paged_steps import SHAPES, assert_right, make_step, needs_triton


def parsed(numbers, sequences):
    """Entries that are used, and first result and count of pieces by sequence."""
    cut = len(numbers) - 2 * sequences
    work = [tuple(numbers[i : i + 4]) for i in range(0, cut, 4)]
    return [entry for entry in work if entry[0] >= 0], [tuple(numbers[i : i + 2]) for i in range(cut, len(numbers), 2)]


@given(st.lists(st.integers(0, 40_000), min_size=1, max_size=40), st.integers(1, 264))
@example([8193], 128)
def test_every_row_is_read_once(lengths, programs):
    numbers = pieces(lengths, programs)
    assert len(numbers) == 4 * entries(len(lengths), programs) + 2 * len(lengths)
    work, by_sequence = parsed(numbers, len(lengths))
    results = []
    for s, length in enumerate(lengths):
        mine = sorted(entry[1:] for entry in work if entry[0] == s)
        first, count = by_sequence[s]
        assert len(mine) == count <= MOST_PIECES
        assert mine[-1][1] == length
        assert mine[0][0] == 0
        assert all(before[1] == after[0] for before, after in itertools.pairwise(mine))
        assert [partial for *_, partial in mine] == ([-1] if count == 1 else [*range(first, first + count)])
        results += [partial for *_, partial in mine if partial >= 0]
    assert sorted(results) == list(range(len(results)))
    sizes = [end - begin for _, begin, end, _ in work]
    assert sizes == sorted(sizes, reverse=True)
    # Scheduled longest first, no program reads much more than twice its share, unless a sequence has too many pieces.
    ends = [0] * programs
    for size in sizes:
        heapq.heapreplace(ends, ends[0] + size)
    share = sum(sizes) / programs
    assert max(ends) <= max(2 * share, max(lengths) / MOST_PIECES) + 2 * UNIT


def test_a_long_sequence_beside_short_ones_is_cut():
    for short in (63, 32, 20):
        work, _ = parsed(pieces([1500] * short + [131072], 33), short + 1)
        assert max(end - begin for _, begin, end, _ in work) < 131072 / 15
        assert len(work) == short + sum(s == short for s, *_ in work)


def test_equal_sequences_run_at_once():
    for sequences in (1, 8, 16, 32):
        work, _ = parsed(pieces([32768] * sequences, 33), sequences)
        assert len(work) == 32


@needs_triton
@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_memory_is_nan")
@pytest.mark.parametrize("shape", ["group-3", "mla"])
def test_listed_pieces_are_merged(shape, monkeypatch):
    """Sequences in one piece and in several, ragged drafts, and a length of 0."""
    from mlaforge.ops import paged_attention_triton as attention

    monkeypatch.setattr(work_list, "UNIT", 16)
    step = make_step(SHAPES[shape], [(300, 1), (20, 3), (9, 9), (150, 2)])
    programs = GpuProperties.of_capability(9, 0, 40)
    launch = attention.make_launch(*step.inputs, gpu=programs)
    assert launch.arguments["LISTED"] and len(launch.pieces) > 4
    sinks = torch.linspace(-1, 1, step.q.shape[1], device=step.q.device)
    assert_right(step, attention.run(launch))
    out, _ = attention.run(attention.make_launch(*step.inputs, gpu=programs, sinks_H=sinks))
    torch.testing.assert_close(
        out, paged_attention(*step.inputs, sinks, implementation="reference")[0], atol=1e-5, rtol=1e-5
    )
