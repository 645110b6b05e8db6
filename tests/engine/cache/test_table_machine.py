"""Random operations on block tables, as an engine drives them, against a simulated memory. The tables are DeviceTables
on the CPU, and their device copy is compared now and then.

A row of the simulated memory holds all tokens up to its own, which a real row of keys depends on. So a row is right
only if its token and its whole prefix are.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from random import Random

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlaforge.engine.cache.block_pool import block_digests
from mlaforge.engine.cache.block_tables import CacheGroup
from mlaforge.engine.cache.device_tables import DeviceTables
from support.engine_driver import most_blocks, vars_of

FULL = CacheGroup("full", 30)
MODELS = {
    "full": (FULL,),
    "full+window": (FULL, CacheGroup("window", 25, 5)),
    "windows": (CacheGroup("narrow", 18, 2), CacheGroup("wide", 25, 7)),
    "everything": (CacheGroup("one", 20, 1), FULL, CacheGroup("whole blocks", 25, 6)),
    "newest unquantized": (CacheGroup("newest", 30, newest_unquantized=True, num_unquantized=18),),
    "unquantized and windows": (
        FULL,
        CacheGroup("newest", 25, 6, True, 20),
        CacheGroup("newest narrow", 25, 3, True, 22),
    ),
}
MAX_SEQUENCES = 5  # sequences at a time
CHUNK = 7
WHICH = st.integers(0, MAX_SEQUENCES - 1)  # the how manieth of the live sequences
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=CHUNK)


@dataclasses.dataclass
class Run:
    """The engine's knowledge of a sequence: tokens, how many are computed, and the two lengths that limit a rewind:
    where it started, and the longest it has been."""

    tokens: list[int]
    computed: int
    origin: int
    longest: int


class Engine(RuleBasedStateMachine):
    @initialize(
        groups=st.sampled_from(sorted(MODELS)),
        block_size=st.integers(1, 4),
        caching=st.sampled_from([True, True, True, False]),
        lookback=st.integers(0, 3),
    )
    def build(self, groups, block_size, caching, lookback):
        self.bs = block_size
        self.tables = DeviceTables(MODELS[groups], block_size, caching, lookback)
        self.memory = [{} for _ in MODELS[groups]]
        self.live: dict[int, Run] = {}
        self.lookback = lookback
        self.copied = self.hits = 0

    def cached(self, tokens, group):
        """Whether the pool has each block of a prompt."""
        pool = self.tables._pools[group]
        return [pool.find(d) is not None for d in block_digests(tokens, self.bs)]

    def expected_hit(self, tokens):
        """The longest hit, by positions: every position that a query at its end sees is in a cached block."""
        known = [self.cached(tokens, group) for group in range(len(self.tables.groups))]
        for length in range((len(tokens) - 1) // self.bs * self.bs, 0, -self.bs):
            if all(
                known[g][p // self.bs]
                for g, group in enumerate(self.tables.groups)
                for p in range(0 if group.window is None else max(0, length - group.window + 1), length)
            ):
                return length
        return 0

    def begin(self, seq, tokens, reuse=True):
        expected = self.expected_hit(tokens) if self.tables.caching and reuse else 0
        num_cached = self.tables.start(seq, tokens, reuse)
        assert num_cached == expected
        self.hits += num_cached > 0
        self.live[seq] = Run(list(tokens), num_cached, num_cached, num_cached)

    def slot(self, seq, group, position, query):
        """The slot of a position for a query, in a block of the kind that the query must read."""
        first, blocks = self.tables.table(seq, group)
        number, block = position // self.bs, blocks[(position - first) // self.bs]
        if number == query // self.bs:
            block = self.tables.written(seq, group).get(number, block)
        whole = self.tables.groups[group].newest_unquantized and number == query // self.bs
        assert self.tables._pools[group].is_unquantized(block) == whole
        return block * self.bs + position % self.bs

    def seen(self, group, query):
        """The earlier positions that a query sees."""
        window = self.tables.groups[group].window
        return range(0 if window is None else max(0, query - window + 1), query)

    def pack(self, seq, length):
        """Quantize the written blocks that are full now."""
        for group, memory in enumerate(self.memory):
            first, blocks = self.tables.table(seq, group)
            for number, block in self.tables.written(seq, group).items():
                packed = blocks[number - first // self.bs]
                if (number + 1) * self.bs <= length:
                    assert packed != block
                    for row in range(self.bs):
                        memory[packed * self.bs + row] = memory[block * self.bs + row]

    def pick(self, which):
        return sorted(self.live)[which % len(self.live)]

    def new(self):
        return min(set(range(MAX_SEQUENCES)) - set(self.live))

    @precondition(lambda self: len(self.live) < MAX_SEQUENCES)
    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=16),
        like=st.none() | WHICH,
        reuse=st.sampled_from([True, True, True, False]),
    )
    def start(self, tokens, like, reuse):
        if self.live and like is not None:  # a prompt that goes on where another is
            tokens = (self.live[self.pick(like)].tokens + tokens)[:40]
        self.begin(self.new(), tokens, reuse)

    @precondition(lambda self: self.live)
    @rule(
        skipped=st.sets(WHICH, max_size=2),
        chunks=st.tuples(*[TOKENS] * MAX_SEQUENCES),
        rejected=st.tuples(*[st.integers(0, 3)] * MAX_SEQUENCES),
        preempted=st.none() | st.none() | WHICH,
    )
    def step(self, skipped, chunks, rejected, preempted):
        """Compute known tokens and then drafts, the last few of which are rejected."""
        copies, batch = [], {}
        for seq in sorted(set(self.live) - skipped):
            run = self.live[seq]
            written = (run.tokens[run.computed :] + chunks[seq])[: len(chunks[seq])]
            before = copy.deepcopy(self.tables)
            got = self.tables.reserve(seq, run.computed + len(written))
            if got is None:
                assert vars_of(before) == vars_of(self.tables)
            else:
                copies += got
                batch[seq] = written
        if preempted is not None:
            batch.pop(self.pick(preempted), None)
            self.free(preempted)
        self.copied += len(copies)
        for move in copies:
            memory = self.memory[move.group]
            for row in range(self.bs):
                memory[move.target * self.bs + row] = memory.get(move.source * self.bs + row)
        for seq, written in batch.items():
            run = self.live[seq]
            history = run.tokens[: run.computed] + written
            for group, memory in enumerate(self.memory):
                for position in range(run.computed, len(history)):
                    memory[self.slot(seq, group, position, position)] = tuple(history[: position + 1])
            self.pack(seq, len(history))
            for group, memory in enumerate(self.memory):
                for query in range(run.computed, len(history)):
                    for p in [*self.seen(group, query), query]:
                        assert memory[self.slot(seq, group, p, query)] == tuple(history[: p + 1])
        for seq, written in batch.items():
            run = self.live[seq]
            computed = run.computed + max(0, len(written) - rejected[seq])
            history = run.tokens[: run.computed] + written
            run.tokens = max(run.tokens, history[:computed], key=len)
            self.tables.commit(seq, run.tokens, computed)
            run.computed = computed
            run.longest = max(run.longest, computed)

    @precondition(lambda self: self.live)
    @rule(which=WHICH, by=st.integers(0, 9), other=TOKENS, again=st.booleans())
    def rewind(self, which, by, other, again):
        seq = self.pick(which)
        run = self.live[seq]
        length = max(0, run.computed - by)
        num_computed = self.tables.rewind(seq, length)
        if (
            any(group.newest_unquantized for group in self.tables.groups)
            and length // self.bs < run.computed // self.bs
        ):
            length -= length % self.bs
        assert num_computed in (0, length)
        if length >= run.origin and run.longest - length <= self.lookback:
            assert num_computed == length
        if all(group.window is None for group in self.tables.groups):
            assert num_computed == length
        tokens = run.tokens[:length] + other
        run.tokens, run.computed, run.origin = tokens, num_computed, min(run.origin, num_computed)
        if not num_computed:
            run.longest = 0
            if again:
                self.begin(seq, tokens)

    @precondition(lambda self: 0 < len(self.live) < MAX_SEQUENCES)
    @rule(which=WHICH)
    def fork(self, which):
        parent, child = self.pick(which), self.new()
        self.tables.fork(parent, child)
        self.live[child] = copy.deepcopy(self.live[parent])

    @precondition(lambda self: self.live)
    @rule(which=WHICH)
    def free(self, which):
        seq = self.pick(which)
        self.tables.free(seq)
        del self.live[seq]

    @precondition(lambda self: self.live)
    @rule(which=st.lists(WHICH, min_size=1, max_size=MAX_SEQUENCES), group=st.integers(0, 3))
    def read_device_table(self, which, group):
        """Read the device table of some sequences of one group, in any order. Changes of the others are uploaded
        later."""
        group %= len(self.tables.groups)
        seqs = [seq for seq in {self.pick(place): None for place in which} if self.tables.table(seq, group)[1]]
        if not seqs:
            return
        tables = [self.tables.table(seq, group)[1] for seq in seqs]
        table_SB = self.tables.table_SB(seqs, group)
        assert table_SB.dtype == torch.int32 and table_SB.shape == (len(seqs), max(map(len, tables)))
        for row, blocks in zip(table_SB.tolist(), tables, strict=True):
            assert row[: len(blocks)] == blocks

    def turn(self, random, done):
        """Apply one random rule that is possible."""
        name = random.choices(["start", "step", "rewind", "fork", "free", "read_device_table"], [3, 8, 4, 2, 1, 6])[0]
        if name in ("start", "fork") and len(self.live) == MAX_SEQUENCES:
            name = "free"
        if name != "start" and not self.live:
            name = "start"
        done[name] += 1

        def some(most):
            return [random.randrange(2) for _ in range(random.randint(1, most))]

        which = random.randrange(MAX_SEQUENCES)
        if name == "start":
            self.start(some(16), random.choice([None, which]), which > 0)
        elif name == "step":
            skipped = set(random.sample(range(MAX_SEQUENCES), random.choice([0, 1, 2])))
            rejected = [random.choice([0, 0, 1, 3]) for _ in range(MAX_SEQUENCES)]
            self.step(
                skipped, [some(CHUNK) for _ in range(MAX_SEQUENCES)], rejected, random.choice([None] * 7 + [which])
            )
        elif name == "rewind":
            self.rewind(which, random.choice([0, 1, 2, 3, 3, 5, 9]), some(CHUNK), random.random() < 0.7)
        elif name == "read_device_table":
            self.read_device_table(random.sample(range(MAX_SEQUENCES), random.randint(1, MAX_SEQUENCES)), which)
        else:
            getattr(self, name)(which)

    @invariant()
    def tables_are_consistent(self):
        self.tables.check_integrity()
        assert self.tables.used + self.tables.available == self.tables.num_blocks
        if not self.live:
            assert self.tables.used == 0

    @invariant()
    def next_query_sees_what_it_should(self):
        for seq, run in self.live.items():
            for group, memory in enumerate(self.memory):
                for p in self.seen(group, run.computed):
                    assert memory[self.slot(seq, group, p, run.computed)] == tuple(run.tokens[: p + 1])

    @invariant()
    def published_blocks_hold_what_their_digest_says(self):
        for pool, memory in zip(self.tables._pools, self.memory, strict=True):
            for block in range(pool.num_blocks):
                if (digest := pool.digest(block)) is not None:
                    assert not pool.is_unquantized(block)
                    rows = [memory[block * self.bs + row] for row in range(self.bs)]
                    history = rows[-1]
                    assert digest == block_digests(history, self.bs)[-1]
                    assert len(history) % self.bs == 0
                    assert rows == [history[: len(history) - self.bs + 1 + row] for row in range(self.bs)]

    @invariant()
    def tables_are_bounded(self):
        for seq in self.live:
            for group in range(len(self.tables.groups)):
                most = most_blocks(self.tables, group, 10**6, CHUNK)
                assert len(self.tables.table(seq, group)[1]) <= most


TestEngine = Engine.TestCase
TestEngine.settings = settings(max_examples=15, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("seed", range(2 * len(MODELS)))
def test_random_lifetimes(seed):
    """The same rules with the frequencies of a busy engine, so that pools fill up and prefixes meet."""
    random = Random(seed)
    engine = Engine()
    engine.build(
        sorted(MODELS)[seed % len(MODELS)], 1 + seed // len(MODELS), caching=seed % 7 != 6, lookback=random.randrange(4)
    )
    done = Counter()
    for _ in range(300):
        engine.turn(random, done)
        engine.tables_are_consistent()
        engine.next_query_sees_what_it_should()
        engine.published_blocks_hold_what_their_digest_says()
        engine.tables_are_bounded()
    while engine.live:
        engine.free(0)
    engine.tables_are_consistent()
    assert done["step"] > 50 and done["fork"] > 5 and done["rewind"] > 20
    assert engine.copied > 1 or engine.bs == 1
    assert engine.hits > 0 or not engine.tables.caching
