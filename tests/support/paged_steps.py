"""Steps of paged attention over random caches, and the expected results: dense attention on gathered rows.

Unused slots of a cache are NaN, so that reading an invisible row is detected.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from mlaforge.modeling.attention_mla import attend
from mlaforge.ops.cache_view import CacheView
from mlaforge.runtime import triton_interpreted

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def need_interpreter() -> None:
    """Skip a test unless Triton's kernels run on CPU tensors."""
    pytest.importorskip("triton")
    if not triton_interpreted():
        pytest.skip("it runs in Triton's interpreter, which a machine with a GPU does not use")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Shape of heads. `aliased`: the values are the first columns of the keys (an MLA row)."""

    heads: int
    key_heads: int
    key: int
    value: int
    aliased: bool = False


SHAPES = {
    "mha": Shape(2, 2, 16, 16),
    "group-3": Shape(6, 2, 24, 16),
    "group-8": Shape(8, 1, 16, 20),
    "group-16": Shape(16, 1, 8, 8),
    "mla": Shape(8, 1, 40, 32, aliased=True),
    "mla-two-pieces": Shape(4, 1, 104, 80, aliased=True),
    # The last piece of the value is masked where the rotary columns begin.
    "mla-masked": Shape(4, 1, 32, 24, aliased=True),
    "mla-two-masked": Shape(4, 1, 84, 72, aliased=True),
    "mla-all-value": Shape(3, 1, 48, 48, aliased=True),
    "wide-value": Shape(4, 2, 16, 96),
    "two-pieces": Shape(2, 1, 96, 80),
}


@dataclasses.dataclass(frozen=True)
class Step:
    q: Tensor
    k: Tensor
    v: Tensor
    view: CacheView
    # Per sequence the slots of positions first to length.
    slots: list[list[int]]

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, CacheView, float]:
        return self.q, self.k, self.v, self.view, 0.3


def make_step(
    shape: Shape,
    sequences: list[tuple[int, int]],
    block_size: int = 4,
    window: int | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    round_up: int = 0,
) -> Step:
    """`sequences`: (length, query tokens) of each. `round_up` is added to the host's bounds, as graphs do."""
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    firsts = [0] * len(sequences)
    if window is not None:
        # Some blocks that lie before every window are gone, perhaps all of them.
        gone = [max(0, length - T - window + 1) // block_size for length, T in sequences]
        firsts = [chance.randint(most // 2, most) * block_size for most in gone]
    columns = [-(-(length - first) // block_size) for (length, _), first in zip(sequences, firsts, strict=True)]
    num_blocks = sum(columns) + 3
    free = chance.sample(range(num_blocks), num_blocks)
    # Neighbours in the cache now and then, so that runs are longer than a block.
    if chance.random() < 0.5:
        free.sort(reverse=True)
    table = torch.zeros(len(sequences), max(columns, default=0) + 1, dtype=torch.int32)
    slots: list[list[int]] = []
    for s, ((length, _), first) in enumerate(zip(sequences, firsts, strict=True)):
        blocks = [free.pop() for _ in range(columns[s])]
        table[s, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        slots.append([blocks[i // block_size] * block_size + i % block_size for i in range(length - first)])

    def cache(width: int) -> Tensor:
        # Heads before slots in memory: strides that are not the shape's own.
        rows = torch.full((shape.key_heads, num_blocks * block_size, width), torch.nan)
        used = list(itertools.chain(*slots))
        rows[:, used] = torch.randn(shape.key_heads, len(used), width, generator=generator)
        return rows.to(DEVICE, dtype).transpose(0, 1)

    k = cache(shape.key)
    v = k[..., : shape.value] if shape.aliased else cache(shape.value)
    queries = [T for _, T in sequences]
    starts = torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32)
    written = [slot for one, T in zip(slots, queries, strict=True) for slot in one[len(one) - T :]]
    view = CacheView(
        block_table_SB=table.to(DEVICE),
        seq_lens_S=torch.tensor([length for length, _ in sequences], dtype=torch.int32, device=DEVICE),
        first_S=torch.tensor(firsts, dtype=torch.int32, device=DEVICE),
        query_start_S1=starts.to(DEVICE),
        slots_N=torch.tensor(written, device=DEVICE),
        block_size=block_size,
        max_query=max(queries) + round_up,
        max_seq_len=max(length for length, _ in sequences) + 100 * round_up,
        window=window,
        queries=tuple(queries),
        runs=tuple(tuple(runs(one)) for one in slots),
        lengths=tuple(map(len, slots)),
    )
    q = torch.randn(sum(queries), shape.heads, shape.key, generator=generator).to(DEVICE, dtype)
    return Step(q, k, v, view, slots)


def runs(slots: list[int]) -> Iterator[tuple[int, int]]:
    """Yield (start, length) of the runs of consecutive slots."""
    for _, group in itertools.groupby(enumerate(slots), lambda pair: pair[1] - pair[0]):
        stretch = [slot for _, slot in group]
        yield stretch[0], len(stretch)


def expected(step: Step) -> tuple[Tensor, Tensor]:
    """Return dense attention on rows gathered by the step's list of slots, with an explicit mask by position."""
    outs, lses = [], []
    begin = 0
    for s, slots in enumerate(step.slots):
        T, length, first = step.view.queries[s], int(step.view.seq_lens_S[s]), int(step.view.first_S[s])
        q = step.q[begin : begin + T].float().transpose(0, 1)[None]
        k, v = (cache[slots].float().transpose(0, 1)[None] for cache in (step.k, step.v))
        begin += T
        if not slots:
            outs.append(torch.zeros(T, q.shape[1], v.shape[-1], device=q.device))
            lses.append(torch.full((T, q.shape[1]), -torch.inf, device=q.device))
            continue
        window = step.view.window or length + T
        mask = torch.tensor(
            [[at - window < position <= at for position in range(first, length)] for at in range(length - T, length)],
            dtype=torch.bool,
            device=step.q.device,
        ).view(1, 1, T, length - first)
        out, lse = attend(q, k, v, mask, step.inputs[-1])
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0].T)
    return torch.cat(outs), torch.cat(lses)


def assert_right(
    step: Step, actual: tuple[Tensor, Tensor], tolerance: float = 2e-5, dense: tuple[Tensor, Tensor] | None = None
) -> None:
    """dense: expected(step), if it is computed already."""
    out, lse = dense or expected(step)
    assert actual[0].shape == out.shape and actual[0].dtype == step.q.dtype
    assert actual[1].shape == lse.shape and actual[1].dtype == torch.float32
    torch.testing.assert_close(actual[0].float(), out, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(actual[1], lse, atol=tolerance, rtol=tolerance)


def steps(max_length: int) -> st.SearchStrategy[Step]:
    sequence = st.tuples(st.integers(1, max_length), st.integers(1, 6)).map(lambda pair: (max(pair), pair[1]))
    return st.builds(
        make_step,
        st.sampled_from(list(SHAPES.values())),
        st.lists(sequence, min_size=1, max_size=4),
        block_size=st.sampled_from([1, 3, 4, 16]),
        window=st.none() | st.integers(1, 12),
        seed=st.integers(0, 1000),
        round_up=st.sampled_from([0, 5]),
    )
