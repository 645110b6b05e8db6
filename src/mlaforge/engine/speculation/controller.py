"""The length of drafts: a fixed one, or one chosen by the measured time of steps and acceptance."""

from __future__ import annotations

import dataclasses
import time
from collections import abc

from mlaforge.engine.request.sequence import Sequence
from mlaforge.engine.speculation.partial import PartialVerification
from mlaforge.engine.speculation.policy import DraftPolicy

# A mode that was not used for RETRY_TOKENS is tried for TRIAL_TOKENS; the weight of a measurement halves every
# HALF_LIFE_TOKENS; what earlier texts have shown counts at most PRIOR_TOKENS for a new one.
RETRY_TOKENS, TRIAL_TOKENS, HALF_LIFE_TOKENS, PRIOR_TOKENS = 64, 6, 32, 8


# How a step drafts: a chain of tokens, or none; a tree, or none; tokens that a part of the cache verifies first, in a
# chain or in trees.
CHAIN, TREE, PARTIAL, PARTIAL_TREE = "chain", "tree", "partial", "partial tree"


@dataclasses.dataclass
class _Mode:
    """Measurements of a mode. `tokens` and `seconds` decay with a half-life; `trial_tokens` are left of its trial;
    `tokens_since_use` were made by other modes."""

    tokens: float = 0.0
    seconds: float = 0.0
    trial_tokens: float = 0.0
    tokens_since_use: float = RETRY_TOKENS


class ModeSelector:
    """Selects the mode with the most tokens a second, by the number of decoding sequences and the magnitude of their
    cached tokens. Each mode is measured while it is used, retried now and then, and measured anew for a sequence that
    runs alone."""

    def __init__(self) -> None:
        self._modes: dict[tuple[int, int], dict[str, _Mode]] = {}
        self._current: dict[str, _Mode] = {}
        self._alone: int | None = None

    def choose(self, active: int, modes: abc.Sequence[str], alone: int | None = None, cached: int = 0) -> str:
        """One of `modes`, of equals the first; `alone` is the number of a sequence that runs alone. The next call of
        `record` is of this choice."""
        self._current = self._modes.setdefault((active, cached.bit_length()), {})
        candidates = [self._current.setdefault(mode, _Mode()) for mode in modes]
        if alone not in (None, self._alone):
            self._alone = alone
            for mode in self._current.values():
                # Another text: measurements of the last ones are a guess.
                weight = min(1.0, PRIOR_TOKENS / max(mode.tokens, 1.0))
                mode.tokens, mode.seconds = weight * mode.tokens, weight * mode.seconds
                mode.tokens_since_use = RETRY_TOKENS
        for mode in candidates:
            if mode.tokens_since_use >= RETRY_TOKENS:
                mode.trial_tokens, mode.tokens_since_use = TRIAL_TOKENS, 0.0
        trials = [name for name, mode in zip(modes, candidates, strict=True) if mode.trial_tokens > 0]
        if trials:
            return trials[0]
        return max(modes, key=lambda name: self._current[name].tokens / self._current[name].seconds)

    def record(self, mode: str, tokens: int, seconds: float) -> None:
        """Adds a measurement: a step in which all sequences decoded made so many tokens."""
        for other in self._current.values():
            other.tokens_since_use += tokens
        measured, decay = self._current[mode], 0.5 ** (tokens / HALF_LIFE_TOKENS)
        measured.tokens, measured.seconds = decay * measured.tokens + tokens, decay * measured.seconds + seconds
        measured.trial_tokens, measured.tokens_since_use = measured.trial_tokens - tokens, 0.0


@dataclasses.dataclass(frozen=True)
class Decision:
    """What a step drafts for each decoding sequence that wants it: `count` tokens in a row, or as many as `counts` says
    of it, ended before a path less likely than `min_probability`; where `tree` is not 0 a tree of so many tokens,
    `count` deep, for the only sequence there is. `copied` tokens at the most are copied from the text instead, ended
    before a path less likely than `copy_probability`. `partial`: whether drafted tokens are judged by a part of the
    cache first, where `tree` is not 0 that many at a time; None where there was no choice. `policy` decided the number
    of tokens and is to learn from it; None where nothing is measured. `mode` was chosen by the mode selector,
    which is to learn from it; None where there was one only. `began` is when the step did (time.perf_counter())."""

    count: int
    min_probability: float = 0.0
    tree: int = 0
    copied: int = 0
    copy_probability: float = 0.0
    policy: DraftPolicy | None = None
    partial: bool | None = None
    began: float = 0.0
    counts: abc.Mapping[Sequence, int] = dataclasses.field(default_factory=dict)
    mode: str | None = None

    def depth(self, sequence: Sequence) -> int:
        """How many drafted tokens in a row the sequence has use for."""
        if not sequence.request.params.speculate:
            return 0
        # The target's own token comes on top.
        return max(0, min(self.counts.get(sequence, self.count), sequence.stopping.remaining_tokens - 1))

    def tokens(self, sequence: Sequence) -> int:
        """How many drafted tokens the sequence is to have room for."""
        depth = self.depth(sequence)
        copied = min(self.copied, sequence.stopping.remaining_tokens - 1) if sequence.request.params.speculate else 0
        if self.partial:
            # Copies come behind what is pending; so does a tree, of which most is left behind.
            return min(depth + max(copied, self.tree if depth else 0), sequence.stopping.remaining_tokens - 1)
        return max(self.tree if depth else 0, depth, copied)


# What a step without a drafter drafts.
NO_DRAFT = Decision(0)


class Controller:
    """Decides step by step: `most` tokens per sequence, fewer where `adaptive` measurement says so; where one sequence
    runs alone a tree of `tree` tokens that is so deep, if that is not 0; with `partial` tokens that are judged by a
    part of the cache first. Without measurement the last of these that applies, else what is measured to be fastest.
    With any of them up to `copied` tokens are copied from the text where they stood in it."""

    def __init__(
        self, most: int, adaptive: bool, tree: int = 0, partial: PartialVerification | None = None, copied: int = 0
    ):
        self.most, self.tree, self.partial, self.copied = most, tree, partial, copied
        self.policy = DraftPolicy(most) if adaptive else None
        self.mode_selector = ModeSelector() if adaptive and (partial or tree) else None
        # Of trees acceptance and times are others.
        self.tree_policy = DraftPolicy(most, tree) if adaptive and tree else None

    @property
    def longest(self) -> int:
        """Tokens of a draft at the most."""
        return max(self.most, self.copied, self.partial.pattern.max_pending + self.copied if self.partial else 0)

    def decide(self, running: abc.Sequence[Sequence], waiting: bool) -> Decision:
        """For the step that begins now with these sequences; `waiting`: others may join it."""
        began = time.perf_counter()
        active = sum(sequence.decoding for sequence in running)
        modes = [CHAIN]
        trees = self.tree and active == len(running) == 1 and not waiting
        if trees:
            modes.append(TREE)
        if self.partial is not None and any(s.decoding and self.partial.applies(s) for s in running):
            modes += [PARTIAL, PARTIAL_TREE] if trees else [PARTIAL]
        mode, measured, cached = modes[-1], None, sum(s.computed for s in running if s.decoding)
        alone = next(s.number for s in running if s.decoding) if active == 1 else None
        if self.mode_selector is not None and len(modes) > 1:
            mode = measured = self.mode_selector.choose(active, modes, alone, cached)
        partial = mode in (PARTIAL, PARTIAL_TREE) if PARTIAL in modes else None
        worth = 0.0
        if self.policy is not None and active:
            self.policy.look(cached)
            worth = self.policy.min_probability(active, 1)
        decision = Decision(
            self.most, copied=self.copied, copy_probability=worth, partial=partial, began=began, mode=measured
        )
        if partial:
            assert self.partial is not None
            # No more room than may be used: what is reserved is taken from others.
            counts = {sequence: self.partial.wanted(sequence) for sequence in running if sequence.decoding}
            return dataclasses.replace(decision, counts=counts, tree=self.tree if mode == PARTIAL_TREE else 0)
        tree, policy = (self.tree, self.tree_policy) if mode == TREE else (0, self.policy)
        if policy is None or not active:
            return dataclasses.replace(decision, tree=tree, policy=policy)
        count = policy.choose(active, cached, alone)
        likely = policy.min_probability(active, count) if count else 0.0
        return dataclasses.replace(decision, count=count, min_probability=likely, tree=tree, policy=policy)
