"""Drafting with an EAGLE-3 head on the paged cache.

The head's keys and values are a cache group of their own that shares the sequences' block tables: what is found of a
prefix, forked, rewound or evicted is so for target and head alike. Its row i is made of the target's states at i and of
token i + 1. Rows of accepted tokens are made from the target's own states in the step that computed them, before
anybody can find their blocks; rows of drafted tokens lie in the room that is reserved for verification, and are made
anew. The last row before a place where texts part (a prefix found at a block's end, the continuations of a request)
is that of whichever text was first: that one row can cost acceptance, never a wrong token.

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
from torch.nn import functional as F

from mlaforge.checkpoint.eagle3 import check_head
from mlaforge.engine.cache.kv_cache import LayerCache
from mlaforge.engine.execution.angles import Angles
from mlaforge.engine.execution.attention import PagedGroupedQueryAttention, Step
from mlaforge.engine.execution.batch import Batch, Chunk
from mlaforge.engine.execution.linear import QUANTIZED, fused, vocabulary_head
from mlaforge.engine.execution.mlp import GatedMlp
from mlaforge.engine.execution.model import EngineModel
from mlaforge.engine.execution.nvtx import span
from mlaforge.engine.request.sequence import Sequence
from mlaforge.engine.sampling.sampler import likeliest
from mlaforge.engine.speculation.drafter import Draft, ancestry
from mlaforge.modeling.eagle3 import Eagle3Config, Eagle3Head
from mlaforge.ops.native import kernels
from mlaforge.ops.paged_rows import PagedRows
from mlaforge.ops.row_format import Plain
from mlaforge.runtime import on_device

# Children of a node in a tree, and nodes of a level that get any, at most.
BRANCHES = 8
# Makes the batch of some chunks with the view of the head's cache group alone.
MakeBatch = Callable[[list[Chunk]], Batch]


def head_cache(config: Eagle3Config, group: int, dtype: torch.dtype) -> LayerCache:
    """What the head caches per token, as the layer of cache group number `group`: always in the model's dtype."""
    return LayerCache("gqa", Plain(2 * config.layer.num_key_value_heads * config.layer.head_dim, dtype), group)


def head_format(format: str, device: torch.device) -> str:
    """The format of a head's weights beside a model's of this format.

    A head costs what reading its weights does, once for every drafted token; rounded ones change no token of the model,
    and a head's own drafts hardly.
    """
    return "int8" if format == "bfloat16" and device.type == "cpu" and kernels() is not None else format


def _converted(head: Eagle3Head, dtype: torch.dtype, format: str) -> Eagle3Head:
    """The head in the model's dtype, in place. Matrices that are packed in 8 or 4 bits keep theirs: rounded once, and
    those of a head that is stored in int8 get its codes back."""
    for name, parameter in head.named_parameters():
        packed = format in QUANTIZED and parameter.ndim == 2 and not name.startswith("embed_tokens.")
        if not packed:
            parameter.data = parameter.data.to(dtype)
    return head


@dataclasses.dataclass
class _Tree:
    """Candidates, parents first: tokens of the target, which each follows, and its path's log probability."""

    token_ids: list[int]
    parents: list[int]
    scores: list[float]

    def grow(self, nodes: list[int], token_ids: list[list[int]], logprobs: list[list[float]]) -> range:
        """Places of new candidates: for each of `nodes` (-1: the sequence's newest token) its children."""
        begin = len(self.parents)
        for node, children, values in zip(nodes, token_ids, logprobs, strict=True):
            before = self.scores[node] if node >= 0 else 0.0
            self.token_ids += children
            self.parents += [node] * len(children)
            self.scores += [before + value for value in values]
        return range(begin, len(self.parents))

    def best(self, count: int) -> Draft:
        """The `count` likeliest. No child is likelier than its parent, and of equals the parent comes first."""
        likeliest = sorted(range(len(self.scores)), key=lambda node: -self.scores[node])[:count]
        places = {node: place for place, node in enumerate(sorted(likeliest))}
        parents = [places[self.parents[node]] if self.parents[node] >= 0 else -1 for node in places]
        tokens = [self.token_ids[node] for node in places]
        return Draft(tokens, parents=None if parents == list(range(-1, len(parents) - 1)) else parents)


@dataclasses.dataclass(frozen=True)
class _Depth:
    """The drafted tokens of one depth of some sequences' chains, on the device: int64 [S], the distribution [V] of each
    that was drawn from one, and how likely the paths up to here are, fp64 [S]."""

    sequences: list[Sequence]
    token_ids_S: Tensor
    qs: list[Tensor | None]
    likely_S: Tensor


def _drafts(chains: list[_Depth], min_probability: float) -> dict[Sequence, Draft]:
    """Each sequence's tokens before the first whose path is less likely than `min_probability`. The host reads all
    chains at once, in fp64, which holds every token id as it is."""
    token_ids_n = torch.cat([depth.token_ids_S for depth in chains]).double()
    token_ids, likelihoods = torch.stack((token_ids_n, torch.cat([depth.likely_S for depth in chains]))).tolist()
    tokens: dict[Sequence, list[int]] = {sequence: [] for sequence in chains[0].sequences}
    qs: dict[Sequence, list[Tensor]] = {sequence: [] for sequence in tokens}
    rows = ((i, *row) for i, depth in enumerate(chains) for row in zip(depth.sequences, depth.qs, strict=True))
    for (i, sequence, q_V), token, likely in zip(rows, token_ids, likelihoods, strict=True):
        # Of a chain that was drafted further nothing counts behind an unlikely path: no path gets likelier.
        # NaN is not likely either.
        if not likely >= min_probability:
            continue
        assert len(tokens[sequence]) == i
        tokens[sequence].append(int(token))
        if q_V is not None:
            qs[sequence].append(q_V)
    return {s: Draft(ids, torch.stack(qs[s]) if qs[s] else None) for s, ids in tokens.items()}


def drawn_from(distribution_V: Tensor, generator: torch.Generator) -> Tensor:
    """A token of a distribution [V], int64 []. As torch.multinomial draws it, which reads first whether it is a
    distribution: on a GPU the host would wait."""
    return (distribution_V / torch.empty_like(distribution_V).exponential_(generator=generator)).argmax()


class EagleDrafter:
    """Drafts a chain per sequence: greedily for greedy requests, else by draws from the head's own distribution.

    The host waits for the device once for all chains, and once for each level of a tree. `stops_early`: a chain is
    drafted no further than its path is likely enough, which takes a look at every depth: on a CPU that costs nothing
    and saves passes of the head. Elsewhere chains are cut afterwards, to the same drafts.

    `rows` is the head's part of the cache; `model` gives dtype, device and, where the head has none, the embedding, and
    its format decides the head's.
    """

    def __init__(self, head: Eagle3Head, model: EngineModel, rows: PagedRows, make_batch: MakeBatch):
        config = head.config
        check_head(config, model.spec.hidden_size, model.spec.vocab_size)
        self.config, self.boundaries, self.model, self._make_batch = config, config.boundaries, model, make_batch
        self.target_ids = head.target_ids.to(model.device)
        self.format = head_format(model.format, model.device)
        head = _converted(head.to(model.device), model.dtype, self.format)
        layer, norm = head.midlayer, model.rewritten_norm
        self.embedding = head.embed_tokens.weight if config.has_embed_tokens else model.embedding
        self.state_norms = [norm(each) for each in head.fc_norm] if config.fc_norm else None
        self.states_norm = norm(head.input_norm) if config.norm_before_fc else None
        self.fc = fused([head.fc], self.format)
        self.hidden_norm, self.input_norm = norm(layer.hidden_norm), norm(layer.input_layernorm)
        self.attention = PagedGroupedQueryAttention(layer.self_attn, 0, rows, False, self.format)
        self.post_attention_norm, self.mlp = norm(layer.post_attention_layernorm), GatedMlp(layer.mlp, self.format)
        self.norm, self.head = norm(head.norm), vocabulary_head(head.lm_head.weight, self.format)
        self.angles = Angles(head.rotary(), self.attention.head_dim, model.dtype)
        self.stops_early = model.device.type == "cpu"
        # Sequence -> how many of its positions are in the head's cache, and the output of the last of them.
        self._outs: dict[int, tuple[int, Tensor]] = {}

    @torch.inference_mode()
    def observe(self, starts: abc.Sequence[tuple[Sequence, int]], states_NS: Tensor) -> None:
        """As Drafter.observe."""
        chunks = [Chunk(s.number, s.token_ids, start, s.computed) for s, start in starts]
        next_ids: list[int] = []
        for sequence, start in starts:
            ids = sequence.token_ids[start + 1 : sequence.computed + 1]
            # A prompt that is read only has no next token.
            next_ids += ids if len(ids) == sequence.computed - start else [*ids, sequence.token_ids[-1]]
        with span("DRAFT_OBSERVE", self.model.device):
            out_NC = self._layer(self._fused(states_NS), self._ids(next_ids), self._make_batch(chunks))
        self._outs, row = {}, 0
        for sequence, start in starts:
            row += sequence.computed - start
            self._outs[sequence.number] = sequence.computed, out_NC[row - 1]

    @torch.inference_mode()
    def propose(self, budgets: abc.Sequence[tuple[Sequence, int]], min_probability: float) -> list[Draft | None]:
        """As Drafter.propose; None for a sequence whose state is not known: a continuation in its first step. How
        likely a path is, is said by the likeliest token at each of its places."""
        known = [i for i, (s, _) in enumerate(budgets) if self._outs.get(s.number, (0,))[0] == s.computed]
        drafts: list[Draft | None] = [None] * len(budgets)
        if not known:
            return drafts
        drafted = _drafts(self._chains([budgets[i] for i in known], min_probability), min_probability)
        for i in known:
            drafts[i] = drafted[budgets[i][0]]
        return drafts

    def _chains(self, active: list[tuple[Sequence, int]], min_probability: float) -> list[_Depth]:
        """The drafted tokens, depth by depth. The host waits for none of them, unless it stops early."""
        chains: list[_Depth] = []
        out_SC = torch.stack([self._outs[sequence.number][1] for sequence, _ in active])
        likely_S = torch.ones(len(active), dtype=torch.float64, device=self.model.device)
        with span("DRAFT", self.model.device):
            for depth in range(max(count for _, count in active)):
                if depth:
                    keep = [i for i, (_, count) in enumerate(active) if count > depth]
                    if self.stops_early and min_probability:
                        likely = likely_S.tolist()
                        keep = [i for i in keep if likely[i] >= min_probability]
                    if not keep:
                        break
                    token_ids_S = chains[-1].token_ids_S
                    if len(keep) < len(active):
                        active, keep_S = [active[i] for i in keep], self._ids(keep)
                        out_SC, likely_S = out_SC.index_select(0, keep_S), likely_S.index_select(0, keep_S)
                        token_ids_S = token_ids_S.index_select(0, keep_S)
                    out_SC = self._chained(out_SC, token_ids_S, [sequence for sequence, _ in active], depth)
                logits_SV = self.head(self.norm(out_SC))
                if min_probability:
                    # NaN where the head's logits are not finite.
                    likely_S = likely_S * logits_SV.float().softmax(-1).amax(-1)
                sequences = [sequence for sequence, _ in active]
                chains.append(_Depth(sequences, *self._drawn(logits_SV, sequences), likely_S))
        return chains

    @torch.inference_mode()
    def propose_tree(self, sequence: Sequence, tokens: int, depth: int) -> Draft | None:
        """As TreeDrafter.propose_tree: of all paths the likeliest tokens by the product of the head's probabilities
        along them (EAGLE-2, arXiv:2406.16858). On each level the likeliest nodes get children, as many nodes as there
        is room for their rows."""
        computed, out_SC = self._outs.get(sequence.number, (0, None))
        if out_SC is None or computed != sequence.computed:
            return None
        width = tokens if depth == 1 else max(1, min(BRANCHES, (tokens + 1) // (depth - 1)))
        tree = _Tree([], [], [])
        # What the newest level's candidates follow: their places, and the rows of the head that they come from.
        nodes, out_SC, rows = [-1], out_SC[None], [-1]
        # Of each row of the head which row it follows.
        parents: list[int] = []
        with span("DRAFT", self.model.device):
            for level in range(depth):
                logits_SV = self.head(self.norm(out_SC)).float() / (sequence.request.params.temperature or 1.0)
                top = logits_SV.log_softmax(-1).topk(min(max(width, BRANCHES), logits_SV.shape[-1]))
                # Read at once, in fp64, which holds every token id as it is.
                token_ids, logprobs = torch.stack((self.target_ids[top.indices].double(), top.values.double())).tolist()
                if any(map(math.isnan, itertools.chain(*logprobs))):
                    # The head has overflowed: what it thinks is likely means nothing.
                    break
                new = tree.grow(nodes, [[int(token) for token in row] for row in token_ids], logprobs)
                if level + 1 < depth:
                    chosen = sorted(new, key=lambda node: -tree.scores[node])[:width]
                    # Where among the rows just computed each one's parent is.
                    at = [nodes.index(tree.parents[node]) for node in chosen]
                    parents += [rows[i] for i in at]
                    out_SC = out_SC.index_select(0, self._ids(at))
                    out_SC = self._branched(sequence, out_SC, [tree.token_ids[node] for node in chosen], parents)
                    nodes, rows = chosen, list(range(len(parents) - len(chosen), len(parents)))
        return tree.best(tokens) if tree.token_ids else None

    def _branched(self, sequence: Sequence, out_SC: Tensor, token_ids: list[int], parents: list[int]) -> Tensor:
        """The layer's output after each of these tokens, whose states are `out_SC` of their parents; the head's rows
        behind the sequence's own follow `parents`, these being the last."""
        stop = sequence.computed + len(parents)
        tree = ancestry(parents)[-len(token_ids) :]
        chunk = Chunk(sequence.number, range(stop), stop - len(token_ids), stop, tree)
        fed_SC = self.norm(out_SC) if self.config.norm_output else out_SC
        return self._layer(fed_SC, self._ids(token_ids), self._make_batch([chunk]))

    def _chained(self, out_SC: Tensor, token_ids_S: Tensor, sequences: list[Sequence], depth: int) -> Tensor:
        """The layer's output after the newest of the `depth` drafted tokens of each sequence."""
        chunks = []
        for sequence in sequences:
            # Row i is of token i + 1.
            position = sequence.computed + depth - 1
            chunks.append(Chunk(sequence.number, range(position + 1), position, position + 1))
        fed_SC = self.norm(out_SC) if self.config.norm_output else out_SC
        return self._layer(fed_SC, token_ids_S, self._make_batch(chunks))

    def _drawn(self, logits_SV: Tensor, sequences: list[Sequence]) -> tuple[Tensor, list[Tensor | None]]:
        """A token of the target's vocabulary for each row, int64 [S], and the distribution [V] where it was drawn from
        one."""
        tokens_S = likeliest(logits_SV)
        qs: list[Tensor | None] = [None] * len(sequences)
        for i, sequence in enumerate(sequences):
            params = sequence.request.params
            if not params.greedy:
                distribution_V = (logits_SV[i].float() / params.temperature).softmax(-1)
                tokens_S[i] = drawn_from(distribution_V, sequence.state.generator)
                q_V = distribution_V.new_zeros(self.model.spec.vocab_size)
                qs[i] = q_V.index_copy_(0, self.target_ids, distribution_V)
        return self.target_ids[tokens_S], qs

    def _fused(self, states_NS: Tensor) -> Tensor:
        if self.states_norm is not None:
            states_NS = self.states_norm(states_NS)
        if self.state_norms is not None:
            parts = states_NS.split(self.config.target_hidden_size, dim=-1)
            states_NS = torch.cat([norm(part) for norm, part in zip(self.state_norms, parts, strict=True)], dim=-1)
        return self.fc(states_NS)

    @torch.inference_mode()
    def stages(self, states_NS: Tensor, next_ids: list[int], chunk: Chunk) -> dict[str, Tensor]:
        """What each part makes of the rows of one text, by the names of drafting/parity.py; `chunk` is their room."""
        kept = {"fc_out": self._fused(states_NS)}
        out_NC = self._layer(kept["fc_out"], self._ids(next_ids), self._make_batch([chunk]), kept)
        kept["pre_head_hidden"] = self.norm(out_NC)
        return {**kept, "logits": self.head(kept["pre_head_hidden"])}

    def _layer(self, hidden_NC: Tensor, ids_N: Tensor, batch: Batch, kept: dict[str, Tensor] | None = None) -> Tensor:
        """[N, C] before the final norm, of states and the tokens after them. `kept` gets what attention and MLP add."""
        step = Step.make(batch, self.angles)
        normed_NC = self.hidden_norm(hidden_NC)
        both = torch.cat((self.input_norm(F.embedding(ids_N, self.embedding)), normed_NC), dim=-1)
        plus_NC = normed_NC if self.config.norm_before_residual else hidden_NC
        hidden_NC = self.attention(both, step, plus_NC)
        if kept is not None:
            # Once more, alone: what is left of a sum has lost digits.
            kept["attn_out"] = self.attention(both, step, torch.zeros_like(plus_NC))
            kept["ffn_out"] = self.mlp(self.post_attention_norm(hidden_NC), torch.zeros_like(hidden_NC))
        return self.mlp(self.post_attention_norm(hidden_NC), hidden_NC)

    def _ids(self, token_ids: list[int]) -> Tensor:
        return on_device(token_ids, torch.int64, self.model.device)
