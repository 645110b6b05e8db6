"""A tree of drafted tokens through the compiled kernels: what every node gets is, to the bit, what decoding gives the
newest token of a text that ends with the node's path, from a cache that has this text row after row.

What nobody wrote is NaN, so rows of other branches and those behind a node's own would show.
"""

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from mlaforge.engine.speculation.drafter import ancestry
from mlaforge.ops.row_format import Int8, RowFormat
from support.packed_caches import Cache, latent_format, latent_layer, make_cache

# Rows of text before a tree of up to 24: none, some, and so many that a chunk of 256 ends before, at or in the tree.
BEFORE = [0, 37, 241, 256, 505, 700]
WINDOWS = [None, 5, 40, 300]


def random_tree(chance: random.Random) -> Tensor:
    """CacheView.tree_Tn: a deep one, a bushy one or between; now and then with several roots."""
    nodes = chance.randint(2, 24)
    near = chance.choice([1, 3, nodes])
    parents = [
        chance.randint(max(0, at - near), at - 1) if at and chance.random() > 0.05 else -1 for at in range(nodes)
    ]
    return torch.tensor(ancestry(parents), dtype=torch.int32)


def texts(format: RowFormat, block_size: int, whole: tuple[int, ...] = ()) -> Iterator[tuple[Cache, Tensor]]:
    """Caches whose last rows are a tree's, all of them packed."""
    chance = random.Random(0)
    for window in WINDOWS:
        for before in BEFORE:
            tree_Tn = random_tree(chance)
            cache = make_cache(format, [(before + len(tree_Tn), len(tree_Tn))], block_size, window, whole)
            if int(cache.slots.max()) < len(cache.packed):
                yield cache, tree_Tn


def decoding(cache: Cache, rows: tuple, back: Tensor) -> tuple[tuple, Tensor, tuple]:
    """Of one node: rows among which its path lies one after another behind the text, its slot, and what it sees."""
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


@pytest.mark.parametrize("stored", ["bf16", "int8", "int8-first-whole"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size"),
    # Among them a block of no sixteen rows, whole trees in one task, and tokens of more heads than a task has columns.
    [(9, 3, 64, 16), (4, 1, 80, 32), (6, 2, 20, 8), (2, 2, 32, 64), (72, 8, 16, 16), (130, 1, 16, 16)],
)
def test_grouped_queries(heads, kv_heads, dim, block_size, stored, compiled):
    H, G, D = heads, kv_heads, dim
    q_THD = torch.randn(24, H, D, generator=torch.Generator().manual_seed(1)).bfloat16()
    for cache, tree_Tn in texts(Int8((D,) * 2 * G), block_size, (0,) if "whole" in stored else ()):
        rows = cache.rows(decoded=stored == "bf16")

        def attend(q, rows, view, tree):
            return compiled.decode(q, *rows, G, D, G * D, *view, 0.3, tree)

        found, lses = attend(q_THD[: len(tree_Tn)], rows, cache.view, tree_Tn)
        for m, back in enumerate(tree_Tn):
            straight, _, view = decoding(cache, rows, back)
            wanted, lse = attend(q_THD[m : m + 1], straight, view, None)
            assert wanted.isfinite().all()
            assert torch.equal(found[m], wanted[0]) and torch.equal(lses[m], lse[0]), (cache.view[1:], back)
        # Where a head grows the tree, only the newest nodes ask.
        T = (len(tree_Tn) + 1) // 2
        asked = (*cache.view[:3], torch.tensor([0, T], dtype=torch.int32), *cache.view[4:])
        newest = slice(len(tree_Tn) - T, len(tree_Tn))
        part, part_lses = attend(q_THD[newest], rows, asked, tree_Tn[newest].contiguous())
        assert torch.equal(part, found[newest]) and torch.equal(part_lses, lses[newest])


@pytest.mark.parametrize("stored", ["bf16", "int8", "coded"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "rank", "rope", "block_size"),
    [(9, 3, 128, 64, 16), (4, 2, 40, 8, 8), (16, 1, 72, 32, 32), (72, 8, 32, 16, 16)],
)
@pytest.mark.parametrize("layout", ["latent", "latent_rope"])
def test_latents(layout, heads, kv_heads, rank, rope, block_size, stored, compiled):
    E = rope if layout == "latent_rope" else 0
    kernel = getattr(compiled, layout)
    for cache, tree_Tn in texts(latent_format("int8" if stored == "bf16" else stored, rank, E), block_size):
        both, *layer = latent_layer(heads, kv_heads, rank, E, len(tree_Tn))
        rows = cache.rows(decoded=stored == "bf16")
        found = kernel(both, *layer, *rows, cache.slots, *cache.view, 0.3, tree_Tn)
        for m, back in enumerate(tree_Tn):
            straight, slot, view = decoding(cache, rows, back)
            # The kernel writes the newest token's own row itself.
            straight[0][slot] = 255 if straight[0].dtype == torch.uint8 else torch.nan
            own = [layer[0][m : m + 1], *layer[1:]] if E else layer
            wanted = kernel(both[m : m + 1], *own, *straight, slot, *view, 0.3, None)
            assert wanted.isfinite().all()
            assert torch.equal(found[m], wanted[0]), (cache.view[1:], back)


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("before", [0, 256, 300])
def test_scratch_may_hold_anything(before, window, compiled):
    """Of a path's rows the keys are copied to scratch, where values of another step may be: they are in no result."""
    H, G, D, T = 6, 2, 16, 5
    q_THD, format = torch.randn(T, H, D, generator=torch.Generator().manual_seed(1)).bfloat16(), Int8((D,) * 2 * G)
    broken, cache = make_cache(format, [(300, 1)], 16, whole=(0,)), make_cache(format, [(before + T, T)], 16, window)
    broken.packed[:, format.width + 2 * G : format.width + 4 * G] = 255  # scales of values
    tree_Tn = torch.tensor(ancestry([-1, 0, 1, 2, 3]), dtype=torch.int32)

    def attend(q, cache, decoded, tree):
        return compiled.decode(q, *cache.rows(decoded), G, D, G * D, *cache.view, 0.3, tree)[0]

    wanted = attend(q_THD, cache, True, tree_Tn)
    assert attend(q_THD[:1], broken, False, None).isnan().all()
    assert wanted.isfinite().all() and torch.equal(attend(q_THD, cache, True, tree_Tn), wanted)
