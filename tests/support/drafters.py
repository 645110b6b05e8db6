"""Drafters for tests and benchmarks, with known texts or random tokens."""

from __future__ import annotations

import torch

from mlaforge.engine.speculation.drafter import Draft, Drafter


class Knowing(Drafter):
    """Proposes the continuation of a known text; each token is correct with probability `right`, else random."""

    def __init__(self, texts: list[list[int]], right: float = 1.0, vocab_size: int = 256, seed: int = 0):
        self.texts, self.right, self.vocab_size = texts, right, vocab_size
        self.generator = torch.Generator().manual_seed(seed)

    def propose(self, budgets, min_probability):
        return [self._draft(sequence.token_ids, count) for sequence, count in budgets]

    def _draft(self, token_ids, count):
        text = next((t for t in self.texts if t[: len(token_ids)] == token_ids), None)
        if text is None:
            return None
        tokens = text[len(token_ids) : len(token_ids) + count]
        for at in range(len(tokens)):
            if torch.rand((), generator=self.generator) >= self.right:
                tokens[at] = int(torch.randint(0, self.vocab_size, (), generator=self.generator))
        return Draft(tokens) if tokens else None

    def observe(self, starts, states_NS):
        raise AssertionError("nothing was captured")


class Drawing(Drafter):
    """Samples each token from a known q: a softmax of random numbers over a few tokens."""

    def __init__(self, tokens: list[int], vocab_size: int, seed: int = 0):
        self.tokens, self.vocab_size = torch.tensor(tokens), vocab_size
        self.generator = torch.Generator().manual_seed(seed)

    def propose(self, budgets, min_probability):
        return [self._draft(count) for _, count in budgets]

    def _draft(self, count):
        q = torch.randn(count, len(self.tokens), generator=self.generator).softmax(-1)
        q_KV = torch.zeros(count, self.vocab_size)
        q_KV[:, self.tokens] = q
        drawn = torch.multinomial(q, 1, generator=self.generator)[:, 0]
        return Draft(self.tokens[drawn].tolist(), q_KV)

    def observe(self, starts, states_NS):
        raise AssertionError("nothing was captured")


class Branching(Knowing):
    """Knowing with trees of random shape, which contain the next token of the text with probability `right`."""

    def propose_tree(self, sequence, tokens, depth):
        """Return a tree whose nodes have distinct children."""
        known = sequence.token_ids
        text = next((t for t in self.texts if t[: len(known)] == known), known)[len(known) :]
        # For each node, starting with the sequence's newest token: its level, whether it is on the text, its children.
        levels, true, children = [0], [True], [set()]
        ids, parents = [], []
        for _ in range(tokens):
            at = int(torch.randint(0, len(levels), (), generator=self.generator))
            if levels[at] == depth:
                continue
            token = int(torch.randint(0, self.vocab_size, (), generator=self.generator))
            can_follow = true[at] and levels[at] < len(text) and text[levels[at]] not in children[at]
            if can_follow and torch.rand((), generator=self.generator) < self.right:
                token = text[levels[at]]
            if token in children[at]:
                continue
            children[at].add(token)
            true.append(true[at] and text[levels[at] : levels[at] + 1] == [token])
            levels.append(levels[at] + 1)
            children.append(set())
            ids.append(token)
            parents.append(at - 1)
        return Draft(ids, parents=parents) if ids else None
