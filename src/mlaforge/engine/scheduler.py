"""Scheduler: the tokens that the next step computes. Continuous batching with chunked prefill.

Every decoding sequence has its token in every step, and its draft. The rest of the step's token budget goes to prompts,
cut where they do not fit: first to those that one step completes, so that short prompts do not wait behind long ones,
then to the others, each in order of arrival. Every TURNth step that several prompts compete for follows the order of
arrival alone, so that no stream of short prompts stops a long one. When blocks run out, the newest running sequence is
preempted: it gives up its blocks and is recomputed later (its full blocks stay cached, and most are found again).
"""

from __future__ import annotations

import bisect
import dataclasses
import operator
from collections import deque
from collections.abc import Callable

from mlaforge.engine.cache.block_tables import BlockTables, Copy
from mlaforge.engine.request.sequence import Sequence

# Most generated tokens that a step recomputes of a sequence where they are computed in another form than prompts: the
# form of few query tokens, in sparse layers with a selection for each, which takes memory.
REPLAYED_TOKENS = 32

# Of the steps that several prompts compete for, one in TURN computes them in order of arrival. Simulated at 0.6 to 1
# requests per second, a fifth of them with 2,000 to 6,000 tokens and the others with up to 512: the 99th percentile of
# the short ones' first tokens is 0.10 to 0.17 of that in order of arrival alone (0.13 to 0.22 with TURN = 2), that of
# the long ones' 1.1 to 1.2 with either, and 1.1 to 1.5 where the shortest rest goes first among long prompts too.
TURN = 4


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
        # Number of available blocks at which a waiting sequence did not fit; -1 if none was tried since one started.
        self._insufficient_blocks = -1
        # Steps since prompts began to compete.
        self._contested_steps = 0

    def add(self, sequence: Sequence) -> None:
        sequence.computed = self._num_cached(sequence)
        self.waiting.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Remove a finished or aborted sequence and free its blocks."""
        if sequence in self.running:
            self.running.remove(sequence)
            self.tables.free(sequence.number)
        else:
            self.waiting.remove(sequence)
            self._insufficient_blocks = min(self._insufficient_blocks, 0)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Run `child` from what `parent` has computed; they share blocks."""
        self.tables.fork(parent.number, child.number)
        child.computed = parent.computed
        self.running.append(child)

    def schedule(self, drafts: Callable[[Sequence], int] = lambda sequence: 0) -> SchedulerOutput:
        """Return the next step, with blocks reserved for it; empty when no sequence can run.

        `drafts` returns the number of drafted tokens that a decoding sequence wants to verify. The sequence gets fewer
        where they would take the last token from a running prompt, and none where blocks are short: a draft preempts no
        sequence.
        """
        scheduled, preemptions = SchedulerOutput(), self.preemptions
        # Tokens of the step beyond one for each decoding sequence.
        budget = self.max_num_batched_tokens - sum(map(_decodes, self.running))
        prompts = [sequence for sequence in self.running if not (sequence.decoding or sequence.waiting_for_grammar)]
        ends: dict[Sequence, int] = {}
        for sequence in filter(_decodes, self.running):
            count = max(0, min(drafts(sequence), budget - len(prompts)))
            ends[sequence] = len(sequence.token_ids) + count
            budget -= count
        queue, rest = self._order(prompts), budget
        for sequence in queue:
            if not rest:
                break
            ends[sequence] = self._end(sequence, sequence.computed, rest)
            rest -= _cost(sequence, ends[sequence], rest)
        self._reserve(ends, scheduled)
        lacking = self.preemptions > preemptions
        if not lacking:
            for sequence in prompts:
                budget -= _cost(sequence, ends.get(sequence, sequence.computed), budget)
            if not self._start_waiting(queue, budget, scheduled):
                # Running prompts that gave way to waiting ones, which lack blocks, get what is left.
                left = self._left_out(prompts, ends, scheduled)
                self._reserve(left, scheduled, preempts=not scheduled.chunks)
                lacking = True
        if lacking and prompts and not scheduled.chunks:
            # The sequences with a share of the step lack blocks; the running prompts that remain have theirs.
            return self.schedule(drafts)
        waiting = any(sequence.waiting_for_grammar for sequence in self.running)
        assert scheduled.chunks or waiting or not (self.running or self.waiting), "too few blocks for a single sequence"
        return scheduled

    def _left_out(
        self, prompts: list[Sequence], ends: dict[Sequence, int], scheduled: SchedulerOutput
    ) -> dict[Sequence, int]:
        """Ends of prompts without a share of the step, as far as its budget lasts."""
        total = self.max_num_batched_tokens
        budget = total - sum(_cost(sequence, upto, total) for sequence, upto in scheduled.chunks)
        left: dict[Sequence, int] = {}
        for sequence in prompts:
            if sequence not in ends and budget > 0:
                left[sequence] = self._end(sequence, sequence.computed, budget)
                budget -= _cost(sequence, left[sequence], budget)
        return left

    def _order(self, prompts: list[Sequence]) -> list[Sequence]:
        """The order in which running prompts and waiting sequences share the step.

        Where a waiting sequence lacks places or blocks, waiting ones get what running ones leave and start in order of
        arrival, so that no other takes what the oldest needs.
        """
        places, most = self._places, self.max_num_batched_tokens
        waiting = [sequence for sequence in self.waiting if _num_sequences(sequence) <= places]
        if self.tables.available <= self._insufficient_blocks or waiting[:1] != list(self.waiting)[:1]:
            waiting = []
        self._contested_steps = self._contested_steps + 1 if len(prompts) + len(waiting) > 1 else 0
        by_arrival = self._contested_steps % TURN == 0

        def rank(sequence: Sequence) -> tuple[bool, int]:
            return not by_arrival and _remaining_cost(sequence) > most, sequence.number

        if self._insufficient_blocks >= 0:
            return sorted(prompts, key=rank) + waiting
        return sorted(prompts + waiting, key=rank)

    def _reserve(self, ends: dict[Sequence, int], scheduled: SchedulerOutput, preempts: bool = True) -> None:
        """Schedule the running sequences of `ends` up to these positions. Where blocks are short, preempt the newest;
        not where the step has scheduled others before: then leave the sequence out."""
        for index, sequence in enumerate(list(self.running)):
            if index >= len(self.running):
                # This sequence and those after it were preempted.
                break
            if sequence not in ends:
                continue
            upto = ends[sequence]
            copies = self.tables.reserve(sequence.number, upto)
            if copies is None and sequence.decoding:
                # Without its draft.
                upto = len(sequence.token_ids)
                copies = self.tables.reserve(sequence.number, upto)
            while copies is None and preempts:
                last = self.running[-1]
                self._preempt(last)
                if last is sequence:
                    break
                copies = self.tables.reserve(sequence.number, upto)
            if copies is not None:
                scheduled.chunks.append((sequence, upto))
                scheduled.copies += copies

    def _start_waiting(self, queue: list[Sequence], budget: int, scheduled: SchedulerOutput) -> bool:
        """Run waiting sequences from this step on, in the order of the queue, while the budget lasts. Return False if
        one lacks places or blocks, which ends the search."""
        running = set(self.running)
        waiting = [sequence for sequence in queue if sequence not in running]
        if not waiting:
            return True
        # Places, and blocks of each group that running prompts need for their rest: computed once, because a step may
        # start hundreds.
        places, rest = (
            self._places,
            self.tables.growth({s.number: len(s.token_ids) for s in self.running if not s.decoding}),
        )
        for sequence in waiting:
            if not budget:
                break
            if _num_sequences(sequence) > places:
                return False
            cached = self.tables.start(sequence.number, sequence.token_ids, sequence.reuses_prefix)
            whole = {sequence.number: len(sequence.token_ids)}
            upto, leaves_room = self._end(sequence, cached, budget), self._leaves_room(rest, whole)
            copies = self.tables.reserve(sequence.number, upto) if leaves_room else None
            if copies is None:
                self.tables.free(sequence.number)
                # Try again only when more blocks are available, or when fewer prompts need room.
                self._insufficient_blocks = self.tables.available if leaves_room else 0
                return False
            self._run(sequence, cached)
            places -= _num_sequences(sequence)
            if not sequence.decoding:
                rest = list(map(operator.add, rest, self.tables.growth(whole)))
            scheduled.chunks.append((sequence, upto))
            scheduled.copies += copies
            budget -= _cost(sequence, upto, budget)
        return True

    def _run(self, sequence: Sequence, cached: int) -> None:
        """Move a waiting sequence, whose first `cached` tokens are in the cache, to the running ones."""
        request = sequence.request
        if not sequence.prefilled:
            # What a preempted prompt finds may be its own.
            request.num_cached_tokens = min(cached, request.num_cached_tokens) if sequence.started else cached
        sequence.computed, sequence.started = cached, True
        self.waiting.remove(sequence)
        self.running.append(sequence)
        self._insufficient_blocks = -1

    @property
    def _places(self) -> int:
        """Number of further sequences that may run."""
        return self.max_num_seqs - sum(map(_num_sequences, self.running))

    def _leaves_room(self, rest: list[int], whole: dict[int, int]) -> bool:
        """Whether prompts that began before have blocks for their `rest`, though that of `whole` is computed
        completely: else they would preempt it, again and again."""
        return not any(rest) or self.tables.fits(list(map(operator.add, rest, self.tables.growth(whole))))

    def _end(self, sequence: Sequence, start: int, budget: int) -> int:
        """The position up to which a step may compute a sequence, from `start` on."""
        end = min(len(sequence.token_ids), start + _affordable(sequence, budget))
        if not (self.replays and sequence.prefilled):
            return end
        prompt = len(sequence.request.prompt_ids)
        return min(end, prompt if start < prompt else start + REPLAYED_TOKENS)

    def _preempt(self, sequence: Sequence) -> None:
        """Move the last running sequence to the queue, in order of arrival. A sequence that this step has given room to
        is never the last, because it precedes the one that needs blocks."""
        self.running.remove(sequence)
        self.tables.free(sequence.number)
        sequence.computed, sequence.waiting_for_grammar = self._num_cached(sequence), False
        bisect.insort(self.waiting, sequence, key=lambda s: s.number)
        self._insufficient_blocks = 0
        self.preemptions += 1

    def _num_cached(self, sequence: Sequence) -> int:
        """Number of the sequence's tokens that need not be computed, as far as is known before it starts."""
        return self.tables.num_cached(sequence.token_ids) if sequence.reuses_prefix else 0


def _num_sequences(sequence: Sequence) -> int:
    """Number of sequences that this one is, or becomes when its prompt is computed."""
    return 1 if sequence.prefilled else sequence.request.params.n


def _decodes(sequence: Sequence) -> bool:
    """Whether the sequence has a token in every step."""
    return sequence.decoding and not sequence.waiting_for_grammar


def _affordable(sequence: Sequence, budget: int) -> int:
    """Number of its tokens that a step may compute, at least one."""
    return max(1, budget // sequence.token_cost)


def _remaining_cost(sequence: Sequence) -> int:
    """Token budget that the rest of the sequence takes."""
    return sequence.token_cost * (len(sequence.token_ids) - sequence.computed)


def _cost(sequence: Sequence, upto: int, budget: int) -> int:
    """What computing the sequence up to this position takes from the budget."""
    return min(budget, sequence.token_cost * (upto - sequence.computed))
