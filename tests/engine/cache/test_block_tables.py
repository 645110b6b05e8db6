"""Block tables: prefix hits, windows, rewinds, forks, and assertions on misuse.

Random combinations: test_table_machine.py.
"""

import copy

import pytest

from mlaforge.engine.cache.block_tables import BlockTables, CacheGroup, Copy
from support.block_runs import runs
from support.engine_driver import most_blocks, vars_of


def feed(tables, seq, tokens, computed=0, chunk=64):
    """Compute all tokens in chunks; return the copies."""
    copies = []
    while computed < len(tokens):
        upto = min(computed + chunk, len(tokens))
        got = tables.reserve(seq, upto)
        assert got is not None
        copies += got
        tables.commit(seq, tokens, upto)
        computed = upto
    return copies


def pair(blocks=64, window=8, **options):
    return BlockTables([CacheGroup("full", blocks), CacheGroup("window", blocks, window)], 4, **options)


def test_an_identical_prompt_hits_after_the_first_has_ended():
    tables = pair()
    prompt = list(range(20))
    assert tables.start(1, prompt) == 0
    feed(tables, 1, prompt)
    tables.free(1)
    assert tables.used == 0
    assert tables.start(2, prompt) == 16  # one token is left to compute
    assert tables.table(2, 0)[0] == 0 and len(tables.table(2, 0)[1]) == 4
    # A query at 16 sees 9 to 16.
    assert tables.table(2, 1)[0] == 8 and len(tables.table(2, 1)[1]) == 2
    assert tables.start(3, [*prompt, 1]) == 20
    assert tables.start(4, prompt, reuse=False) == 0
    assert tables.start(5, prompt[:8] + [9] * 12) == 8
    tables.check_integrity()


def test_without_caching_nothing_is_found_or_kept():
    tables = pair(caching=False)
    prompt = list(range(20))
    tables.start(1, prompt)
    feed(tables, 1, prompt)
    assert tables.start(2, prompt) == 0
    tables.free(1)
    tables.free(2)
    assert tables.used == 0
    tables.check_integrity()


def test_the_tail_of_a_sequence_is_evicted_before_its_head():
    tables = BlockTables([CacheGroup("full", 6)], 4)
    prompt = list(range(16))
    tables.start(1, prompt)
    feed(tables, 1, prompt)
    tables.free(1)
    tables.start(2, [7] * 12, reuse=False)
    feed(tables, 2, [7] * 12)  # takes the two free blocks and one of the four
    assert tables.start(3, [*prompt, 0]) == 12


def test_a_window_alone_is_enough_for_a_hit_where_no_group_is_full():
    tables = BlockTables([CacheGroup("window", 8, 8)], 4)
    prompt = list(range(100))
    tables.start(1, prompt)
    feed(tables, 1, prompt, chunk=4)
    tables.free(1)
    # The head was evicted long ago; the blocks that a query at 96 sees are there.
    assert tables.start(2, prompt) == 96
    first, blocks = tables.table(2, 0)
    assert first == 88 and len(blocks) == 2


@pytest.mark.parametrize("chunk", [1, 3, 4, 30])
@pytest.mark.parametrize("lookback", [0, 5])
def test_a_window_group_needs_a_bounded_number_of_blocks(chunk, lookback):
    length = 400
    tables = BlockTables([CacheGroup("window", 200, 10)], 4, caching=False, lookback=lookback)
    most = most_blocks(tables, 0, length, chunk)
    assert most * 4 < 10 + lookback + chunk + 2 * 4
    tables.start(1, [])
    peak = 0
    for computed in range(0, length, chunk):
        upto = min(computed + chunk, length)
        assert tables.reserve(1, upto) == []
        peak = max(peak, tables.used)
        tables.commit(1, [0] * length, upto)
        first, blocks = tables.table(1, 0)
        assert first <= max(0, upto - 10 + 1 - lookback) < first + 4
        assert first + 4 * len(blocks) >= upto
    assert peak <= most
    if chunk < 4:  # every alignment has been seen
        assert peak == most
    assert most_blocks(tables, 0, 7, chunk) == 2


def test_rewind_works_within_lookback_and_else_returns_zero():
    tables = pair(lookback=3)
    tokens = list(range(40))
    tables.start(1, tokens)
    for length in range(12, 40):
        feed(tables, 1, tokens[:length], computed=length - 1 if length > 12 else 0)
    assert tables.rewind(1, 36) == 36
    assert tables.rewind(1, 20) == 0
    assert tables.used == 0
    # The window's blocks were given up, not forgotten.
    assert tables.start(1, tokens[:21]) == 20
    tables.check_integrity()


def test_rewind_and_other_tokens_leave_no_stale_content():
    tables = BlockTables([CacheGroup("full", 16)], 4)
    old, new = [1] * 12, [1] * 6 + [2] * 6
    tables.start(1, old)
    feed(tables, 1, old)
    assert tables.rewind(1, 6) == 6
    assert tables.reserve(1, 6) == []  # nothing is written
    assert tables.start(2, [*old, 0]) == 12  # until it is written to, the block is what it was
    tables.free(2)
    feed(tables, 1, new, computed=6)
    assert tables.start(3, [*old, 0]) == 4
    assert tables.start(4, [*new, 0]) == 12
    tables.check_integrity()


def test_rewind_into_a_shared_prefix_copies_what_others_see():
    tables = BlockTables([CacheGroup("full", 16)], 4)
    tokens = [1] * 12
    tables.start(1, tokens)
    feed(tables, 1, tokens)
    assert tables.start(2, [*tokens, 5]) == 12
    theirs = list(tables.table(1, 0)[1])
    tables.rewind(2, 6)
    copies = tables.reserve(2, 7)
    assert copies == [Copy(0, source=theirs[1], target=tables.table(2, 0)[1][1])]
    assert tables.table(1, 0)[1] == theirs
    assert tables.start(3, [*tokens, 0]) == 12


def test_children_of_a_fork_write_to_blocks_of_their_own():
    tables = pair()
    prompt = list(range(10))
    tables.start(0, prompt)
    feed(tables, 0, prompt)
    for child in (1, 2):
        tables.fork(0, child)
    assert tables.used == 6
    copies = [tables.reserve(seq, 11) for seq in (0, 1, 2)]
    # The last one to write owns the block that they shared.
    assert [[c.group for c in found] for found in copies] == [[0, 1], [0, 1], []]
    for group in (0, 1):
        blocks = [tables.table(seq, group)[1] for seq in (0, 1, 2)]
        assert blocks[0][:2] == blocks[1][:2] == blocks[2][:2]
        assert len({b[2] for b in blocks}) == 3
        assert all(c.source == blocks[2][2] for found in copies for c in found if c.group == group)
    assert tables.reserve(0, 12) == []
    tables.check_integrity()


def test_reserve_changes_nothing_when_one_group_is_short():
    tables = BlockTables([CacheGroup("ample", 50), CacheGroup("short", 3, 8)], 4)
    tables.start(1, [])
    assert tables.reserve(1, 13) is None
    assert tables.used == 0
    assert tables.reserve(1, 12) == []
    tables.commit(1, list(range(10)), 10)
    tables.fork(1, 2)
    before = copy.deepcopy(tables)
    assert tables.reserve(2, 11) is None  # the copy would need a block
    assert vars_of(before) == vars_of(tables)


@pytest.mark.parametrize("caching", [True, False])
def test_eight_sequences_in_lockstep_stay_contiguous(caching):
    tables = BlockTables([CacheGroup("full", 2000), CacheGroup("window", 400, 128)], 16, caching)
    tokens = {seq: [seq] * 50 for seq in range(8)}
    for seq in tokens:
        tables.start(seq, tokens[seq])
        feed(tables, seq, tokens[seq])
    counted = [[], []]
    for length in range(51, 1500):
        for seq in tokens:
            tokens[seq].append(length % 5)
            feed(tables, seq, tokens[seq], computed=length - 1)
            for group in (0, 1):
                counted[group].append(runs(tables.table(seq, group)[1]))
    assert max(counted[0]) == 1
    if caching:  # what the window has passed stays until it is evicted, and comes back from all over the pool
        assert sum(counted[1]) / len(counted[1]) <= 5
    else:
        assert max(counted[1]) <= 3


def test_asserts_on_misuse():
    tables = pair()
    tables.start(1, [1, 2, 3])
    with pytest.raises(AssertionError, match="has no block"):
        tables.commit(1, [1, 2, 3], 3)
    tables.reserve(1, 3)
    with pytest.raises(AssertionError, match="has been started"):
        tables.start(1, [1])
    with pytest.raises(AssertionError, match="has been started"):
        tables.fork(1, 1)
    with pytest.raises(AssertionError, match="has 0 tokens, not 1"):
        tables.rewind(1, 1)
    with pytest.raises(KeyError):
        tables.free(2)
    tables._sequences[1].computed = 9
    with pytest.raises(AssertionError, match="sequence 1"):
        tables.check_integrity()
