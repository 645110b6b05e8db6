"""Forests of drafted tokens, as indices of parents, and attention of their nodes."""

import torch
from hypothesis import strategies as st

from mlaforge.engine.cache.block_tables import BlockTables, CacheGroup
from mlaforge.engine.execution.batch import Chunk, make_batch
from mlaforge.engine.speculation.drafter import ancestry
from mlaforge.ops.paged_attention import OP

# Parents before children, -1 for a root.
forests = st.lists(st.integers(-1, 30), min_size=1, max_size=12).map(
    lambda parents: [min(parent, at - 1) for at, parent in enumerate(parents)]
)


def path(parents, node):
    """Nodes from the root to `node`."""
    nodes = []
    while node >= 0:
        nodes.append(node)
        node = parents[node]
    return nodes[::-1]


class Nodes:
    """The last `queries` nodes of a forest after `before` tokens, as when a head grows a tree; random rows and queries,
    and NaN where no row was written."""

    def __init__(self, parents, before, window, block_size, queries, heads):
        self.parents, self.before, self.heads = parents, before, heads
        H, G, D, self.value_dim = heads
        n, self.T = len(parents), min(queries, len(parents))
        self.window, tables = window, BlockTables([CacheGroup("it", 60, window)], block_size)
        tables.start(0, [])
        for computed in (before, before + n):
            tables.reserve(0, computed)
            if computed == before:
                tables.commit(0, list(range(before)), before)
        chunk = Chunk(0, range(400), before + n - self.T, before + n, ancestry(parents)[n - self.T :])
        self.batch = make_batch([chunk], tables, torch.device("cpu"))
        (self.view,) = self.batch.views
        self.first, blocks = tables.table(0, 0)
        self.slots = [blocks[(p - self.first) // block_size] * block_size + (p - self.first) % block_size
                      for p in range(self.first, before + n)]  # fmt: skip
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.full((60 * block_size, G, D), torch.nan)
        self.rows[self.slots] = torch.randn(len(self.slots), G, D, generator=generator)
        self.q = torch.randn(self.T, H, D, generator=generator)

    def attend(self, implementation):
        values = self.rows[..., : self.value_dim]
        return OP(self.q, self.rows, values, self.view, 0.3, implementation=implementation)

    def check(self, results, tolerance):
        """Compare (out, lse) of implementations with attention to each node's path and the tokens before it."""
        H, G, _, V = self.heads
        for t, node in enumerate(range(len(self.parents) - self.T, len(self.parents))):
            line = [*range(self.before), *(self.before + at for at in path(self.parents, node))]
            line = line[-self.window if self.window else None :]
            keys = self.rows[[self.slots[p - self.first] for p in line]].double().repeat_interleave(H // G, dim=1)
            scores = torch.einsum("hd,lhd->hl", self.q[t].double(), keys) * 0.3
            expected = torch.einsum("hl,lhv->hv", scores.softmax(-1), keys[..., :V])
            for name, (out, lse) in results.items():
                torch.testing.assert_close(out[t].double(), expected, atol=tolerance, rtol=tolerance, msg=name)
                torch.testing.assert_close(lse[t].double(), scores.logsumexp(-1), atol=tolerance, rtol=0.0, msg=name)
