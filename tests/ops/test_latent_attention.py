"""Compiled kernels of latent attention, from a layer's projections to its heads' outputs."""

import functools
import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mlaforge.ops.decompressed_keys import DecompressedKeys, key_format
from mlaforge.ops.latent_attention import CodeWeights
from mlaforge.ops.native import pack
from mlaforge.ops.paged_attention import paged_attention
from support.packed_caches import NO_CODES, packed_up
from support.paged_steps import DEVICE, Shape, make_step
from support.pairwise import pairwise

pytestmark = [
    pytest.mark.skipif(DEVICE != "cpu", reason="kernels of the CPU"),
    pytest.mark.usefixtures("fresh_memory_is_nan"),
]


SEQUENCES = [[(1, 1), (70, 1), (300, 1)], [(300, 4), (5, 5), (9, 1)], [(40, 40), (300, 200)]]
LONG = [(40, 40), (5000, 20), (300, 200)]
OPTIONS = {
    "window": {"all": None, "window": 40},
    "sinks": {"plain": False, "sinks": True},
    # Which sequences of a step are parts of prompts: the first, third, ... or the others.
    "prompts": ["even", "odd"],
}
NORMS = {"bare": False, "norms": True}


def prompt_flags(prompts: str, sequences: int) -> list[bool]:
    return [(s % 2 == 0) == (prompts == "even") for s in range(sequences)]


@pairwise(
    {
        "sequences": SEQUENCES, "heads,kv_heads,rank,rope": [(9, 3, 128, 64), (4, 2, 40, 8), (16, 1, 66, 32)],
        **OPTIONS,
    }
)  # fmt: skip
def test_latent_rope(sequences, heads, kv_heads, rank, rope, window, sinks, prompts, compiled):
    """Compare with absorbed attention by its definition, in fp32."""
    H, G, D, V, R, E = heads, kv_heads, 16, 24, rank, rope
    step = make_step(Shape(H, 1, R + E, R, aliased=True), sequences, 16, window, dtype=torch.bfloat16)
    generator, view, N = torch.Generator().manual_seed(1), step.view, len(step.q)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    w_uk, w_uv, b_k, b_v = normal(G, D, R).bfloat16() / 4, normal(G, V, R).bfloat16() / 4, normal(G, D), normal(G, V)
    qkv, sink_H = normal(N, H * (D + E) + R + E).bfloat16(), normal(H)
    index, angles = torch.randperm(E, generator=generator)[: E // 2], normal(N, 1, E)
    turn = torch.complex(angles.cos(), angles.sin())
    rows = step.k[:, 0].contiguous()

    def turned(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        cos, sin = angles.cos()[..., index], angles.sin()[..., index]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    out = compiled.latent_rope(
        qkv, turn, index, torch.stack([pack(w.T) for w in w_uk]), packed_up(w_uk, w_uv), b_k, b_v,
        sink_H if sinks else None, rows, None, [0], view.slots_N, view.block_table_SB, view.seq_lens_S, view.first_S,
        view.query_start_S1, view.block_size, view.window or 0, prompt_flags(prompts, len(sequences)), 0.3, None,
    )  # fmt: skip
    q, row = qkv.float().split([H * (D + E), R + E], dim=1)
    wanted_rows = torch.cat((row[:, :R], turned(row[:, None, R:])[:, 0]), dim=1)
    torch.testing.assert_close(rows[view.slots_N].float(), wanted_rows, rtol=2**-8, atol=1e-6)
    nope, rotary = q.view(N, H, D + E).split([D, E], dim=-1)
    nope = nope.unflatten(1, (G, H // G))
    absorbed = torch.cat((torch.einsum("ngjd,gdr->ngjr", nope, w_uk.float()).flatten(1, 2), turned(rotary)), dim=-1)
    keys = rows[:, None].float()
    latent, lse = paged_attention(absorbed, keys, keys[..., :R], view, 0.3, implementation="reference")
    expected = torch.einsum("ngjr,gvr->ngjv", latent.unflatten(1, (G, H // G)), w_uv.float()) + b_v[:, None]
    if sinks:
        shift = torch.einsum("ngjd,gd->ngj", nope, b_k).flatten(1, 2) * 0.3
        expected = expected * torch.sigmoid(lse + shift - sink_H).unflatten(1, (G, H // G))[..., None]
    size = expected.abs().amax()
    torch.testing.assert_close(out.float(), expected.flatten(1), rtol=2e-2, atol=float(1e-2 * size))


@pairwise(
    {
        "block_size": [8, 16, 64], "heads,kv_heads,dim,rank": [(9, 3, 64, 310), (4, 2, 24, 66)], "norms": NORMS,
        "window": {"all": None, "window": 300},
    },
    more=0,
)  # fmt: skip
def test_latent_has_one_result(block_size, heads, kv_heads, dim, rank, norms, window, compiled):
    """A token's result in its form, that of prompts, of generated tokens or of those with selections, whose keys are
    rounded and cached, is bitwise equal for any chunk, alone or with others of all forms, with any shared blocks."""
    H, G, D, V, R, L = heads, kv_heads, dim, 16, rank, 704
    generator, columns = torch.Generator().manual_seed(1), L // block_size

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    queries, angles, rows = normal(L, H * D).bfloat16(), normal(L, D // 2), normal(8 * L, R).bfloat16()
    blocks = torch.randperm(8 * columns, generator=generator).to(torch.int32).view(8, columns)
    norm = (normal(D).bfloat16(), normal(D).bfloat16()) if norms else (None, None)
    w_up = packed_up(normal(G, D, R) / 8, normal(G, V, R))
    biases = normal(G * D).bfloat16(), normal(G, V)
    keys = DecompressedKeys.empty(8 * L, key_format(G, D))

    def attended(readings: list[int], *sequences: tuple[int, int, int, int]) -> tuple[Tensor, ...]:
        """Run sequences (text, length, T, blocks shared with the first text); returns the last T tokens of each."""
        table = torch.stack(
            [torch.cat((blocks[0, :shared], blocks[text, shared:])) for text, _, _, shared in sequences]
        )
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
        qkv = torch.cat((queries[torch.cat(tokens)], rows[slots]), dim=1)
        out = compiled.latent(
            qkv, angles.cos(), angles.sin(), w_up, *NO_CODES, *biases, *norm, 1e-5, None, rows, None, [0], slots,
            table, *numbers, block_size, window or 0, readings, 0.05, None, None,
            keys.keys, keys.metadata,
        )  # fmt: skip
        assert out.isfinite().all()
        return out.split(queried)

    @functools.cache
    def whole(reading: int, text: int, shared: int) -> Tensor:
        return attended([reading], (text, L, L, shared))[0]

    for reading, length in itertools.product(range(3), (1, 33, 256, 300, 700)):
        assert torch.equal(attended([reading], (0, length, 1, 0))[0], whole(reading, 0, 0)[length - 1 : length])
    assert not torch.equal(whole(0, 0, 0), whole(2, 0, 0))
    steps = [
        [(0, 700, 1, 0), (1, 690, 2, 0), (2, 300, 1, 0), (3, 64, 1, 0)],
        [(0, 700, 1, 0), (1, 690, 2, 40), (2, 700, 1, 20), (3, 64, 1, 2), (4, 300, 1, 1), (5, 700, 1, 5)],
        [(0, 640, 40, 0), (1, 700, 1, 70), (2, 690, 30, 30), (3, 650, 30, 9), (4, 300, 100, 2), (5, 300, 3, 0)],
    ]
    chance = random.Random(f"{block_size} {norms} {window}")
    for sequences in steps:
        # All forms in every step, from another one on.
        first = chance.randrange(3)
        readings = [(first + s) % 3 for s in range(len(sequences))]
        for (text, length, T, shared), reading, actual in zip(
            sequences, readings, attended(readings, *sequences), strict=True
        ):
            assert torch.equal(actual, whole(reading, text, shared)[length - T : length])
    assert bool((keys.metadata[: 8 * L] >= 0).any())


@pairwise(
    {
        "sequences": [*SEQUENCES[:2], LONG], "heads,kv_heads,rank": [(9, 3, 128), (4, 2, 40), (16, 1, 66)],
        "norms": NORMS, **OPTIONS,
    }
)  # fmt: skip
def test_latent(sequences, heads, kv_heads, rank, window, norms, sinks, prompts, compiled):
    """Compare with attention over decompressed keys by its definition."""
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
    qkv, sink_H, angles = normal(N, H * D + R).bfloat16(), normal(H), normal(max(view.max_seq_len, 1), D // 2)
    q_norm, k_norm = (normal(D).bfloat16(), normal(D).bfloat16()) if norms else (None, None)
    b_k = b_k.bfloat16()
    rows = step.k[:, 0].contiguous()
    out = compiled.latent(
        qkv, angles.cos(), angles.sin(), packed_up(w_uk, w_uv), *NO_CODES, b_k.flatten(), b_v, q_norm, k_norm, 1e-5,
        sink_H if sinks else None, rows, None, [0], view.slots_N, view.block_table_SB, view.seq_lens_S, view.first_S,
        view.query_start_S1, view.block_size, view.window or 0, prompt_flags(prompts, len(sequences)), 0.3, None,
    )  # fmt: skip
    q, c = qkv.float().split([H * D, R], dim=1)
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
    expected = torch.einsum("ngjr,gvr->ngjv", latent.unflatten(1, (G, H // G)), w_uv.float()) + b_v[:, None]
    if sinks:
        expected = expected * torch.sigmoid(lse - sink_H).unflatten(1, (G, H // G))[..., None]
    size = expected.abs().amax()
    torch.testing.assert_close(out.float(), expected.flatten(1), rtol=3e-2, atol=float(1.5e-2 * size))


# Coordinates with at least 1, 2, ... bits: none, some and all with more than 8.
COUNTS = {
    "narrow": (104, 40),
    "some wide": (352, 352, 320, 288, 224, 192, 96, 96, 72, 32),
    "all wide": (40,) * 11,
}


def drawn_codes(counts, rows, generator):
    """Codes of latents, with the least and the greatest of each coordinate among them."""
    half_R = 2 ** (torch.tensor([sum(count > r for count in counts) for r in range(counts[0])]) - 1)
    codes = (torch.rand(rows, counts[0], generator=generator) * 2 * half_R).long() - half_R
    codes[0], codes[1] = -half_R, half_R - 1
    return codes


@given(st.sampled_from([*COUNTS]), st.integers(1, 40), st.integers(0, 99), st.sampled_from([1e-30, 1e-3, 1e4]))
def test_code_weights_are_rounded_to_nearest_and_offsets_undo_unsigned_bytes(counts, outputs, seed, size):
    counts, generator = COUNTS[counts], torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, counts[0], generator=generator) * size
    weight[0] = 0
    codes = CodeWeights.of(weight, counts)
    rounded = codes.unpacked()
    assert ((rounded[:outputs, : counts[0]] - weight).abs() <= weight.abs().amax(1, keepdim=True) / 253).all()
    integers, K = (rounded / codes.scales[:, None]).round().long(), rounded.shape[1]
    assert not integers[outputs:].any() and not integers[:, counts[0] :].any()
    latents = torch.nn.functional.pad(drawn_codes(counts, 8, generator), (0, K - counts[0]))
    wide = codes.wide_steps * 64
    unsigned = latents + torch.where(torch.arange(K) < wide, 1088, 128)
    low, high = unsigned.clone(), torch.zeros_like(unsigned)
    low[:, :wide], high[:, :wide] = unsigned[:, :wide] & 127, unsigned[:, :wide] >> 7
    assert low.max() <= 255 and low.min() >= 0 and high.max() <= 31 and high.min() >= 0
    sums = low @ integers.T + 128 * (high @ integers.T) + codes.offsets.long()
    assert torch.equal(sums, latents @ integers.T) and sums.abs().max() < 2**31


@pytest.mark.parametrize("counts", [*COUNTS])
@pytest.mark.parametrize("prompt", [True, False], ids=["prompt", "generated"])
def test_codes_are_multiplied_as_bytes(counts, prompt, compiled, request):
    """Keys of coded latents come from `codes` alone where the processor multiplies bytes: W_uk in w_up is NaN."""
    H, G, D, V, counts, L = 4, 2, 16, 16, COUNTS[counts], 40
    generator = torch.Generator().manual_seed(2)
    R = counts[0]
    w_uk, w_uv = (torch.randn(G, X, R, generator=generator) for X in (D, V))
    rows = torch.zeros(L + 8, R).bfloat16()
    rows[:L] = drawn_codes(counts, L, generator).bfloat16()
    up = packed_up(w_uk, w_uv)
    codes = NO_CODES
    if "avx2" not in request.node.callspec.params["compiled"]:
        codes = CodeWeights.of(w_uk.flatten(0, 1), counts).arguments
        up[: G * D // 16] = torch.nan
    slots, numbers = torch.arange(L - 1, L), [torch.tensor(x, dtype=torch.int32) for x in ([L], [0], [0, 1])]
    table = torch.arange((L + 8) // 8, dtype=torch.int32)[None]
    qkv = torch.cat((torch.randn(1, H * D, generator=generator) * 1e-3, rows[L - 1 : L]), dim=1).bfloat16()
    angles = torch.zeros(L, D // 2)
    out = compiled.latent(
        qkv, angles.cos(), angles.sin(), up, *codes, torch.zeros(G * D).bfloat16(), torch.zeros(G, V), None, None, 0.0,
        None, rows, None, [0], slots, table, *numbers, 8, 0, [prompt], 1.0, None,
    )  # fmt: skip
    c = rows[:L].float()
    q = qkv[0, : H * D].float().view(G, H // G, D)
    weights = torch.einsum("gjd,lgd->gjl", q, torch.einsum("lr,gdr->lgd", c, w_uk)).softmax(-1)
    expected = torch.einsum("gjl,lgv->gjv", weights, torch.einsum("lr,gvr->lgv", c, w_uv))
    size = expected.abs().amax()
    torch.testing.assert_close(out.float().view(G, H // G, V), expected, rtol=3e-2, atol=float(3e-2 * size))
