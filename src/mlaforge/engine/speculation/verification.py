"""Verification: from the logits of a step to the accepted drafted tokens and the target's next token.

The acceptance rule (`verify`, `rejection_sampled` in sampling/sampler.py):

- A drafted token that was not sampled (prompt lookup, greedy draft head) is accepted if the target, sampling as it
  would without a draft, produces the same token. Greedy and seeded tokens then equal those of plain decoding wherever
  a row of logits is the same alone and in a batch (compiled CPU kernels; elsewhere two logits within rounding may
  swap). In a tree the path is followed whose tokens the target produces; for drafts that were not sampled that accepts
  as often as rejection sampling from child to child (SpecInfer, arXiv:2305.09781).
- A token sampled from q is accepted with probability min(1, p / q), otherwise replaced by a sample of
  max(0, p - q): the target's distribution, though with other random numbers (Leviathan et al., arXiv:2211.17192).

p includes everything that plain decoding applies: bias, penalties, grammar, min_tokens, temperature and filters, given
the tokens before.

Legend: R rows of logits, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from mlaforge.engine.request import grammar_wait
from mlaforge.engine.request.output import Completion
from mlaforge.engine.request.sequence import Sequence
from mlaforge.engine.sampling.logprobs import Logprobs, logprobs_of
from mlaforge.engine.sampling.sampler import NO_TOKEN, Sampler, checked, likeliest, rejection_sampled
from mlaforge.engine.speculation.drafter import Draft
from mlaforge.runtime import on_device


@dataclasses.dataclass
class Verified:
    """Result of a step for a sequence.

    completion      the new tokens
    accepted        indices of the accepted tokens in the draft
    non_finite      the logits after these tokens have NaN or infinity
    distributions   of a provisional copy: the target's, [V], that its tokens were sampled from
    """

    completion: Completion
    accepted: list[int] = dataclasses.field(default_factory=list)
    non_finite: bool = False
    distributions: list[Tensor] = dataclasses.field(default_factory=list)


def verify(
    sampler: Sampler, logits_RV: Tensor, sequences: list[Sequence], drafts: list[Draft | None], first_rows: list[int]
) -> list[Verified]:
    """Accept drafted tokens and sample the target's next token; both are appended to the sequences.

    logits_RV    rows of all sequences: for sequence i row first_rows[i] follows its newest token, and one row follows
                 each of its drafted tokens

    A sequence gets fewer tokens where its text ends, its logits are not finite, or its grammar is not ready.
    Provisional copies do not end; all sequences are, or none.
    """
    verified = [Verified(Completion(sequence.index, [], "", None)) for sequence in sequences]
    sample = _TargetSampler(sampler, logits_RV, sequences, drafts)
    active, nodes = list(range(len(sequences))), [-1] * len(sequences)
    while active:
        sampled = sample(active, [first_rows[i] + 1 + nodes[i] for i in active], [nodes[i] for i in active])
        next_active = []
        for i, token, logprob, p_V in zip(active, *sampled, strict=True):
            sequence, completion, draft = sequences[i], verified[i].completion, drafts[i]
            if token == NO_TOKEN:
                verified[i].non_finite = True
                continue
            if p_V is not None and not sequence.request.params.greedy:
                verified[i].distributions.append(p_V)
            if sequence.original is None:
                text, _, completion.finish_reason, completion.stop_reason = sequence.stopping.append([token])
                completion.text += text
            completion.token_ids.append(token)
            if logprob is not None:
                completion.logprobs = [*(completion.logprobs or ()), logprob]
            sequence.token_ids.append(token)
            sequence.state.append([token])
            node = None if draft is None else draft.child(nodes[i], token)
            if node is not None:
                nodes[i] = node
                verified[i].accepted.append(node)
                if completion.finish_reason is None:
                    next_active.append(i)
        # A sequence whose grammar takes long continues in a later step.
        ready = grammar_wait.can_draw_again([sequences[i] for i in next_active])
        active = [i for i, is_ready in zip(next_active, ready, strict=True) if is_ready]
    return verified


class _TargetSampler:
    """Samples the target's token for rows of a step, with log probabilities where a request has them on, of provisional
    copies with distributions."""

    def __init__(self, sampler: Sampler, logits_RV: Tensor, sequences: list[Sequence], drafts: list[Draft | None]):
        self.sampler, self.logits_RV, self.sequences, self.drafts = sampler, logits_RV, sequences, drafts
        self.provisional = any(sequence.original is not None for sequence in sequences)
        self.argmax: list[int] | None = None
        if all(sequence.state.plain for sequence in sequences):
            # Independent of the tokens before: all rows at once, so the host waits once.
            self.argmax = checked(likeliest(logits_RV), logits_RV).tolist()

    def __call__(
        self, active: list[int], rows: list[int], nodes: list[int]
    ) -> tuple[list[int], Items[Logprobs | None], Items[Tensor | None]]:
        """Tokens, log probabilities and distributions [V] of the sequences with indices `active`, which have reached
        these rows and draft nodes."""
        sequences, nothing = [self.sequences[i] for i in active], [None] * len(rows)
        if self.argmax is not None:
            tokens = [self.argmax[row] for row in rows]
            counts = [sequence.request.params.logprobs for sequence in sequences]
            if self.provisional or all(count is None for count in counts):
                return tokens, nothing, nothing
            return tokens, logprobs_of(self._logits(rows), tokens, counts), nothing
        states, logits_NV = [sequence.state for sequence in sequences], self._logits(rows)
        drafts = zip((self.drafts[i] for i in active), nodes, strict=True)
        drafted = [None if draft is None else draft.sampled(node + 1) for draft, node in drafts]
        if not self.provisional:
            sampled = self.sampler(logits_NV, states, drafted)
            return sampled.token_ids.tolist(), sampled.logprobs(), nothing
        p_NV = self.sampler.probabilities(logits_NV, states)
        return checked(rejection_sampled(p_NV, states, drafted), logits_NV).tolist(), nothing, list(p_NV)

    def _logits(self, rows: list[int]) -> Tensor:
        if rows == list(range(len(self.logits_RV))):
            return self.logits_RV
        return self.logits_RV.index_select(0, on_device(rows, torch.int64, self.logits_RV.device))
