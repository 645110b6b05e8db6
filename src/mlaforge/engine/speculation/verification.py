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

import torch
from torch import Tensor

from mlaforge.engine.request import grammar_wait
from mlaforge.engine.request.output import Completion
from mlaforge.engine.request.sequence import Sequence
from mlaforge.engine.sampling.logprobs import Logprobs, logprobs_of
from mlaforge.engine.sampling.sampler import NO_TOKEN, Sampler, checked, likeliest
from mlaforge.engine.speculation.drafter import Draft
from mlaforge.runtime import on_device


@dataclasses.dataclass
class Verified:
    """Result of a step for a sequence.

    completion      the new tokens
    accepted        indices of the accepted tokens in the draft
    non_finite      the logits after these tokens have NaN or infinity
    """

    completion: Completion
    accepted: list[int] = dataclasses.field(default_factory=list)
    non_finite: bool = False


def verify(
    sampler: Sampler, logits_RV: Tensor, sequences: list[Sequence], drafts: list[Draft | None], first_rows: list[int]
) -> list[Verified]:
    """Accept drafted tokens and sample the target's next token; both are appended to the sequences.

    logits_RV    rows of all sequences: for sequence i row first_rows[i] follows its newest token, and one row follows
                 each of its drafted tokens

    A sequence gets fewer tokens where its text ends, its logits are not finite, or its grammar is not ready.
    """
    sample = _TargetSampler(sampler, logits_RV, sequences, drafts)
    verified = [Verified(Completion(sequence.index, [], "", None)) for sequence in sequences]
    active, nodes = list(range(len(sequences))), [-1] * len(sequences)
    while active:
        tokens, logprobs = sample(active, [first_rows[i] + 1 + nodes[i] for i in active], [nodes[i] for i in active])
        next_active = []
        for i, token, logprob in zip(active, tokens, logprobs, strict=True):
            sequence, completion, draft = sequences[i], verified[i].completion, drafts[i]
            if token == NO_TOKEN:
                verified[i].non_finite = True
                continue
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
    """Samples the target's token for rows of a step, with log probabilities where a request has them on."""

    def __init__(self, sampler: Sampler, logits_RV: Tensor, sequences: list[Sequence], drafts: list[Draft | None]):
        self.sampler, self.logits_RV, self.sequences, self.drafts = sampler, logits_RV, sequences, drafts
        self.argmax: list[int] | None = None
        if all(sequence.state.plain for sequence in sequences):
            # Independent of the tokens before: all rows at once, so the host waits once.
            self.argmax = checked(likeliest(logits_RV), logits_RV).tolist()

    def __call__(
        self, active: list[int], rows: list[int], nodes: list[int]
    ) -> tuple[list[int], list[Logprobs | None]]:  # fmt: skip
        """Tokens of the sequences with indices `active`, which have reached these rows and draft nodes."""
        sequences = [self.sequences[i] for i in active]
        if self.argmax is not None:
            tokens = [self.argmax[row] for row in rows]
            counts = [sequence.request.params.logprobs for sequence in sequences]
            if all(count is None for count in counts):
                return tokens, [None] * len(rows)
            return tokens, logprobs_of(self._logits(rows), tokens, counts)
        drafts = zip((self.drafts[i] for i in active), nodes, strict=True)
        sampled = self.sampler(
            self._logits(rows), [sequence.state for sequence in sequences],
            [None if draft is None else draft.sampled(node + 1) for draft, node in drafts],
        )  # fmt: skip
        return sampled.token_ids.tolist(), sampled.logprobs()

    def _logits(self, rows: list[int]) -> Tensor:
        if rows == list(range(len(self.logits_RV))):
            return self.logits_RV
        return self.logits_RV.index_select(0, on_device(rows, torch.int64, self.logits_RV.device))
