"""Compiled kernels on packed rows, bitwise: attention equals attention over a bf16 cache of the decoded rows, and
written bytes equal those of ops/row_formats/. Grouped-query rows that are all int8 are multiplied as integers:
compared with fp64 within the rounding of queries and weights to 16 bits. Unwritten rows are NaN in both caches."""

import functools
import itertools
import random

import pytest
import torch
from torch import Tensor

from mlaforge.ops.row_formats.coded import Coded
from mlaforge.ops.row_formats.int4 import Int4
from mlaforge.ops.row_formats.int8 import Int8
from support.packed_caches import CPU, Cache, latent_format, latent_layer, make_cache
from support.pairwise import pairwise


def same(actual: Tensor, expected: Tensor) -> bool:
    return bool(expected.isfinite().all()) and torch.equal(actual, expected)


INT8 = {"smollm2": (9, 3, 64), "one-head": (4, 1, 80), "no-whole-vector": (6, 2, 20), "narrow": (4, 4, 6)}
SEQUENCES = [
    [(1, 1)],
    [(5, 1), (300, 1), (700, 1)],
    [(300, 4), (5, 5), (9, 1), (700, 9)],
    [(40, 40), (600, 130), (513, 1)],
]


WINDOWS = {"all": None, "narrow": 40, "wide": 300}


@pairwise(
    {
        "bits,block_size,whole": [(8, 8, (0,)), (8, 16, (0,)), (8, 64, (0, -1)), (4, 32, (-1,)), (4, 64, (0, -1))],
        "sequences": SEQUENCES, "shape": INT8, "window": WINDOWS,
    }
)  # fmt: skip
def test_attention_equals_attention_over_decoded_rows(bits, block_size, whole, sequences, shape, window, compiled):
    H, G, D = shape
    format = Int8((D,) * 2 * G) if bits == 8 else Int4(G, D)
    cache = make_cache(format, sequences, block_size, window, whole)
    q = torch.randn(len(cache.slots), H, D, generator=torch.Generator().manual_seed(1)).bfloat16()
    step = (G, D, G * D, *cache.view, 0.3, None)
    actual, expected = (compiled.decode(q, *cache.rows(decoded), *step) for decoded in (False, True))
    assert same(actual[0], expected[0]) and same(actual[1], expected[1])


def codes(cache: Cache) -> tuple[Tensor, Tensor]:
    """Codes and scales of the rows: [L, 2, G, D] and [L, 2, G, 1], in fp64."""
    G, (D, *_), W = len(cache.format.group_sizes) // 2, cache.format.group_sizes, cache.format.width
    scale = cache.packed[:, W:].contiguous().view(torch.bfloat16).double().view(-1, 2, G, 1)
    return cache.packed[:, :W].view(torch.int8).double().view(-1, 2, G, D), scale


def in_whole_numbers(
    cache: Cache, q_NHD: Tensor, scaling: float
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Attention in fp64 over codes times scales, [N, H, D], its lse [N, H], and error bounds of both for queries
    rounded to 1/32767 of their largest element, weights times value scales rounded to 1/32767 of a chunk's largest, and
    fp32 otherwise. An element of a query is off by half a step, a score by `off`, half a step times the sum of a key's
    magnitudes, so the lse by `off` and a weight by a factor of e^(2 off). Half a step of a weight contributes that
    times a value's code."""
    table, lengths, firsts, starts, size, window = cache.view
    rows, scales = codes(cache)
    results: list[list[Tensor]] = [[], [], [], []]
    for s, (length, first, start, end) in enumerate(zip(lengths, firsts, starts[:-1], starts[1:], strict=True)):
        at = torch.arange(int(first), int(length))
        slots = table[s, (at - first) // size].long() * size + (at - first) % size
        (keys, values), (key_scales, value_scales) = (x[slots].transpose(0, 1) for x in (rows, scales))
        q = q_NHD[start:end].double().unflatten(1, (keys.shape[1], -1))
        stands = torch.arange(int(length - end + start), int(length))[:, None]
        seen = (at <= stands) & (at > stands - (window or length))
        scores = torch.einsum("tgjd,lgd->tgjl", q, keys * key_scales) * scaling
        scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
        lse, weights = scores.logsumexp(3), scores.softmax(3)
        magnitudes = (keys * key_scales).abs().sum(2).T[:, None].masked_fill(~seen[:, None, None], 0).amax(3)
        off = scaling * q.abs().amax(3) / 65534 * magnitudes + 2e-5
        scaled = weights * value_scales[..., 0].T[:, None].nan_to_num() * seen[:, None, None]
        chunks = at // 256
        most = torch.stack([scaled[..., chunks == chunk].amax(3) for chunk in chunks.unique()], dim=3)
        parts = most[..., chunks - chunks[0]] * seen[:, None, None] / 65534
        values, value_scales = values.nan_to_num(), value_scales.nan_to_num()
        out = torch.einsum("tgjl,lgd->tgjd", scaled, values)
        error = torch.expm1(2 * off)[..., None] * torch.einsum("tgjl,lgd->tgjd", scaled, values.abs())
        error += 1.01 * torch.einsum("tgjl,lgd->tgjd", parts, values.abs())
        for result, x in zip(results, (out, lse, error + 2**-8 * out.abs() + 1e-5, off), strict=True):
            result.append(x.flatten(1, 2))
    out, lse, error, off = map(torch.cat, results)
    return (out, lse), (error, off)


@functools.cache
def integer_case(
    shape: tuple[int, int, int], sequences: tuple[tuple[int, int], ...], block_size: int, window: int | None
) -> tuple[Cache, Tensor, tuple | None]:
    """An int8 cache, queries and what `in_whole_numbers` returns, computed once for all forms; None for rows that are
    decoded."""
    H, G, D = shape
    cache = make_cache(Int8((D,) * 2 * G), list(sequences), block_size, window)
    q = torch.randn(len(cache.slots), H, D, generator=torch.Generator().manual_seed(1)).bfloat16()
    return cache, q, None if G > 16 or D % 4 else in_whole_numbers(cache, q, 0.3)


def check_int8(
    shape: tuple[int, int, int], sequences: list[tuple[int, int]], block_size: int, window: int | None, compiled
) -> None:
    cache, q, exact = integer_case(shape, tuple(sequences), block_size, window)
    _, G, D = shape
    step = (G, D, G * D, *cache.view, 0.3, None)
    actual = compiled.decode(q, *cache.rows(decoded=False), *step)
    if exact is None:
        expected = compiled.decode(q, *cache.rows(decoded=True), *step)
        assert same(actual[0], expected[0]) and same(actual[1], expected[1])
        return
    for x, expected, error in zip(actual, *exact, strict=True):
        assert bool(((x.double() - expected).abs() <= error).all())


@pairwise(
    {
        "block_size": [8, 16, 64], "shape": [*INT8.values(), (16, 2, 128), (72, 8, 16), (20, 20, 8)],
        "sequences": SEQUENCES, "window": WINDOWS,
    },
    more=0,
)  # fmt: skip
def test_int8_in_integers(block_size, shape, sequences, window, compiled):
    check_int8(shape, sequences, block_size, window, compiled)


@pytest.mark.parametrize("seed", range(12))
def test_random_steps(seed, compiled):
    """Any shapes, lengths, windows and block sizes, packed and as integers, with every block packed or some not."""
    chance = random.Random(seed)
    bits, G, D = chance.choice([8, 4]), chance.randint(1, 6), 2 * chance.randint(1, 48)
    H, window = G * chance.randint(1, 9), chance.choice([None, chance.randint(1, 64), chance.randint(65, 600)])
    block_size = chance.choice([32, 64] if bits == 4 else [1, 3, 8, 16, 24, 64])
    queries = [chance.choice([1, 1, 4, chance.randint(2, 150)]) for _ in range(chance.randint(1, 4))]
    sequences = [(T + chance.choice([0, chance.randint(0, 40), chance.randint(0, 700)]), T) for T in queries]
    cache = make_cache(
        Int8((D,) * 2 * G) if bits == 8 else Int4(G, D),
        sequences,
        block_size,
        window,
        whole=chance.choice([(0,), (-1,)]),
    )
    q = torch.randn(len(cache.slots), H, D, generator=torch.Generator().manual_seed(seed)).bfloat16()
    step = (G, D, G * D, *cache.view, 0.3, None)
    actual, expected = (compiled.decode(q, *cache.rows(decoded), *step) for decoded in (False, True))
    assert same(actual[0], expected[0]) and same(actual[1], expected[1])
    if bits == 8:
        check_int8((H, G, D), sequences, block_size, window, compiled)


@pairwise(
    {
        "decoded": {"int8": False, "bf16": True}, "block_size": [8, 16],
        "shape": [(9, 3, 64), (4, 1, 80), (6, 2, 20), (4, 2, 80), (72, 8, 16)], "window": WINDOWS,
    },
    more=0,
)  # fmt: skip
def test_a_tokens_result_is_batch_invariant(decoded, block_size, shape, window, compiled):
    """Bitwise equal in a prompt, among drafted tokens, alone, and with any other tokens."""
    H, G, D = shape
    sequences = [(600, 130), (5, 1), (513, 4)]
    cache = make_cache(Int8((D,) * 2 * G), sequences, block_size, window, shared=0 if window else 4)
    q = torch.randn(len(cache.slots), H, D, generator=torch.Generator().manual_seed(1)).bfloat16()
    table, _, firsts, starts = cache.view[:4]

    def attend(q, *view):
        return compiled.decode(q, *cache.rows(decoded), G, D, G * D, *view, *cache.view[4:], 0.3, None)

    actual = attend(q, *cache.view[:4])
    for s, (length, T) in enumerate(sequences):
        for m, n in itertools.pairwise(sorted({0, *range(T // 3, min(T, T // 3 + 20)), T - 1, T})):
            ends, begins = (
                torch.tensor([length - T + n], dtype=torch.int32),
                torch.tensor([0, n - m], dtype=torch.int32),
            )
            part = slice(int(starts[s]) + m, int(starts[s]) + n)
            alone = attend(q[part], table[s : s + 1], ends, firsts[s : s + 1], begins)
            assert same(alone[0], actual[0][part]) and same(alone[1], actual[1][part]), (s, m, n)


def test_nan_values_propagate(compiled):
    """NaN reaches the columns of its head; others are unchanged."""
    cache = make_cache(Int8((64,) * 4), [(300, 1)], 16)
    q = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    step = (2, 64, 128, *cache.view, 0.3, None)
    before, _ = compiled.decode(q, *cache.rows(decoded=False), *step)
    at = cache.format.width + 4
    cache.packed[cache.slots[0], at : at + 2] = 255
    after, _ = compiled.decode(q, *cache.rows(decoded=False), *step)
    assert torch.equal(after[:, 2:], before[:, 2:])
    assert bool(after[:, :2].isnan().all())


@pytest.mark.parametrize("format", [Int8((64,) * 6), Int4(3, 64)], ids=["int8", "int4"])
def test_shared_blocks_and_trees(format, compiled):
    """Sequences that share their first blocks; and a tree of drafted tokens after text."""
    q = torch.randn(7, 9, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    shared = make_cache(format, [(300, 1), (200, 4), (290, 2)], 32, whole=(-1,), shared=4)
    tree = torch.tensor([[0, -1, -1, -1], [0, 1, -1, -1], [0, -1, 1, -1], [0, 1, -1, 2]], dtype=torch.int32)
    tree = torch.where(tree >= 0, tree.amax(1, keepdim=True) - tree, tree)
    for cache, tree_Tn in ((shared, None), (make_cache(format, [(302, 4)], 32, whole=(-1,)), tree)):
        step = (3, 64, 192, *cache.view, 0.3, tree_Tn)
        actual, expected = (compiled.decode(q[: len(cache.slots)], *cache.rows(d), *step) for d in (False, True))
        assert same(actual[0], expected[0]) and same(actual[1], expected[1])


@pairwise(
    {
        "stored": ["int8", "coded"], "layout": ["latent", "latent_rope"],
        "whole": {"packed": (), "first-whole": (0,)},
        "heads,kv_heads,rank,rope": [(9, 3, 128, 64), (4, 2, 40, 8), (16, 1, 66, 32)],
        "window": {"all": None, "window": 40},
    },
)  # fmt: skip
def test_latents(stored, layout, whole, heads, kv_heads, rank, rope, window, compiled):
    sequences = [(300, 4), (5, 5), (9, 1), (400, 90), (70, 1)]
    check_latents(stored, layout, (heads, kv_heads, rank, rope), (sequences, 16, window, whole), compiled)


@pytest.mark.parametrize("seed", range(6))
def test_latents_of_random_steps(seed, compiled):
    chance = random.Random(seed)
    kv_heads, rank, rope = chance.randint(1, 5), 2 * chance.randint(8, 100), 2 * chance.randint(1, 32)
    shape = (kv_heads * chance.randint(1, 6), kv_heads, rank, rope)
    queries = [chance.choice([1, 1, 4, chance.randint(2, 100)]) for _ in range(chance.randint(1, 5))]
    sequences = [(T + chance.choice([0, chance.randint(0, 40), chance.randint(0, 600)]), T) for T in queries]
    cached = (sequences, chance.choice([8, 16, 32]), chance.choice([None, chance.randint(1, 400)]))
    for stored, layout in itertools.product(["int8", "coded"], ["latent", "latent_rope"]):
        check_latents(stored, layout, shape, (*cached, chance.choice([(), (0,)])), compiled)


def check_latents(stored: str, layout: str, shape: tuple[int, ...], cached: tuple, compiled) -> None:
    """The kernel writes packed bf16 rows, and attends over the decoded ones, of prompts and of generated tokens. shape:
    heads, KV heads, rank, rotary key; cached: arguments of make_cache after the format."""
    heads, kv_heads, rank, rope = shape
    E = rope if layout == "latent_rope" else 0
    R = rank if stored == "int8" else rank // 8 * 8
    cache = make_cache(latent_format(stored, R, E), *cached)
    format, prompts = cache.format, [s % 2 == 0 for s in range(len(cached[0]))]
    first = latent_layer(format, heads, kv_heads, R, E, len(cache.slots))
    kernel = getattr(compiled, layout)
    before, step = cache.packed.clone(), (*cache.view, prompts, 0.3, None)
    actual = kernel(*first, *cache.rows(decoded=False), cache.slots, *step)

    exact = cache.decoded.clone()
    kernel(*first, exact, None, [0], cache.slots, *step)
    packed = cache.slots < len(cache.packed)
    format.write(before, cache.slots[packed], exact[cache.slots[packed]])
    assert torch.equal(cache.packed, before)
    assert torch.equal(cache.read()[cache.slots[~packed]], exact[cache.slots[~packed]])

    cache.decoded.copy_(cache.read())
    expected = kernel(*first, *cache.rows(decoded=True), cache.spare, *step)
    assert same(actual, expected)


def test_coded_rows(compiled):
    """Planes of every number and length, including a single one, and rows with NaN, tiny values and ties: written as
    defined; and a token that sees only itself gets its row."""
    chance, generator = random.Random(0), torch.Generator().manual_seed(0)
    for _ in range(80):
        eights = [chance.randint(1, chance.choice([1, 9, 24])) for _ in range(chance.randint(1, 11))]
        format, N = Coded(tuple(8 * n for n in sorted(eights, reverse=True)), chance.choice([0, 0, 2, 6, 64])), 12
        x = torch.randn(N, format.width, generator=generator) * 2.0 ** torch.randint(0, 12, (N, 1), generator=generator)
        x[1] = x[1].round() + 0.5
        x[2:5, :: chance.randint(1, 9)] = torch.tensor([torch.nan, torch.inf, -torch.inf])[:, None]
        x[5:8] *= torch.tensor([1e-30, 1e30, 0.0])[:, None]
        rows, slots = format.empty(16 * N, CPU).fill_(255), 16 * torch.randperm(N, generator=generator)
        expected = rows.clone()
        format.write(expected, slots, x.bfloat16())
        turn = torch.ones(N, 1, 1, dtype=torch.complex64)
        compiled.rope_and_store(x.bfloat16(), turn, rows, None, format.descriptor, slots, 0, 2)
        torch.testing.assert_close(
            format.read(rows, slots), format.read(expected, slots), rtol=0, atol=0, equal_nan=True
        )
        # A NaN scale may have any NaN encoding.
        rows[slots[2]] = expected[slots[2]]
        assert torch.equal(rows, expected), format

        table, ones = (slots // 16).int()[:, None], torch.ones(N, dtype=torch.int32)
        view = (table, ones, 0 * ones, torch.arange(N + 1, dtype=torch.int32), 16, 0)
        q = torch.zeros(N, 1, format.width).bfloat16()
        actual, _ = compiled.decode(q, rows, None, format.descriptor, 1, format.width, 0, *view, 1.0, None)
        finite = x.isfinite().all(1)
        assert torch.equal(actual[finite, 0], format.read(rows, slots[finite])), format


@pytest.mark.parametrize(("G", "D"), [(3, 64), (2, 20), (1, 6)])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_rope_and_store(G, D, size, compiled):
    format, N = Int8((D,) * 2 * G), 9
    generator = torch.Generator().manual_seed(1)
    x, angles = (torch.randn(N, (2 + 2 * G) * D, generator=generator) * size).bfloat16(), torch.rand(N, 1, D // 2)
    x[5] = 0
    turn, slots = torch.complex(angles.cos(), angles.sin()), torch.randperm(60, generator=generator)[:N]
    rows, whole = format.empty(30, CPU).fill_(255), torch.full((30, format.width), torch.nan).bfloat16()
    expected, wanted_whole, packed = rows.clone(), whole.clone(), slots < 30
    compiled.rope_and_store(x, turn, rows, whole, format.descriptor, slots, 2 + G, D)
    row = x[:, 2 * D :]
    format.write(expected, slots[packed], row[packed])
    wanted_whole[slots[~packed] - 30] = row[~packed]
    assert torch.equal(rows, expected)
    assert torch.equal(whole.view(torch.int16), wanted_whole.view(torch.int16))


@pairwise({"block_size": [32, 64], "size": [1e-30, 1.0, 1e30], "G,D": [(3, 64), (2, 20), (1, 6)]}, more=0)
def test_blocks_are_packed(block_size, size, G, D, compiled):
    format, units = Int4(G, D), block_size // 32
    whole = (torch.randn(5 * block_size, format.width, generator=torch.Generator().manual_seed(1)) * size).bfloat16()
    whole[:block_size, 1] = 3.0
    whole[7] = 0
    rows = format.empty(4 * units, CPU).fill_(255)
    expected = rows.clone()
    source, target = torch.tensor([4, 8, 5]), torch.tensor([3, 0, 2])
    compiled.pack_blocks(rows, whole, format.descriptor, source, target, block_size)
    at = (target[:, None] * units + torch.arange(units)).flatten()
    format.write(expected, at, whole.view(5, -1)[source - 4].view(-1, format.width))
    assert torch.equal(rows, expected)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("format", [Int8((64, 64)), Int4(1, 64)], ids=["int8", "int4"])
def test_nan_stays_nan(format, bad, compiled):
    x = torch.randn(32, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[3, 5] = x[9, 70] = bad
    rows = format.empty(32 // format.tokens, CPU)
    expected = rows.clone()
    if format.tokens == 1:
        compiled.rope_and_store(x.clone(), torch.ones(32, 1, 32, dtype=torch.complex64), rows, None, format.descriptor,
                                torch.arange(32), 0, 64)  # fmt: skip
    else:
        compiled.pack_blocks(rows, x, format.descriptor, torch.tensor([1]), torch.tensor([0]), 32)
    units = torch.arange(len(rows))
    format.write(expected, units, x)
    torch.testing.assert_close(format.read(rows, units), format.read(expected, units), rtol=0, atol=0, equal_nan=True)


def test_rejects_rows_of_another_size(compiled):
    x, turn, slots = torch.zeros(1, 384).bfloat16(), torch.ones(1, 1, 32, dtype=torch.complex64), torch.zeros(1).long()
    rows = torch.zeros(4, 300, dtype=torch.uint8)
    for format in ([1, *(64,) * 6], [2, 3, 64], [2, 3], [9]):
        with pytest.raises(RuntimeError, match=r"have 396 bytes|have 7296 bytes|are not supported"):
            compiled.rope_and_store(x, turn, rows, None, format, slots, 3, 64)
