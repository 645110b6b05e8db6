"""Speculation step by step: a decision before a step, a proposal for it, and statistics after it."""

from __future__ import annotations

import dataclasses
import time
from collections import abc

from mlaforge.engine.execution.step_bytes import StepBytes
from mlaforge.engine.request.sequence import Sequence
from mlaforge.engine.speculation.controller import NO_DRAFT, Controller, Decision
from mlaforge.engine.speculation.copies import Copies
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
    read: StepBytes = dataclasses.field(default_factory=StepBytes)


class Speculation:
    """An engine's drafter, the controller of how much it drafts, and the statistics of what became of it; with `copies`
    what stood in a text before comes ahead of what the drafter proposes.

    A step is what `controller` decides, `propose` of that, and `end` of what was proposed.
    """

    def __init__(self, drafter: Drafter, controller: Controller, copies: Copies | None = None):
        assert not controller.tree or isinstance(drafter, TreeDrafter)
        self.drafter, self.controller, self.partial, self.copies = drafter, controller, controller.partial, copies
        self.stats = SpeculationStats(controller.longest)

    def propose(self, decision: Decision, chunks: list[tuple[Sequence, int]]) -> Proposal:
        """Drafts for the positions that were reserved beyond the sequences' tokens; the chunks are cut to what came."""
        budgets = [(s, upto - len(s.token_ids)) for s, upto in chunks if upto > len(s.token_ids)]
        drafts: dict[Sequence, Draft] = {}
        budget_of: dict[Sequence, int] = {}
        made = self._drafts(decision, budgets)
        for sequence, count in budgets:
            if (draft := made.get(sequence)) is not None:
                assert len(draft.token_ids) <= count
                own = min(count, decision.depth(sequence))
                budget_of[sequence] = draft.length if decision.tree or draft.copied else own
                if draft.token_ids:
                    drafts[sequence] = draft
        lengths = {sequence: len(draft.token_ids) for sequence, draft in drafts.items()}
        cut = [(s, min(upto, len(s.token_ids) + lengths.get(s, 0))) for s, upto in chunks]
        judged = any(draft.partial_steps for draft in drafts.values())
        read = self.partial.read if judged and self.partial is not None else StepBytes()
        return Proposal(cut, decision, drafts, budget_of, time.perf_counter(), read)

    def _drafts(self, decision: Decision, budgets: list[tuple[Sequence, int]]) -> abc.Mapping[Sequence, Draft | None]:
        def copy(sequence: Sequence, room: int) -> Draft | None:
            most = min(room, decision.copied)
            return self.copies.propose(sequence, most, decision.copy_probability) if self.copies and most else None

        drafts = {sequence: draft for sequence, room in budgets if (draft := copy(sequence, room))}
        budgets = [(s, room) for s, room in budgets if s not in drafts and decision.depth(s)]
        if not budgets:
            return drafts
        if decision.partial and self.partial is not None:
            return drafts | self.partial.propose(budgets, decision.min_probability, copy, decision.tree)
        if not decision.tree:
            own = [(s, min(room, decision.depth(s))) for s, room in budgets]
            proposed = self.drafter.propose(own, decision.min_probability)
            return drafts | dict(zip((s for s, _ in own), proposed, strict=True))
        assert isinstance(self.drafter, TreeDrafter)
        ((sequence, room),) = budgets
        count = min(room, decision.tree)
        return drafts | {sequence: self.drafter.propose_tree(sequence, count, min(count, decision.depth(sequence)))}

    def end(
        self, proposal: Proposal, decoded: abc.Sequence[tuple[Sequence, Verified]], verified_at: float,
        rows: int | None, read: StepBytes,
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
                copied = 0 if draft is None else draft.copied
                pending, kept = drafted - copied, min(accepted, drafted - copied) - verified.overruled
                if draft is not None and draft.partial_steps and self.partial is not None:
                    self.partial.learn(sequence, pending, kept)
                    self.stats.partial_steps += draft.partial_steps
                    self.stats.judging_steps += 1
                    self.stats.pending += pending
                    self.stats.kept += kept
                self.stats.copied += copied
                # Where the text ended among the drafted tokens, the rest was not judged.
                if accepted == drafted or accepted < new:
                    if copied and self.copies is not None and accepted >= pending:
                        self.copies.acceptance.record(copied, accepted - pending)
                    elif policy is not None and not copied:
                        policy.acceptance.record(proposal.budgets.get(sequence, 0), accepted)
        seconds = time.perf_counter() - decision.began
        if speculating:
            drafting, verifying = proposal.at - decision.began, verified_at - proposal.at
            self.stats.count_engine_step(speculating, seconds, drafting, verifying)
        if rows is None or len(decoded) != speculating:
            return
        new = sum(len(verified.completion.token_ids) for _, verified in decoded)
        self.stats.count_read(new, read, proposal.read)
        # One text's copy is the same in every way; of several texts one copies nearly always.
        copying = speculating == 1 and any(draft.copied for draft in proposal.drafts.values())
        if decision.mode is not None and self.controller.mode_selector is not None and not copying:
            self.controller.mode_selector.record(decision.mode, new, seconds)
        if policy is not None and not (decision.tree and copying):
            policy.record_time(rows if decision.tree else len(decoded) + sum(proposal.budgets.values()), seconds)
