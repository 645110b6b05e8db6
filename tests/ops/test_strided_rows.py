"""Compiled kernels on rows that lie apart, as in vLLM's cache, which has the rows of all layers side by side: results
and written rows are bitwise those of contiguous rows, and nothing is written between them."""

import pytest
import torch

from mlaforge.ops.paged_attention import paged_attention
from mlaforge.ops.paged_rows import PagedRows, native_supports
from mlaforge.ops.row_formats.int4 import Int4
from mlaforge.ops.row_formats.int8 import Int8
from support.packed_caches import apart, latent_format, latent_layer, make_cache
from support.paged_steps import Shape, make_step
from support.pairwise import pairwise

SEQUENCES = {"decoded": [(5, 1), (300, 1), (700, 1)], "prompts": [(300, 4), (9, 1), (600, 130)]}
TREE = torch.tensor([[0, -1, -1], [1, 0, -1], [1, -1, 0]], dtype=torch.int32)


def check(kernel, rows, *step):
    """`kernel` writes to the rows that it reads, or leaves them as they are."""
    packed, unquantized, descriptor = rows
    inside, gaps = apart(packed, 24)
    assert not inside.is_contiguous()
    expected, actual = kernel(packed, unquantized, descriptor, *step), kernel(inside, unquantized, descriptor, *step)
    expected, actual = ((x if isinstance(x, tuple) else (x,)) for x in (expected, actual))
    for wanted, x in zip(expected, actual, strict=True):
        assert bool(wanted.isfinite().all()) and torch.equal(x, wanted)
    assert torch.equal(inside.view(torch.uint8), packed.view(torch.uint8)) and bool((gaps == 99).all())


@pairwise(
    {
        "stored": ["bf16", "int8", "int4"], "shape": {"smollm2": (9, 3, 64), "no-whole-vector": (6, 2, 20)},
        "sequences": SEQUENCES, "block_size": [32, 40], "tree": {"tree": True, "no-tree": False},
    },
    more=0,
)  # fmt: skip
def test_decode(stored, shape, sequences, block_size, tree, compiled):
    if stored == "int4" and block_size % 32:
        block_size = 64
    H, G, D = shape
    sequences = [(300, 3)] if tree else sequences
    cache = make_cache(Int4(G, D) if stored == "int4" else Int8((D,) * 2 * G), sequences, block_size)
    q = torch.randn(len(cache.slots), H, D, generator=torch.Generator().manual_seed(1)).bfloat16()
    step = (G, D, G * D, *cache.view, 0.3, TREE if tree else None)
    check(lambda *x: compiled.decode(q, *x), cache.rows(stored == "bf16"), *step)


@pytest.mark.parametrize("layout", ["latent", "latent_rope"])
@pytest.mark.parametrize("stored", ["bf16", "int8", "coded"])
def test_latents(stored, layout, compiled):
    H, G, R, E = 4, 2, 40, 8 if layout == "latent_rope" else 0
    cache = make_cache(latent_format("int8" if stored == "bf16" else stored, R, E), [(300, 4), (9, 1), (400, 90)], 16)
    first = latent_layer(cache.format, H, G, R, E, len(cache.slots))
    step = (cache.slots, *cache.view, [True, False, True], 0.3, None)
    if stored != "bf16":
        assert native_supports(PagedRows(cache.format, apart(cache.packed, 24)[0], torch.bfloat16)) is True
    check(lambda *x: getattr(compiled, layout)(*first, *x), cache.rows(stored == "bf16"), *step)


def test_keys_and_values_at_the_end_of_a_row(compiled):
    """The last row ends with the memory."""
    step = make_step(Shape(4, 2, 32, 32), [(300, 4), (9, 1)], 16, None, dtype=torch.bfloat16)
    L = len(step.k)
    rows = torch.cat((torch.full((L, 24), 99), step.k.flatten(1), step.v.flatten(1)), dim=1).bfloat16()
    keys, values = rows[:, 24:].view(L, 2, 2, 32).unbind(1)
    expected = paged_attention(
        step.q, keys.contiguous(), values.contiguous(), step.view, 0.3, implementation="reference"
    )
    actual = paged_attention(step.q, keys, values, step.view, 0.3, implementation="native")
    for x, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(x.float(), wanted.float(), rtol=2e-2, atol=2e-2)
