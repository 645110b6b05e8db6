"""The length of drafts: a fixed one, or one chosen by the measured time of steps and acceptance."""

from __future__ import annotations

import dataclasses
import time
from collections import abc

from mlaforge.engine.request.sequence import Sequence
from mlaforge.engine.speculation.partial import PartialVerification
from mlaforge.engine.speculation.policy import DraftPolicy

# A way that has made none of so many tokens is tried for so many; what was so many tokens ago counts half; and what
# earlier texts have shown counts as so many tokens of a new one.
PACE_AGAIN, PACE_TRIAL, PACE_HALF, PACE_USUAL = 64, 6, 32, 8


# How a step drafts: tokens in a row, or none; a tree, or none; tokens that are judged by a part of the cache first, in
# a row or in trees.
CHAIN, TREE, PARTIAL, PARTIAL_TREE = "chain", "tree", "partial", "partial tree"


@dataclasses.dataclass
class _Way:
    """Tokens and seconds, older ones counting less; tokens left of its trial, and those that others have made since."""

    tokens: float = 0.0
    seconds: float = 0.0
    trial: float = 0.0
    since: float = PACE_AGAIN


class Pace:
    """Which way makes most tokens a second, by the number of sequences that decode and the magnitude of what is cached
    of them: each is measured as it is used and tried now and then, and anew for a sequence that runs alone."""

    def __init__(self) -> None:
        self._ways: dict[tuple[int, int], dict[str, _Way]] = {}
        self._now: dict[str, _Way] = {}
        self._alone: int | None = None

    def choose(self, active: int, ways: abc.Sequence[str], alone: int | None = None, cached: int = 0) -> str:
        """One of `ways`, of equals the first; `alone` is the number of a sequence that runs alone. What is recorded
        next is of these."""
        self._now = self._ways.setdefault((active, cached.bit_length()), {})
        own = [self._now.setdefault(way, _Way()) for way in ways]
        if alone not in (None, self._alone):
            self._alone = alone
            for each in self._now.values():
                # Another text: what the last ones were like is a guess.
                weight = min(1.0, PACE_USUAL / max(each.tokens, 1.0))
                each.tokens, each.seconds, each.since = weight * each.tokens, weight * each.seconds, PACE_AGAIN
        for each in own:
            if each.since >= PACE_AGAIN:
                each.trial, each.since = PACE_TRIAL, 0.0
        tried = [way for way, each in zip(ways, own, strict=True) if each.trial > 0]
        return tried[0] if tried else max(ways, key=lambda way: self._now[way].tokens / self._now[way].seconds)

    def record(self, way: str, tokens: int, seconds: float) -> None:
        """A step of decoding sequences alone made so many tokens."""
        for other in self._now.values():
            other.since += tokens
        own, left = self._now[way], 0.5 ** (tokens / PACE_HALF)
        own.tokens, own.seconds = left * own.tokens + tokens, left * own.seconds + seconds
        own.trial, own.since = own.trial - tokens, 0.0


@dataclasses.dataclass(frozen=True)
class Decision:
    """What a step drafts for each decoding sequence that wants it: `count` tokens in a row, or as many as `counts` says
    of it, ended before a path less likely than `min_probability`; where `tree` is not 0 a tree of so many tokens,
    `count` deep, for the only sequence there is. `copied` tokens at the most are copied from the text instead, ended
    before a path less likely than `copy_probability`. `partial`: whether drafted tokens are judged by a part of the
    cache first, where `tree` is not 0 that many at a time; None where there was no choice. `policy` decided the number
    of tokens and is to learn from it; None where nothing is measured. `way` was chosen by the pace, which is to learn
    from it; None where there was one only. `began` is when the step did (time.perf_counter())."""

    count: int
    min_probability: float = 0.0
    tree: int = 0
    copied: int = 0
    copy_probability: float = 0.0
    policy: DraftPolicy | None = None
    partial: bool | None = None
    began: float = 0.0
    counts: abc.Mapping[Sequence, int] = dataclasses.field(default_factory=dict)
    way: str | None = None

    def depth(self, sequence: Sequence) -> int:
        """How many drafted tokens in a row the sequence has use for."""
        if not sequence.request.params.speculate:
            return 0
        # The target's own token comes on top.
        return max(0, min(self.counts.get(sequence, self.count), sequence.stopping.room - 1))

    def tokens(self, sequence: Sequence) -> int:
        """How many drafted tokens the sequence is to have room for."""
        depth = self.depth(sequence)
        copied = min(self.copied, sequence.stopping.room - 1) if sequence.request.params.speculate else 0
        if self.partial:
            # Copies come behind what is pending; so does a tree, of which most is left behind.
            return min(depth + max(copied, self.tree if depth else 0), sequence.stopping.room - 1)
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
        self.pace = Pace() if adaptive and (partial or tree) else None
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
        ways = [CHAIN]
        trees = self.tree and active == len(running) == 1 and not waiting
        if trees:
            ways.append(TREE)
        if self.partial is not None and any(s.decoding and self.partial.applies(s) for s in running):
            ways += [PARTIAL, PARTIAL_TREE] if trees else [PARTIAL]
        way, measured, cached = ways[-1], None, sum(s.computed for s in running if s.decoding)
        alone = next(s.number for s in running if s.decoding) if active == 1 else None
        if self.pace is not None and len(ways) > 1:
            way = measured = self.pace.choose(active, ways, alone, cached)
        partial = way in (PARTIAL, PARTIAL_TREE) if PARTIAL in ways else None
        worth = 0.0
        if self.policy is not None and active:
            self.policy.look(cached)
            worth = self.policy.min_probability(active, 1)
        decision = Decision(
            self.most, copied=self.copied, copy_probability=worth, partial=partial, began=began, way=measured
        )
        if partial:
            assert self.partial is not None
            # No more room than may be used: what is reserved is taken from others.
            counts = {sequence: self.partial.wanted(sequence) for sequence in running if sequence.decoding}
            return dataclasses.replace(decision, counts=counts, tree=self.tree if way == PARTIAL_TREE else 0)
        tree, policy = (self.tree, self.tree_policy) if way == TREE else (0, self.policy)
        if policy is None or not active:
            return dataclasses.replace(decision, tree=tree, policy=policy)
        count = policy.choose(active, cached, alone)
        likely = policy.min_probability(active, count) if count else 0.0
        return dataclasses.replace(decision, count=count, min_probability=likely, tree=tree, policy=policy)
