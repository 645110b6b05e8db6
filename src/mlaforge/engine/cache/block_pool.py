"""The block pool of one cache group: reference counts, content digests, allocation and eviction.

A block is free (nobody holds it, nothing is known of it), used (held at least once) or evictable (nobody holds it, but
its content is known by a digest, so that a later prompt with the same beginning may take it again). Digests form a
chain: equal digests mean equal tokens from the first one of the sequence on, so they are a trie without its nodes.

Blocks may be of two kinds, packed ones and, behind them, whole ones (block_tables.py says what for).
"""

from __future__ import annotations

import dataclasses
import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence

DIGEST_BYTES = 16


def block_digests(token_ids: Sequence[int], block_size: int, parent: bytes | None = None) -> list[bytes]:
    """Digests of the whole blocks of `token_ids`; a partial last block has none.

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
class _Kind:
    """The blocks of one kind, numbers `start` to before `stop`."""

    start: int
    stop: int
    num_free: int
    evictable: OrderedDict[int, None] = dataclasses.field(default_factory=OrderedDict)  # least recently released first

    @property
    def num_available(self) -> int:
        return self.num_free + len(self.evictable)

    @property
    def least_evicted(self) -> int:
        """One by one, evictions would hand out an old sequence backwards, from its tail; in stretches they leave a gap
        that a growing sequence fills forwards."""
        return max(1, (self.stop - self.start) // 64)


class BlockPool:
    """Blocks of one cache group, reference-counted; blocks whose content is known by hash stay after their last user
    until they are evicted, least recently released first.

    `caching` False forgets every content at once. Nothing here touches memory: blocks are numbers of `block_size` rows
    each, 0 to num_packed - 1 and then `num_whole` whole ones.
    """

    def __init__(self, num_packed: int, block_size: int, caching: bool = True, num_whole: int = 0) -> None:
        assert num_packed > 0 and block_size > 0 and num_whole >= 0, f"{num_packed} blocks of {block_size} rows"
        self.num_packed, self.num_blocks = num_packed, num_packed + num_whole
        self.block_size = block_size
        self.caching = caching
        self._ref_counts = [0] * self.num_blocks
        self._free = bytearray(b"\x01" * self.num_blocks)  # 1: free
        self._packed = _Kind(0, num_packed, num_packed)
        self._whole = _Kind(num_packed, self.num_blocks, num_whole)
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    @property
    def num_available(self) -> int:
        """Blocks of both kinds that an allocation could take: free or evictable."""
        return self._packed.num_available + self._whole.num_available

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    @property
    def num_used_whole(self) -> int:
        return self._whole.stop - self._whole.start - self._whole.num_available

    def is_whole(self, block: int) -> bool:
        return block >= self.num_packed

    def has(self, packed: int, whole: int) -> bool:
        """Whether so many of each kind could be allocated."""
        return packed <= self._packed.num_available and whole <= self._whole.num_available

    def allocate(self, count: int, after: int | None = None, whole: bool = False) -> list[int] | None:
        """`count` blocks held once, or None, and nothing changed, when so many are not available.

        As contiguous as can be, because attention reads a contiguous run without copying: on from block `after`, then
        from the largest gaps. Evicts only when free blocks do not suffice. One block after `after` costs O(1).
        """
        kind = self._whole if whole else self._packed
        if count > kind.num_available:
            return None
        if count > kind.num_free:
            self._evict(kind, max(count - kind.num_free, kind.least_evicted))
        blocks = [] if after is None else self._take(kind, after + 1, count)
        if len(blocks) < count:
            for start in self._gaps(kind, count - len(blocks)):
                blocks += self._take(kind, start, count - len(blocks))
                if len(blocks) == count:
                    break
        return blocks

    def find(self, digest: bytes) -> int | None:
        """The block that holds this content; it is not taken."""
        return self._block_of.get(digest)

    def match(self, digests: Sequence[bytes]) -> list[int]:
        """The leading run of blocks that hold these contents; they are not taken."""
        blocks: list[int] = []
        for digest in digests:
            if (block := self.find(digest)) is None:
                break
            blocks.append(block)
        return blocks

    def acquire(self, blocks: Iterable[int]) -> None:
        """Hold blocks that somebody holds already or that are evictable."""
        for block in blocks:
            assert not self._free[block], f"block {block} is free: nothing is known of its content"
            self._kind(block).evictable.pop(block, None)
            self._ref_counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Let go of blocks, in this order; it is the order in which they are evicted once nobody holds them."""
        for block in blocks:
            assert self._ref_counts[block] > 0, f"block {block} is released but nobody holds it"
            self._ref_counts[block] -= 1
            if self._ref_counts[block]:
                continue
            if block in self._digest_of:
                self._kind(block).evictable[block] = None
            else:
                self._set_free(block)

    def publish(self, block: int, digest: bytes) -> None:
        """The content of a held block is complete. Where another block is known for it already, that one stays."""
        assert self._ref_counts[block] > 0, f"block {block} is published but nobody holds it"
        if not self.caching or digest in self._block_of:
            return
        assert block not in self._digest_of, f"block {block} is published with a second content"
        self._block_of[digest] = block
        self._digest_of[block] = digest

    def withdraw(self, block: int) -> None:
        """The content of a held block is about to change: forget its digest, if it has one."""
        assert self._ref_counts[block] > 0, f"block {block} is withdrawn but nobody holds it"
        if (digest := self._digest_of.pop(block, None)) is not None:
            del self._block_of[digest]

    def forget(self, digest: bytes) -> None:
        """Nobody finds this content any more; who holds its block goes on holding it."""
        if (block := self._block_of.pop(digest, None)) is None:
            return
        del self._digest_of[block]
        if not self._ref_counts[block]:
            del self._kind(block).evictable[block]
            self._set_free(block)

    def digest(self, block: int) -> bytes | None:
        """What the block is known to contain."""
        return self._digest_of.get(block)

    def is_shared(self, block: int) -> bool:
        return self._ref_counts[block] > 1

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """AssertionError unless `holders`, each a list of the blocks that it holds, explain every count in here."""
        held = Counter(block for blocks in holders for block in blocks)
        for block, count in enumerate(self._ref_counts):
            assert count == held[block], f"block {block} counts {count} holders, but {held[block]} hold it"
            states = [count > 0, self._free[block] == 1, block in self._kind(block).evictable]
            assert sum(states) == 1, f"block {block} is (used, free, evictable) = {states}, not one of them"
            published = block in self._digest_of
            assert not (states[1] and published), f"block {block} is free but published"
            assert not states[2] or published, f"block {block} is evictable but not published"
        for kind in (self._packed, self._whole):
            free = sum(self._free[kind.start : kind.stop])
            assert kind.num_free == free, f"{free} of blocks {kind.start} to {kind.stop} are free, not {kind.num_free}"
        forth = {digest: block for block, digest in self._digest_of.items()}
        assert forth == self._block_of and len(forth) == len(self._digest_of), "digests and blocks are not one to one"

    def _kind(self, block: int) -> _Kind:
        return self._whole if self.is_whole(block) else self._packed

    def _evict(self, kind: _Kind, count: int) -> None:
        for _ in range(min(count, len(kind.evictable))):
            block, _ = kind.evictable.popitem(last=False)
            del self._block_of[self._digest_of.pop(block)]
            self._set_free(block)

    def _set_free(self, block: int) -> None:
        self._free[block] = 1
        self._kind(block).num_free += 1

    def _take(self, kind: _Kind, start: int, count: int) -> list[int]:
        """The free blocks from `start` on, at most `count`."""
        stop = min(start + count, kind.stop)
        end = self._free.find(0, start, stop)
        blocks = list(range(start, stop if end < 0 else end))
        for block in blocks:
            self._free[block] = 0
            self._ref_counts[block] = 1
        kind.num_free -= len(blocks)
        return blocks

    def _gaps(self, kind: _Kind, count: int) -> Iterator[int]:
        """Where to start: the runs of free blocks, largest first. A run whose left neighbour is used is entered in its
        middle, so that the neighbour can grow, or as far right as `count` blocks fit."""
        runs = []
        start = self._free.find(1, kind.start, kind.stop)
        while start >= 0:
            end = self._free.find(0, start, kind.stop)
            runs.append((start, end if end >= 0 else kind.stop))
            start = self._free.find(1, end, kind.stop) if end >= 0 else -1
        if count == 1:
            runs = [max(runs, key=lambda run: run[1] - run[0])]
        for start, end in sorted(runs, key=lambda run: run[0] - run[1]):
            room = end - start
            yield (
                start + max(0, min(room // 2, room - count))
                if start > kind.start and self._ref_counts[start - 1]
                else start
            )
