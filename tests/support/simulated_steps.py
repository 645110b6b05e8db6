"""Steps of the scheduler without a model."""

from __future__ import annotations

import itertools

from mlaforge.engine.cache.block_tables import BlockTables, CacheGroup
from mlaforge.engine.request.sequence import Request, Sequence
from mlaforge.engine.scheduler import Scheduler, SchedulerOutput
from support.engine_driver import greedy


class SimulatedSteps:
    """A scheduler whose plans are executed without a model: every draft is rejected, every sequence ends at its
    length."""

    def __init__(self, num_blocks: int, max_num_seqs: int, max_step: int):
        groups = [CacheGroup("full", num_blocks), CacheGroup("window", num_blocks, 6)]
        self.scheduler = Scheduler(BlockTables(groups, 4), max_num_seqs, max_step)
        self.numbers = itertools.count()
        self.remaining: dict[Sequence, int] = {}

    def add(
        self, name: str, length: int, max_tokens: int, n: int = 1, scored: bool = False, token: int = 0
    ) -> Request:  # fmt: skip
        """Queue a prompt of `length` times the token. Prompts of the same token share blocks."""
        params, prompt = greedy(max_tokens, n=n, prompt_logprobs=1 if scored else None), [token] * length
        request = Request(name, prompt, params)
        request.sequences = [Sequence(next(self.numbers), request, i, list(prompt), None, None) for i in range(n)]
        self.remaining |= dict.fromkeys(request.sequences, max_tokens)
        self.scheduler.add(request.sequences[0])
        return request

    def has_blocks(self, prompt: Sequence) -> bool:
        """Whether blocks are left for the longest chunk that a step could compute of a running prompt, and a copy."""
        tables = self.scheduler.tables
        stop = min(len(prompt.token_ids), prompt.computed + self.scheduler.max_num_batched_tokens)
        missing = -(-stop // tables.block_size) - -(-prompt.computed // tables.block_size) + 1
        return all(pool.num_available >= missing for pool in tables._pools)

    def run(self, plan: SchedulerOutput, drafts: int = 0) -> None:
        tables, forks, ended = self.scheduler.tables, [], []
        for sequence, upto in plan.chunks:
            assert sequence.computed < upto <= len(sequence.token_ids) + drafts * sequence.decoding
            draws = upto >= len(sequence.token_ids)
            sequence.computed = min(upto, len(sequence.token_ids))
            tables.commit(sequence.number, sequence.token_ids, sequence.computed)
            tables.rewind(sequence.number, sequence.computed)
            if draws:
                drawing = [sequence] if sequence.prefilled else sequence.request.sequences
                forks += [(sequence, other) for other in drawing[1:]]
                for continuation in drawing:
                    continuation.prefilled = True
                    continuation.token_ids.append(self.remaining[continuation])
                    self.remaining[continuation] -= 1
                    ended += [continuation] if not self.remaining[continuation] else []
        for parent, child in forks:
            self.scheduler.fork(parent, child)
        for sequence in ended:
            self.scheduler.finish(sequence)
