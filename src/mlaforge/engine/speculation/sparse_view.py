"""Sparse-view verification (SpecPV, arXiv:2512.02337), lossless: for some steps the target verifies drafts against a
part of the cache, then all tokens that it accepted there against the whole cache.

A sparse view holds a sequence's first tokens, in each layer the tokens with the largest attention mass in the last full
step, and the newest tokens. Tokens that the target accepts under it are provisional: for the engine they are a draft
like any other. The full step verifies them, keeps the longest correct prefix and rewrites their rows. So nothing that
was computed under a sparse view is published, streamed or found as a prefix, and the tokens of a request are the
target's own, whatever the view left out (to the token where a row of logits is the same alone and in a batch:
verification.py). Sampled requests sample provisional tokens from the target's distribution under the view; the full
step verifies them by rejection sampling like the sampled drafts of a head.

Legend: L layers with full attention, S sequences, N rows of a step, K slots of a sequence's view, C hidden size,
V vocabulary.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import weakref
from collections.abc import Iterable
from collections.abc import Sequence as Items

import numpy as np
import torch
from torch import Tensor

from mlaforge.engine.cache.block_tables import BlockTables
from mlaforge.engine.cache.view import select_view
from mlaforge.engine.config import EngineConfig
from mlaforge.engine.execution.attention_probe import AttentionProbe
from mlaforge.engine.execution.batch import Batch, Chunk, make_batch
from mlaforge.engine.execution.model import EngineModel, Layer
from mlaforge.engine.execution.runner import Runner
from mlaforge.engine.execution.step_bytes import StepBytes, StepBytesModel
from mlaforge.engine.request.sequence import Sequence
from mlaforge.engine.sampling.sampler import Sampler
from mlaforge.engine.speculation.drafter import Draft, Drafter
from mlaforge.engine.speculation.lookup import PromptLookupDrafter, proposals
from mlaforge.engine.speculation.verification import verify
from mlaforge.ops import native
from mlaforge.ops.attention_mass import top_tokens
from mlaforge.runtime import UserError, on_device, uploaded


@dataclasses.dataclass(frozen=True)
class SparseViewConfig:
    """Tokens of a view (`sink` first, `retrieval` retrieved, `window` newest) and when a full step is due: after
    `full_every` sparse-view steps or `max_provisional` provisional tokens. Options of the engine are those to which a
    sweep is sensible (docs/notes/speculation.md); the others stay within its noise."""

    retrieval: int
    sink: int = 16
    window: int = 256
    full_every: int = 6
    max_provisional: int = 16

    @classmethod
    def from_options(cls, config: EngineConfig, layers: Iterable[Layer] = ()) -> SparseViewConfig:
        """For sparse `layers` `retrieval` is the number of tokens that they select, not the option's."""
        topk = [layer.attention.sparse.topk for layer in layers if layer.attention.sparse is not None]
        return cls(max(topk, default=config.specpv_retrieval))

    @property
    def num_tokens(self) -> int:
        """Tokens of a view."""
        return self.sink + self.retrieval + self.window

    @property
    def min_length(self) -> int:
        """Tokens of the shortest sequence for which a view saves enough."""
        return 2 * self.num_tokens


# Slots of a sequence's view are padded to a multiple of this, the kernels' chunk.
SLOT_MULTIPLE = 256


def sparse_view_format(config: EngineConfig, model: EngineModel) -> str:
    """Weight format of sparse-view steps.

    With a small view most bytes of a step are weights. Full steps verify with the model's own weights, so rounded ones
    change no token, only how many provisional tokens are accepted. UserError for a format that does not go with the
    model's.
    """
    format = config.specpv_dtype
    if format in ("model", model.format):
        return model.format
    quantizable = model.format == "bfloat16" and model.device.type == "cpu"
    if format != "auto":
        if not quantizable:
            raise UserError(
                f"specpv_dtype = {format} is for bfloat16 models on a CPU; this one is {model.format} on "
                f"{model.device.type}: use model"
            )
        return format
    # Experts are most of a model: a second copy of them takes too much memory.
    experts = any(layer.moe for layer in model.spec.layers)
    return "int4" if quantizable and not experts and native.is_available() else model.format


# First and least limit of provisional tokens (at least 4: 17.1 ms per token instead of 17.0); tokens after which
# retrieved ones are refreshed (16: 17.9 ms, 32: 17.6, within the noise).
FIRST_PROVISIONAL, LEAST_PROVISIONAL, REFRESH_EVERY = 4, 2, 8


class SparseView(Drafter):
    """Turns the drafts of `drafter`, and within its steps those of `lookup`, into drafts that the target has verified
    under a sparse view. Sequences shorter than `SparseViewConfig.min_length` get the drafter's own, unverified.

    max_tokens      longest draft of `drafter`; `lookup_tokens` that of `lookup`
    model, runner   compute sparse-view steps, on the engine's cache
    step_bytes      counts the bytes that they read
    """

    name = "sparse view"

    def __init__(
        self, view: SparseViewConfig, drafter: Drafter, max_tokens: int, lookup: PromptLookupDrafter | None,
        lookup_tokens: int, model: EngineModel, runner: Runner, step_bytes: StepBytesModel, tables: BlockTables,
    ):  # fmt: skip
        self.view, self.drafter, self.max_tokens = view, drafter, max_tokens
        self.lookup, self.lookup_tokens = lookup, lookup_tokens
        self.model, self.runner, self.step_bytes, self.tables = model, runner, step_bytes, tables
        # Bytes that the sparse-view steps of the newest proposal have read.
        self.bytes_read = StepBytes()
        self.sampler = Sampler()
        # Cache group and number of the target's layers with full attention.
        full = [layer.attention.group for layer in model.layers if tables.groups[layer.attention.group].window is None]
        self.group, self.num_layers = (full[0] if full else None), len(full)
        # Tokens that the last full step retrieved; limit of provisional tokens.
        self.retrieved: weakref.WeakKeyDictionary[Sequence, RetrievedTokens] = weakref.WeakKeyDictionary()
        self.limits: weakref.WeakKeyDictionary[Sequence, int] = weakref.WeakKeyDictionary()
        # The probe of the current step, with its sequences.
        self._probed: tuple[Items[tuple[Sequence, int]], AttentionProbe] | None = None

    def covers(self, sequence: Sequence, computed: int) -> bool:
        """Whether sparse-view steps verify drafts for the sequence once `computed` of its tokens are in the cache."""
        return bool(self.num_layers) and sequence.request.params.speculate and computed >= self.view.min_length

    def applies(self, decoding: Items[Sequence], alone: bool) -> bool:
        """As Drafter.applies: for at least one long sequence."""
        return any(self.covers(sequence, sequence.computed) for sequence in decoding)

    def room(self, sequence: Sequence, length: int) -> int:
        """As Drafter.room: the limit of provisional tokens, no more than can be used: room is taken from others."""
        if not self.covers(sequence, sequence.computed):
            return length
        return min(self.view.max_provisional, self.limits.get(sequence, FIRST_PROVISIONAL))

    def record(self, sequence: Sequence, draft: Draft, budget: int, accepted: int) -> None:
        """As Drafter.record. The next limit of provisional tokens is twice as many if all were right, otherwise the
        number of right ones: acceptance varies along a text."""
        if draft.steps:
            complete = accepted == len(draft.token_ids)
            self.limits[sequence] = 2 * accepted if complete else max(LEAST_PROVISIONAL, accepted)
        else:
            self.drafter.record(sequence, draft, budget, accepted)

    def probe(self, ends: Items[tuple[Sequence, int]]) -> AttentionProbe | None:
        """Attention probe for a full step that computes each (sequence, stop) up to position `stop`; None if no
        sequence retrieves.

        Probed are sequences whose newest token the step computes, ends of prompts included, so that a view, and what
        is sampled under it, does not depend on the prompt's chunks or prefix hits."""
        # A probe costs about a third of a step: tokens that were retrieved recently stay.
        probed = [
            i for i, (sequence, stop) in enumerate(ends)
            if self.view.retrieval and stop == len(sequence.token_ids) and self.covers(sequence, stop - 1)
            and self._age(sequence, stop - 1) >= REFRESH_EVERY
        ]  # fmt: skip
        self._probed = (ends, AttentionProbe(probed)) if probed else None
        return self._probed[1] if self._probed else None

    def _age(self, sequence: Sequence, computed: int) -> int:
        """Tokens since the last retrieval."""
        tokens = self.retrieved.get(sequence)
        return REFRESH_EVERY if tokens is None else computed - self.view.window - tokens.stop

    def retrieve(self) -> None:
        """Store for each sequence that the step's probe recorded the tokens with the largest attention mass, for its
        next views."""
        if self._probed is None:
            return
        (ends, probe), self._probed = self._probed, None
        sink, window, count = self.view.sink, self.view.window, self.view.retrieval
        first, of_sequences = np.arange(sink), list(zip(*probe.layers, strict=True))
        # Drafted tokens may be rejected: the window starts before the newest certain token.
        stops = [max(sink, ends[i][1] - 1 - window) for i in probe.sequences]
        selected: list[Tensor] = []
        for layers, stop in zip(of_sequences, stops, strict=True):
            attention_mass = [scores for scores in layers if scores.is_floating_point()]
            top = iter(top_tokens(attention_mass, sink, stop, count) if attention_mass else ())
            selected += [next(top) if scores.is_floating_point() else scores.long() for scores in layers]
        # The host waits once, for all layers of all sequences.
        on_host = iter(torch.cat(selected).cpu().split([len(positions) for positions in selected]))
        for i, layers, stop in zip(probe.sequences, of_sequences, stops, strict=True):
            chosen = [next(on_host).numpy() for _ in layers]
            # A sparse layer's selection stands for the first tokens too.
            positions = [
                np.concatenate((first, layer)) if scores.is_floating_point() else layer[layer < stop]
                for scores, layer in zip(layers, chosen, strict=True)
            ]
            self.retrieved[ends[i][0]] = RetrievedTokens(positions, stop)

    def propose(self, budgets: Items[tuple[Sequence, int]], min_probability: float) -> list[Draft | None]:
        """As Drafter.propose."""
        self.bytes_read = StepBytes()
        long = [(s, count) for s, count in budgets if self.covers(s, s.computed)]
        drafts = self._provisional_drafts(long) if long else {}
        short = [(s, count) for s, count in budgets if s not in drafts]
        drafts |= zip((s for s, _ in short), self.drafter.propose(short, min_probability) if short else (), strict=True)
        return [drafts.get(sequence) for sequence, _ in budgets]

    @torch.inference_mode()
    def _provisional_drafts(self, budgets: Items[tuple[Sequence, int]]) -> dict[Sequence, Draft | None]:
        """Run sparse-view steps until a full step is due."""
        texts = [ProvisionalText(sequence.provisional_copy(), count) for sequence, count in budgets]
        views: SparseViews | None = None
        for _ in range(self.view.full_every):
            active = [text for text in texts if text.remaining and text.finite]
            if not active:
                break
            if views is None or len(active) < len(views.texts):
                views = self._build_views(active)
            self._step(active, views)
        return {sequence: text.draft() for (sequence, _), text in zip(budgets, texts, strict=True)}

    def _step(self, texts: list[ProvisionalText], views: SparseViews) -> None:
        """One sparse-view step: append accepted tokens and the target's own to each text."""
        sequences = [text.sequence for text in texts]
        budgets = [(text.sequence, text.remaining - 1, self.max_tokens) for text in texts]
        drafts = proposals(self.drafter, self.lookup, budgets, self.lookup_tokens, 0.0)
        chunks = []
        for sequence in sequences:
            tokens = sequence.token_ids + (drafts[sequence].token_ids if sequence in drafts else [])
            chunks.append(Chunk(sequence.number, tokens, sequence.computed, len(tokens), None, True))
        hidden_states_NX = self.runner(self._batch(chunks, views))
        seen = zip(chunks, map(max, zip(*views.surplus, strict=True)), strict=True)
        self.bytes_read += self.step_bytes((c.stop - c.start, c.stop, c.stop + surplus) for c, surplus in seen)
        C, starts = self.model.spec.hidden_size, list[tuple[Sequence, int]]()
        first_rows = list(itertools.accumulate((c.stop - c.start for c in chunks[:-1]), initial=0))
        logits_NV, proposed = self.model.logits(hidden_states_NX[:, :C]), [drafts.get(s) for s in sequences]
        verified = verify(self.sampler, logits_NV, sequences, proposed, first_rows)
        rows: list[int] = []
        for text, row, result in zip(texts, first_rows, verified, strict=True):
            text.steps += 1
            text.finite = not result.non_finite
            text.qs += result.distributions
            if count := len(result.completion.token_ids):
                starts.append((text.sequence, text.sequence.computed))
                rows += range(row, row + count)
                text.sequence.computed += count
        if starts and self.drafter.boundaries:
            states_NS = hidden_states_NX[:, C:].index_select(0, on_device(rows, torch.int64, self.model.device))
            self.drafter.observe(starts, states_NS)

    def _build_views(self, texts: list[ProvisionalText]) -> SparseViews:
        """Views of texts, which stay valid while these grow."""
        sink, window, size, group = self.view.sink, self.view.window, self.tables.block_size, self.group
        assert group is not None
        positions: list[list[np.ndarray]] = []
        for text in texts:
            # Tokens after an old retrieval would otherwise grow without bound.
            near_start = max(sink, text.start - window - self.view.max_provisional - 2)
            retrieved = self.retrieved.get(text.sequence.original or text.sequence)
            if retrieved is None:
                retrieved = RetrievedTokens([np.arange(sink)] * self.num_layers, near_start)
            near = np.arange(max(near_start, retrieved.stop), text.stop)
            positions.append([np.concatenate((layer, near)) for layer in retrieved.positions])
        counts_SL = np.array([[len(layer) for layer in layers] for layers in positions])
        K = -(-counts_SL.max() // SLOT_MULTIPLE) * SLOT_MULTIPLE
        slots_and_positions = np.zeros((2, self.num_layers, len(texts), K), dtype=np.int32)
        for s, (text, layers) in enumerate(zip(texts, positions, strict=True)):
            blocks, at = np.asarray(self.tables.table(text.sequence.number, group)[1]), np.concatenate(layers)
            mask_LK = np.arange(K) < counts_SL[s, :, None]
            slots_and_positions[:, :, s][:, mask_LK] = blocks[at // size] * size + at % size, at
        slots_LSK, positions_LSK = uploaded(torch.from_numpy(slots_and_positions), self.model.device)
        surplus_LS = counts_SL.T - [text.stop for text in texts]
        return SparseViews(texts, slots_LSK, positions_LSK, [tuple(layer) for layer in surplus_LS.tolist()])

    def _batch(self, chunks: list[Chunk], views: SparseViews) -> Batch:
        """Batch of the chunks with a sparse view for each layer with full attention."""
        batch = make_batch(chunks, self.tables, self.model.device)
        assert self.group is not None
        full, stops = batch.views[self.group], [chunk.stop for chunk in chunks]
        sparse = tuple(
            select_view(full, slots_SK, positions_SK, tuple(map(operator.add, stops, surplus)), True)
            for slots_SK, positions_SK, surplus in zip(views.slots_LSK, views.positions_LSK, views.surplus, strict=True)
        )
        return dataclasses.replace(batch, sparse_views=sparse)


@dataclasses.dataclass(frozen=True)
class RetrievedTokens:
    """By layer, ascending positions before `stop`: the first tokens and those with the largest attention mass, or the
    selection of a sparse layer."""

    positions: list[np.ndarray]
    stop: int


@dataclasses.dataclass
class ProvisionalText:
    """A copy of a sequence, to which sparse-view steps append at most `room` tokens; `qs`: the distributions [V] that
    they were sampled from; whether all logits were finite, which a sparse-view step's may not be where a full one's
    are."""

    sequence: Sequence
    room: int
    steps: int = 0
    qs: list[Tensor] = dataclasses.field(default_factory=list)
    finite: bool = True

    def __post_init__(self) -> None:
        self.start = len(self.sequence.token_ids)
        self.stop = self.start + self.room

    @property
    def remaining(self) -> int:
        """Tokens for which there is room."""
        return self.stop - len(self.sequence.token_ids)

    def draft(self) -> Draft | None:
        """The provisional tokens; None where logits were not finite."""
        token_ids = self.sequence.token_ids[self.start :]
        return Draft(token_ids, torch.stack(self.qs) if self.qs else None, steps=self.steps) if self.finite else None


@dataclasses.dataclass(frozen=True)
class SparseViews:
    """Slots and positions, int32 [L, S, K], of each layer's view of each text. Of a text with n tokens layer l sees the
    first n + surplus[l][s] entries."""

    texts: list[ProvisionalText]
    slots_LSK: Tensor
    positions_LSK: Tensor
    surplus: list[tuple[int, ...]]
