"""Plain decoding as the reference of speculation: tokens, rows in the cache, and what is published as a prefix."""

import torch

from mlaforge.engine.cache.block_pool import block_digests
from support.engine_driver import greedy, renew
from support.speculating import tokens


class Plain:
    """Plain decoding of `new` tokens on an engine that never speculates, and the cache's rows of a text of at most
    `longest` tokens, each computed once. oracle: checks tokens up to ties; None where they must be equal."""

    def __init__(self, llm, oracle, longest, new):
        self.llm, self.oracle, self.new, self.known, self.rows = llm, oracle, new, {}, {}
        renew(llm.engine, 10, longest, block_size=16, max_step=64, caching=False)

    def continuation(self, prompt):
        key = tuple(prompt)
        if key not in self.known:
            self.known[key] = tokens(self.llm.generate([prompt], greedy(self.new))[0])[0]
        return self.known[key]

    def check(self, prompt, got):
        if self.oracle is not None:
            self.oracle.check(prompt, got, len(got))
        else:
            assert got == self.continuation(prompt)[: len(got)]

    def rows_of(self, text):
        """[tokens, numbers of all layers with full attention]"""
        key = tuple(text)
        if key not in self.rows:
            engine = self.llm.engine
            engine.add("text", text, greedy(2))
            while not (engine.scheduler.running and engine.scheduler.running[0].decoding):
                engine.step()
            blocks = engine.tables.table(engine.scheduler.running[0].number, 0)[1]
            self.rows[key] = torch.cat([rows_in(engine, block) for block in blocks])[: len(text)]
            engine.abort("text")
        return self.rows[key]


def rows_in(engine, block):
    """[block size, numbers of all layers with full attention]"""
    size, layers = engine.tables.block_size, zip(engine.cache.rows, engine.cache.layers, strict=True)
    return torch.cat([rows.packed[block * size :][:size] for rows, layer in layers if layer.group == 0], dim=1)


def published(engine, texts):
    """(block, text, number of the block in it) of each block that can be found as a prefix in the first group. All of
    it was output before, or stood in a prompt."""
    size = engine.tables.block_size
    places = {digest: (text, at) for text in texts for at, digest in enumerate(block_digests(text, size))}
    for pool in engine.tables._pools:
        assert set(pool._block_of) <= set(places)
    return [(block, *places[digest]) for digest, block in engine.tables._pools[0]._block_of.items()]
