"""The phases of a step as types. Each is built from the one before it, so that there is one order:

Decision          how many tokens to draft, before room is reserved (engine/speculation/policy.py)
SchedulerOutput   what each sequence computes, with room reserved, and blocks to copy first (scheduler.py)
Proposal          drafts, within the reserved room (engine/speculation/speculation.py)
Computed          the hidden states of all rows
Drawn             the tokens that follow, appended to their sequences
Settled           accepted rows are in place and the drafter has seen the step: blocks may be published as prefixes

Legend: N rows of the step, C hidden size, S columns of the captured states.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from mlaforge.engine.execution.batch import Batch, Chunk
from mlaforge.engine.execution.step_bytes import StepBytes
from mlaforge.engine.request.output import Completion
from mlaforge.engine.request.sequence import Request, Sequence
from mlaforge.engine.sampling.logprobs import logprobs_of
from mlaforge.engine.speculation.drafter import Draft
from mlaforge.engine.speculation.speculation import Proposal
from mlaforge.engine.speculation.verification import Verified
from mlaforge.runtime import on_device


@dataclasses.dataclass(frozen=True)
class Part:
    """A sequence's share of a step, at the start of the step: `chunk` with its `draft`, in the step's rows from `row`
    on; whether it was `decoding`, and whether its prompt had been computed completely (`prefilled`)."""

    sequence: Sequence
    chunk: Chunk
    draft: Draft | None
    row: int
    decoding: bool
    prefilled: bool

    @property
    def rows(self) -> range:
        """The rows of this sequence in the step."""
        return range(self.row, self.row + self.chunk.stop - self.chunk.start)

    @property
    def draws(self) -> bool:
        """Whether the next token can be drawn: the step computes all tokens of the sequence, and more are requested."""
        return self.chunk.stop >= len(self.sequence.token_ids) and self.sequence.request.params.max_tokens != 0


def parts(proposal: Proposal) -> list[Part]:
    """Lay out the step of a proposal, one sequence after another."""
    step_parts: list[Part] = []
    row = 0
    for sequence, upto in proposal.chunks:
        draft = proposal.drafts.get(sequence)
        chunk = _chunk(sequence, draft, upto)
        step_parts.append(Part(sequence, chunk, draft, row, sequence.decoding, sequence.prefilled))
        row = step_parts[-1].rows.stop
    return step_parts


def _chunk(sequence: Sequence, draft: Draft | None, upto: int) -> Chunk:
    """The tokens up to position `upto` that a step computes of a sequence, with its draft."""
    tokens, tree = sequence.token_ids, None
    if draft is not None:
        tokens, tree = tokens + draft.token_ids, draft.tree
    dense = sequence.request.params.dense
    return Chunk(sequence.number, tokens, sequence.computed, upto, tree, sequence.generating, dense)


@dataclasses.dataclass(frozen=True)
class Computed:
    """Result of the model's pass over a step: `hidden_NC` before the final norm, the states captured for the drafter,
    and a lower bound of the bytes that it read."""

    proposal: Proposal
    parts: list[Part]
    batch: Batch
    hidden_NC: Tensor
    states_NS: Tensor
    read: StepBytes


# Most rows of a prompt whose logits are in memory at once.
LOGIT_ROWS = 128


def read_prompt_logprobs(computed: Computed, logits: Callable[[Tensor], Tensor]) -> list[Request]:
    """Append prompt log probabilities to the requests that need them, for the rows of this step. Return the requests
    whose logits have NaN or infinity. `logits` maps hidden states to logits."""
    non_finite: list[Request] = []
    for part in computed.parts:
        start, request = part.chunk.start, part.sequence.request
        count = request.params.prompt_logprobs
        if count is None or part.prefilled:
            continue
        if request.prompt_logprobs is None or start == 0:
            request.prompt_logprobs = [None]
        targets = request.prompt_ids[start + 1 : part.chunk.stop + 1]
        if not targets:
            continue
        hidden_NC = computed.hidden_NC[part.row :][: len(targets)]
        target_chunks = [targets[i : i + LOGIT_ROWS] for i in range(0, len(targets), LOGIT_ROWS)]
        for chunk_NC, ids in zip(hidden_NC.split(LOGIT_ROWS), target_chunks, strict=True):
            logprobs = logprobs_of(logits(chunk_NC), ids, [count] * len(ids))
            if any(entry is not None and math.isnan(entry.logprob) for entry in logprobs):
                non_finite.append(request)
            request.prompt_logprobs += logprobs
    return non_finite


@dataclasses.dataclass(frozen=True)
class Drawn:
    """New tokens.

    verified     results of the sequences that drew, without those that wait for a grammar
    completions  of all sequences with something new, in the order of the output
    forks        (parent, child) of prompts that were completed
    non_finite   requests whose logits had NaN or infinity: they end
    at           when the tokens were there (time.perf_counter())
    """

    computed: Computed
    verified: dict[Sequence, Verified]
    completions: list[tuple[Sequence, Completion]]
    forks: list[tuple[Sequence, Sequence]]
    non_finite: list[Request]
    at: float

    def length(self, part: Part) -> int:
        """Number of the sequence's tokens in the cache now, without rejected ones: of a decoding sequence all but the
        newest, which was not computed. A sequence that waits for a grammar computes its newest token once more."""
        return (
            len(part.sequence.token_ids) - 1 if part.decoding else part.chunk.stop - part.sequence.waiting_for_grammar
        )

    @property
    def path(self) -> list[int] | None:
        """The rows of the step to keep where its draft is a tree (which is then all of the step): the newest token's,
        and the accepted ones, without the last where it ended the text."""
        part = self.computed.parts[0]
        if part.chunk.tree is None:
            return None
        if part.sequence.waiting_for_grammar:
            return []
        rows = [0, *(node + 1 for node in self.verified[part.sequence].accepted)]
        return rows[: self.length(part) - part.chunk.start]

    def states(self) -> Tensor:
        """Captured states of the rows to keep, [rows, S], one sequence after another."""
        states_NS, path = self.computed.states_NS, self.path
        if path is not None:
            return states_NS.index_select(0, on_device(path, torch.int64, states_NS.device))
        parts = self.computed.parts
        return torch.cat([states_NS[part.row :][: self.length(part) - part.chunk.start] for part in parts])


@dataclasses.dataclass(frozen=True)
class Settled:
    """Sequences whose `computed` positions hold their tokens. `completions` and `forks` are Drawn's, without those of
    its `non_finite` requests, whose blocks may not be published."""

    sequences: list[Sequence]
    completions: list[tuple[Sequence, Completion]]
    forks: list[tuple[Sequence, Sequence]]
    non_finite: list[Request]
