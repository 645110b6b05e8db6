"""What a step drafts: its mode and number of tokens, fixed or chosen by measured tokens per second."""

from __future__ import annotations

import dataclasses
import time
from collections import abc

from mlaforge.engine.request.sequence import Sequence
from mlaforge.engine.speculation.policy import DraftPolicy
from mlaforge.engine.speculation.sparse_view import SparseViewDrafter

# A mode that was not used for RETRY_TOKENS is tried for TRIAL_TOKENS; the weight of a measurement halves every
# HALF_LIFE_TOKENS; measurements of earlier texts weigh at most PRIOR_TOKENS for a new one.
RETRY_TOKENS, TRIAL_TOKENS, HALF_LIFE_TOKENS, PRIOR_TOKENS = 64, 6, 32, 8

# Modes: drafts are chains or trees (or empty), and the last two verify them in sparse-view steps first.
CHAIN, TREE, SPARSE_VIEW, SPARSE_TREE = "chain", "tree", "sparse view", "sparse view tree"


@dataclasses.dataclass
class _Mode:
    """Measurements of a mode. `tokens` and `seconds` decay with a half-life; `trial_tokens` remain of its trial;
    `tokens_since_use` were generated in other modes."""

    tokens: float = 0.0
    seconds: float = 0.0
    trial_tokens: float = 0.0
    tokens_since_use: float = RETRY_TOKENS


class ModeSelector:
    """Selects the mode with the most tokens per second, by the number of decoding sequences and the power of two of
    their cached tokens. Each mode is measured while it is used, retried now and then, and measured anew for a sequence
    that runs alone."""

    def __init__(self) -> None:
        self._modes: dict[tuple[int, int], dict[str, _Mode]] = {}
        self._current: dict[str, _Mode] = {}
        self._single: int | None = None

    def choose(self, active: int, modes: abc.Sequence[str], single: int | None = None, cached: int = 0) -> str:
        """One of `modes`, the first of equals. `single`: number of the sequence where only one runs. The next call of
        `record` belongs to this choice."""
        self._current = self._modes.setdefault((active, cached.bit_length()), {})
        candidates = [self._current.setdefault(mode, _Mode()) for mode in modes]
        if single not in (None, self._single):
            self._single = single
            for mode in self._current.values():
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
        """Add a measurement: a step in which all sequences were decoding generated `tokens` tokens."""
        for other in self._current.values():
            other.tokens_since_use += tokens
        used, decay = self._current[mode], 0.5 ** (tokens / HALF_LIFE_TOKENS)
        used.tokens, used.seconds = decay * used.tokens + tokens, decay * used.seconds + seconds
        used.trial_tokens, used.tokens_since_use = used.trial_tokens - tokens, 0.0


@dataclasses.dataclass(frozen=True)
class Decision:
    """What a step drafts for each decoding sequence that allows speculation.

    count                    longest chain, or depth of the tree
    counts                   longest chain of single sequences, in place of `count`
    min_probability          a draft ends before a path that is less likely
    tree                     tokens of a tree for the only running sequence; 0 for chains
    lookup_tokens            longest draft by prompt lookup, which replaces the drafter's
    lookup_min_probability   a lookup draft ends before a path that is less likely
    sparse_view              verify drafts in sparse-view steps first; None where no sequence is long enough
    policy                   chose the number of tokens and learns from the step; None for a fixed number
    mode                     the mode selector's choice, from which it learns; None where only one mode was possible
    start_time               start of the step (time.perf_counter())
    """

    count: int
    min_probability: float = 0.0
    tree: int = 0
    lookup_tokens: int = 0
    lookup_min_probability: float = 0.0
    policy: DraftPolicy | None = None
    sparse_view: bool | None = None
    start_time: float = 0.0
    counts: abc.Mapping[Sequence, int] = dataclasses.field(default_factory=dict)
    mode: str | None = None

    def depth(self, sequence: Sequence) -> int:
        """Longest path of drafted tokens that the sequence can use."""
        if not sequence.request.params.speculate:
            return 0
        # One position remains for the target's own token.
        return max(0, min(self.counts.get(sequence, self.count), sequence.stopping.remaining_tokens - 1))

    def tokens(self, sequence: Sequence) -> int:
        """Drafted tokens for which the cache reserves room."""
        depth = self.depth(sequence)
        lookup = (
            min(self.lookup_tokens, sequence.stopping.remaining_tokens - 1) if sequence.request.params.speculate else 0
        )
        if self.sparse_view:
            # Provisional tokens are followed by a lookup draft, or by a tree of which one path remains.
            return min(depth + max(lookup, self.tree if depth else 0), sequence.stopping.remaining_tokens - 1)
        return max(self.tree if depth else 0, depth, lookup)


# Decision of a step without a drafter.
NO_DRAFT = Decision(0)


class Controller:
    """Decides for each step what to draft.

    max_tokens      longest chain per sequence
    adaptive        choose mode and length by measurement; otherwise the last mode that applies, at full length
    tree            tokens of a tree, which is possible where one sequence runs alone; 0 for none
    sparse_view     verifies drafts in sparse-view steps; None for none
    lookup_tokens   longest draft by prompt lookup, in every mode
    """

    def __init__(
        self, max_tokens: int, adaptive: bool, tree: int = 0, sparse_view: SparseViewDrafter | None = None,
        lookup_tokens: int = 0,
    ):  # fmt: skip
        self.max_tokens, self.tree, self.sparse_view, self.lookup_tokens = max_tokens, tree, sparse_view, lookup_tokens
        self.policy = DraftPolicy(max_tokens) if adaptive else None
        self.mode_selector = ModeSelector() if adaptive and (sparse_view or tree) else None
        # Trees differ from chains in acceptance and time.
        self.tree_policy = DraftPolicy(max_tokens, tree) if adaptive and tree else None

    @property
    def max_draft_tokens(self) -> int:
        """Longest path of a draft."""
        provisional = self.sparse_view.config.max_provisional + self.lookup_tokens if self.sparse_view else 0
        return max(self.max_tokens, self.lookup_tokens, provisional)

    def decide(self, running: abc.Sequence[Sequence], waiting: bool) -> Decision:
        """Decide for the step that starts now with the sequences `running`; `waiting`: others may join it."""
        start_time = time.perf_counter()
        active = sum(sequence.decoding for sequence in running)
        modes = [CHAIN]
        trees = self.tree and active == len(running) == 1 and not waiting
        if trees:
            modes.append(TREE)
        if self.sparse_view is not None and any(s.decoding and self.sparse_view.applies(s) for s in running):
            modes += [SPARSE_VIEW, SPARSE_TREE] if trees else [SPARSE_VIEW]
        mode, selected, cached = modes[-1], None, sum(s.computed for s in running if s.decoding)
        single = next(s.number for s in running if s.decoding) if active == 1 else None
        if self.mode_selector is not None and len(modes) > 1:
            mode = selected = self.mode_selector.choose(active, modes, single, cached)
        sparse = mode in (SPARSE_VIEW, SPARSE_TREE) if SPARSE_VIEW in modes else None
        lookup_min_probability = 0.0
        if self.policy is not None and active:
            self.policy.set_cached(cached)
            lookup_min_probability = self.policy.min_probability(active, 1)
        decision = Decision(
            self.max_tokens, lookup_tokens=self.lookup_tokens, lookup_min_probability=lookup_min_probability,
            sparse_view=sparse, start_time=start_time, mode=selected,
        )  # fmt: skip
        if sparse:
            assert self.sparse_view is not None
            # Reserve no more room than can be used: it is taken from other sequences.
            counts = {
                sequence: self.sparse_view.max_draft_tokens(sequence) for sequence in running if sequence.decoding
            }
            return dataclasses.replace(decision, counts=counts, tree=self.tree if mode == SPARSE_TREE else 0)
        tree, policy = (self.tree, self.tree_policy) if mode == TREE else (0, self.policy)
        if policy is None or not active:
            return dataclasses.replace(decision, tree=tree, policy=policy)
        count = policy.choose(active, cached, single)
        min_probability = policy.min_probability(active, count) if count else 0.0
        return dataclasses.replace(decision, count=count, min_probability=min_probability, tree=tree, policy=policy)
