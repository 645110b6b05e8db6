"""Attention to a row is bitwise independent of block sizes, down to single rows, the blocks of partial views and of
selections. The AMX kernels take 16 consecutive rows as a tile, and windows may begin within 16 rows."""

import itertools
import random
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from mlaforge.engine.speculation.drafter import ancestry
from mlaforge.ops.row_formats.format import RowFormat
from mlaforge.ops.row_formats.int4 import Int4
from mlaforge.ops.row_formats.int8 import Int8
from support.kernel_forms import EVERY_FORM
from support.packed_caches import Cache, latent_format, latent_layer, make_cache, regrouped
from support.pairwise import pairwise

WINDOWS = {"all": None, "narrow": 5, "wide": 300}
pytestmark = pytest.mark.parametrize("compiled", EVERY_FORM, indirect=True, scope="module")
# Decoding, verification and prompts, shorter and longer than a chunk of 256; and the text before a tree.
CHAINS = [[(1, 1), (70, 1), (700, 9)], [(300, 4), (5, 5), (513, 1)], [(40, 40), (600, 70)], [(600, 3)]]
BEFORE = [0, 37, 241, 505]
# Single rows, and in turn the other sizes.
SIZES = [(1, 4), (1, 8), (1, 16)]

Attend = Callable[[Cache, Tensor | None], tuple[Tensor, ...]]


def steps(format: RowFormat, window: int | None, whole: tuple[int, ...]) -> Iterator[tuple[Cache, Tensor | None]]:
    """Yield steps over caches in blocks of 16 (or of a unit): chains, then trees of drafted tokens."""
    chance, size = random.Random(window or 0), max(16, format.tokens)
    for sequences in CHAINS:
        yield make_cache(format, sequences, size, window, whole), None
    for before in BEFORE:
        nodes = chance.randint(2, 24)
        parents = [chance.randint(max(-1, at - 3), at - 1) for at in range(nodes)]
        cache = make_cache(format, [(before + nodes, nodes)], size, window, whole)
        yield cache, torch.tensor(ancestry(parents), dtype=torch.int32)


def differing(attend: Attend, format: RowFormat, window: int | None, whole: tuple[int, ...] = ()) -> list[str]:
    """List the steps for which `attend` gives different bits when the same rows are in other blocks."""
    mismatches = []
    for (cache, tree_Tn), sizes in zip(steps(format, window, whole), itertools.cycle(SIZES), strict=False):
        # Copies, because `attend` may write rows.
        others = [regrouped(cache, size) for size in sizes]
        expected = attend(cache, tree_Tn)
        assert all(bool(x.isfinite().all()) for x in expected)
        for other in others:
            _, lengths, _, starts, size, window = other.view
            if not all(map(torch.equal, attend(other, tree_Tn), expected)):
                tokens = "a tree" if tree_Tn is not None else starts.diff().tolist()
                mismatches.append(f"blocks of {size}: {tokens} of {lengths.tolist()}, window {window}")
    return mismatches


@pairwise(
    {
        "stored": ["bf16", "int8", "int8-first-whole", "int4"],
        "heads,kv_heads,dim": [(9, 3, 64), (6, 2, 20), (4, 4, 6), (72, 8, 16)], "window": WINDOWS,
    },
    more=0,
)  # fmt: skip
def test_grouped_queries(heads, kv_heads, dim, stored, window, compiled):
    H, G, D = heads, kv_heads, dim
    format, whole = Int4(G, D) if stored == "int4" else Int8((D,) * 2 * G), (0,) if "whole" in stored else ()
    q_NHD = torch.randn(128, H, D, generator=torch.Generator().manual_seed(1)).bfloat16()

    def attend(cache: Cache, tree_Tn: Tensor | None) -> tuple[Tensor, ...]:
        table, lengths, _, starts, size, window = cache.view
        q, rows = q_NHD[: len(cache.slots)], cache.rows(stored == "bf16")
        inputs = (q, *rows, G, D, G * D, *cache.view, 0.3, tree_Tn)
        actual = compiled.decode(*inputs)
        if window or tree_Tn is not None:
            return actual
        # Attention mass: recorded by attention, and by the separate kernel.
        *same, mass = compiled.decode_with_mass(*inputs, list(range(len(table))))
        assert all(map(torch.equal, same, actual))
        return *actual, mass, compiled.attention_mass(q[starts[1:].long() - 1], *rows, G, table, lengths, size, 0.3)

    assert not differing(attend, format, window, whole)


@pairwise(
    {
        "stored": ["bf16", "int8", "coded"], "layout": ["latent", "latent_rope"],
        "heads,kv_heads,rank,rope": [(9, 3, 128, 64), (4, 2, 40, 8), (72, 8, 32, 16)], "window": WINDOWS,
    },
    more=0,
)  # fmt: skip
def test_latents(layout, heads, kv_heads, rank, rope, stored, window, compiled):
    E = rope if layout == "latent_rope" else 0
    format, kernel = latent_format("int8" if stored == "bf16" else stored, rank, E), getattr(compiled, layout)

    def attend(cache: Cache, tree_Tn: Tensor | None) -> tuple[Tensor, ...]:
        layer = latent_layer(format, heads, kv_heads, rank, E, len(cache.slots))
        sequences, size = len(cache.view[1]), cache.view[4]
        inputs, ending = (*layer, *cache.rows(stored == "bf16"), cache.slots, *cache.view), (0.3, tree_Tn)
        prompts = kernel(*inputs, [1] * sequences, *ending) if tree_Tn is None else torch.empty(0)
        actual = kernel(*inputs, [0] * sequences, *ending)
        if layout == "latent_rope" or cache.view[5]:
            return actual, prompts
        # Tokens with selections, here of all tokens, read rounded keys; the second run reads cached ones, of all tokens
        # or of as many as there are entries for.
        slots, positions = len(cache.decoded), None
        if size == 1 and sequences == 1:
            positions = torch.arange(int(cache.view[1]), dtype=torch.int32)[None]
        rounded = []
        for entries in (slots, 5, 0):
            keys = Int8((layer[8].numel() // kv_heads,) * kv_heads).empty(entries, torch.device("cpu"))
            metadata = torch.full((slots + entries + 1,), -1, dtype=torch.int32)
            metadata[-1] = 0
            for _ in range(2):
                rounded.append(kernel(*inputs, [2] * sequences, *ending, positions, keys, metadata))
                assert torch.equal(rounded[-1], rounded[0])
        return actual, prompts, rounded[0]

    assert not differing(attend, format, window)
