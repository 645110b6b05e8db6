"""Paged attention: every implementation against dense attention on gathered rows, over random caches.

Unused slots of the cache are NaN, so a row that nobody may see shows wherever it leaks.
"""

import dataclasses
import importlib.util
import itertools
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mlaforge import runtime
from mlaforge.modeling.attention_mla import attend
from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.native import pack, why_not
from mlaforge.ops.paged_attention import OP, paged_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
IMPLEMENTATIONS = [pytest.param(name, marks=[needs_triton] if name == "triton" else []) for name in OP.names]


@dataclasses.dataclass(frozen=True)
class Shape:
    """value None: the values are the keys' own first columns (an MLA row)."""

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


@pytest.fixture(autouse=True, scope="module")
def fresh_memory_is_nan() -> Iterator[None]:
    """torch.empty gives NaN, so that what was never written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


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
    )
    q = torch.randn(sum(queries), shape.heads, shape.key, generator=generator).to(DEVICE, dtype)
    return Step(q, k, v, view, slots)


def attention(step: Step, implementation: str) -> tuple[Tensor, Tensor]:
    """By this implementation; skips what those that are made for some inputs only do not take."""
    if implementation in ("native", "runs"):
        reason = OP.implementations[implementation].supports(*step.inputs)
        if reason is not True:
            pytest.skip(f"{reason}: {why}" if implementation == "native" and (why := why_not()) else reason)
    return paged_attention(*step.inputs, implementation=implementation)


def runs(slots: list[int]) -> Iterator[tuple[int, int]]:
    """(start, length) of the stretches of consecutive slots."""
    for _, group in itertools.groupby(enumerate(slots), lambda pair: pair[1] - pair[0]):
        stretch = [slot for _, slot in group]
        yield stretch[0], len(stretch)


def expected(step: Step) -> tuple[Tensor, Tensor]:
    """Dense attention on what is gathered by the test's own list of slots, with the mask written out by position."""
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


def assert_right(step: Step, actual: tuple[Tensor, Tensor], tolerance: float = 2e-5) -> None:
    out, lse = expected(step)
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


@given(steps(max_length=40))
@settings(max_examples=60)
def test_reference_against_dense_attention(step):
    assert_right(step, paged_attention(*step.inputs, implementation="reference"))


@needs_triton
@given(steps(max_length=150), st.sampled_from([None, 1, 3]))
@settings(max_examples=12)
def test_triton_against_dense_attention(step, splits):
    from mlaforge.ops import paged_attention_triton

    assert_right(step, paged_attention_triton.attend(*step.inputs, splits=splits))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("window", [None, 7], ids=["all", "window"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
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
    """Keys and values as the engine keeps them: parts of one bf16 row per slot, NaN all over."""
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


# Sequences (length, query tokens) and a block size: more tokens than one task takes, several sequences, some of several
# query tokens (verification) or many (prompts).
STEPS = [
    ([(1, 1)], 8),
    ([(5, 1), (300, 1), (700, 1)], 16),
    ([(1100, 1)], 8),
    ([(300, 4), (5, 5), (9, 1), (700, 9)], 8),
    ([(300, 4), (5, 5), (9, 1), (700, 9)], 32),
    ([(40, 40), (600, 130), (513, 1)], 16),
    ([(600, 130), (90, 70)], 8),
]


@pytest.mark.skipif(DEVICE != "cpu", reason="kernels of the CPU")
@pytest.mark.parametrize("window", [None, 7, 300], ids=["all", "narrow", "wide"])
@pytest.mark.parametrize("shape", DECODING.values(), ids=DECODING)
@pytest.mark.parametrize(("sequences", "block_size"), STEPS, ids=str)
def test_the_kernels_on_the_engines_rows(sequences, block_size, shape, window, compiled):
    step = engine_step(shape, sequences, block_size, window)
    assert_right(step, attention(step, "native"), tolerance=1e-2)


@pytest.mark.skipif(DEVICE != "cpu", reason="an implementation of the CPU")
@pytest.mark.parametrize("window", [None, 7, 300], ids=["all", "narrow", "wide"])
@pytest.mark.parametrize("shape", DECODING.values(), ids=DECODING)
@pytest.mark.parametrize(("sequences", "block_size"), STEPS, ids=str)
def test_runs_on_the_engines_rows(sequences, block_size, shape, window):
    step = engine_step(shape, sequences, block_size, window)
    assert_right(step, attention(step, "runs"), tolerance=1e-2)


def engine_step(shape: Shape, sequences: list[tuple[int, int]], block_size: int, window: int | None) -> Step:
    """As `make_step`, from rows as the engine has them."""
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
def test_a_query_token_has_one_result(shape, window, compiled):
    """Decoded, verified among others, or in a prompt; blocks before its window gone or not: equal to the bit."""
    step = engine_step(shape, [(700, 300)], 16, window)
    whole, lse = attention(step, "native")
    start = int(step.view.first_S)
    for first, last in ((0, 1), (3, 8), (17, 140), (299, 300)):
        seen = 400 + last
        gone = max(0, 401 + first - window - start) // 16 if window else 0
        view = dataclasses.replace(
            step.view, seq_lens_S=torch.tensor([seen], dtype=torch.int32), max_query=last - first, max_seq_len=seen,
            query_start_S1=torch.tensor([0, last - first], dtype=torch.int32), queries=(last - first,),
            slots_N=step.view.slots_N[first:last], first_S=step.view.first_S + 16 * gone,
            block_table_SB=step.view.block_table_SB[:, gone:].contiguous(),
        )  # fmt: skip
        part, part_lse = attention(dataclasses.replace(step, q=step.q[first:last], view=view), "native")
        assert torch.equal(part, whole[first:last])
        assert torch.equal(part_lse, lse[first:last])


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
    """Sequences that only fill up a graph's batch have length 0."""
    step = make_step(SHAPES["group-3"], lengths)
    out, lse = attention(step, implementation)
    assert_right(step, (out, lse))
    assert not out[0].any() and (lse[0] == -torch.inf).all()


@needs_triton
def test_many_sequences_are_found_and_splits_merged(monkeypatch):
    """More sequences than one search step looks at, most of them with nothing in the second split."""
    import triton.language as tl

    from mlaforge.ops import paged_attention_triton

    monkeypatch.setattr(paged_attention_triton, "SEARCHED", tl.constexpr(4))
    step = make_step(SHAPES["mha"], [(1, 1), (7, 2)] * 3 + [(64, 60), (3, 2), (1, 1)])
    launch = paged_attention_triton.make_launch(*step.inputs)
    assert launch.arguments["TILES"] == 0
    assert_right(step, paged_attention_triton.attend(*step.inputs, splits=2))


@needs_triton
@given(st.integers(1, 3000), st.integers(1, 400), st.integers(1, 264))
def test_splits_keep_the_machine_busy(programs, most, room):
    from mlaforge.ops.paged_attention_triton import choose_splits

    splits = choose_splits(programs, most, room)
    assert 1 <= splits <= min(most, 128)
    if most >= room > 10 * programs:
        assert splits * programs >= 0.8 * min(room, 128 * programs)


@needs_triton
@given(st.integers(1, 600), st.integers(0, 200), st.booleans())
def test_pieces_cover_a_row(value, more, in_key):
    from mlaforge.ops.paged_attention_triton import cut

    keys, values = cut(value + more, value, in_key)
    for width in (*keys, *values):
        assert width == 0 or (width >= 16 and width & (width - 1) == 0)
    assert sum(values) >= value and sum(values) - value < max(16, value)
    if in_key:
        assert keys[:2] == values and keys[2] >= more
    else:
        assert sum(keys) >= value + more


@needs_triton
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": torch.float64}, "float64"),
        ({"k": torch.float16}, "differ in dtype"),
        ({"v": 700}, "do not fit"),
        ({"strided": True}, "one after another"),
    ],
)
def test_the_kernel_says_what_it_cannot_do(change, words):
    step = make_step(SHAPES["mha"], [(5, 1)])
    q, k, v, view, scale = step.inputs
    if "dtype" in change:
        q, k, v = (x.to(change["dtype"]) for x in (q, k, v))
    if "k" in change:
        k = k.to(change["k"])
    if "v" in change:
        v = k.new_zeros(*k.shape[:2], change["v"])
    if "strided" in change:
        k = k.new_zeros(*k.shape[:2], 2 * k.shape[2])[..., ::2]
    with pytest.raises(runtime.UserError, match=words):
        paged_attention(q, k, v, view, scale, implementation="triton")


@pytest.mark.slow
@needs_triton
def test_the_kernel_compiles_for_hopper_and_fits(monkeypatch):
    """On real shapes, without a GPU, in a process where nothing is interpreted."""
    import json

    monkeypatch.setenv("TRITON_INTERPRET", "0")
    script = Path(__file__).parents[1] / "support" / "compile_ahead.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert {"gqa-64", "gqa-128", "mla-512-64", "mla-256-64", "mla-320-32"} <= set(told)
    for name, line in told.items():
        assert line["shared"] <= 227 * 1024, line
        assert line["spilled"] <= 256, line
        assert line["wgmma"] or line.get("tile", [0])[0] < 64, f"{name} does not use the asynchronous tensor cores"


@pytest.mark.skipif(DEVICE != "cpu", reason="a kernel of the CPU")
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("window", [None, 40], ids=["all", "window"])
@pytest.mark.parametrize(("heads", "kv_heads", "rank", "rope"), [(9, 3, 128, 64), (4, 2, 40, 8), (16, 1, 66, 32)])
@pytest.mark.parametrize(
    "sequences", [[(1, 1), (70, 1), (300, 1)], [(300, 4), (5, 5), (9, 1)], [(40, 40), (300, 200)]], ids=str
)
def test_latent_rope(sequences, heads, kv_heads, rank, rope, window, sinks, compiled):
    """The kernel from projections to heads' outputs against absorbed attention by its definition, in fp32."""
    H, G, D, V, R, E = heads, kv_heads, 16, 24, rank, rope
    step = make_step(Shape(H, 1, R + E, R, aliased=True), sequences, 16, window, dtype=torch.bfloat16)
    generator, view, N = torch.Generator().manual_seed(1), step.view, len(step.q)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    w_uk, w_uv, b_k, b_v = normal(G, D, R).bfloat16() / 4, normal(G, V, R).bfloat16() / 4, normal(G, D), normal(G, V)
    both, sink_H = normal(N, H * (D + E) + R + E).bfloat16(), normal(H)
    index, angles = torch.randperm(E, generator=generator)[: E // 2], normal(N, 1, E)
    turn = torch.complex(angles.cos(), angles.sin())
    rows = step.k[:, 0].contiguous()

    def turned(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        cos, sin = angles.cos()[..., index], angles.sin()[..., index]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    out = compiled.latent_rope(
        both, turn, index, torch.stack([pack(w.T) for w in w_uk]), torch.stack([pack(w) for w in w_uv]), b_k, b_v,
        sink_H if sinks else None, rows, None, [0], view.slots_N, view.block_table_SB, view.seq_lens_S, view.first_S,
        view.query_start_S1, view.block_size, view.window or 0, 0.3, None,
    )  # fmt: skip
    q, row = both.float().split([H * (D + E), R + E], dim=1)
    wanted_rows = torch.cat((row[:, :R], turned(row[:, None, R:])[:, 0]), dim=1)
    torch.testing.assert_close(rows[view.slots_N].float(), wanted_rows, rtol=2**-8, atol=1e-6)
    nope, rotary = q.view(N, H, D + E).split([D, E], dim=-1)
    nope = nope.unflatten(1, (G, H // G))
    absorbed = torch.cat((torch.einsum("ngjd,gdr->ngjr", nope, w_uk.float()).flatten(1, 2), turned(rotary)), dim=-1)
    keys = rows[:, None].float()
    latent, lse = paged_attention(absorbed, keys, keys[..., :R], view, 0.3, implementation="reference")
    wanted = torch.einsum("ngjr,gvr->ngjv", latent.unflatten(1, (G, H // G)), w_uv.float()) + b_v[:, None]
    if sinks:
        shift = torch.einsum("ngjd,gd->ngj", nope, b_k).flatten(1, 2) * 0.3
        wanted = wanted * torch.sigmoid(lse + shift - sink_H).unflatten(1, (G, H // G))[..., None]
    size = wanted.abs().amax()
    torch.testing.assert_close(out.float(), wanted.flatten(1), rtol=2e-2, atol=float(1e-2 * size))


@pytest.mark.skipif(DEVICE != "cpu", reason="a kernel of the CPU")
@pytest.mark.parametrize("window", [None, 300], ids=["all", "window"])
@pytest.mark.parametrize("norms", [False, True], ids=["bare", "norms"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "rank"), [(9, 3, 64, 310), (4, 2, 24, 66)])
@pytest.mark.parametrize("block_size", [8, 16, 64])
def test_latent_has_one_result(block_size, heads, kv_heads, dim, rank, norms, window, compiled):
    """A token gets the same to the bit decoded or in a prompt, alone or beside others, whatever blocks they share."""
    H, G, D, V, R, L = heads, kv_heads, dim, 16, rank, 704
    generator, columns = torch.Generator().manual_seed(1), L // block_size

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    queries, angles, rows = normal(L, H * D).bfloat16(), normal(L, D // 2), normal(8 * L, R).bfloat16()
    own = torch.randperm(8 * columns, generator=generator).to(torch.int32).view(8, columns)
    norm = (normal(D).bfloat16(), normal(D).bfloat16()) if norms else (None, None)
    w_uk, w_uv = pack(normal(G * D, R) / 8, 32), torch.stack([pack(normal(V, R)) for _ in range(G)])
    biases = normal(G * D).bfloat16(), normal(G, V)

    def attended(*sequences: tuple[int, int, int, int]) -> tuple[Tensor, ...]:
        """Of each its last T tokens: (text, length, T, blocks that are the first text's)."""
        table = torch.stack([torch.cat((own[0, :shared], own[text, shared:])) for text, _, _, shared in sequences])
        lengths, queried = ([sequence[at] for sequence in sequences] for at in (1, 2))
        tokens = [torch.arange(length - T, length) for _, length, T, _ in sequences]
        slots = torch.cat([
            table[s].long()[at // block_size] * block_size + at % block_size for s, at in enumerate(tokens)
        ])  # fmt: skip
        first = [
            max(0, length - T - window) // block_size * block_size if window else 0 for _, length, T, _ in sequences
        ]
        table = torch.stack([row.roll(-before // block_size) for row, before in zip(table, first, strict=True)])
        numbers = (torch.tensor(x, dtype=torch.int32) for x in (lengths, first, [0, *itertools.accumulate(queried)]))
        both = torch.cat((queries[torch.cat(tokens)], rows[slots]), dim=1)
        out = compiled.latent(
            both, angles.cos(), angles.sin(), w_uk, w_uv, *biases, *norm, 1e-5, None, rows, None, [0], slots, table,
            *numbers, block_size, window or 0, 0.05, None,
        )  # fmt: skip
        assert out.isfinite().all()
        return out.split(queried)

    (prompt,) = attended((0, L, L, 0))
    for length in (1, 33, 256, 300, 700):
        assert torch.equal(attended((0, length, 1, 0))[0], prompt[length - 1 : length])
    steps = [
        [(0, 700, 1, 0), (1, 690, 2, 0), (2, 300, 1, 0), (3, 64, 1, 0)],
        [(0, 700, 1, 0), (1, 690, 2, 40), (2, 700, 1, 20), (3, 64, 1, 2), (4, 300, 1, 1), (5, 700, 1, 5)],
        [(0, 640, 40, 0), (1, 700, 1, 70), (2, 690, 30, 30), (3, 650, 30, 9), (4, 300, 100, 2), (5, 300, 3, 0)],
    ]
    for sequences in steps:
        for (text, length, T, shared), found in zip(sequences, attended(*sequences), strict=True):
            (alone,) = attended((text, length, length, shared))
            assert torch.equal(found, alone[length - T :])


@pytest.mark.skipif(DEVICE != "cpu", reason="a kernel of the CPU")
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("norms", [False, True], ids=["bare", "norms"])
@pytest.mark.parametrize("window", [None, 40], ids=["all", "window"])
@pytest.mark.parametrize(("heads", "kv_heads", "rank"), [(9, 3, 128), (4, 2, 40), (16, 1, 66)])
@pytest.mark.parametrize(
    "sequences", [[(1, 1), (70, 1), (300, 1)], [(300, 4), (5, 5), (9, 1)], [(40, 40), (5000, 20), (300, 200)]], ids=str
)
def test_latent(sequences, heads, kv_heads, rank, window, norms, sinks, compiled):
    """The kernel from projections to heads' outputs against attention over decompressed keys by its definition."""
    H, G, D, V, R = heads, kv_heads, 16, 24, rank
    step = make_step(Shape(H, 1, R, R, aliased=True), sequences, 16, window, dtype=torch.bfloat16)
    generator, view, N = torch.Generator().manual_seed(1), step.view, len(step.q)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    def normed(x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else torch.nn.functional.rms_norm(x, (D,), weight.float(), 1e-5).bfloat16().float()

    def turned(x: Tensor, at: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        cos, sin = angles.cos()[at][:, None], angles.sin()[at][:, None]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    w_uk, w_uv, b_k, b_v = normal(G, D, R).bfloat16() / 8, normal(G, V, R).bfloat16() / 4, normal(G, D), normal(G, V)
    both, sink_H, angles = normal(N, H * D + R).bfloat16(), normal(H), normal(max(view.max_seq_len, 1), D // 2)
    q_norm, k_norm = (normal(D).bfloat16(), normal(D).bfloat16()) if norms else (None, None)
    b_k = b_k.bfloat16()
    rows = step.k[:, 0].contiguous()
    out = compiled.latent(
        both, angles.cos(), angles.sin(), pack(w_uk.flatten(0, 1), 32), torch.stack([pack(w) for w in w_uv]),
        b_k.flatten(), b_v, q_norm, k_norm, 1e-5, sink_H if sinks else None, rows, None, [0], view.slots_N,
        view.block_table_SB, view.seq_lens_S, view.first_S, view.query_start_S1, view.block_size, view.window or 0,
        0.3, None,
    )  # fmt: skip
    q, c = both.float().split([H * D, R], dim=1)
    assert torch.equal(rows[view.slots_N].float(), c)
    keys = torch.zeros(len(rows), G, D)
    at = []
    for slots, length, T in zip(step.slots, view.seq_lens_S.tolist(), view.queries, strict=True):
        raw = rows[slots].float() @ w_uk.flatten(0, 1).float().T + b_k.flatten().float()
        positions = torch.arange(length - len(slots), length)
        keys[slots] = turned(normed(raw.bfloat16().float().view(-1, G, D), k_norm), positions)
        at += range(length - T, length)
    queries = turned(normed(q.view(N, H, D), q_norm), torch.tensor(at))
    values = rows[:, None].float().expand(-1, G, -1)
    latent, lse = paged_attention(queries, keys, values, view, 0.3, implementation="reference")
    wanted = torch.einsum("ngjr,gvr->ngjv", latent.unflatten(1, (G, H // G)), w_uv.float()) + b_v[:, None]
    if sinks:
        wanted = wanted * torch.sigmoid(lse - sink_H).unflatten(1, (G, H // G))[..., None]
    size = wanted.abs().amax()
    torch.testing.assert_close(out.float(), wanted.flatten(1), rtol=3e-2, atol=float(1.5e-2 * size))
