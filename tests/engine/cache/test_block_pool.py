"""The block pool against a simple model: reference counts, contents by digest, and the order of release."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mlaforge.engine.cache.block_pool import BlockPool, block_digests
from support.block_runs import runs


def digest(number):
    return number.to_bytes(16, "big")


class PoolMachine(RuleBasedStateMachine):
    """One holder per allocation or acquisition; few digests, so that they collide."""

    SIZE = 12

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(self.SIZE, 4)
        self.holders = []
        self.contents = {}
        self.released = []  # evictable, least recently released first

    def used_blocks(self):
        return {block for blocks in self.holders for block in blocks}

    def free(self):
        return set(range(self.SIZE)) - self.used_blocks() - set(self.released)

    @rule(count=st.integers(0, 7), after=st.none() | st.integers(0, SIZE - 1))
    def allocate(self, count, after):
        free, available = self.free(), self.pool.num_available
        taken = self.pool.allocate(count, after)
        if count > available:
            assert taken is None
            return
        assert len(taken) == len(set(taken)) == count
        evicted = self.released[: max(0, count - len(free))]
        assert set(taken) <= free | set(evicted) and set(evicted) <= set(taken)
        if count and after is not None and after + 1 in free:
            assert taken[0] == after + 1
        self.released = self.released[len(evicted) :]
        for block in evicted:
            del self.contents[block]
        self.holders.append(taken)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data):
        blocks = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.release(blocks)
        self.released += [b for b in blocks if b not in self.used_blocks() and b in self.contents]

    @rule(data=st.data(), number=st.integers(0, 5))
    def publish(self, data, number):
        known = [b for b in sorted(self.used_blocks()) if b not in self.contents]
        if known:
            block = data.draw(st.sampled_from(known))
            self.pool.publish(block, digest(number))
            if digest(number) not in self.contents.values():
                self.contents[block] = digest(number)

    @rule(data=st.data())
    def withdraw(self, data):
        if self.used_blocks():
            block = data.draw(st.sampled_from(sorted(self.used_blocks())))
            self.pool.withdraw(block)
            self.contents.pop(block, None)

    @rule(numbers=st.lists(st.integers(0, 5), max_size=4, unique=True))
    def acquire(self, numbers):
        blocks = self.pool.match([digest(n) for n in numbers])
        place = {content: block for block, content in self.contents.items()}
        expected = [place.get(digest(n)) for n in numbers]
        assert blocks == (expected[: expected.index(None)] if None in expected else expected)
        self.pool.acquire(blocks)
        self.released = [b for b in self.released if b not in blocks]
        self.holders.append(blocks)

    @invariant()
    def agrees(self):
        self.pool.check_integrity(self.holders)
        assert self.pool.num_used == len(self.used_blocks())
        assert self.pool.num_available == self.SIZE - len(self.used_blocks())
        for block in range(self.SIZE):
            assert self.pool.digest(block) == self.contents.get(block)
            assert self.pool.is_shared(block) == (sum(block in blocks for blocks in self.holders) > 1)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_failed_allocation_changes_nothing():
    pool = BlockPool(4, 2)
    taken = pool.allocate(3)
    assert pool.allocate(2) is None
    assert pool.num_available == 1
    pool.check_integrity([taken])
    assert pool.allocate(0) == []


def test_least_recently_released_is_evicted_first_and_use_renews():
    pool = BlockPool(4, 2)
    blocks = pool.allocate(4)
    for block in blocks:
        pool.publish(block, digest(block))
    pool.release([2, 0, 3, 1])
    pool.acquire([2])
    pool.release([2])
    assert [pool.allocate(1)[0] for _ in range(4)] == [0, 3, 1, 2]
    assert pool.match([digest(2)]) == []


def test_free_blocks_go_before_cached_ones():
    pool = BlockPool(6, 2)
    blocks = pool.allocate(6)
    for block in blocks[:4]:
        pool.publish(block, digest(block))
    pool.release(blocks)
    assert sorted(pool.allocate(2)) == [4, 5]
    assert pool.match([digest(b) for b in range(4)]) == [0, 1, 2, 3]


def test_first_block_of_a_content_stays_registered():
    pool = BlockPool(3, 2)
    one, two = pool.allocate(2)
    pool.publish(one, digest(7))
    pool.publish(two, digest(7))
    assert pool.match([digest(7)]) == [one]
    pool.withdraw(two)
    assert pool.match([digest(7)]) == [one]
    pool.withdraw(one)
    assert pool.match([digest(7)]) == []


def test_no_content_stays_without_caching():
    pool = BlockPool(3, 2, caching=False)
    blocks = pool.allocate(2)
    pool.publish(blocks[0], digest(1))
    assert pool.match([digest(1)]) == []
    pool.release(blocks)
    pool.check_integrity([])
    assert pool.num_used == 0


def test_gaps_are_entered_where_the_neighbour_can_grow():
    pool = BlockPool(16, 2)
    assert pool.allocate(2) == [0, 1]
    assert pool.allocate(1) == [9]  # the middle of 2 to 15, since 1 may grow
    assert pool.allocate(2, after=1) == [2, 3]
    assert pool.allocate(5) == [11, 12, 13, 14, 15]  # as far right as five fit behind 9
    assert pool.allocate(6, after=3) == [4, 5, 6, 7, 8, 10]


def test_a_large_request_is_one_run_where_one_fits():
    pool = BlockPool(64, 2)
    first = pool.allocate(4)
    assert runs(pool.allocate(50)) == 1
    assert runs(pool.allocate(5, after=first[-1])) == 1


@pytest.mark.parametrize("sequences", [1, 2, 8])
def test_sequences_in_lockstep_stay_contiguous(sequences):
    pool = BlockPool(1024, 16)
    tables = [pool.allocate(3) for _ in range(sequences)]
    for _ in range(60):
        for table in tables:
            table += pool.allocate(1, after=table[-1])
    assert max(map(runs, tables)) <= 2, [runs(table) for table in tables]


def test_full_cache_is_evicted_in_contiguous_runs():
    pool = BlockPool(4096, 16)
    old = pool.allocate(4096)
    for block in old:
        pool.publish(block, digest(block))
    pool.release(reversed(old))
    table = pool.allocate(1)
    for _ in range(255):
        table += pool.allocate(1, after=table[-1])
    assert runs(table) <= 256 // 64
    # No more went than one stretch beyond what was needed, and the head of the old sequence is still there.
    assert len(pool.match([digest(block) for block in old])) >= 4096 - 256 - 64


def test_growing_scans_no_other_block():
    """Allocating the next block costs the same in a small and in a large pool: counted, not timed."""

    class Watched(bytearray):
        seen = 0

        def find(self, value, start=0, stop=None):
            Watched.seen += (len(self) if stop is None else stop) - start
            return bytearray.find(self, value, start, len(self) if stop is None else stop)

    pool = BlockPool(100_000, 16)
    pool._free = Watched(pool._free)
    table = pool.allocate(1)
    Watched.seen = 0
    for _ in range(1000):
        table += pool.allocate(1, after=table[-1])
    assert Watched.seen == 1000 and runs(table) == 1


def test_asserts_on_misuse():
    pool = BlockPool(4, 2)
    (block,) = pool.allocate(1)
    with pytest.raises(AssertionError, match="has 1 references, but 0 users"):
        pool.check_integrity([])
    with pytest.raises(AssertionError, match="has 1 references, but 2 users"):
        pool.check_integrity([[block], [block]])
    pool.publish(block, digest(1))
    with pytest.raises(AssertionError, match="second content"):
        pool.publish(block, digest(2))
    pool.release([block])
    for misuse in (lambda: pool.release([block]), lambda: pool.withdraw(block), lambda: pool.publish(block, digest(3))):
        with pytest.raises(AssertionError, match="but has no references"):
            misuse()
    with pytest.raises(AssertionError, match="its content is unknown"):
        pool.acquire([block + 1])


@given(st.lists(st.integers(0, 2**40), max_size=40), st.integers(1, 5), st.data())
def test_digests_can_be_computed_in_parts(tokens, size, data):
    whole = block_digests(tokens, size)
    assert len(whole) == len(tokens) // size == len(set(whole))
    cut = data.draw(st.integers(0, len(whole)))
    rest = block_digests(tokens[cut * size :], size, whole[cut - 1] if cut else None)
    assert whole[:cut] + rest == whole


def test_digests_distinguish_prefixes():
    tokens = [1, 2, 3, 4, 3, 4]
    first = block_digests(tokens, 2)
    assert len(set(first)) == 3
    assert not set(first) & set(block_digests([0, 2, 3, 4, 3, 4], 2))
    assert first[:2] == block_digests([1, 2, 3, 4, 9, 9], 2)[:2]
