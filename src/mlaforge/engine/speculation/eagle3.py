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

import dataclasses
import itertools
import math
from collections import abc
from collections.abc import Callable

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
from mlaforge.engine.speculation.draft_sampling import sample_drafts
from mlaforge.engine.speculation.drafter import Draft, Drafter, ancestry
from mlaforge.modeling.eagle3 import Eagle3Head
from mlaforge.ops.paged_rows import PagedRows
from mlaforge.runtime import on_device, ops_choice

# Most children of a tree node, and most nodes of a level that get children.
BRANCHES = 8
# Builds a batch of chunks with the view of the head's cache group only.
MakeBatch = Callable[[list[Chunk]], Batch]


@dataclasses.dataclass
class _Tree:
    """Candidate tokens, parents first: target token ids, index of the parent, log probability of the path."""

    token_ids: list[int]
    parents: list[int]
    scores: list[float]

    def grow(self, nodes: list[int], token_ids: list[list[int]], logprobs: list[list[float]]) -> range:
        """Add children to each of `nodes` (-1: the sequence's newest token); return the indices of the new nodes."""
        start = len(self.parents)
        for node, children, values in zip(nodes, token_ids, logprobs, strict=True):
            score = self.scores[node] if node >= 0 else 0.0
            self.token_ids += children
            self.parents += [node] * len(children)
            self.scores += [score + value for value in values]
        return range(start, len(self.parents))

    def best(self, count: int) -> Draft:
        """The `count` most probable candidates: a tree, because no child is more probable than its parent and the sort
        keeps parents first."""
        top = sorted(range(len(self.scores)), key=lambda node: -self.scores[node])[:count]
        index = {node: i for i, node in enumerate(sorted(top))}
        parents = [index[self.parents[node]] if self.parents[node] >= 0 else -1 for node in index]
        tokens = [self.token_ids[node] for node in index]
        return Draft(tokens, parents=None if parents == list(range(-1, len(parents) - 1)) else parents)


@dataclasses.dataclass(frozen=True)
class _Depth:
    """Drafted tokens at one depth of the chains, on the device: int64 [S]; the distribution [V] of each sampled token;
    fp64 probabilities [S] of the paths up to here."""

    sequences: list[Sequence]
    token_ids_S: Tensor
    qs: list[Tensor | None]
    probability_S: Tensor


def _drafts(chains: list[_Depth], min_probability: float) -> dict[Sequence, Draft]:
    """Cut each chain before the first token whose path is less likely than `min_probability`.

    The host reads all chains at once, in fp64, which represents every token id exactly."""
    token_ids_n = torch.cat([depth.token_ids_S for depth in chains]).double()
    token_ids, probabilities = torch.stack((token_ids_n, torch.cat([d.probability_S for d in chains]))).tolist()
    tokens: dict[Sequence, list[int]] = {sequence: [] for sequence in chains[0].sequences}
    qs: dict[Sequence, list[Tensor]] = {sequence: [] for sequence in tokens}
    rows = ((i, *row) for i, depth in enumerate(chains) for row in zip(depth.sequences, depth.qs, strict=True))
    for (i, sequence, q_V), token, probability in zip(rows, token_ids, probabilities, strict=True):
        # Probabilities fall along a path, so all tokens after the cut are skipped too; so are NaN.
        if not probability >= min_probability:
            continue
        assert len(tokens[sequence]) == i
        tokens[sequence].append(int(token))
        if q_V is not None:
            qs[sequence].append(q_V)
    return {s: Draft(ids, torch.stack(qs[s]) if qs[s] else None) for s, ids in tokens.items()}


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
        self.stops_early = model.device.type == "cpu"
        self.graphs: DraftGraphs | None = None
        if graphs is not None and self.head.mask_state is None:
            self.graphs = DraftGraphs(
                self._drafted, lambda run: graphs.capture(run), graphs.scratch[-1], graphs.max_num_seqs
            )  # fmt: skip
        # By sequence number: positions in the head's cache, and the layer's output [C] at the last of them.
        self._outs: dict[int, tuple[int, Tensor]] = {}

    @torch.inference_mode()
    def observe(self, starts: abc.Sequence[tuple[Sequence, int]], states_NS: Tensor) -> None:
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

    @torch.inference_mode()
    def propose(self, budgets: abc.Sequence[tuple[Sequence, int]], min_probability: float) -> list[Draft | None]:
        """As Drafter.propose; None for a sequence without known states: a continuation in its first step. The
        probability of a path is the product of the head's highest probability at each depth."""
        known = [i for i, (s, _) in enumerate(budgets) if self._outs.get(s.number, (0,))[0] == s.computed]
        drafts: list[Draft | None] = [None] * len(budgets)
        if not known:
            return drafts
        draft = self._chains if self.head.mask_state is None else self._parallel
        chains = _drafts(draft([budgets[i] for i in known], min_probability), min_probability)
        for i in known:
            drafts[i] = chains[budgets[i][0]]
        return drafts

    def _chains(self, active: list[tuple[Sequence, int]], min_probability: float) -> list[_Depth]:
        """Draft depth by depth, without waiting for the device unless `stops_early`."""
        chains: list[_Depth] = []
        out_SC = torch.stack([self._outs[sequence.number][1] for sequence, _ in active])
        if self.graphs is not None and self._uniform(active):
            replayed = self._replayed(self.graphs, active, out_SC, bool(min_probability))
            if replayed is not None:
                return replayed
        probability_S = torch.ones(len(active), dtype=torch.float64, device=self.model.device)
        vocabulary = self.model.spec.vocab_size
        with span("DRAFT", self.model.device):
            for depth in range(max(count for _, count in active)):
                if depth:
                    keep = [i for i, (_, count) in enumerate(active) if count > depth]
                    if self.stops_early and min_probability:
                        probabilities = probability_S.tolist()
                        keep = [i for i in keep if probabilities[i] >= min_probability]
                    if not keep:
                        break
                    token_ids_S = chains[-1].token_ids_S
                    if len(keep) < len(active):
                        active, keep_S = [active[i] for i in keep], self._ids(keep)
                        out_SC, probability_S = out_SC.index_select(0, keep_S), probability_S.index_select(0, keep_S)
                        token_ids_S = token_ids_S.index_select(0, keep_S)
                    out_SC = self._extend_chains(out_SC, token_ids_S, [sequence for sequence, _ in active], depth)
                logits_SV = self.head.logits(out_SC)
                if min_probability:
                    # NaN where the head's logits are not finite.
                    probability_S = probability_S * logits_SV.float().softmax(-1).amax(-1)
                sequences = [sequence for sequence, _ in active]
                chains.append(
                    _Depth(sequences, *sample_drafts(logits_SV, sequences, self.target_ids, vocabulary), probability_S)
                )
        return chains

    def _parallel(self, active: list[tuple[Sequence, int]], min_probability: float) -> list[_Depth]:
        """As `_chains` for a head with masks: all tokens after the first from one pass."""
        assert self.head.mask_state is not None
        outs, firsts, chunks = [self._outs[sequence.number][1] for sequence, _ in active], [], []
        rows = len(active)
        for sequence, count in active:
            firsts.append(rows - 1)
            stop = sequence.computed + count - 1
            if count > 1:
                chunks.append(Chunk(sequence.number, range(stop), sequence.computed, stop))
            rows += count - 1
        out_NC = torch.stack(outs)
        with span("DRAFT", self.model.device):
            if chunks:
                N = rows - len(active)
                ids_N = self._ids([self.head.config.mask_token_id or 0] * N)
                masked_NC = self.head(self.head.mask_state.expand(N, -1), ids_N, self._make_batch(chunks))
                out_NC = torch.cat((out_NC, masked_NC))
            logits_NV, vocabulary = self.head.logits(out_NC), self.model.spec.vocab_size
            probability_N = logits_NV.float().softmax(-1).amax(-1).double() if min_probability else None
            chains: list[_Depth] = []
            for depth in range(max(count for _, count in active)):
                indices = [i for i, (_, count) in enumerate(active) if count > depth]
                sequences = [active[i][0] for i in indices]
                rows_S = self._ids([firsts[i] + depth if depth else i for i in indices])
                drafted = sample_drafts(logits_NV.index_select(0, rows_S), sequences, self.target_ids, vocabulary)
                path_S = torch.ones(len(indices), dtype=torch.float64, device=self.model.device)
                if probability_N is not None:
                    path_S = probability_N.index_select(0, rows_S)
                    if chains:
                        before = [chains[-1].sequences.index(sequence) for sequence in sequences]
                        path_S = path_S * chains[-1].probability_S.index_select(0, self._ids(before))
                chains.append(_Depth(sequences, *drafted, path_S))
        return chains

    def _uniform(self, active: list[tuple[Sequence, int]]) -> bool:
        """Whether chains are greedy, of equal length and longer than a token, which takes no pass of the head."""
        counts = {count for _, count in active}
        return len(counts) == 1 and counts != {1} and all(s.request.params.greedy for s, _ in active)

    def _replayed(
        self, graphs: DraftGraphs, active: list[tuple[Sequence, int]], out_SC: Tensor, probabilities: bool
    ) -> list[_Depth] | None:
        """As `_chains`, from a graph; None where the head cannot be captured."""
        sequences, count = [sequence for sequence, _ in active], active[0][1]
        chunks = []
        for sequence in sequences:
            stop = sequence.computed + count - 1
            chunks.append(Chunk(sequence.number, range(stop), sequence.computed, stop, generating=True))
        (view,) = self._make_batch(chunks).views
        if not self.head.attention.capturable(view):
            return None
        with span("DRAFT", self.model.device):
            token_ids_KS, probability_KS = graphs(out_SC, view, count, (probabilities, ops_choice()))
        nothing: list[Tensor | None] = [None] * len(sequences)
        rows = zip(token_ids_KS, probability_KS, strict=True)
        return [_Depth(sequences, token_ids_S, nothing, probability_S) for token_ids_S, probability_S in rows]

    def _drafted(self, chains: Chains, count: int, state: tuple[bool, str]) -> Tensor:
        """Greedy chains from numbers on the device: token ids and, if the state says so, probabilities of their paths,
        fp64 [2, K, S], which represents every token id exactly."""
        probabilities, _ = state
        out_SC, drafted = chains.out_SC, list[Tensor]()
        token_ids_S = torch.empty(0, dtype=torch.int64, device=out_SC.device)
        probability_S = torch.ones(len(out_SC), dtype=torch.float64, device=out_SC.device)
        for depth in range(count):
            if depth:
                out_SC = self.head.next(out_SC, token_ids_S, chains.batch(token_ids_S, depth))
            logits_SV = self.head.logits(out_SC)
            if probabilities:
                probability_S = probability_S * logits_SV.float().softmax(-1).amax(-1)
            token_ids_S = self.target_ids[likeliest(logits_SV)]
            drafted.append(torch.stack((token_ids_S.double(), probability_S)))
        return torch.stack(drafted, dim=1)

    @torch.inference_mode()
    def propose_tree(self, sequence: Sequence, tokens: int, depth: int) -> Draft | None:
        """Draft a tree of at most `tokens` tokens and `depth` levels, for which the cache has room: the candidates
        whose paths are most probable by the product of the head's probabilities (EAGLE-2, arXiv:2406.16858). On each
        level the most probable nodes get children, as many nodes as there is room for their rows."""
        computed, out_SC = self._outs.get(sequence.number, (0, None))
        if out_SC is None or computed != sequence.computed:
            return None
        width = tokens if depth == 1 else max(1, min(BRANCHES, (tokens + 1) // (depth - 1)))
        tree = _Tree([], [], [])
        # Parents of the next level's candidates: tree nodes, and the head's rows that predict their children.
        nodes, out_SC, rows = [-1], out_SC[None], [-1]
        # For each of the head's rows the row of its parent.
        parents: list[int] = []
        with span("DRAFT", self.model.device):
            for level in range(depth):
                logits_SV = self.head.logits(out_SC).float() / (sequence.request.params.temperature or 1.0)
                top = logits_SV.log_softmax(-1).topk(min(max(width, BRANCHES), logits_SV.shape[-1]))
                # Read at once, in fp64, which represents every token id exactly.
                token_ids, logprobs = torch.stack((self.target_ids[top.indices].double(), top.values.double())).tolist()
                if any(map(math.isnan, itertools.chain(*logprobs))):
                    # The head has overflowed: its probabilities mean nothing.
                    break
                new = tree.grow(nodes, [[int(token) for token in row] for row in token_ids], logprobs)
                if level + 1 < depth:
                    chosen = sorted(new, key=lambda node: -tree.scores[node])[:width]
                    # Index of each chosen node's parent among the rows just computed.
                    parent_rows = [nodes.index(tree.parents[node]) for node in chosen]
                    parents += [rows[i] for i in parent_rows]
                    out_SC = out_SC.index_select(0, self._ids(parent_rows))
                    out_SC = self._extend_tree(sequence, out_SC, [tree.token_ids[node] for node in chosen], parents)
                    nodes, rows = chosen, list(range(len(parents) - len(chosen), len(parents)))
        return tree.best(tokens) if tree.token_ids else None

    def _extend_tree(self, sequence: Sequence, out_SC: Tensor, token_ids: list[int], parents: list[int]) -> Tensor:
        """Layer output at the tree's newest nodes `token_ids`, from the outputs `out_SC` at their parents. `parents`:
        parent of each of the head's rows beyond the sequence's tokens, the new nodes' last."""
        stop = sequence.computed + len(parents)
        tree = ancestry(parents)[-len(token_ids) :]
        chunk = Chunk(sequence.number, range(stop), stop - len(token_ids), stop, tree)
        return self.head.next(out_SC, self._ids(token_ids), self._make_batch([chunk]))

    def _extend_chains(self, out_SC: Tensor, token_ids_S: Tensor, sequences: list[Sequence], depth: int) -> Tensor:
        """Layer output at the newest of `depth` drafted tokens of each sequence."""
        chunks = []
        for sequence in sequences:
            # Row i is computed from token i + 1.
            position = sequence.computed + depth - 1
            chunks.append(Chunk(sequence.number, range(position + 1), position, position + 1))
        return self.head.next(out_SC, token_ids_S, self._make_batch(chunks))

    def stages(self, states_NS: Tensor, next_ids: list[int], chunk: Chunk) -> dict[str, Tensor]:
        """Intermediate outputs for one text under the names of drafting/parity.py; `chunk` is its room in the cache."""
        return self.head.stages(states_NS, self._ids(next_ids), self._make_batch([chunk]))

    def _ids(self, token_ids: list[int]) -> Tensor:
        return on_device(token_ids, torch.int64, self.model.device)
