"""Views of the cache as batch.py lays them out, against a dictionary from position to slot."""

import dataclasses

import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from mlaforge.engine.cache.block_tables import CacheGroup
from mlaforge.engine.execution.batch import Chunk, make_batch
from mlaforge.engine.execution.bucket import Bucket, padded
from mlaforge.ops import host_view

NUM_BLOCKS = 12
CPU = torch.device("cpu")


@dataclasses.dataclass
class Tables:
    """As BlockTables, but the blocks are what the test says."""

    block_size: int
    groups: list[CacheGroup]
    block_lists: list[tuple[int, list[int]]]

    def table(self, seq, group):
        first, blocks = self.block_lists[seq]
        return first * self.block_size, blocks


@dataclasses.dataclass
class Problem:
    block_size: int
    window: int | None
    # Per sequence: number of its first block, its blocks, computed tokens, and those after this step.
    sequences: list[tuple[int, list[int], int, int]]

    def batch(self):
        tables = Tables(
            self.block_size,
            [CacheGroup("it", NUM_BLOCKS, self.window)],
            [(first, blocks) for first, blocks, _, _ in self.sequences],
        )
        chunks = [
            Chunk(n, range(1000), start, stop, generating=True) for n, (_, _, start, stop) in enumerate(self.sequences)
        ]
        return make_batch(chunks, tables, CPU)

    def slot(self, index, position):
        first, blocks, _, _ = self.sequences[index]
        block, offset = divmod(position - first * self.block_size, self.block_size)
        return blocks[block] * self.block_size + offset

    def seen(self, index, position):
        """Positions that a query at `position` sees."""
        return range(0 if self.window is None else max(0, position - self.window + 1), position + 1)


@st.composite
def problems(draw, decode=False):
    """Sequences of any blocks in any order, the last of them perhaps not needed yet."""
    size = draw(st.integers(1, 5))
    window = draw(st.none() | st.integers(1, 9))
    free = list(draw(st.permutations(range(NUM_BLOCKS))))
    sequences = []
    for _ in range(draw(st.integers(1, 3))):
        stop = draw(st.integers(1, 4 * size if window is None else 40))
        start = stop - 1 if decode else draw(st.integers(max(0, stop - 7), stop - 1))
        first = 0 if window is None else max(0, start - window + 1) // size
        count = -(-stop // size) - first + draw(st.integers(0, 1))
        if count > len(free):
            break
        blocks, free = free[:count], free[count:]
        sequences.append((first, blocks, start, stop))
    assume(sequences)
    return Problem(size, window, sequences)


@settings(max_examples=150)
@given(problems())
@example(Problem(2, None, [(0, [0, 5, 2], 3, 6)]))
@example(Problem(2, None, [(0, [0, 2, 1, 3], 7, 8)]))
@example(Problem(2, 3, [(1, [4, 3, 2], 6, 8)]))
def test_a_sequence_reads_its_own_rows_in_order_and_masks_what_is_later(problem):
    batch = problem.batch()
    (view,) = batch.views
    row = 0
    for index, (_, _, start, stop) in enumerate(problem.sequences):
        T = stop - start
        assert batch.token_ids_N[row : row + T].tolist() == list(range(start, stop))
        assert batch.positions_N[row : row + T].tolist() == list(range(start, stop))
        assert view.slots_N[row : row + T].tolist() == [problem.slot(index, p) for p in range(start, stop)]
        row += T
        assert batch.last_S[index] == row - 1

        rows = torch.arange(NUM_BLOCKS * problem.block_size)[:, None]
        got, mask = host_view.host_view(view).sequence(index, rows)
        positions = range(problem.seen(index, start).start, stop)
        assert got[0, :, 0].tolist() == [problem.slot(index, p) for p in positions]
        visible = [[p in problem.seen(index, q) for p in positions] for q in range(start, stop)]
        assert (visible if mask is None else mask[0, 0].tolist()) == visible
        assert mask is not None or all(map(all, visible))


@settings(max_examples=150)
@given(problems())
def test_tables_and_runs_are_what_a_loop_over_blocks_makes(problem):
    """Filled up with 0 to the widest; stretches end where the next block is no neighbour, or with the length."""
    (view,) = problem.batch().views
    size, widest = problem.block_size, max(len(blocks) for _, blocks, _, _ in problem.sequences)
    for index, (first, blocks, _, stop) in enumerate(problem.sequences):
        assert view.block_table_SB[index].tolist() == blocks + [0] * (widest - len(blocks))
        assert view.first_S[index] == first * size
        runs, left = [], stop - first * size
        for block in blocks[: -(-left // size)]:
            rows = min(left, size)
            if runs and sum(runs[-1]) == block * size:
                runs[-1][1] += rows
            else:
                runs.append([block * size, rows])
            left -= rows
        assert view.runs[index] == tuple(map(tuple, runs))
    assert (view.block_table_SB.dtype, view.first_S.dtype, view.slots_N.dtype) == (
        torch.int32, torch.int32, torch.int64
    )  # fmt: skip


@settings(max_examples=150)
@given(problems())
def test_blocks_gathered_are_those_that_are_read(problem):
    """One sequence after another, each in one stretch; the slots of the step's tokens among them."""
    (view,) = problem.batch().views
    blocks, gathered = host_view.host_view(view).gathered
    size, at = (
        problem.block_size,
        [problem.slot(i, p) for i, (_, _, a, b) in enumerate(problem.sequences) for p in range(a, b)],
    )
    slots = (blocks[:, None] * size + torch.arange(size)).flatten()
    assert slots[gathered.slots_N].tolist() == at
    for index, (first, expected, _, stop) in enumerate(problem.sequences):
        ((begin, length),) = gathered.runs[index]
        assert length == stop - first * size
        assert slots[begin : begin + length].tolist() == [problem.slot(index, p) for p in range(first * size, stop)]
        needed = -(-length // size)
        assert blocks[gathered.block_table_SB[index, :needed]].tolist() == expected[:needed]
        assert not gathered.block_table_SB[index, needed:].any()
    assert (gathered.first_S, gathered.seq_lens_S, gathered.window) == (view.first_S, view.seq_lens_S, view.window)


@settings(max_examples=150)
@given(problems(decode=True))
def test_batched_decoding_sees_the_same_and_reads_no_foreign_rows(problem):
    (view,) = problem.batch().views
    slots_SL, mask = host_view.host_view(view).dense(torch.float32)
    assert host_view.host_view(view).dense(torch.float32)[1] is mask
    for index, (_, blocks, _, stop) in enumerate(problem.sequences):
        expected = [problem.slot(index, p) for p in problem.seen(index, stop - 1)]
        seen = mask[index, 0, 0] == 0
        assert slots_SL[index][seen].tolist() == expected
        assert (mask[index, 0, 0][~seen] == -torch.inf).all()
        assert {int(slot) // problem.block_size for slot in slots_SL[index]} <= set(blocks)


def test_a_step_from_a_graph_computes_no_runs(monkeypatch):
    """Runs take a look at every block: computed when they are read, for the sequence that is read, and once."""
    computed, runs = [], host_view._runs
    monkeypatch.setattr(host_view, "_runs", lambda *inputs: computed.append(inputs) or runs(*inputs))
    problem = Problem(4, None, [(0, [3, 4, 9, 7, 8], 14, 15), (0, [1, 2], 4, 5)])
    batch = problem.batch()
    (view,) = batch.views
    padded(batch, Bucket.of(batch, 8), [NUM_BLOCKS])
    assert view.lengths == (15, 5) and len(view.runs) == 2
    assert host_view.host_view(view).gathered[1].lengths == (15, 5) and host_view.host_view(view).dense(torch.float32)[
        0
    ].shape == (2, 15)
    assert not computed
    assert view.runs[1] == view.runs[-1] == ((4, 5),)
    assert len(computed) == 1
    assert tuple(view.runs) == view.runs[:] == (((12, 8), (36, 4), (28, 3)), ((4, 5),))
    assert len(computed) == 2


class Kept(Tables):
    """Where the newest block is whole: those that a step writes to."""

    def written(self, seq, group):
        return {0: {1: 20, 2: 21, 3: 22}, 1: {0: 23}}[seq]


def test_queries_read_their_block_unquantized_and_earlier_ones_quantized():
    """Positions 6 to 12 of one sequence, 1 of another, in blocks of 4: a step that fills two blocks."""
    group = CacheGroup("it", 20, newest_unquantized=True, num_unquantized=4)
    tables = Kept(4, [group], [(0, [3, 5, 4, 22]), (0, [23])])
    batch = make_batch([Chunk(0, range(1000), 6, 13), Chunk(1, range(1000), 1, 2)], tables, CPU)
    (view,) = batch.views
    assert view.block_table_SB.tolist() == [[3, 20, 0, 0], [3, 5, 21, 0], [3, 5, 4, 22], [23, 0, 0, 0]]
    assert view.seq_lens_S.tolist() == [8, 12, 13, 2] and view.query_start_S1.tolist() == [0, 2, 6, 7, 8]
    assert view.queries == (2, 4, 1, 1) and (view.max_query, view.max_seq_len) == (4, 13)
    assert view.slots_N.tolist() == [82, 83, 84, 85, 86, 87, 88, 93]
    assert view.packs_2K.tolist() == [[20, 21], [5, 4]]
    # The batch itself has its two sequences.
    assert batch.positions_N.tolist() == [*range(6, 13), 1] and batch.last_S.tolist() == [6, 7]


def test_runs_are_consecutive_slots():
    """Whole blocks until the length, merged where blocks follow each other."""
    problem = Problem(4, None, [(0, [3, 4, 9, 7, 8], 0, 15), (0, [1, 2], 4, 5)])
    (view,) = problem.batch().views
    assert tuple(view.runs) == (((12, 8), (36, 4), (28, 3)), ((4, 5),))
    assert view.queries == (15, 1)
    assert view.block_table_SB.tolist() == [[3, 4, 9, 7, 8], [1, 2, 0, 0, 0]]
    assert (view.max_query, view.max_seq_len) == (15, 15)
