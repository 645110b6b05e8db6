"""Block pool of one cache group: reference counts, content digests, allocation and eviction.

A block is free (no references, content unknown), used (at least one reference) or evictable (no references, but a
digest names its content, so that a later prompt with the same prefix can reuse it). Digests form a chain: equal digests
mean that all tokens from the first of the sequence on are equal. They are a trie without nodes.

A pool has two kinds of blocks, quantized ones and, behind them, unquantized ones (block_tables.py says what for).
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence

DIGEST_BYTES = 16


def block_digests(token_ids: Sequence[int], block_size: int, parent: bytes | None = None) -> list[bytes]:
    """Return the digests of the full blocks of `token_ids`; a partial last block has none.

    `parent` is the digest of the block before them; without it the chain begins here.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES).digest() if parent is None else parent
    digests = []
    data = memoryview(array("q", token_ids)).cast("B")
    step = 8 * block_size
    for start in range(0, len(data) - step + 1, step):
        digest = hashlib.blake2b(digest + data[start : start + step], digest_size=DIGEST_BYTES).digest()
        digests.append(digest)
    return digests


@dataclasses.dataclass
class _Region:
    """The blocks of one kind: numbers `start` (inclusive) to `stop` (exclusive)."""

    start: int
    stop: int
    num_free: int
    evictable: OrderedDict[int, None] = dataclasses.field(default_factory=OrderedDict)  # least recently released first

    @property
    def num_available(self) -> int:
        return self.num_free + len(self.evictable)

    @property
    def min_evictions(self) -> int:
        """Blocks per eviction. One by one, evictions would hand out an old sequence backwards, from its tail; many at
        once leave a gap that a growing sequence fills forwards."""
        return max(1, (self.stop - self.start) // 64)


class BlockPool:
    """Reference-counted blocks of one cache group. Blocks with a digest stay cached after their last user until they
    are evicted, least recently released first.

    Without `caching` released blocks are free at once. The pool allocates no memory: blocks are numbers, each for
    `block_size` rows: 0 to num_quantized - 1, then `num_unquantized` unquantized ones.
    """

    def __init__(self, num_quantized: int, block_size: int, caching: bool = True, num_unquantized: int = 0) -> None:
        assert num_quantized > 0 and block_size > 0 and num_unquantized >= 0, (
            f"{num_quantized} blocks of {block_size} rows"
        )
        self.num_quantized, self.num_blocks = num_quantized, num_quantized + num_unquantized
        self.block_size = block_size
        self.caching = caching
        self._ref_counts = [0] * self.num_blocks
        self._free = bytearray(b"\x01" * self.num_blocks)  # 1: free
        self._quantized = _Region(0, num_quantized, num_quantized)
        self._unquantized = _Region(num_quantized, self.num_blocks, num_unquantized)
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    @property
    def num_available(self) -> int:
        """Blocks of both kinds that can be allocated: free or evictable."""
        return self._quantized.num_available + self._unquantized.num_available

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    @property
    def num_used_unquantized(self) -> int:
        return self._unquantized.stop - self._unquantized.start - self._unquantized.num_available

    def is_unquantized(self, block: int) -> bool:
        return block >= self.num_quantized

    def can_allocate(self, quantized: int, unquantized: int) -> bool:
        """Whether this many blocks of each kind can be allocated."""
        return quantized <= self._quantized.num_available and unquantized <= self._unquantized.num_available

    def allocate(self, count: int, after: int | None = None, unquantized: bool = False) -> list[int] | None:
        """Return `count` blocks with one reference each. Return None, and change nothing, when too few are available.

        Blocks are as contiguous as possible, because attention reads a contiguous run without a copy: first those after
        block `after`, then the largest gaps. Evicts only when free blocks do not suffice. One block after `after` costs
        O(1).
        """
        region = self._unquantized if unquantized else self._quantized
        if count > region.num_available:
            return None
        if count > region.num_free:
            self._evict(region, max(count - region.num_free, region.min_evictions))
        blocks = [] if after is None else self._take(region, after + 1, count)
        if len(blocks) < count:
            for start in self._gaps(region, count - len(blocks)):
                blocks += self._take(region, start, count - len(blocks))
                if len(blocks) == count:
                    break
        return blocks

    def find(self, digest: bytes) -> int | None:
        """Return the block with this content, without a reference to it."""
        return self._block_of.get(digest)

    def match(self, digests: Sequence[bytes]) -> list[int]:
        """Return the leading run of blocks with these contents, without references to them."""
        blocks: list[int] = []
        for digest in digests:
            if (block := self.find(digest)) is None:
                break
            blocks.append(block)
        return blocks

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of these blocks, which are used or evictable."""
        for block in blocks:
            assert not self._free[block], f"block {block} is free: its content is unknown"
            self._region(block).evictable.pop(block, None)
            self._ref_counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Remove a reference from each of these blocks. Blocks without references are evicted in the order of their
        release."""
        for block in blocks:
            assert self._ref_counts[block] > 0, f"block {block} is released but has no references"
            self._ref_counts[block] -= 1
            if self._ref_counts[block]:
                continue
            if block in self._digest_of:
                self._region(block).evictable[block] = None
            else:
                self._set_free(block)

    def publish(self, block: int, digest: bytes) -> None:
        """Register the complete content of a used block. If another block is registered for it, that one stays."""
        assert self._ref_counts[block] > 0, f"block {block} is published but has no references"
        if not self.caching or digest in self._block_of:
            return
        assert block not in self._digest_of, f"block {block} is published with a second content"
        self._block_of[digest] = block
        self._digest_of[block] = digest

    def withdraw(self, block: int) -> None:
        """Forget the digest of a used block, because its content is about to change."""
        assert self._ref_counts[block] > 0, f"block {block} is withdrawn but has no references"
        if (digest := self._digest_of.pop(block, None)) is not None:
            del self._block_of[digest]

    def forget(self, digest: bytes) -> None:
        """Forget a content: later prompts do not find it. Users of its block keep the block."""
        if (block := self._block_of.pop(digest, None)) is None:
            return
        del self._digest_of[block]
        if not self._ref_counts[block]:
            del self._region(block).evictable[block]
            self._set_free(block)

    def digest(self, block: int) -> bytes | None:
        """Return the digest of the block's content, or None."""
        return self._digest_of.get(block)

    def is_shared(self, block: int) -> bool:
        return self._ref_counts[block] > 1

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless `holders`, a list of blocks per user, explain every reference count."""
        # By sets: a loop over thousands of blocks would be most of a checked step.
        users = Counter(block for blocks in holders for block in blocks)
        counts = {block: count for block, count in enumerate(self._ref_counts) if count}
        for block in (block for block in counts.keys() | users.keys() if counts.get(block, 0) != users[block]):
            raise AssertionError(f"block {block} has {counts.get(block, 0)} references, but {users[block]} users")
        blocks = range(len(self._ref_counts))
        free = set(itertools.compress(blocks, self._free))
        evictable = self._quantized.evictable.keys() | self._unquantized.evictable.keys()
        published = self._digest_of.keys()
        # Blocks in none or two of the three sets, or in all.
        for block in set(blocks) ^ counts.keys() ^ free ^ evictable or counts.keys() & free & evictable:
            states = [block in counts, block in free, block in evictable]
            raise AssertionError(f"block {block} is (used, free, evictable) = {states}, not one of them")
        for block in free & published:
            raise AssertionError(f"block {block} is free but published")
        for block in evictable - published:
            raise AssertionError(f"block {block} is evictable but not published")
        for region in (self._quantized, self._unquantized):
            num_free = sum(self._free[region.start : region.stop])
            assert region.num_free == num_free, (
                f"{num_free} of blocks {region.start} to {region.stop} are free, not {region.num_free}"
            )
            assert all(region.start <= block < region.stop for block in region.evictable), "evictable in another region"
        block_of = {digest: block for block, digest in self._digest_of.items()}
        assert block_of == self._block_of and len(block_of) == len(self._digest_of), "digests and blocks differ"

    def _region(self, block: int) -> _Region:
        return self._unquantized if self.is_unquantized(block) else self._quantized

    def _evict(self, region: _Region, count: int) -> None:
        for _ in range(min(count, len(region.evictable))):
            block, _ = region.evictable.popitem(last=False)
            del self._block_of[self._digest_of.pop(block)]
            self._set_free(block)

    def _set_free(self, block: int) -> None:
        self._free[block] = 1
        self._region(block).num_free += 1

    def _take(self, region: _Region, start: int, count: int) -> list[int]:
        """Take the free blocks from `start` on, at most `count`."""
        stop = min(start + count, region.stop)
        end = self._free.find(0, start, stop)
        blocks = list(range(start, stop if end < 0 else end))
        for block in blocks:
            self._free[block] = 0
            self._ref_counts[block] = 1
        region.num_free -= len(blocks)
        return blocks

    def _gaps(self, region: _Region, count: int) -> Iterator[int]:
        """Yield where to allocate: runs of free blocks, largest first. Start in the middle of a run whose left
        neighbour is used, so that the neighbour can grow, or as far right as `count` blocks fit."""
        runs = []
        start = self._free.find(1, region.start, region.stop)
        while start >= 0:
            end = self._free.find(0, start, region.stop)
            runs.append((start, end if end >= 0 else region.stop))
            start = self._free.find(1, end, region.stop) if end >= 0 else -1
        if count == 1:
            runs = [max(runs, key=lambda run: run[1] - run[0])]
        for start, end in sorted(runs, key=lambda run: run[0] - run[1]):
            room = end - start
            yield (
                start + max(0, min(room // 2, room - count))
                if start > region.start and self._ref_counts[start - 1]
                else start
            )
