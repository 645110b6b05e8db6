"""Speculation of one step: the drafts before it, the statistics and measurements after it."""

from __future__ import annotations

import dataclasses
import time
from collections import abc

from mlaforge.engine.execution.step_bytes import StepBytes
from mlaforge.engine.request.sequence import Sequence
from mlaforge.engine.speculation.controller import NO_DRAFT, Controller, Decision
from mlaforge.engine.speculation.drafter import Draft, Drafter, TreeDrafter
from mlaforge.engine.speculation.lookup import PromptLookupDrafter
from mlaforge.engine.speculation.statistics import SpeculationStats
from mlaforge.engine.speculation.verification import Verified


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A step with its drafts.

    chunks        (sequence, stop): the step computes the sequence up to position `stop`, its draft included
    budgets       tokens that a draft could have had, for sequences with a draft, empty drafts included
    ready_time    when the drafts were ready (time.perf_counter())
    sparse_bytes  bytes that sparse-view steps read for the drafts
    """

    chunks: list[tuple[Sequence, int]]
    decision: Decision = NO_DRAFT
    drafts: dict[Sequence, Draft] = dataclasses.field(default_factory=dict)
    budgets: dict[Sequence, int] = dataclasses.field(default_factory=dict)
    ready_time: float = 0.0
    sparse_bytes: StepBytes = dataclasses.field(default_factory=StepBytes)


class Speculation:
    """A drafter, the controller that decides how much it drafts, and statistics.

    `lookup`: drafts by prompt lookup go before the drafter's own. Per step: `controller.decide`, `propose`, and after
    verification `record`."""

    def __init__(self, drafter: Drafter, controller: Controller, lookup: PromptLookupDrafter | None = None):
        assert not controller.tree or isinstance(drafter, TreeDrafter)
        self.drafter, self.controller, self.lookup = drafter, controller, lookup
        self.sparse_view = controller.sparse_view
        self.stats = SpeculationStats(controller.max_draft_tokens)

    def propose(self, decision: Decision, chunks: list[tuple[Sequence, int]]) -> Proposal:
        """Draft for the positions that were reserved beyond each sequence's tokens; chunks shrink to their drafts."""
        budgets = [(s, stop - len(s.token_ids)) for s, stop in chunks if stop > len(s.token_ids)]
        drafts: dict[Sequence, Draft] = {}
        budget_of: dict[Sequence, int] = {}
        proposed = self._drafts(decision, budgets)
        for sequence, count in budgets:
            if (draft := proposed.get(sequence)) is not None:
                assert len(draft.token_ids) <= count
                fixed = decision.tree or draft.lookup_tokens
                budget_of[sequence] = draft.depth if fixed else min(count, decision.depth(sequence))
                if draft.token_ids:
                    drafts[sequence] = draft
        lengths = {sequence: len(draft.token_ids) for sequence, draft in drafts.items()}
        chunks = [(s, min(stop, len(s.token_ids) + lengths.get(s, 0))) for s, stop in chunks]
        sparse = any(draft.sparse_steps for draft in drafts.values())
        sparse_bytes = self.sparse_view.bytes_read if sparse and self.sparse_view is not None else StepBytes()
        return Proposal(chunks, decision, drafts, budget_of, time.perf_counter(), sparse_bytes)

    def _drafts(self, decision: Decision, budgets: list[tuple[Sequence, int]]) -> abc.Mapping[Sequence, Draft | None]:
        def look_up(sequence: Sequence, room: int) -> Draft | None:
            count = min(room, decision.lookup_tokens)
            if self.lookup is None or not count:
                return None
            return self.lookup.propose_confident(sequence, count, decision.lookup_min_probability)

        drafts = {sequence: draft for sequence, room in budgets if (draft := look_up(sequence, room))}
        budgets = [(s, room) for s, room in budgets if s not in drafts and decision.depth(s)]
        if not budgets:
            return drafts
        if decision.sparse_view and self.sparse_view is not None:
            return drafts | self.sparse_view.propose(budgets, decision.min_probability, look_up, decision.tree)
        if not decision.tree:
            chains = [(s, min(room, decision.depth(s))) for s, room in budgets]
            proposed = self.drafter.propose(chains, decision.min_probability)
            return drafts | dict(zip((s for s, _ in chains), proposed, strict=True))
        assert isinstance(self.drafter, TreeDrafter)
        ((sequence, room),) = budgets
        count = min(room, decision.tree)
        return drafts | {sequence: self.drafter.propose_tree(sequence, count, min(count, decision.depth(sequence)))}

    def record(
        self, proposal: Proposal, decoded: abc.Sequence[tuple[Sequence, Verified]], verified_time: float,
        rows: int | None, full_bytes: StepBytes,
    ) -> None:  # fmt: skip
        """Record a finished step.

        decoded         decoding sequences and their verification
        verified_time   when the tokens were known (time.perf_counter())
        rows            computed rows; None where the step computed prompts too
        full_bytes      bytes that the step read, drafting excluded
        """
        decision = proposal.decision
        speculating = [(s, verified) for s, verified in decoded if s.request.params.speculate]
        for sequence, verified in speculating:
            self._record_sequence(proposal, sequence, verified)
        seconds = time.perf_counter() - decision.start_time
        if speculating:
            draft_seconds, verify_seconds = (
                proposal.ready_time - decision.start_time,
                verified_time - proposal.ready_time,
            )
            self.stats.count_engine_step(len(speculating), seconds, draft_seconds, verify_seconds)
        if rows is None or len(decoded) != len(speculating):
            return
        tokens = sum(len(verified.completion.token_ids) for _, verified in decoded)
        self.stats.count_bytes(tokens, full_bytes, proposal.sparse_bytes)
        # A lookup draft of a single sequence is the same in every mode; of several sequences one nearly always has one.
        looked_up = len(speculating) == 1 and any(draft.lookup_tokens for draft in proposal.drafts.values())
        if decision.mode is not None and self.controller.mode_selector is not None and not looked_up:
            self.controller.mode_selector.record(decision.mode, tokens, seconds)
        if decision.policy is not None and not (decision.tree and looked_up):
            rows = rows if decision.tree else len(decoded) + sum(proposal.budgets.values())
            decision.policy.record_time(rows, seconds)

    def _record_sequence(self, proposal: Proposal, sequence: Sequence, verified: Verified) -> None:
        draft, accepted = proposal.drafts.get(sequence), len(verified.accepted)
        drafted, tokens = 0 if draft is None else draft.depth, len(verified.completion.token_ids)
        self.stats.count(drafted, accepted, tokens)
        if draft is not None and draft.parents is not None:
            self.stats.tree_tokens += len(draft.token_ids)
        lookup = 0 if draft is None else draft.lookup_tokens
        provisional = drafted - lookup
        if draft is not None and draft.sparse_steps and self.sparse_view is not None:
            confirmed = min(accepted, provisional) - verified.disagreements
            self.sparse_view.record_verification(sequence, provisional, confirmed)
            self.stats.sparse_steps += draft.sparse_steps
            self.stats.full_steps += 1
            self.stats.provisional += provisional
            self.stats.confirmed += confirmed
        self.stats.lookup_tokens += lookup
        # Where the text ended within the draft, the rest was not verified.
        if accepted == drafted or accepted < tokens:
            policy = proposal.decision.policy
            if lookup and self.lookup is not None and accepted >= provisional:
                self.lookup.acceptance.record(lookup, accepted - provisional)
            elif policy is not None and not lookup:
                policy.acceptance.record(proposal.budgets.get(sequence, 0), accepted)
