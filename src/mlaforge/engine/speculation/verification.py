"""From the logits of a step to tokens: each sequence's next one, after as many drafted ones as the target agrees to.

A drafted token that nobody drew (prompt lookup, the likeliest of a draft head) is kept where the target, drawing as it
would without a draft, draws the same: its greedy and its seeded tokens are those of plain decoding, one by one, where a
row of logits is the same alone and verified (compiled CPU kernels; elsewhere two logits within rounding may swap). Of a
tree that path is followed whose tokens the target draws, one after another. Where nobody drew that accepts as often as
rejection from child to child does (SpecInfer, arXiv:2305.09781), in which each one's q is all on itself.
A token drawn from q is kept with probability min(1, p / q), else replaced by one drawn from max(0, p - q): the target's
distribution as well, though by other random numbers. p has everything in it that plain decoding has: bias, penalties,
grammar, min_tokens, temperature, filters, each as of the tokens before.

Legend: R rows of logits, N of them at once, V vocabulary.
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
    """What a step made of a sequence: `completion` is what is new of it, `accepted` are the places in its draft of what
    stays, to `overruled` of which the target did not agree. `non_finite`: behind that its logits have NaN or infinity.
    """

    completion: Completion
    accepted: list[int] = dataclasses.field(default_factory=list)
    overruled: int = 0
    non_finite: bool = False


def verify(
    sampler: Sampler, logits_RV: Tensor, sequences: list[Sequence], drafts: list[Draft | None], first_rows: list[int]
) -> list[Verified]:
    """What is new of each sequence, already appended to it: drafted tokens up to the first that the target does not
    draw, then the target's own; fewer where the text ends before, or logits are not finite.

    Sequence i has the row first_rows[i] after its newest token, and one after each of its drafted tokens.
    """
    draw = _Draw(sampler, logits_RV, sequences, drafts)
    verified = [Verified(Completion(sequence.index, [], "", None)) for sequence in sequences]
    active, nodes = list(range(len(sequences))), [-1] * len(sequences)
    while active:
        tokens, logprobs = draw(active, [first_rows[i] + 1 + nodes[i] for i in active], [nodes[i] for i in active])
        next_active = []
        for i, token, logprob in zip(active, tokens, logprobs, strict=True):
            sequence, completion, draft = sequences[i], verified[i].completion, drafts[i]
            if token == NO_TOKEN:
                verified[i].non_finite = True
                continue
            if draft is not None and draft.final and nodes[i] + 1 < len(draft.token_ids):
                verified[i].overruled += token != draft.token_ids[nodes[i] + 1]
                token = draft.token_ids[nodes[i] + 1]
            text, _, completion.finish_reason, completion.stop_reason = sequence.stopping.append([token])
            completion.text += text
            completion.token_ids.append(token)
            if logprob is not None:
                completion.logprobs = [*(completion.logprobs or ()), logprob]
            sequence.token_ids.append(token)
            sequence.state.append([token])
            node = None if draft is None else draft.after(nodes[i], token)
            if node is not None:
                nodes[i] = node
                verified[i].accepted.append(node)
                if completion.finish_reason is None:
                    next_active.append(i)
        # Where a grammar takes its time, what follows is left to another step.
        goes_on = grammar_wait.can_draw_again([sequences[i] for i in next_active])
        active = [i for i, goes in zip(next_active, goes_on, strict=True) if goes]
    return verified


class _Draw:
    """Tokens of some rows and their log probabilities where they are asked for."""

    def __init__(self, sampler: Sampler, logits_RV: Tensor, sequences: list[Sequence], drafts: list[Draft | None]):
        self.sampler, self.logits_RV, self.sequences, self.drafts = sampler, logits_RV, sequences, drafts
        self.likeliest: list[int] | None = None
        if all(sequence.state.plain for sequence in sequences):
            # Nothing of it depends on the tokens before: all rows at once, and the host waits once.
            self.likeliest = checked(likeliest(logits_RV), logits_RV).tolist()

    def __call__(
        self, active: list[int], rows: list[int], nodes: list[int]
    ) -> tuple[list[int], list[Logprobs | None]]:  # fmt: skip
        """For those sequences whose numbers are `active`, which have come to these rows and places in their drafts."""
        sequences = [self.sequences[i] for i in active]
        if self.likeliest is not None:
            tokens = [self.likeliest[row] for row in rows]
            counts = [sequence.request.params.logprobs for sequence in sequences]
            if all(count is None for count in counts):
                return tokens, [None] * len(rows)
            return tokens, logprobs_of(self._of(rows), tokens, counts)
        drafts = zip((self.drafts[i] for i in active), nodes, strict=True)
        sampled = self.sampler(
            self._of(rows), [sequence.state for sequence in sequences],
            [None if draft is None else draft.drawn(node + 1) for draft, node in drafts],
        )  # fmt: skip
        return sampled.token_ids.tolist(), sampled.logprobs()

    def _of(self, rows: list[int]) -> Tensor:
        if rows == list(range(len(self.logits_RV))):
            return self.logits_RV
        return self.logits_RV.index_select(0, on_device(rows, torch.int64, self.logits_RV.device))
