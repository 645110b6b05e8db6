"""Paged attention: every implementation against dense attention on gathered rows, over random caches."""

import dataclasses
import functools

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from mlaforge.ops.external.library import EXTERNAL
from mlaforge.ops.native import why_not
from mlaforge.ops.paged_attention import OP, paged_attention
from support.paged_steps import DEVICE, SHAPES, Shape, Step, assert_right, expected, make_step, needs_triton, steps
from support.pairwise import pairwise

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_memory_is_nan")]
# Those of fp32 and fp16; `native` takes bf16 rows.
IMPLEMENTATIONS = [name for name in OP.names if name != "native" and name not in EXTERNAL]


def attention(step: Step, implementation: str) -> tuple[Tensor, Tensor]:
    """Run this implementation; skip inputs that it does not support."""
    if implementation == "triton":
        pytest.importorskip("triton")
    if implementation in ("native", "runs"):
        reason = OP.implementations[implementation].supports(*step.inputs)
        if reason is not True:
            pytest.skip(f"{reason}: {why}" if implementation == "native" and (why := why_not()) else reason)
    return paged_attention(*step.inputs, implementation=implementation)


@given(steps(max_length=40))
@settings(max_examples=60)
def test_reference_against_dense_attention(step):
    assert_right(step, paged_attention(*step.inputs, implementation="reference"))


@pairwise({"shape": SHAPES, "window": {"all": None, "window": 7}, "implementation": IMPLEMENTATIONS}, more=0)
def test_every_shape(shape, window, implementation):
    step = make_step(shape, [(1, 1), (83, 1), (30, 4)], window=window)
    assert_right(step, attention(step, implementation))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("window", [None, 9], ids=["all", "window"])
def test_prefill_beside_decode(window, implementation):
    """Chunks of very different lengths in one step; 60 rows of one sequence, 3 of the others."""
    step = make_step(SHAPES["group-3"], [(40, 1), (90, 60), (12, 12), (25, 1), (3, 2), (5, 1)], window=window)
    assert_right(step, attention(step, implementation))


def cached_rows(shape: Shape, blocks: int, block_size: int) -> tuple[Tensor, Tensor]:
    """Keys and values in the engine's layout: parts of one bf16 row per slot, initially NaN."""
    width = shape.key if shape.aliased else shape.key_heads * (shape.key + shape.value)
    rows = torch.full((blocks * block_size, width), torch.nan, dtype=torch.bfloat16)
    if shape.aliased:
        return rows[:, None], rows[:, None, : shape.value]
    keys, values = rows.split([shape.key_heads * shape.key, shape.key_heads * shape.value], dim=1)
    return keys.view(-1, shape.key_heads, shape.key), values.view(-1, shape.key_heads, shape.value)


DECODING = {
    "smollm2": Shape(9, 3, 64, 64),
    "gpt-oss": Shape(16, 2, 64, 64),
    "nine-per-head": Shape(9, 1, 80, 48, aliased=True),
    "no-whole-vector": Shape(6, 2, 20, 20),
    "wider-value": Shape(4, 4, 8, 40),
}


# Sequences (length, query tokens) and a block size: more tokens than one task takes, several sequences, some with
# several query tokens (verification) or many (prompts).
STEPS = [
    ([(1, 1)], 8),
    ([(5, 1), (300, 1), (700, 1)], 16),
    ([(1100, 1)], 8),
    ([(300, 4), (5, 5), (9, 1), (700, 9)], 8),
    ([(300, 4), (5, 5), (9, 1), (700, 9)], 32),
    ([(40, 40), (600, 130), (513, 1)], 16),
    ([(600, 130), (90, 70)], 8),
]


ENGINE = {
    "sequences,block_size": STEPS, "shape": DECODING, "window": {"all": None, "narrow": 7, "wide": 300},
}  # fmt: skip


@pytest.mark.skipif(DEVICE != "cpu", reason="kernels of the CPU")
@pairwise(ENGINE, more=0)
def test_the_kernels_on_the_engines_rows(sequences, block_size, shape, window, compiled):
    step, dense = engine_case(tuple(sequences), block_size, shape, window)
    assert_right(step, attention(step, "native"), tolerance=1e-2, dense=dense)


@pytest.mark.skipif(DEVICE != "cpu", reason="an implementation of the CPU")
@pairwise(ENGINE, more=0)
def test_runs_on_the_engines_rows(sequences, block_size, shape, window):
    step, dense = engine_case(tuple(sequences), block_size, shape, window)
    assert_right(step, attention(step, "runs"), tolerance=1e-2, dense=dense)


@functools.cache
def engine_case(
    sequences: tuple[tuple[int, int], ...], block_size: int, shape: Shape, window: int | None
) -> tuple[Step, tuple[Tensor, Tensor]]:
    """A step and its dense attention, computed once for all implementations."""
    step = engine_step(shape, list(sequences), block_size, window)
    return step, expected(step)


def engine_step(shape: Shape, sequences: list[tuple[int, int]], block_size: int, window: int | None) -> Step:
    """As `make_step`, with rows in the engine's layout."""
    step = make_step(shape, sequences, block_size=block_size, window=window, dtype=torch.bfloat16)
    k, v = cached_rows(shape, len(step.k) // block_size, block_size)
    for slots in step.slots:
        if not shape.aliased:
            v[slots] = step.v[slots]
        k[slots] = step.k[slots]
    return dataclasses.replace(step, k=k, v=v)


@pytest.mark.skipif(DEVICE != "cpu", reason="kernels of the CPU")
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("shape", [DECODING["smollm2"], DECODING["nine-per-head"]], ids=["gqa", "mla"])
def test_a_query_tokens_result_is_batch_invariant(shape, window, compiled):
    """Bitwise equal when decoded, verified among others, or in a prompt, with or without the blocks before its
    window."""
    step = engine_step(shape, [(700, 300)], 16, window)
    whole, lse = attention(step, "native")
    for first, last in ((0, 1), (3, 8), (17, 140), (299, 300)):
        part, part_lse = attention(part_of(step, first, last), "native")
        assert torch.equal(part, whole[first:last])
        assert torch.equal(part_lse, lse[first:last])


@pytest.mark.skipif(DEVICE != "cpu", reason="kernels of the CPU")
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("length", [9, 200, 300])
def test_threads_change_nothing(length, window, compiled):
    """A text with fewer chunks than threads is split by KV heads."""
    step, threads = engine_step(DECODING["smollm2"], [(length, 5)], 16, window), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = [attention(part_of(step, m, m + 1), "native") for m in range(5)]
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            out, lse = attention(step, "native")
            assert torch.equal(out, torch.cat([part_out for part_out, _ in alone])), count
            assert torch.equal(lse, torch.cat([part_out for _, part_out in alone])), count
    finally:
        torch.set_num_threads(threads)


def part_of(step: Step, first: int, last: int) -> Step:
    """Query tokens [first, last) of a step's only sequence as a separate step, without the blocks before their
    window."""
    view = step.view
    before = int(view.seq_lens_S) - len(step.q)
    gone = max(0, before + 1 + first - view.window - int(view.first_S)) // 16 if view.window else 0
    view = dataclasses.replace(
        view, seq_lens_S=torch.tensor([before + last], dtype=torch.int32), max_query=last - first,
        max_seq_len=before + last, query_start_S1=torch.tensor([0, last - first], dtype=torch.int32),
        queries=(last - first,), slots_N=view.slots_N[first:last], first_S=view.first_S + 16 * gone,
        block_table_SB=view.block_table_SB[:, gone:].contiguous(),
    )  # fmt: skip
    return dataclasses.replace(step, q=step.q[first:last], view=view)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_half_precision(implementation):
    step = make_step(SHAPES["mla"], [(70, 2), (9, 1)], dtype=torch.float16)
    assert_right(step, attention(step, implementation), tolerance=3e-3)


@pytest.mark.parametrize("implementation", ["reference", pytest.param("triton", marks=needs_triton)])
@pytest.mark.parametrize("shape", ["mla", "group-3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_in_fp8_are_cast_where_they_are_read(dtype, shape, implementation):
    step = make_step(SHAPES[shape], [(70, 2), (9, 1)], dtype=dtype)
    rounded = [rows.to(torch.float8_e4m3fn) for rows in (step.k, step.v)]
    if SHAPES[shape].aliased:
        rounded[1] = rounded[0][..., : SHAPES[shape].value]
    exact = dataclasses.replace(step, k=rounded[0].to(dtype), v=rounded[1].to(dtype))
    found = paged_attention(step.q, *rounded, *step.inputs[3:], implementation=implementation)
    assert_right(exact, found, tolerance=2e-5 if dtype == torch.float32 else 3e-3)
    if DEVICE == "cpu":
        assert OP.choose(step.q, *rounded, *step.inputs[3:])[0] == "reference"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("lengths", [[(0, 1), (20, 1), (0, 1)], [(0, 2)]], ids=["some", "all"])
def test_a_row_that_sees_nothing(lengths, implementation):
    """Padding sequences of a graph's batch have length 0."""
    step = make_step(SHAPES["group-3"], lengths)
    out, lse = attention(step, implementation)
    assert_right(step, (out, lse))
    assert not out[0].any() and (lse[0] == -torch.inf).all()
