"""Block tables: the blocks of each sequence in every cache group, and the prefix cache.

A group with full attention keeps every position. A group with window W keeps what a query may still see: at position p
the positions p - W + 1 to p. All groups of a sequence hold the same tokens, so one chain of digests serves them all.

A group with a quantized format may keep the newest block of a sequence, the query's, unquantized. All blocks before it
are quantized for the query, also where one step fills several. So a step has an unquantized block for each one that it
writes to, and for each that it fills a quantized one too, which is quantized before attention runs. In other groups all
blocks count as quantized.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from mlaforge.engine.cache.block_pool import BlockPool, block_digests


@dataclasses.dataclass(frozen=True)
class CacheGroup:
    """Layers that cache the same positions. `window` None is full attention. With `newest_unquantized`
    the newest block of a sequence is one of the pool's `num_unquantized` blocks, which follow the `num_blocks` others.
    """

    name: str
    num_blocks: int
    window: int | None = None
    newest_unquantized: bool = False
    num_unquantized: int = 0


@dataclasses.dataclass(frozen=True)
class Copy:
    """Copy all rows of block `source` to block `target` in the layers of cache group number `group`."""

    group: int
    source: int
    target: int


@dataclasses.dataclass
class _Table:
    """Blocks of one sequence in one group. `first` is the block number, within the sequence, of blocks[0]. Where the
    newest block is unquantized, `written` maps the number of each block that the current step writes to; `blocks` has
    what later queries read, which is quantized once it is full. `unchanged` counts the leading blocks that
    `take_changes` has returned and that were neither replaced nor removed since."""

    first: int = 0
    blocks: list[int] = dataclasses.field(default_factory=list)
    written: dict[int, int] = dataclasses.field(default_factory=dict)
    unchanged: int = 0

    @property
    def end(self) -> int:
        return self.first + len(self.blocks)

    @property
    def unique_blocks(self) -> list[int]:
        """All blocks, each once."""
        return [*self.blocks, *set(self.written.values()).difference(self.blocks)]

    def write_block(self, number: int) -> int:
        """Return the block that the step writes to for this number."""
        return self.written.get(number, self.blocks[number - self.first])

    def replace(self, number: int, block: int) -> None:
        """Set the block of this number."""
        index = number - self.first
        self.blocks[index] = block
        self.unchanged = min(self.unchanged, index)

    def truncate(self, count: int) -> list[int]:
        """Remove all but the first `count` blocks; return the removed ones."""
        removed = self.blocks[count:]
        del self.blocks[count:]
        self.unchanged = min(self.unchanged, count)
        return removed

    def drop_first(self, count: int) -> list[int]:
        """Remove and return the first `count` blocks."""
        removed = self.blocks[:count]
        del self.blocks[:count]
        self.first += count
        self.unchanged = 0
        return removed


@dataclasses.dataclass(frozen=True)
class _Need:
    """Numbers of a sequence's blocks that need a quantized or an unquantized block, and the shared block to copy."""

    quantized: list[int]
    unquantized: list[int]
    shared: int | None


@dataclasses.dataclass
class _Sequence:
    """`computed` tokens are in the cache; `digests` are those of the full blocks among them (none without caching).
    Blocks after these are reserved, and their content is not valid."""

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
        self.reset_prefix_cache()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. Only while there are no sequences."""
        assert not self._sequences, f"{self.sequences} hold blocks"
        self._pools = [
            BlockPool(group.num_blocks, self.block_size, self.caching, group.num_unquantized) for group in self.groups
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
    def unquantized_by_group(self) -> list[int]:
        """The unquantized blocks among `used_by_group`."""
        return [pool.num_used_unquantized for pool in self._pools]

    @property
    def available(self) -> int:
        return sum(pool.num_available for pool in self._pools)

    @property
    def sequences(self) -> set[int]:
        """The sequences that were started or forked and not freed."""
        return set(self._sequences)

    def start(self, seq: int, token_ids: Sequence[int], reuse: bool = True) -> int:
        """Begin a sequence, or one that was rewound to nothing, with what the cache holds of its tokens.

        Return the number of cached tokens. These are full blocks, and at least one token is left to compute.
        """
        old = self._sequences.get(seq)
        assert old is None or not any(table.blocks for table in old.tables), f"sequence {seq} has been started"
        digests = self._cached_digests(token_ids) if reuse else []
        cached = len(digests) * self.block_size
        tables = []
        for group, pool in enumerate(self._pools):
            first = self._first_visible_block(group, cached)
            blocks = pool.match(digests[first:])
            pool.acquire(blocks)
            tables.append(_Table(first, blocks))
        self._sequences[seq] = _Sequence(cached, digests, tables)
        return cached

    def num_cached(self, token_ids: Sequence[int]) -> int:
        """Number of cached tokens that `start` would find now."""
        return len(self._cached_digests(token_ids)) * self.block_size

    def growth(self, lengths: Mapping[int, int]) -> list[int]:
        """Number of blocks of each group that these sequences need beside their own to grow to these lengths. An
        estimate for windows, which drop blocks on the way."""
        return [sum(self._growth(index, *pair) for pair in lengths.items()) for index in range(len(self.groups))]

    def fits(self, growth: Sequence[int]) -> bool:
        """Whether this many blocks of each group are available."""
        return all(pool.can_allocate(count, 0) for pool, count in zip(self._pools, growth, strict=True))

    def reserve(self, seq: int, upto: int) -> list[Copy] | None:
        """Make room to write positions [computed, upto) in every group. Return None, and change nothing, when any group
        has too few blocks.

        Only the last block can be partly computed. If other sequences share it, a copy replaces it, which is returned
        here; otherwise its former content, left behind by a rewind, is withdrawn from the cache.
        """
        state = self._sequences[seq]
        if upto <= state.computed:
            return []
        needs = [self._need(group, table, state.computed, upto) for group, table in enumerate(state.tables)]
        for pool, need in zip(self._pools, needs, strict=True):
            unquantized_copy = need.shared is not None and pool.is_unquantized(need.shared)
            quantized_copy = need.shared is not None and not unquantized_copy
            if not pool.can_allocate(len(need.quantized) + quantized_copy, len(need.unquantized) + unquantized_copy):
                return None
        copies = []
        for group, need in enumerate(needs):
            pool, table = self._pools[group], state.tables[group]
            if need.shared is not None:
                copies.append(self._copy(group, table, state.computed, need.shared))
            elif state.computed % self.block_size:
                pool.withdraw(table.write_block(state.computed // self.block_size))
            self._extend(group, table, state.computed, need)
        return copies

    def _need(self, group: int, table: _Table, computed: int, upto: int) -> _Need:
        """The blocks that a step to position `upto` still needs."""
        pool, newest_unquantized = self._pools[group], self.groups[group].newest_unquantized
        last, rows = divmod(computed, self.block_size)
        quantized: list[int] = []
        unquantized: list[int] = []
        for number in range(last, -(-upto // self.block_size)):
            if not newest_unquantized:
                if number >= table.end:
                    quantized.append(number)
                continue
            if number not in table.written and not (number == last and rows):
                unquantized.append(number)
            filled = (number + 1) * self.block_size <= upto
            if filled and (number >= table.end or pool.is_unquantized(table.blocks[number - table.first])):
                quantized.append(number)
        partial = table.write_block(last) if rows else None
        return _Need(quantized, unquantized, partial if partial is not None and pool.is_shared(partial) else None)

    def _copy(self, group: int, table: _Table, computed: int, shared: int) -> Copy:
        """Replace the partly computed, shared block by a copy."""
        pool = self._pools[group]
        allocated = pool.allocate(1, unquantized=pool.is_unquantized(shared))
        assert allocated is not None
        pool.release([shared])
        table.replace(computed // self.block_size, allocated[0])
        return Copy(group, source=shared, target=allocated[0])

    def _extend(self, group: int, table: _Table, computed: int, need: _Need) -> None:
        """Allocate the needed blocks and enter them in the table."""
        pool, newest_unquantized = self._pools[group], self.groups[group].newest_unquantized
        last, rows = divmod(computed, self.block_size)
        if newest_unquantized and rows:
            table.written.setdefault(last, table.blocks[last - table.first])
        unquantized = pool.allocate(len(need.unquantized), unquantized=True)
        after = table.blocks[-1] if table.blocks and not pool.is_unquantized(table.blocks[-1]) else None
        quantized = pool.allocate(len(need.quantized), after)
        assert unquantized is not None and quantized is not None
        allocated = dict(zip(need.unquantized, unquantized, strict=True))
        if newest_unquantized:
            table.written |= allocated
        allocated |= zip(need.quantized, quantized, strict=True)
        for number in sorted(allocated):
            if number < table.end:
                table.replace(number, allocated[number])
            else:
                table.blocks.append(allocated[number])

    def commit(self, seq: int, token_ids: Sequence[int], computed: int) -> None:
        """Positions < computed now hold these tokens (`token_ids` from position 0 on, `computed` of them or more).

        Publish the blocks that have become full and release those that no query from `computed` - lookback on sees.
        """
        state = self._sequences[seq]
        assert state.computed <= computed <= len(token_ids), f"{state.computed} <= {computed} <= {len(token_ids)}"
        assert all(computed <= t.end * self.block_size for t in state.tables), f"position {computed - 1} has no block"
        full = state.computed // self.block_size
        now_full = computed // self.block_size
        state.computed = computed
        self._finalize_step(state)
        if self.caching and now_full > full:
            new = token_ids[full * self.block_size : now_full * self.block_size]
            parent = state.digests[-1] if full else None
            state.digests += block_digests(new, self.block_size, parent)
            for pool, table in zip(self._pools, state.tables, strict=True):
                for index in range(full, now_full):
                    pool.publish(table.blocks[index - table.first], state.digests[index])
        for group, table in enumerate(state.tables):
            num_expired = self._first_visible_block(group, computed - self.lookback) - table.first
            if num_expired > 0:
                self._pools[group].release(reversed(table.drop_first(num_expired)))

    def rewind(self, seq: int, length: int) -> int:
        """Go back to the first `length` tokens and release the blocks after them. Return the number of tokens still
        computed.

        This is `length`; or the start of the block, if `length` is inside a block that was quantized when it was full;
        or 0, if a window group has released blocks that a query there sees. Then everything is released, and `start`
        finds what is still cached.
        """
        state = self._sequences[seq]
        assert 0 <= length <= state.computed, f"sequence {seq} has {state.computed} tokens, not {length}"
        self._finalize_step(state)
        if length // self.block_size < state.computed // self.block_size and any(
            g.newest_unquantized for g in self.groups
        ):
            length -= length % self.block_size
        if any(table.first > self._first_visible_block(group, length) for group, table in enumerate(state.tables)):
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
        """Begin `child` with all that `parent` has computed; they share blocks, the partial last one too."""
        assert child not in self._sequences, f"sequence {child} has been started"
        state = self._sequences[parent]
        self._finalize_step(state)
        end = -(-state.computed // self.block_size)
        tables = []
        for pool, table in zip(self._pools, state.tables, strict=True):
            blocks = table.blocks[: end - table.first]
            pool.acquire(blocks)
            tables.append(_Table(table.first, blocks))
        self._sequences[child] = _Sequence(state.computed, state.digests.copy(), tables)

    def free(self, seq: int) -> None:
        """End the sequence; its full blocks stay cached until they are evicted."""
        self.rewind(seq, 0)
        del self._sequences[seq]

    def unpublish(self, seq: int) -> None:
        """Remove the sequence's tokens from the prefix cache, because their rows are wrong."""
        for pool in self._pools:
            for digest in self._sequences[seq].digests:
                pool.forget(digest)

    def table(self, seq: int, group: int) -> tuple[int, list[int]]:
        """Return the position of the first row and the blocks from there on (not a copy: read it at once)."""
        table = self._sequences[seq].tables[group]
        return table.first * self.block_size, table.blocks

    def take_changes(self, seq: int, group: int) -> tuple[int, list[int]]:
        """Return the first column of a sequence's table that has changed since the last call, and the blocks from there
        on, none without a change. Removed columns are not reported. For a single caller (DeviceTables)."""
        table = self._sequences[seq].tables[group]
        column, table.unchanged = table.unchanged, len(table.blocks)
        return column, table.blocks[column:]

    def written(self, seq: int, group: int) -> Mapping[int, int]:
        """Return the unquantized blocks that the current step writes to, by block number of the sequence, where the
        newest block is unquantized. Not a copy: read it at once."""
        return self._sequences[seq].tables[group].written

    def check_integrity(self) -> None:
        """Raise AssertionError, which says what is wrong, unless tables and pools agree."""
        for group, pool in enumerate(self._pools):
            pool.check_integrity(state.tables[group].unique_blocks for state in self._sequences.values())
        for seq, state in self._sequences.items():
            full = state.computed // self.block_size
            assert len(state.digests) == (full if self.caching else 0), f"sequence {seq}: {len(state.digests)} digests"
            for group, (pool, table) in enumerate(zip(self._pools, state.tables, strict=True)):
                where = f"sequence {seq}, group {self.groups[group].name}, {state.computed} tokens"
                assert table.first <= self._first_visible_block(group, state.computed), (
                    f"{where}: starts at {table.first}"
                )
                assert state.computed <= table.end * self.block_size, f"{where}: ends at {table.end}"
                newest, written = self.groups[group].newest_unquantized, {full: None, **table.written}
                for number, block in enumerate(table.blocks, start=table.first):
                    unquantized = newest and number in written and written[number] in (None, block)
                    assert pool.is_unquantized(block) == unquantized, (
                        f"{where}: block {block} is {'not ' * unquantized}unquantized"
                    )
                # The last block has no digest until it is full.
                for block, digest in zip(table.blocks, state.digests[table.first :], strict=False):
                    assert pool.digest(block) in (None, digest), (
                        f"{where}: block {block} is published with another content"
                    )

    def _finalize_step(self, state: _Sequence) -> None:
        """Where the newest block is unquantized, keep only what the step has computed: full blocks quantized, the
        partial one unquantized."""
        end = -(-state.computed // self.block_size)
        for group, table in enumerate(state.tables):
            if not self.groups[group].newest_unquantized:
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

    def _cached_digests(self, token_ids: Sequence[int]) -> list[bytes]:
        """Digests of the leading blocks that the cache holds, without the block of the last token."""
        if not self.caching:
            return []
        num_full = max(0, len(token_ids) - 1) // self.block_size
        digests = block_digests(token_ids[: num_full * self.block_size], self.block_size)
        return digests[: self._longest_cached_prefix(digests)]

    def _growth(self, group: int, seq: int, length: int) -> int:
        """Number of blocks that the sequence needs beside its own to grow to this length."""
        table, window = self._sequences[seq].tables[group], self.groups[group].window
        tokens = max(0, length - table.end * self.block_size)
        return -(-(tokens if window is None else min(tokens, window)) // self.block_size)

    def _first_visible_block(self, group: int, length: int) -> int:
        """Number of the first block that a query at position `length` sees."""
        window = self.groups[group].window
        return 0 if window is None else max(0, length - window + 1) // self.block_size

    def _longest_cached_prefix(self, digests: Sequence[bytes]) -> int:
        """Largest number of leading blocks after which a query finds all that it sees, in every group."""
        longest = 0
        runs = [0] * len(self.groups)  # length of the run of cached blocks that ends here
        for length, digest in enumerate(digests, start=1):
            runs = [
                run + 1 if pool.find(digest) is not None else 0 for run, pool in zip(runs, self._pools, strict=True)
            ]
            seen = (length - self._first_visible_block(group, length * self.block_size) for group in range(len(runs)))
            if all(run >= needed for run, needed in zip(runs, seen, strict=True)):
                longest = length
        return longest
