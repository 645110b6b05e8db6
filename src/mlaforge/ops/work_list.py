"""How the cached rows of a step's sequences are divided among a GPU's programs: pieces of about equal length, computed
on the host from host numbers, longest first. As FlashMLA's tile scheduler metadata (github.com/deepseek-ai/FlashMLA),
but the number of entries depends only on the number of sequences, so that a captured graph launches any lengths.

Legend: S sequences, W entries of a list.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mlaforge.ops.cache_view import CacheView
from mlaforge.runtime import on_device

# Pieces begin at multiples of so many rows, and a sequence has at most so many pieces.
UNIT, MOST_PIECES = 64, 128


@dataclasses.dataclass(frozen=True)
class WorkList:
    """numbers  int32 [4 W + 2 S]: per entry the sequence (-1: none), the first and the last row + 1 of its table, and
             the number of its partial result (-1: the sequence has no other piece); then per sequence the number of
             its first partial result and of its pieces
    entries    W
    """

    numbers: Tensor
    entries: int


def entries(sequences: int, programs: int) -> int:
    """Return the entries of a list for so many sequences on a GPU that runs `programs` pieces at a time."""
    return sequences + programs


def pieces(lengths: Sequence[int], programs: int) -> list[int]:
    """Return the numbers of a list for sequences with so many rows in their tables.

    Pieces are a program's equal share,
    or larger ones that all run at once, if the last of the smaller ones is expected to end later.
    """

    def count(size: int) -> int:
        return sum(max(1, -(-length // size)) for length in lengths)

    share, longest = sum(lengths) / programs, max(lengths, default=0)
    size = max(1, math.ceil(max(share, longest / MOST_PIECES) / UNIT)) * UNIT
    if len(lengths) <= programs < count(size):
        low, high = size // UNIT, max(size, longest) // UNIT + 1
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if count(middle * UNIT) > programs else (low, middle)
        # The bound of scheduling the longest piece first (Graham 1969), with the shortest one as the last to end.
        shortest = min(length / max(1, -(-length // size)) for length in lengths)
        if low * UNIT <= share + shortest:
            size = low * UNIT
    work, by_sequence, first = [], [], 0
    for s, length in enumerate(lengths):
        # Equal pieces of the sequence.
        number = max(1, -(-length // size))
        step = max(1, -(-length // (number * UNIT))) * UNIT
        cuts = range(0, max(length, 1), step)
        partial = first if len(cuts) > 1 else -1
        work += [(s, cut, min(cut + step, length), partial + i if partial >= 0 else -1) for i, cut in enumerate(cuts)]
        by_sequence += [first, len(cuts)]
        first += len(cuts) if partial >= 0 else 0
    work.sort(key=lambda entry: entry[1] - entry[2])
    work += [(-1, 0, 0, -1)] * (entries(len(lengths), programs) - len(work))
    return [number for entry in work for number in entry] + by_sequence


@functools.lru_cache(maxsize=64)
def _uploaded(lengths: tuple[int, ...], programs: int, device: torch.device) -> WorkList:
    """The list of a step, which its layers share."""
    numbers = on_device(pieces(lengths, programs), torch.int32, device)
    return WorkList(numbers, entries(len(lengths), programs))


def work_list(view: CacheView, programs: int) -> WorkList | None:
    """Return the list of a view on a GPU that runs `programs` pieces at a time; None where the host does not know the
    lengths. The list of a captured step is a buffer: `refill`."""
    if (buffers := _buffers(view)) is None:
        if not view.lengths:
            return None
        return _uploaded(view.lengths, programs, view.slots_N.device)
    if programs not in buffers.lists:
        fresh = _uploaded(buffers.lengths, programs, view.slots_N.device)
        buffers.lists[programs] = WorkList(fresh.numbers.clone(), fresh.entries)
    return buffers.lists[programs]


@dataclasses.dataclass
class _Buffers:
    lengths: tuple[int, ...]
    lists: dict[int, WorkList] = dataclasses.field(default_factory=dict)


def _buffers(view: CacheView) -> _Buffers | None:
    buffers: _Buffers | None = vars(view).get("_work_buffers")
    return buffers


def refill(view: CacheView, lengths: Sequence[int]) -> None:
    """Set the lengths of a captured step's view, and overwrite the lists that its launches read."""
    buffers = vars(view).setdefault("_work_buffers", _Buffers(()))
    buffers.lengths = (*lengths, *[0] * (len(view.seq_lens_S) - len(lengths)))
    for programs, buffer in buffers.lists.items():
        fresh = _uploaded(buffers.lengths, programs, view.slots_N.device)
        buffer.numbers.copy_(fresh.numbers)
