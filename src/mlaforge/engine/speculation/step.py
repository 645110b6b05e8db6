"""Speculation step by step: a decision before a step, a proposal for it, and statistics after it."""

from __future__ import annotations

import dataclasses
import time
from collections import abc

from mlaforge.engine.execution.traffic import Read
from mlaforge.engine.request.sequence import Sequence
from mlaforge.engine.speculation.controller import NO_DRAFT, Controller, Decision
from mlaforge.engine.speculation.drafter import Draft, Drafter, TreeDrafter
from mlaforge.engine.speculation.statistics import SpeculationStats
from mlaforge.engine.speculation.verification import Verified


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A step with its drafts: `chunks` are its sequences, each with the position up to which it is computed, its draft
    included. `budgets`: of those for whom there was a draft, and be it an empty one, how many tokens it might have had.
    `at` is when the drafts were there (time.perf_counter()), `read` what partial steps read for them."""

    chunks: list[tuple[Sequence, int]]
    decision: Decision = NO_DRAFT
    drafts: dict[Sequence, Draft] = dataclasses.field(default_factory=dict)
    budgets: dict[Sequence, int] = dataclasses.field(default_factory=dict)
    at: float = 0.0
    read: Read = dataclasses.field(default_factory=Read)


class Speculation:
    """An engine's drafter, the controller of how much it drafts, and the statistics of what became of it.

    A step is what `controller` decides, `propose` of that, and `end` of what was proposed.
    """

    def __init__(self, drafter: Drafter, controller: Controller):
        assert not controller.tree or isinstance(drafter, TreeDrafter)
        self.drafter, self.controller, self.partial = drafter, controller, controller.partial
        self.stats = SpeculationStats(controller.longest)

    def propose(self, decision: Decision, chunks: list[tuple[Sequence, int]]) -> Proposal:
        """Drafts for the positions that were reserved beyond the sequences' tokens; the chunks are cut to what came."""
        budgets = [(s, upto - len(s.token_ids)) for s, upto in chunks if upto > len(s.token_ids)]
        drafts: dict[Sequence, Draft] = {}
        budget_of: dict[Sequence, int] = {}
        for (sequence, count), draft in zip(budgets, self._drafts(decision, budgets) if budgets else [], strict=True):
            if draft is not None:
                assert len(draft.token_ids) <= count
                budget_of[sequence] = draft.length if decision.tree else count
                if draft.token_ids:
                    drafts[sequence] = draft
        lengths = {sequence: len(draft.token_ids) for sequence, draft in drafts.items()}
        cut = [(s, min(upto, len(s.token_ids) + lengths.get(s, 0))) for s, upto in chunks]
        read = self.partial.read if budgets and decision.partial and self.partial is not None else Read()
        return Proposal(cut, decision, drafts, budget_of, time.perf_counter(), read)

    def _drafts(self, decision: Decision, budgets: list[tuple[Sequence, int]]) -> list[Draft | None]:
        if decision.partial and self.partial is not None:
            return self.partial.propose(budgets, decision.min_probability)
        if not decision.tree:
            return self.drafter.propose(budgets, decision.min_probability)
        assert isinstance(self.drafter, TreeDrafter)
        ((sequence, count),) = budgets
        return [self.drafter.propose_tree(sequence, count, min(count, decision.depth(sequence)))]

    def end(
        self, proposal: Proposal, decoded: abc.Sequence[tuple[Sequence, Verified]], verified_at: float,
        rows: int | None, read: Read,
    ) -> None:  # fmt: skip
        """The step is over. `decoded` are its decoding sequences, verified at time `verified_at`; `rows` are those that
        were computed, None where anything but decoding sequences was; `read` is what it read, drafts apart."""
        decision, policy = proposal.decision, proposal.decision.policy
        speculating = 0
        for sequence, verified in decoded:
            if sequence.request.params.speculate:
                speculating += 1
                draft, accepted = proposal.drafts.get(sequence), len(verified.accepted)
                drafted, new = 0 if draft is None else draft.length, len(verified.completion.token_ids)
                self.stats.count(drafted, accepted, new)
                if draft is not None and draft.parents is not None:
                    self.stats.tree_tokens += len(draft.token_ids)
                if draft is not None and draft.partial_steps and self.partial is not None:
                    self.partial.learn(sequence, drafted, accepted - verified.overruled)
                    self.stats.partial_steps += draft.partial_steps
                    self.stats.judging_steps += 1
                    self.stats.pending += drafted
                    self.stats.kept += accepted - verified.overruled
                # Where the text ended among the drafted tokens, the rest was not judged.
                if policy is not None and (accepted == drafted or accepted < new):
                    policy.record_acceptance(proposal.budgets.get(sequence, 0), accepted)
        seconds = time.perf_counter() - decision.began
        if speculating:
            drafting, verifying = proposal.at - decision.began, verified_at - proposal.at
            self.stats.count_engine_step(speculating, seconds, drafting, verifying)
        if rows is None or len(decoded) != speculating:
            return
        new = sum(len(verified.completion.token_ids) for _, verified in decoded)
        self.stats.count_read(new, read, proposal.read)
        if decision.way is not None and self.controller.pace is not None:
            self.controller.pace.record(speculating, decision.way, new, seconds)
        if policy is not None:
            policy.record_time(rows if decision.tree else len(decoded) + sum(proposal.budgets.values()), seconds)
