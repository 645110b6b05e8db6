"""Speculation of one step: the drafts before it, the statistics and measurements after it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence as Items

from torch import Tensor

from mlaforge.engine.execution.attention_probe import AttentionProbe
from mlaforge.engine.execution.step_bytes import StepBytes
from mlaforge.engine.request.sequence import Sequence
from mlaforge.engine.speculation.drafter import Draft, Drafter
from mlaforge.engine.speculation.lookup import proposals
from mlaforge.engine.speculation.policy import Decision, Policy
from mlaforge.engine.speculation.sparse_view import SparseView
from mlaforge.engine.speculation.statistics import SpeculationStats
from mlaforge.engine.speculation.verification import Verified


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A step with its drafts.

    chunks        (sequence, stop): the step computes the sequence up to position `stop`, its draft included
    drafts        without the empty ones
    budgets       tokens that a draft could have had, for sequences with a draft, empty drafts included
    ready_time    when the drafts were ready (time.perf_counter())
    sparse_bytes  bytes that sparse-view steps read for the drafts
    probe         records the attention of some sequences for the next sparse views
    """

    chunks: list[tuple[Sequence, int]]
    decision: Decision = dataclasses.field(default_factory=Decision)
    drafts: dict[Sequence, Draft] = dataclasses.field(default_factory=dict)
    budgets: dict[Sequence, int] = dataclasses.field(default_factory=dict)
    ready_time: float = 0.0
    sparse_bytes: StepBytes = dataclasses.field(default_factory=StepBytes)
    probe: AttentionProbe | None = None


class Speculation:
    """A drafter, the policy that decides how it drafts, and statistics.

    Per step: `policy.decide`, `propose`, and after verification `observe` and `record`."""

    def __init__(self, drafter: Drafter, policy: Policy):
        self.drafter, self.policy = drafter, policy
        self.sparse_view = next((mode for mode in policy.modes if isinstance(mode, SparseView)), None)
        provisional = self.sparse_view.view.max_provisional if self.sparse_view else 0
        self.stats = SpeculationStats(max(policy.max_tokens, policy.lookup_tokens, provisional))

    def propose(self, decision: Decision, chunks: list[tuple[Sequence, int]]) -> Proposal:
        """Draft for the positions that were reserved beyond each sequence's tokens; chunks shrink to their drafts."""
        drafter = decision.drafter
        assert drafter is not None
        rooms = [(sequence, stop - len(sequence.token_ids)) for sequence, stop in chunks]
        budgets = [(s, room, min(room, decision.room(s))) for s, room in rooms if room > 0]
        proposed = proposals(drafter, self.policy.lookup, budgets, decision.lookup, decision.min_probability)
        budget_of = {
            s: draft.depth if draft.parents or draft.copied else count
            for s, _, count in budgets if (draft := proposed.get(s)) is not None
        }  # fmt: skip
        drafts = {sequence: draft for sequence, draft in proposed.items() if draft.token_ids}
        assert all(len(drafts[s].token_ids) <= room for s, room, _ in budgets if s in drafts)
        lengths = {sequence: len(sequence.token_ids) + len(draft.token_ids) for sequence, draft in drafts.items()}
        chunks = [(s, min(stop, lengths.get(s, len(s.token_ids)))) for s, stop in chunks]
        probe, sparse_bytes = None, StepBytes()
        if (view := self.sparse_view) is not None:
            if drafter is view or not view.applies([s for s, _ in chunks if s.decoding], alone=False):
                # Steps without a sparse view included: a prompt may end whose drafts sparse-view steps verify later.
                probe = view.probe([(sequence, min(stop, len(sequence.token_ids))) for sequence, stop in chunks])
            if any(draft.steps for draft in drafts.values()):
                sparse_bytes = view.bytes_read
        return Proposal(chunks, decision, drafts, budget_of, time.perf_counter(), sparse_bytes, probe)

    def observe(self, starts: Items[tuple[Sequence, int]], states_NS: Tensor | None) -> None:
        """As Drafter.observe, after a step whose probe has recorded. `states_NS`: None without captured states."""
        if self.sparse_view is not None:
            self.sparse_view.retrieve()
        if starts and states_NS is not None:
            self.drafter.observe(starts, states_NS)

    def record(
        self, proposal: Proposal, decoded: Items[tuple[Sequence, Verified]], start_time: float, verified_time: float,
        alone: bool, full_bytes: StepBytes,
    ) -> None:  # fmt: skip
        """Record a finished step.

        decoded         decoding sequences and their verification
        start_time      when the step started, verified_time: when the tokens were known (time.perf_counter())
        alone           whether the step computed decoding sequences only
        full_bytes      bytes that the step read, drafting excluded
        """
        speculating = [(s, verified) for s, verified in decoded if s.request.params.speculate]
        for sequence, verified in speculating:
            self._record_sequence(proposal, sequence, verified)
        seconds = time.perf_counter() - start_time
        if speculating:
            drafting = proposal.ready_time - start_time
            verifying = verified_time - proposal.ready_time
            self.stats.count_engine_step(len(speculating), seconds, drafting, verifying)
        if alone and len(decoded) == len(speculating):
            tokens = sum(len(verified.completion.token_ids) for _, verified in decoded)
            self.stats.count_bytes(tokens, full_bytes, proposal.sparse_bytes)
            self.policy.record(proposal.decision, tokens, len(decoded) + sum(proposal.budgets.values()), seconds)

    def _record_sequence(self, proposal: Proposal, sequence: Sequence, verified: Verified) -> None:
        draft, accepted = proposal.drafts.get(sequence, Draft([])), len(verified.accepted)
        drafted, tokens = draft.depth, len(verified.completion.token_ids)
        self.stats.count(draft, accepted, tokens)
        # Where the text ended within the draft, the rest was not verified.
        if accepted < drafted and accepted == tokens:
            return
        budget = proposal.budgets.get(sequence, 0)
        if draft.copied and self.policy.lookup is not None:
            self.policy.lookup.confident_acceptance.record(budget, accepted)
        elif proposal.decision.drafter is not None:
            proposal.decision.drafter.record(sequence, draft, budget, accepted)
