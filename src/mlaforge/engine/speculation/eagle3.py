"""EAGLE-3 drafter (arXiv:2503.01840) on the paged cache.

The head's keys and values form a cache group that shares the sequences' block tables: prefix hits, forks, rewinds and
evictions apply to target and head alike. Row i of the head is computed from the target's states at position i and from
token i + 1. Rows of accepted tokens are computed from the target's own states, in the step that computed these and
before the blocks can be found as a prefix. Rows of drafted tokens are written to the room reserved for verification and
are overwritten afterwards. Where texts diverge (a prefix that ends with a block, several continuations of a request),
the last shared row depends on the text that came first: that one row can lower acceptance, never change a token.

Legend: N rows, S sequences, C hidden size of the head, K drafted tokens, V vocabulary of the target.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import NamedTuple

import torch
from torch import Tensor

from mlaforge.engine.execution.batch import Batch, Chunk
from mlaforge.engine.execution.draft_graphs import Chains, DraftGraphs
from mlaforge.engine.execution.draft_head import PagedDraftHead
from mlaforge.engine.execution.graphs import Graphs
from mlaforge.engine.execution.model import EngineModel
from mlaforge.engine.execution.nvtx import span
from mlaforge.engine.request.sequence import Sequence
from mlaforge.engine.sampling.sampler import likeliest
from mlaforge.engine.speculation.draft_sampling import (
    DraftRows,
    cut,
    highest_probability,
    read_drafts,
    sample_drafts,
    sample_places,
)
from mlaforge.engine.speculation.drafter import Draft, Drafter, ancestry
from mlaforge.modeling.eagle3 import Eagle3Head
from mlaforge.ops.paged_rows import PagedRows
from mlaforge.runtime import on_device, ops_choice

# Most children of a tree node, and most nodes of a level that get children.
BRANCHES = 8
# Builds a batch of chunks with the view of the head's cache group only.
MakeBatch = Callable[[list[Chunk]], Batch]


class _Node(NamedTuple):
    """Candidate of a tree: its target token, the index of its parent (-1: the sequence's newest token), and the log
    probability of its path."""

    token_id: int
    parent: int
    score: float


def _best(nodes: list[_Node], count: int) -> Draft:
    """The `count` most probable candidates: a tree, because no child is more probable than its parent and the sort
    keeps parents first."""
    top = sorted(sorted(range(len(nodes)), key=lambda node: -nodes[node].score)[:count])
    index = {-1: -1} | {node: i for i, node in enumerate(top)}
    parents = [index[nodes[node].parent] for node in top]
    chain = parents == list(range(-1, len(parents) - 1))
    return Draft([nodes[node].token_id for node in top], parents=None if chain else parents)


def _draft_rows(
    sequence: Sequence, start: int, stop: int, tree: list[list[int]] | None = None, generating: bool = False
) -> Chunk:
    """The head's rows of drafted tokens [start, stop) of a sequence."""
    # Row i is computed from token i + 1.
    first, end = sequence.computed + start, sequence.computed + stop
    return Chunk(sequence.number, range(end), first, end, tree, generating)


class EagleDrafter(Drafter):
    """Drafts a chain per sequence, greedily for greedy requests, otherwise sampled from the head's distribution; or a
    tree for a single sequence.

    head        the draft head; it takes dtype, device, weight format and, if it has none, the embedding from `model`
    rows        the head's cache
    make_batch  builds batches on the head's cache group
    graphs      of the model's steps, on a GPU; greedy chains of equal length are then graphs too

    The host waits for the device once per step for all chains, and once per level of a tree. With `stops_early` (CPU)
    it reads probabilities at every depth and saves passes of the head; elsewhere chains are cut afterwards, with the
    same result.
    """

    def __init__(
        self, head: Eagle3Head, model: EngineModel, rows: PagedRows, make_batch: MakeBatch,
        graphs: Graphs | None = None,
    ):  # fmt: skip
        self.model, self.boundaries, self._make_batch = model, head.config.boundaries, make_batch
        self.head, self.target_ids = PagedDraftHead(head, model, rows), head.target_ids.to(model.device)
        self.stops_early, self.parallel_drafting = model.device.type == "cpu", self.head.mask_state is not None
        self.graphs: DraftGraphs | None = None
        if graphs is not None and self.head.mask_state is None:
            self.graphs = DraftGraphs(
                self._drafted, lambda run: graphs.capture(run), graphs.scratch[-1], graphs.max_num_seqs
            )  # fmt: skip
        # By sequence number: positions in the head's cache, and the layer's output [C] at the last of them.
        self._outs: dict[int, tuple[int, Tensor]] = {}

    @torch.inference_mode()
    def observe(self, starts: Items[tuple[Sequence, int]], states_NS: Tensor) -> None:
        """As Drafter.observe."""
        chunks = [Chunk(s.number, s.token_ids, start, s.computed) for s, start in starts]
        next_ids: list[int] = []
        for sequence, start in starts:
            ids = sequence.token_ids[start + 1 : sequence.computed + 1]
            # A prompt without generation has no next token.
            next_ids += ids if len(ids) == sequence.computed - start else [*ids, sequence.token_ids[-1]]
        with span("DRAFT_OBSERVE", self.model.device):
            out_NC = self.head(self.head.fused(states_NS), self._ids(next_ids), self._make_batch(chunks))
        self._outs, row = {}, 0
        for sequence, start in starts:
            row += sequence.computed - start
            self._outs[sequence.number] = sequence.computed, out_NC[row - 1]

    def _out(self, sequence: Sequence) -> Tensor | None:
        """The layer's output [C] at the sequence's last row; None for a continuation in its first step."""
        computed, out_C = self._outs.get(sequence.number, (None, None))
        return out_C if computed == sequence.computed else None

    @torch.inference_mode()
    def propose(self, budgets: Items[tuple[Sequence, int]], min_probability: float) -> list[Draft | None]:
        """As Drafter.propose; None for a continuation in its first step. The probability of a path is the product of
        the head's highest probability at each depth."""
        known = [(sequence, count) for sequence, count in budgets if self._out(sequence) is not None]
        if not known:
            return [None] * len(budgets)
        outs_SC = torch.stack([self._outs[sequence.number][1] for sequence, _ in known])
        draft = self._chains if self.head.mask_state is None else self._parallel
        with span("DRAFT", self.model.device):
            drafted = read_drafts(draft(known, outs_SC, min_probability))
        return [cut(drafted[s], min_probability) if s in drafted else None for s, _ in budgets]

    def _sample(self, logits_RV: Tensor, sequences: list[Sequence], probabilities: bool) -> DraftRows:
        return sample_drafts(logits_RV, sequences, self.target_ids, self.model.spec.vocab_size, probabilities)

    def _chains(self, active: list[tuple[Sequence, int]], out_SC: Tensor, min_probability: float) -> list[DraftRows]:
        """Draft depth by depth, without waiting for the device unless `stops_early`."""
        probabilities = bool(min_probability)
        if (replayed := self._replayed(active, out_SC, probabilities)) is not None:
            return replayed
        chains = [self._sample(self.head.logits(out_SC), [sequence for sequence, _ in active], probabilities)]
        paths = [1.0] * len(active)
        for depth in range(1, max(count for _, count in active)):
            keep = [i for i, (_, count) in enumerate(active) if count > depth]
            if self.stops_early and probabilities:
                paths = list(map(operator.mul, paths, chains[-1].probability_R.tolist()))
                keep = [i for i in keep if paths[i] >= min_probability]
            if not keep:
                break
            token_ids_S = chains[-1].token_ids_R
            if len(keep) < len(active):
                active, paths, keep_S = [active[i] for i in keep], [paths[i] for i in keep], self._ids(keep)
                out_SC, token_ids_S = out_SC.index_select(0, keep_S), token_ids_S.index_select(0, keep_S)
            sequences = [sequence for sequence, _ in active]
            batch = self._make_batch([_draft_rows(sequence, depth - 1, depth) for sequence in sequences])
            out_SC = self.head.next(out_SC, token_ids_S, batch)
            chains.append(self._sample(self.head.logits(out_SC), sequences, probabilities))
        return chains

    def _parallel(self, active: list[tuple[Sequence, int]], out_SC: Tensor, min_probability: float) -> list[DraftRows]:
        """As `_chains` for a head with masks: all tokens after the first from one pass."""
        assert self.head.mask_state is not None
        if masked := sum(count - 1 for _, count in active):
            chunks = [_draft_rows(sequence, 0, count - 1) for sequence, count in active if count > 1]
            ids_N = self._ids([self.head.config.mask_token_id or 0] * masked)
            mask_NC = self.head.mask_state.expand(masked, -1)
            out_SC = torch.cat((out_SC, self.head(mask_NC, ids_N, self._make_batch(chunks))))
        after = itertools.count(len(active))
        places = [(s, [row, *itertools.islice(after, count - 1)]) for row, (s, count) in enumerate(active)]
        sample = functools.partial(self._sample, probabilities=bool(min_probability))
        return sample_places(self.head.logits(out_SC), places, self.head.markov, sample)

    def _replayed(
        self, active: list[tuple[Sequence, int]], out_SC: Tensor, probabilities: bool
    ) -> list[DraftRows] | None:
        """As `_chains`, from a graph: greedy chains of equal length, longer than a token, which takes no pass of the
        head. None for others, and where the head cannot be captured."""
        sequences, counts = [sequence for sequence, _ in active], {count for _, count in active}
        greedy = all(sequence.request.params.greedy for sequence in sequences)
        if self.graphs is None or len(counts) > 1 or counts == {1} or not greedy:
            return None
        (count,) = counts
        (view,) = self._make_batch([_draft_rows(s, 0, count - 1, generating=True) for s in sequences]).views
        if not self.head.attention.capturable(view):
            return None
        token_ids_KS, probability_KS = self.graphs(out_SC, view, count, (probabilities, ops_choice()))
        nothing: list[Tensor | None] = [None] * len(sequences)
        return [
            DraftRows(sequences, token_ids_S, probability_S, nothing)
            for token_ids_S, probability_S in zip(token_ids_KS, probability_KS, strict=True)
        ]

    def _drafted(self, chains: Chains, count: int, state: tuple[bool, str]) -> Tensor:
        """Greedy chains from numbers on the device: token ids and, if the state says so, the highest probability at
        each, fp64 [2, K, S], which represents every token id exactly."""
        probabilities, _ = state
        out_SC, drafted = chains.out_SC, list[Tensor]()
        token_ids_S = torch.empty(0, dtype=torch.int64, device=out_SC.device)
        probability_S = torch.ones(len(out_SC), dtype=torch.float64, device=out_SC.device)
        for depth in range(count):
            if depth:
                out_SC = self.head.next(out_SC, token_ids_S, chains.batch(token_ids_S, depth))
            logits_SV = self.head.logits(out_SC)
            if probabilities:
                probability_S = highest_probability(logits_SV)
            token_ids_S = self.target_ids[likeliest(logits_SV)]
            drafted.append(torch.stack((token_ids_S.double(), probability_S)))
        return torch.stack(drafted, dim=1)

    @torch.inference_mode()
    def propose_tree(self, sequence: Sequence, tokens: int, depth: int) -> Draft | None:
        """Draft a tree of at most `tokens` tokens and `depth` levels, for which the cache has room: the candidates
        whose paths are most probable by the product of the head's probabilities (EAGLE-2, arXiv:2406.16858). On each
        level the most probable nodes get children, as many nodes as there is room for their rows."""
        out_C = self._out(sequence)
        if out_C is None:
            return None
        width = tokens if depth == 1 else max(1, min(BRANCHES, (tokens + 1) // (depth - 1)))
        nodes: list[_Node] = []
        # Parents of the next level, with their rows; all nodes that have a row of the head, in its order.
        parents, out_SC, extended = [-1], out_C[None], list[int]()
        with span("DRAFT", self.model.device):
            for level in range(depth):
                logits_SV = self.head.logits(out_SC).float() / (sequence.request.params.temperature or 1.0)
                top = logits_SV.log_softmax(-1).topk(min(max(width, BRANCHES), logits_SV.shape[-1]))
                # Read at once, in fp64, which represents every token id exactly.
                token_ids, logprobs = torch.stack((self.target_ids[top.indices].double(), top.values.double())).tolist()
                if any(map(math.isnan, itertools.chain(*logprobs))):
                    # The head has overflowed: its probabilities mean nothing.
                    break
                new = len(nodes)
                for parent, ids, values in zip(parents, token_ids, logprobs, strict=True):
                    path = nodes[parent].score if parent >= 0 else 0.0
                    nodes += [_Node(int(token), parent, path + value) for token, value in zip(ids, values, strict=True)]
                if level + 1 == depth:
                    break
                chosen = sorted(range(new, len(nodes)), key=lambda node: -nodes[node].score)[:width]
                out_SC = out_SC.index_select(0, self._ids([parents.index(nodes[node].parent) for node in chosen]))
                extended += chosen
                row_of = {-1: -1} | {node: row for row, node in enumerate(extended)}
                mask = ancestry([row_of[nodes[node].parent] for node in extended])[-len(chosen) :]
                chunk = _draft_rows(sequence, len(extended) - len(chosen), len(extended), mask)
                ids_S = self._ids([nodes[node].token_id for node in chosen])
                parents, out_SC = chosen, self.head.next(out_SC, ids_S, self._make_batch([chunk]))
        return _best(nodes, tokens) if nodes else None

    def stages(self, states_NS: Tensor, next_ids: list[int], chunk: Chunk) -> dict[str, Tensor]:
        """Intermediate outputs for one text under the names of drafting/parity.py; `chunk` is its room in the cache."""
        return self.head.stages(states_NS, self._ids(next_ids), self._make_batch([chunk]))

    def _ids(self, token_ids: list[int]) -> Tensor:
        return on_device(token_ids, torch.int64, self.model.device)
