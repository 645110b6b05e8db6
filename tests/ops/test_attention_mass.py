"""Attention mass of a step's last query tokens: the fused kernel, the separate kernel and a softmax in fp32 agree, and
recording does not change attention."""

import pytest
import torch

from mlaforge.engine.cache.block_tables import CacheGroup
from mlaforge.engine.cache.view import make_views
from mlaforge.ops.attention_mass import attention_with_mass, probe_attention_mass
from mlaforge.ops.native import kernels
from mlaforge.ops.packed_attention import packed_attention
from mlaforge.ops.paged_attention import paged_attention
from mlaforge.ops.paged_rows import PagedRows
from mlaforge.ops.row_formats.int8 import Int8
from mlaforge.ops.row_formats.plain import Plain

CPU = torch.device("cpu")
H, G, D, SIZE = 6, 2, 16, 16
# (tokens, query tokens) per sequence: decoding, verification, and prompts of many chunks.
SEQUENCES = ((700, 1), (33, 4), (256, 1), (1100, 1100), (513, 12), (300, 60))


class Tables:
    """Block tables of these sequences, with shuffled blocks."""

    block_size = SIZE

    def __init__(self):
        counts = [-(-length // SIZE) for length, _ in SEQUENCES]
        self.order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)).split(counts)
        self.groups = [CacheGroup("rows", sum(counts), None, False, 0)]

    def table(self, seq, group):
        return 0, self.order[seq].tolist()

    def written(self, seq, group):
        return {}


@pytest.mark.skipif(kernels() is None, reason="no kernel keeps anything")
@pytest.mark.parametrize("form", [Plain(2 * G * D, "bfloat16"), Int8((D,) * 2 * G)], ids=str)
@pytest.mark.parametrize("sequences", [[0], [1, 3], [2, 4, 5]], ids=str)
def test_recorded_mass_equals_probed_mass(form, sequences, monkeypatch):
    generator, tables = torch.Generator().manual_seed(0), Tables()
    slots = tables.groups[0].num_blocks * SIZE
    rows = PagedRows.empty(form, slots, torch.bfloat16, CPU, 0)
    numbers = torch.randn(slots, form.width, generator=generator)
    rows.write(torch.arange(slots), numbers.bfloat16())
    (view,) = make_views([(s, length - T, length) for s, (length, T) in enumerate(SEQUENCES)], tables, CPU)
    q = (2 * torch.randn(sum(T for _, T in SEQUENCES), H, D, generator=generator)).bfloat16()
    out, lse, masses = attention_with_mass(q, rows, G, view, 0.3, sequences)
    if rows.direct:
        same = paged_attention(q, *rows.packed.view(-1, 2, G, D).unbind(1), view, 0.3)
    else:
        same = packed_attention(q, rows, view, 0.3)
    assert torch.equal(out, same[0]) and torch.equal(lse, same[1])
    k_LGD = form.read(rows.packed, torch.arange(slots)).float().view(-1, 2, G, D)[:, 0]
    ends = torch.tensor([T for _, T in SEQUENCES]).cumsum(0)
    for s, mass, other in zip(sequences, masses, probe_attention_mass(q, rows, G, view, 0.3, sequences), strict=True):
        length = SEQUENCES[s][0]
        at = (tables.order[s][:, None] * SIZE + torch.arange(SIZE)).flatten()[:length]
        logits = torch.einsum("gjd,lgd->gjl", q[ends[s] - 1].float().view(G, -1, D), k_LGD[at]) * 0.3
        torch.testing.assert_close(mass, logits.softmax(-1).sum((0, 1)), rtol=0.02, atol=1e-3)
        torch.testing.assert_close(mass, other, rtol=0.02, atol=1e-3)
    monkeypatch.setenv("MLAFORGE_OPS", "reference")
    separate = attention_with_mass(q, rows, G, view, 0.3, sequences)
    for actual, expected in zip((out, lse, *masses), (*separate[:2], *separate[2]), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0.03, atol=0.02)
