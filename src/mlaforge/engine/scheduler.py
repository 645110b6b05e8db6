"""Which tokens of which sequences the next step computes: continuous batching with chunked prefill.

Every running sequence that decodes has its token in every step. What is left of the step's tokens goes to drafts and
prompts that run, in the order in which they arrived, so that whoever has begun gets to the end, and then to prompts
that wait, cut where they do not fit. Where blocks run out, the sequence that came last gives up its own and is computed
anew later (its full blocks stay known and are mostly found again).
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable

from mlaforge.engine.cache.block_tables import BlockTables, Copy
from mlaforge.engine.request.sequence import Sequence


@dataclasses.dataclass
class Plan:
    """A step: each sequence with the position up to which it is computed, and blocks to copy before. Positions beyond
    a sequence's tokens are for a draft."""

    chunks: list[tuple[Sequence, int]] = dataclasses.field(default_factory=list)
    copies: list[Copy] = dataclasses.field(default_factory=list)


class Scheduler:
    """Sequences wait, run, and leave by `finish`. `preemptions` and `cached_tokens` count since the start.

    `replays`: tokens that were generated are computed anew as they were, one in a step, because the model reads
    otherwise than in prompts.
    """

    def __init__(self, tables: BlockTables, max_num_seqs: int, max_num_batched_tokens: int, replays: bool = False):
        self.tables, self.replays = tables, replays
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        # Available blocks with which the head of the queue did not fit; -1 where it has not been tried.
        self._short = -1

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Done or aborted, wherever it stands; its blocks are given back."""
        if sequence in self.running:
            self.running.remove(sequence)
            self.tables.free(sequence.number)
        else:
            self.waiting.remove(sequence)
            self._short = -1

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """`child` runs on from what `parent` has computed, sharing its blocks."""
        self.tables.fork(parent.number, child.number)
        child.computed = parent.computed
        self.running.append(child)

    def schedule(self, drafts: Callable[[Sequence], int] = lambda sequence: 0) -> Plan:
        """The next step, with room for it reserved; empty when there is nothing to do but to wait for the held.

        `drafts` says how many drafted tokens a decoding sequence is to verify. It gets fewer where that would take a
        token from a sequence that runs, and none where blocks are short: nobody is preempted for a draft.
        """
        plan = Plan()
        # What a step may compute beyond the tokens of those who decode, each of whom has its own.
        budget = self.max_num_batched_tokens - sum(map(_decodes, self.running))
        prompts = sum(not (sequence.decoding or sequence.held) for sequence in self.running)
        preempted = False
        for index, sequence in enumerate(list(self.running)):
            if index >= len(self.running):
                # It and those after it were preempted for others.
                break
            if sequence.held or not (budget or sequence.decoding):
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
                plan.chunks.append((sequence, upto + count))
                plan.copies += copies
                budget -= count if sequence.decoding else min(budget, sequence.price * (upto - sequence.computed))
        while self.waiting and budget and not preempted and self.tables.available > self._short:
            sequence = self.waiting[0]
            if sum(map(_num_sequences, self.running)) + _num_sequences(sequence) > self.max_num_seqs:
                break
            cached = self.tables.start(sequence.number, sequence.token_ids, sequence.reuse)
            upto = self._end(sequence, cached, budget)
            copies = self.tables.reserve(sequence.number, upto)
            if copies is None:
                self.tables.free(sequence.number)
                # Its prompt is not looked up again before blocks have been given back.
                self._short = self.tables.available
                break
            self._short = -1
            sequence.computed = cached
            if not sequence.prefilled:
                sequence.request.num_cached_tokens = cached
            self.running.append(self.waiting.popleft())
            plan.chunks.append((sequence, upto))
            plan.copies += copies
            budget = max(0, budget - sequence.price * (upto - cached))
        held = any(sequence.held for sequence in self.running)
        assert plan.chunks or held or not (self.running or self.waiting), "blocks are short for a single sequence"
        return plan

    def _end(self, sequence: Sequence, start: int, budget: int) -> int:
        """The position up to which a step may compute it from `start` on."""
        end = min(len(sequence.token_ids), start + _affordable(sequence, budget))
        if not (self.replays and sequence.prefilled):
            return end
        prompt = len(sequence.request.prompt_ids)
        return min(end, prompt) if start < prompt else start + 1

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the head of the queue. Only the last running sequence is ever chosen, and none that this step has
        already given room to: those stand before whoever asks."""
        self.running.remove(sequence)
        self.tables.free(sequence.number)
        sequence.computed, sequence.held = 0, False
        self.waiting.appendleft(sequence)
        self._short = -1
        self.preemptions += 1


def _num_sequences(sequence: Sequence) -> int:
    """How many sequences this one is, or becomes when its prompt is computed."""
    return 1 if sequence.prefilled else sequence.request.params.n


def _decodes(sequence: Sequence) -> bool:
    """Whether a token of every step is its own."""
    return sequence.decoding and not sequence.held


def _affordable(sequence: Sequence, budget: int) -> int:
    """How many of its tokens a step may compute, at least one."""
    return max(1, budget // sequence.price)
