"""Block tables: which blocks of every cache group belong to which sequence, and which prefix is cached already.

A full group keeps every position. A group with window W keeps what a query may still see: at position p the positions
p - W + 1 to p. All groups of a sequence hold the same tokens, so one chain of digests serves them all.

A group may store rows packed and yet keep some blocks *whole*, with rows as they are: the `first` of a sequence, or the
`newest`, that is the one in which a query stands; all blocks before it are packed for that query, also where one step
fills several. So a step has a whole block for each one that it writes to, and for each that it fills a packed one too,
which is packed before anything is attended to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from mlaforge.engine.cache.block_pool import BlockPool, block_digests


@dataclasses.dataclass(frozen=True)
class CacheGroup:
    """Layers that cache the same positions; `window` None is full attention. `whole` says which blocks of a sequence
    are whole, `first`, `newest`, both or none; `num_whole` such blocks stand behind the `num_blocks` others."""

    name: str
    num_blocks: int
    window: int | None = None
    whole: frozenset[str] = frozenset()
    num_whole: int = 0


@dataclasses.dataclass(frozen=True)
class Copy:
    """Copy all rows of block `source` to block `target` in the layers of cache group number `group`."""

    group: int
    source: int
    target: int


@dataclasses.dataclass
class _Table:
    """Blocks of one sequence in one group; the first of them is the sequence's block number `first`. Where the newest
    block is whole, `written` has by its number each block that the step at hand writes to; `blocks` has there what
    later queries see, which is packed once it is full. `unchanged` counts the leading blocks that are as `take_changes`
    last returned them: whatever replaces or removes a block lowers it."""

    first: int = 0
    blocks: list[int] = dataclasses.field(default_factory=list)
    written: dict[int, int] = dataclasses.field(default_factory=dict)
    unchanged: int = 0

    @property
    def end(self) -> int:
        return self.first + len(self.blocks)

    @property
    def held(self) -> list[int]:
        """Every block once."""
        return [*self.blocks, *set(self.written.values()).difference(self.blocks)]

    def newest(self, number: int) -> int:
        """The block of this number as it is written to."""
        return self.written.get(number, self.blocks[number - self.first])

    def replace(self, number: int, block: int) -> None:
        """`block` becomes the block of this number."""
        index = number - self.first
        self.blocks[index] = block
        self.unchanged = min(self.unchanged, index)

    def truncate(self, count: int) -> list[int]:
        """Removes all but the first `count` blocks, and returns the removed ones."""
        removed = self.blocks[count:]
        del self.blocks[count:]
        self.unchanged = min(self.unchanged, count)
        return removed

    def drop_first(self, count: int) -> list[int]:
        """Removes the first `count` blocks, and returns them."""
        removed = self.blocks[:count]
        del self.blocks[:count]
        self.first += count
        self.unchanged = 0
        return removed


@dataclasses.dataclass(frozen=True)
class _Need:
    """Numbers of a sequence's blocks for which a packed, or a whole, one is to be allocated; and the block to be copied
    because others hold it too."""

    packed: list[int]
    whole: list[int]
    copied: int | None


@dataclasses.dataclass
class _Sequence:
    """`computed` tokens are in the cache; `digests` are those of the whole blocks among them (none without caching).
    Blocks beyond them are reserved and hold nothing that counts."""

    computed: int
    digests: list[bytes]
    tables: list[_Table]


class BlockTables:
    """The block tables of all sequences in all cache groups.

    A step is `reserve` for each of its sequences, the copies that this returned (in order, before anything is written),
    the forward pass, and `commit`. Methods raise KeyError for a sequence that was not started or forked.

    `lookback`: tokens that `rewind` can always take back from the longest length a sequence had, window or not.
    """

    def __init__(self, groups: Sequence[CacheGroup], block_size: int, caching: bool = True, lookback: int = 0) -> None:
        assert groups and lookback >= 0 and all(g.window is None or g.window > 0 for g in groups), (
            f"{groups} {lookback}"
        )
        self.groups = tuple(groups)
        self.block_size = block_size
        self.caching = caching
        self.lookback = lookback
        self._sequences: dict[int, _Sequence] = {}
        self.forget()

    def forget(self) -> None:
        """Nothing is known of any prefix from now on. Only while there is no sequence."""
        assert not self._sequences, f"{self.sequences} hold blocks"
        self._pools = [
            BlockPool(group.num_blocks, self.block_size, self.caching, group.num_whole) for group in self.groups
        ]

    @property
    def num_blocks(self) -> int:
        """Blocks of all groups together, as are `used` and `available`."""
        return sum(pool.num_blocks for pool in self._pools)

    @property
    def used(self) -> int:
        return sum(self.used_by_group)

    @property
    def used_by_group(self) -> list[int]:
        return [pool.num_used for pool in self._pools]

    @property
    def whole_by_group(self) -> list[int]:
        """Those of `used_by_group` that are whole."""
        return [pool.num_used_whole for pool in self._pools]

    @property
    def available(self) -> int:
        return sum(pool.num_available for pool in self._pools)

    @property
    def sequences(self) -> set[int]:
        """The sequences that were started or forked and not freed."""
        return set(self._sequences)

    def start(self, seq: int, token_ids: Sequence[int], reuse: bool = True) -> int:
        """Begin a sequence, or one that was rewound to nothing, with what the cache holds of its tokens.

        Returns the number of tokens that are cached: whole blocks, and at least one token is left to compute.
        """
        old = self._sequences.get(seq)
        assert old is None or not any(table.blocks for table in old.tables), f"sequence {seq} has been started"
        digests: list[bytes] = []
        if self.caching and reuse:
            whole = max(0, len(token_ids) - 1) // self.block_size
            digests = block_digests(token_ids[: whole * self.block_size], self.block_size)
            del digests[self._longest_hit(digests) :]
        cached = len(digests) * self.block_size
        tables = []
        for group, pool in enumerate(self._pools):
            first = self._first_seen(group, cached)
            blocks = pool.match(digests[first:])
            pool.acquire(blocks)
            tables.append(_Table(first, blocks))
        self._sequences[seq] = _Sequence(cached, digests, tables)
        return cached

    def reserve(self, seq: int, upto: int) -> list[Copy] | None:
        """Make room to write positions [computed, upto) in every group, or None, and nothing changed, when blocks are
        short in any.

        Only the last block can be partly computed. Where others hold it too, it is replaced by a copy, returned here;
        where it is this sequence's own, the cache forgets its former content (a rewind left it behind).
        """
        state = self._sequences[seq]
        if upto <= state.computed:
            return []
        needs = [self._need(group, table, state.computed, upto) for group, table in enumerate(state.tables)]
        for pool, need in zip(self._pools, needs, strict=True):
            copied = need.copied is not None and pool.is_whole(need.copied)
            if not pool.has(len(need.packed) + (need.copied is not None) - copied, len(need.whole) + copied):
                return None
        copies = []
        for group, need in enumerate(needs):
            pool, table = self._pools[group], state.tables[group]
            if need.copied is not None:
                copies.append(self._copy(group, table, state.computed, need.copied))
            elif state.computed % self.block_size:
                pool.withdraw(table.newest(state.computed // self.block_size))
            self._extend(group, table, state.computed, need)
        return copies

    def _need(self, group: int, table: _Table, computed: int, upto: int) -> _Need:
        """What a step to position `upto` lacks."""
        pool, kinds = self._pools[group], self.groups[group].whole
        last, rows = divmod(computed, self.block_size)
        packed: list[int] = []
        whole: list[int] = []
        for number in range(last, -(-upto // self.block_size)):
            stays = "first" in kinds and number == 0
            if "newest" not in kinds or stays:
                if number >= table.end:
                    (whole if stays else packed).append(number)
                continue
            if number not in table.written and not (number == last and rows):
                whole.append(number)
            filled = (number + 1) * self.block_size <= upto
            if filled and (number >= table.end or pool.is_whole(table.blocks[number - table.first])):
                packed.append(number)
        newest = table.newest(last) if rows else None
        return _Need(packed, whole, newest if newest is not None and pool.is_shared(newest) else None)

    def _copy(self, group: int, table: _Table, computed: int, shared: int) -> Copy:
        """The partly computed block becomes the sequence's own."""
        pool = self._pools[group]
        allocated = pool.allocate(1, whole=pool.is_whole(shared))
        assert allocated is not None
        pool.release([shared])
        table.replace(computed // self.block_size, allocated[0])
        return Copy(group, source=shared, target=allocated[0])

    def _extend(self, group: int, table: _Table, computed: int, need: _Need) -> None:
        """Gives a table what it lacks."""
        pool, kinds = self._pools[group], self.groups[group].whole
        last, rows = divmod(computed, self.block_size)
        if "newest" in kinds and rows and not ("first" in kinds and last == 0):
            table.written.setdefault(last, table.blocks[last - table.first])
        whole = pool.allocate(len(need.whole), whole=True)
        after = table.blocks[-1] if table.blocks and not pool.is_whole(table.blocks[-1]) else None
        packed = pool.allocate(len(need.packed), after)
        assert whole is not None and packed is not None
        found = dict(zip(need.whole, whole, strict=True))
        if "newest" in kinds:
            table.written |= {number: block for number, block in found.items() if number or "first" not in kinds}
        found |= zip(need.packed, packed, strict=True)
        for number in sorted(found):
            if number < table.end:
                table.replace(number, found[number])
            else:
                table.blocks.append(found[number])

    def commit(self, seq: int, token_ids: Sequence[int], computed: int) -> None:
        """Positions < computed now hold these tokens (`token_ids` from position 0 on, `computed` of them or more).

        Publishes the blocks that have become full and releases those that no query from `computed` - lookback on sees.
        """
        state = self._sequences[seq]
        assert state.computed <= computed <= len(token_ids), f"{state.computed} <= {computed} <= {len(token_ids)}"
        assert all(computed <= t.end * self.block_size for t in state.tables), f"position {computed - 1} has no block"
        full = state.computed // self.block_size
        now_full = computed // self.block_size
        state.computed = computed
        self._settle(state)
        if self.caching and now_full > full:
            new = token_ids[full * self.block_size : now_full * self.block_size]
            parent = state.digests[-1] if full else None
            state.digests += block_digests(new, self.block_size, parent)
            for pool, table in zip(self._pools, state.tables, strict=True):
                for index in range(full, now_full):
                    pool.publish(table.blocks[index - table.first], state.digests[index])
        for group, table in enumerate(state.tables):
            passed = self._first_seen(group, computed - self.lookback) - table.first
            if passed > 0:
                self._pools[group].release(reversed(table.drop_first(passed)))

    def rewind(self, seq: int, length: int) -> int:
        """Back to the first `length` tokens; releases the blocks past them. Returns the tokens that are still computed.

        That is `length`; or, where it lies in a block that was packed when it was full, the beginning of that block; or
        0 where a window group has given up blocks that a query there sees: everything is released then, and `start`
        finds what is still cached.
        """
        state = self._sequences[seq]
        assert 0 <= length <= state.computed, f"sequence {seq} has {state.computed} tokens, not {length}"
        self._settle(state)
        if length // self.block_size < state.computed // self.block_size and any(
            "newest" in g.whole for g in self.groups
        ):
            length -= length % self.block_size
        if any(table.first > self._first_seen(group, length) for group, table in enumerate(state.tables)):
            length = 0
        end = -(-length // self.block_size)
        for pool, table in zip(self._pools, state.tables, strict=True):
            keep = max(0, end - table.first)
            # Tail first, here and everywhere: a prefix without its tail is of use, a tail without its prefix is not.
            pool.release(reversed(table.truncate(keep)))
            table.first = min(table.first, end)
        state.computed = length
        del state.digests[length // self.block_size :]
        return length

    def fork(self, parent: int, child: int) -> None:
        """`child` begins with all that `parent` has computed and shares its blocks, the partial last one too."""
        assert child not in self._sequences, f"sequence {child} has been started"
        state = self._sequences[parent]
        self._settle(state)
        end = -(-state.computed // self.block_size)
        tables = []
        for pool, table in zip(self._pools, state.tables, strict=True):
            blocks = table.blocks[: end - table.first]
            pool.acquire(blocks)
            tables.append(_Table(table.first, blocks))
        self._sequences[child] = _Sequence(state.computed, state.digests.copy(), tables)

    def free(self, seq: int) -> None:
        """The sequence ends; its full blocks stay known until they are evicted."""
        self.rewind(seq, 0)
        del self._sequences[seq]

    def unpublish(self, seq: int) -> None:
        """What the cache holds of the sequence's tokens is wrong: nobody finds it any more."""
        for pool in self._pools:
            for digest in self._sequences[seq].digests:
                pool.forget(digest)

    def table(self, seq: int, group: int) -> tuple[int, list[int]]:
        """Position of the first row, and the blocks from there on (the list itself: to be read, and only now)."""
        table = self._sequences[seq].tables[group]
        return table.first * self.block_size, table.blocks

    def take_changes(self, seq: int, group: int) -> tuple[int, list[int]]:
        """The first column of a sequence's table that has changed since the last call, and the blocks from there on,
        none where nothing has. Columns that were removed are not named. For one caller alone (DeviceTables)."""
        table = self._sequences[seq].tables[group]
        column, table.unchanged = table.unchanged, len(table.blocks)
        return column, table.blocks[column:]

    def written(self, seq: int, group: int) -> Mapping[int, int]:
        """The whole blocks that the step at hand writes to, by the numbers of a sequence's blocks, where the newest one
        is whole; none for one that stays whole. To be read, and only now."""
        return self._sequences[seq].tables[group].written

    def check_integrity(self) -> None:
        """AssertionError with what is wrong, unless tables and pools agree."""
        for group, pool in enumerate(self._pools):
            pool.check_integrity(state.tables[group].held for state in self._sequences.values())
        for seq, state in self._sequences.items():
            full = state.computed // self.block_size
            assert len(state.digests) == (full if self.caching else 0), f"sequence {seq}: {len(state.digests)} digests"
            for group, (pool, table) in enumerate(zip(self._pools, state.tables, strict=True)):
                where = f"sequence {seq}, group {self.groups[group].name}, {state.computed} tokens"
                assert table.first <= self._first_seen(group, state.computed), f"{where}: starts at {table.first}"
                assert state.computed <= table.end * self.block_size, f"{where}: ends at {table.end}"
                kinds, newest = self.groups[group].whole, {full: None, **table.written}
                for number, block in enumerate(table.blocks, start=table.first):
                    whole = ("first" in kinds and number == 0) or (
                        "newest" in kinds and number in newest and newest[number] in (None, block)
                    )
                    assert pool.is_whole(block) == whole, f"{where}: block {block} is {'not ' * whole}whole"
                # The last block has no digest until it is full.
                for block, digest in zip(table.blocks, state.digests[table.first :], strict=False):
                    assert pool.digest(block) in (None, digest), f"{where}: block {block} is published as another's"

    def _settle(self, state: _Sequence) -> None:
        """Where the newest block is whole, nothing is kept of a step but what it computed: full blocks packed, the
        partial one whole."""
        end = -(-state.computed // self.block_size)
        for group, table in enumerate(state.tables):
            if "newest" not in self.groups[group].whole:
                continue
            pool, dropped = self._pools[group], table.truncate(max(0, end - table.first))
            pool.release(reversed(dropped))
            for number, block in table.written.items():
                if (number + 1) * self.block_size <= state.computed or (number >= end and block not in dropped):
                    pool.release([block])
                elif number < end and table.blocks[number - table.first] != block:
                    pool.release([table.blocks[number - table.first]])
                    table.replace(number, block)
            table.written = {}

    def _first_seen(self, group: int, length: int) -> int:
        """Number of the first block that a query at position `length` sees."""
        window = self.groups[group].window
        return 0 if window is None else max(0, length - window + 1) // self.block_size

    def _longest_hit(self, digests: Sequence[bytes]) -> int:
        """The most leading blocks after which a query finds all that it sees, in every group."""
        longest = 0
        runs = [0] * len(self.groups)  # how many blocks up to here are cached without a hole
        for length, digest in enumerate(digests, start=1):
            runs = [
                run + 1 if pool.find(digest) is not None else 0 for run, pool in zip(runs, self._pools, strict=True)
            ]
            seen = (length - self._first_seen(group, length * self.block_size) for group in range(len(runs)))
            if all(run >= needed for run, needed in zip(runs, seen, strict=True)):
                longest = length
        return longest
