"""Scheduler: the tokens that the next step computes. Continuous batching with chunked prefill.

Every decoding sequence has its token in every step. The rest of the step's token budget goes to drafts and running
prompts in the order of their arrival, so that started requests finish first, and then to waiting prompts, cut where
they do not fit. When blocks run out, the newest sequence is preempted: it gives up its blocks and is recomputed later
(its full blocks stay cached, and most are found again).
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable

from mlaforge.engine.cache.block_tables import BlockTables, Copy
from mlaforge.engine.request.sequence import Sequence

# Most generated tokens that a step recomputes of a sequence where they are computed in another form than prompts: the
# form of few query tokens, in sparse layers with a selection for each, which takes memory.
REPLAYED_TOKENS = 32


@dataclasses.dataclass
class SchedulerOutput:
    """A step: its sequences with the position up to which each is computed, and the blocks to copy before. Positions
    after a sequence's tokens are for a draft."""

    chunks: list[tuple[Sequence, int]] = dataclasses.field(default_factory=list)
    copies: list[Copy] = dataclasses.field(default_factory=list)


class Scheduler:
    """The queues of waiting and running sequences; a sequence leaves by `finish`. `preemptions` counts since the start.

    `replays`: recompute generated tokens apart from the prompt, because the model computes them in another form.
    """

    def __init__(self, tables: BlockTables, max_num_seqs: int, max_num_batched_tokens: int, replays: bool = False):
        self.tables, self.replays = tables, replays
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        # Number of available blocks at which the head of the queue did not fit; -1 if it was not tried.
        self._insufficient_blocks = -1

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Remove a finished or aborted sequence and free its blocks."""
        if sequence in self.running:
            self.running.remove(sequence)
            self.tables.free(sequence.number)
        else:
            self.waiting.remove(sequence)
            self._insufficient_blocks = -1

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Run `child` from what `parent` has computed; they share blocks."""
        self.tables.fork(parent.number, child.number)
        child.computed = parent.computed
        self.running.append(child)

    def schedule(self, drafts: Callable[[Sequence], int] = lambda sequence: 0) -> SchedulerOutput:
        """Return the next step, with blocks reserved for it; empty when no sequence can run.

        `drafts` returns the number of drafted tokens that a decoding sequence wants to verify. The sequence gets fewer
        where they would take a token from a running sequence, and none where blocks are short: a draft preempts no
        sequence.
        """
        scheduled = SchedulerOutput()
        # Tokens of the step beyond one for each decoding sequence.
        budget = self.max_num_batched_tokens - sum(map(_decodes, self.running))
        prompts = sum(not (sequence.decoding or sequence.waiting_for_grammar) for sequence in self.running)
        preempted = False
        for index, sequence in enumerate(list(self.running)):
            if index >= len(self.running):
                # This sequence and those after it were preempted.
                break
            if sequence.waiting_for_grammar or not (budget or sequence.decoding):
                continue
            count = 0
            if sequence.decoding:
                upto = len(sequence.token_ids)
                count = max(0, min(drafts(sequence), budget - prompts))
            else:
                upto = self._end(sequence, sequence.computed, budget)
                prompts -= 1
            copies = self.tables.reserve(sequence.number, upto + count)
            if copies is None and count:
                count, copies = 0, self.tables.reserve(sequence.number, upto)
            while copies is None:
                preempted = True
                last = self.running[-1]
                self._preempt(last)
                if last is sequence:
                    break
                copies = self.tables.reserve(sequence.number, upto)
            else:
                scheduled.chunks.append((sequence, upto + count))
                scheduled.copies += copies
                budget -= count if sequence.decoding else min(budget, sequence.token_cost * (upto - sequence.computed))
        while self.waiting and budget and not preempted and self.tables.available > self._insufficient_blocks:
            sequence = self.waiting[0]
            if sum(map(_num_sequences, self.running)) + _num_sequences(sequence) > self.max_num_seqs:
                break
            cached = self.tables.start(sequence.number, sequence.token_ids, sequence.reuses_prefix)
            upto = self._end(sequence, cached, budget)
            copies = self.tables.reserve(sequence.number, upto)
            if copies is None:
                self.tables.free(sequence.number)
                # Try again only when more blocks are available.
                self._insufficient_blocks = self.tables.available
                break
            self._insufficient_blocks = -1
            sequence.computed = cached
            if not sequence.prefilled:
                sequence.request.num_cached_tokens = cached
            self.running.append(self.waiting.popleft())
            scheduled.chunks.append((sequence, upto))
            scheduled.copies += copies
            budget = max(0, budget - sequence.token_cost * (upto - cached))
        waiting = any(sequence.waiting_for_grammar for sequence in self.running)
        assert scheduled.chunks or waiting or not (self.running or self.waiting), "too few blocks for a single sequence"
        return scheduled

    def _end(self, sequence: Sequence, start: int, budget: int) -> int:
        """The position up to which a step may compute a sequence, from `start` on."""
        end = min(len(sequence.token_ids), start + _affordable(sequence, budget))
        if not (self.replays and sequence.prefilled):
            return end
        prompt = len(sequence.request.prompt_ids)
        return min(end, prompt if start < prompt else start + REPLAYED_TOKENS)

    def _preempt(self, sequence: Sequence) -> None:
        """Move the last running sequence to the head of the queue. A sequence that this step has given room to is never
        the last, because it precedes the one that needs blocks."""
        self.running.remove(sequence)
        self.tables.free(sequence.number)
        sequence.computed, sequence.waiting_for_grammar = 0, False
        self.waiting.appendleft(sequence)
        self._insufficient_blocks = -1
        self.preemptions += 1


def _num_sequences(sequence: Sequence) -> int:
    """Number of sequences that this one is, or becomes when its prompt is computed."""
    return 1 if sequence.prefilled else sequence.request.params.n


def _decodes(sequence: Sequence) -> bool:
    """Whether the sequence has a token in every step."""
    return sequence.decoding and not sequence.waiting_for_grammar


def _affordable(sequence: Sequence, budget: int) -> int:
    """Number of its tokens that a step may compute, at least one."""
    return max(1, budget // sequence.token_cost)
