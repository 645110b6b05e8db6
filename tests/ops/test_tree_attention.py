"""Trees of drafted tokens in the compiled kernels: each node's result is bitwise equal to decoding the newest token of
a text that ends with the node's path, from a contiguous cache. Unwritten rows are NaN, to detect reads of other
branches and of rows after a node."""

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from mlaforge.engine.speculation.drafter import ancestry
from mlaforge.ops.row_formats.format import RowFormat
from mlaforge.ops.row_formats.int8 import Int8
from support.packed_caches import Cache, latent_format, latent_layer, make_cache
from support.pairwise import pairwise

# Rows of text before a tree of up to 24: none, some, and such that a chunk of 256 ends before, at or in the tree.
BEFORE = [0, 37, 241, 256, 505, 700]
WINDOWS = {"all": None, "narrow": 5, "middle": 40, "wide": 300}


def random_tree(chance: random.Random) -> Tensor:
    """A random CacheView.tree_Tn: deep or bushy, sometimes with several roots."""
    nodes = chance.randint(2, 24)
    near = chance.choice([1, 3, nodes])
    parents = [
        chance.randint(max(0, at - near), at - 1) if at and chance.random() > 0.05 else -1 for at in range(nodes)
    ]
    return torch.tensor(ancestry(parents), dtype=torch.int32)


def texts(
    format: RowFormat, block_size: int, window: int | None, whole: tuple[int, ...] = ()
) -> Iterator[tuple[Cache, Tensor]]:
    """Yield caches whose last rows are a tree's, all packed."""
    chance = random.Random(window or 0)
    for before in BEFORE:
        tree_Tn = random_tree(chance)
        cache = make_cache(format, [(before + len(tree_Tn), len(tree_Tn))], block_size, window, whole)
        if int(cache.slots.max()) < len(cache.packed):
            yield cache, tree_Tn


def some_nodes(tree_Tn: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield at most eight nodes, the first and the last among them, and their rows of the tree."""
    last = len(tree_Tn) - 1
    inner = random.Random(last).sample(range(1, last), min(6, max(0, last - 1)))
    for m in sorted({0, *inner, last}):
        yield m, tree_Tn[m]


def decoding(cache: Cache, rows: tuple, back: Tensor) -> tuple[tuple, Tensor, tuple]:
    """Of one node: a cache with its path contiguous after the text, its slot, and its view."""
    table, lengths, first, _, block_size, window = cache.view
    path = cache.slots[back.argsort(descending=True)[: int(back.max()) + 1]]
    end = lengths - len(back) + len(path)
    at = torch.arange(int(end) - len(path), int(end)) - first
    slots = table[0, at // block_size].long() * block_size + at % block_size
    stored = rows[0].clone()
    stored[cache.slots] = 255 if stored.dtype == torch.uint8 else torch.nan
    stored[slots] = rows[0][path]
    view = (table, end, first, torch.tensor([0, 1], dtype=torch.int32), block_size, window)
    return (stored, *rows[1:]), slots[-1:], view


@pairwise(
    {
        "stored": ["bf16", "int8", "int8-first-whole"], "window": WINDOWS,
        # Block sizes that are not multiples of 16, complete trees in one task, tokens with more heads than a task has
        # columns.
        "heads,kv_heads,dim,block_size": [
            (9, 3, 64, 16), (4, 1, 80, 32), (6, 2, 20, 8), (2, 2, 32, 64), (72, 8, 16, 16), (130, 1, 16, 16),
        ],
    },
    more=0,
)  # fmt: skip
def test_grouped_queries(heads, kv_heads, dim, block_size, stored, window, compiled):
    H, G, D = heads, kv_heads, dim
    q_THD = torch.randn(24, H, D, generator=torch.Generator().manual_seed(1)).bfloat16()
    for cache, tree_Tn in texts(Int8((D,) * 2 * G), block_size, window, (0,) if "whole" in stored else ()):
        rows = cache.rows(decoded=stored == "bf16")

        def attend(q, rows, view, tree):
            return compiled.decode(q, *rows, G, D, G * D, *view, 0.3, tree)

        actual, lses = attend(q_THD[: len(tree_Tn)], rows, cache.view, tree_Tn)
        for m, back in some_nodes(tree_Tn):
            straight, _, view = decoding(cache, rows, back)
            expected, lse = attend(q_THD[m : m + 1], straight, view, None)
            assert expected.isfinite().all()
            assert torch.equal(actual[m], expected[0]) and torch.equal(lses[m], lse[0]), (cache.view[1:], back)
        # While a draft head grows the tree, only the newest nodes are queries.
        T = (len(tree_Tn) + 1) // 2
        view = (*cache.view[:3], torch.tensor([0, T], dtype=torch.int32), *cache.view[4:])
        newest = slice(len(tree_Tn) - T, len(tree_Tn))
        part, part_lses = attend(q_THD[newest], rows, view, tree_Tn[newest].contiguous())
        assert torch.equal(part, actual[newest]) and torch.equal(part_lses, lses[newest])


@pairwise(
    {
        "stored": ["bf16", "int8", "coded"], "layout": ["latent", "latent_rope"], "window": WINDOWS,
        "heads,kv_heads,rank,rope,block_size": [
            (9, 3, 128, 64, 16), (4, 2, 40, 8, 8), (16, 1, 72, 32, 32), (72, 8, 32, 16, 16),
        ],
    },
    more=0,
)  # fmt: skip
def test_latents(layout, heads, kv_heads, rank, rope, block_size, stored, window, compiled):
    E = rope if layout == "latent_rope" else 0
    kernel = getattr(compiled, layout)
    for cache, tree_Tn in texts(latent_format("int8" if stored == "bf16" else stored, rank, E), block_size, window):
        qkv, *layer = latent_layer(cache.format, heads, kv_heads, rank, E, len(tree_Tn))
        rows = cache.rows(decoded=stored == "bf16")
        actual = kernel(qkv, *layer, *rows, cache.slots, *cache.view, [False], 0.3, tree_Tn)
        for m, back in some_nodes(tree_Tn):
            straight, slot, view = decoding(cache, rows, back)
            # The kernel writes the newest token's row itself.
            straight[0][slot] = 255 if straight[0].dtype == torch.uint8 else torch.nan
            inputs = [layer[0][m : m + 1], *layer[1:]] if E else layer
            expected = kernel(qkv[m : m + 1], *inputs, *straight, slot, *view, [False], 0.3, None)
            assert expected.isfinite().all()
            assert torch.equal(actual[m], expected[0]), (cache.view[1:], back)


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("before", [0, 256, 300])
def test_scratch_may_hold_anything(before, window, compiled):
    """Keys of a path's rows are copied to scratch, whose stale contents must not affect results."""
    H, G, D, T = 6, 2, 16, 5
    q_THD, format = torch.randn(T, H, D, generator=torch.Generator().manual_seed(1)).bfloat16(), Int8((D,) * 2 * G)
    broken, cache = make_cache(format, [(300, 1)], 16, whole=(0,)), make_cache(format, [(before + T, T)], 16, window)
    broken.packed[:, format.width + 2 * G : format.width + 4 * G] = 255  # scales of values
    tree_Tn = torch.tensor(ancestry([-1, 0, 1, 2, 3]), dtype=torch.int32)

    def attend(q, cache, decoded, tree):
        return compiled.decode(q, *cache.rows(decoded), G, D, G * D, *cache.view, 0.3, tree)[0]

    expected = attend(q_THD, cache, True, tree_Tn)
    assert attend(q_THD[:1], broken, False, None).isnan().all()
    assert expected.isfinite().all() and torch.equal(attend(q_THD, cache, True, tree_Tn), expected)
