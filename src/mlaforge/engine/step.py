"""The phases of a step as types. Each is made of the one before it, so there is one order:

Decision     how many tokens to draft, before room is given out (engine/speculation/controller.py)
Plan         who computes what, with room for it reserved; blocks to copy before anything is written (scheduler.py)
Proposal     drafts, made in the room that was reserved (engine/speculation/step.py)
Computed     the hidden states of all of it
Drawn        the tokens that follow, appended to their sequences
Settled      what stays in the cache is in its place, and the drafter has seen it: it may be known as a prefix now

Legend: N rows of the step, C hidden size, S captured states side by side.
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
from mlaforge.engine.speculation.step import Proposal
from mlaforge.engine.speculation.verification import Verified
from mlaforge.runtime import on_device


@dataclasses.dataclass(frozen=True)
class Part:
    """A sequence's share of a step, as things stood when it was laid out: `chunk`, its `draft` included, in the step's
    rows from `row` on; whether it was `decoding`, and whether its prompt had been computed whole before (`prefilled`).
    """

    sequence: Sequence
    chunk: Chunk
    draft: Draft | None
    row: int
    decoding: bool
    prefilled: bool

    @property
    def rows(self) -> range:
        """The step's rows that are its own."""
        return range(self.row, self.row + self.chunk.stop - self.chunk.start)

    @property
    def draws(self) -> bool:
        """What follows can be drawn: the sequence's tokens have been computed to the last, and more are asked for."""
        return self.chunk.stop >= len(self.sequence.token_ids) and self.sequence.request.params.max_tokens != 0


def parts(proposal: Proposal) -> list[Part]:
    """The step of a proposal, one sequence after another."""
    laid_out: list[Part] = []
    row = 0
    for sequence, upto in proposal.chunks:
        draft = proposal.drafts.get(sequence)
        chunk = _chunk(sequence, draft, upto)
        laid_out.append(Part(sequence, chunk, draft, row, sequence.decoding, sequence.prefilled))
        row = laid_out[-1].rows.stop
    return laid_out


def _chunk(sequence: Sequence, draft: Draft | None, upto: int) -> Chunk:
    """What a step computes of a sequence: up to position `upto`, its draft included."""
    if draft is None:
        return Chunk(sequence.number, sequence.token_ids, sequence.computed, upto, generating=sequence.generating)
    tokens = sequence.token_ids + draft.token_ids
    return Chunk(sequence.number, tokens, sequence.computed, upto, draft.tree, sequence.generating)


@dataclasses.dataclass(frozen=True)
class Computed:
    """The model's pass over a step: `hidden_NC` before the final norm, what it captured for the drafter, and what it
    read at the least."""

    proposal: Proposal
    parts: list[Part]
    batch: Batch
    hidden_NC: Tensor
    states_NS: Tensor
    read: StepBytes


# Rows of a prompt whose logits are held at once.
LOGIT_ROWS = 128


def read_prompt_logprobs(computed: Computed, logits: Callable[[Tensor], Tensor]) -> list[Request]:
    """Gives the prompt's own log probabilities to the requests that ask for them, as its rows go by. Returns those
    whose logits have NaN or infinity. `logits` are of hidden states."""
    non_finite: list[Request] = []
    for part in computed.parts:
        start, request = part.chunk.start, part.sequence.request
        count = request.params.prompt_logprobs
        if count is None or part.prefilled:
            continue
        if request.prompt_logprobs is None or start == 0:
            request.prompt_logprobs = [None]
        wanted = request.prompt_ids[start + 1 : part.chunk.stop + 1]
        if not wanted:
            continue
        hidden_NC = computed.hidden_NC[part.row :][: len(wanted)]
        pieces = [wanted[at : at + LOGIT_ROWS] for at in range(0, len(wanted), LOGIT_ROWS)]
        for some_NC, ids in zip(hidden_NC.split(LOGIT_ROWS), pieces, strict=True):
            known = logprobs_of(logits(some_NC), ids, [count] * len(ids))
            if any(at is not None and math.isnan(at.logprob) for at in known):
                non_finite.append(request)
            request.prompt_logprobs += known
    return non_finite


@dataclasses.dataclass(frozen=True)
class Drawn:
    """What is new: of those sequences that drew (none that is held), as verified, and `completions` of all that have
    anything, in the order in which they are handed out. `forks` are (parent, child) of prompts that were finished.
    `non_finite` are requests whose logits had NaN or infinity: they end. `at` is when the tokens were there
    (time.perf_counter())."""

    computed: Computed
    verified: dict[Sequence, Verified]
    completions: list[tuple[Sequence, Completion]]
    forks: list[tuple[Sequence, Sequence]]
    non_finite: list[Request]
    at: float

    def length(self, part: Part) -> int:
        """How many of the sequence's tokens the cache holds now, nothing refused among them: of a decoding one all but
        the newest, which was not computed, and of a held one the newest is computed once more."""
        return len(part.sequence.token_ids) - 1 if part.decoding else part.chunk.stop - part.sequence.held

    @property
    def path(self) -> list[int] | None:
        """The step's rows that stay where its draft is a tree, which has them all: the newest token's, and what was
        accepted but the last where that ended the text."""
        part = self.computed.parts[0]
        if part.chunk.tree is None:
            return None
        if part.sequence.held:
            return []
        rows = [0, *(node + 1 for node in self.verified[part.sequence].accepted)]
        return rows[: self.length(part) - part.chunk.start]

    def states(self) -> Tensor:
        """[rows that stay, S], one sequence after another."""
        states_NS, path = self.computed.states_NS, self.path
        if path is not None:
            return states_NS.index_select(0, on_device(path, torch.int64, states_NS.device))
        parts = self.computed.parts
        return torch.cat([states_NS[part.row :][: self.length(part) - part.chunk.start] for part in parts])


@dataclasses.dataclass(frozen=True)
class Settled:
    """Sequences whose `computed` positions hold their tokens. `completions` and `forks` are Drawn's; nothing here is of
    its `non_finite` requests, of which nothing may be known as a prefix."""

    sequences: list[Sequence]
    completions: list[tuple[Sequence, Completion]]
    forks: list[tuple[Sequence, Sequence]]
    non_finite: list[Request]
