"""Partial verification (SpecPV, arXiv:2512.02337), lossless: the target judges a drafter's tokens by a part of the
cache, and now and then what it has judged so by all of it.

A partial view holds a sequence's first tokens, in each layer those that the last full step attended to most, and the
newest ones. What the target agrees to under it is pending. To the engine pending tokens are a draft like any other: the
step's own verification, which reads everything, judges them, keeps the longest right prefix, and writes their rows
anew. So nothing that was made under a partial view is ever published, streamed, or found as a prefix, and the tokens
that come out are the target's own, whatever the view left out.

Legend: L layers that see everything, S sequences, N rows of a step, K rows that a sequence may see, C hidden size.
"""

from __future__ import annotations

import dataclasses
import time
from collections import abc

import numpy as np
import torch
from torch import Tensor

from mlaforge.engine.cache.block_tables import BlockTables
from mlaforge.engine.config import EngineConfig
from mlaforge.engine.execution.batch import Batch, Chunk, Watched, make_batch
from mlaforge.engine.execution.model import EngineModel
from mlaforge.engine.execution.runner import Runner
from mlaforge.engine.request.sequence import Sequence
from mlaforge.engine.sampling.sampler import likeliest
from mlaforge.engine.speculation.drafter import Draft, Drafter
from mlaforge.engine.speculation.policy import DraftPolicy
from mlaforge.ops.attended import heaviest
from mlaforge.ops.native import kernels
from mlaforge.ops.token_selection import narrowed
from mlaforge.runtime import UserError


@dataclasses.dataclass(frozen=True)
class PartialView:
    """How many tokens of a sequence are seen: the first, those that are retrieved, and the newest; and after how many
    partial steps, or pending tokens, a full one comes at the latest."""

    sink: int
    retrieval: int
    window: int
    full_every: int
    max_pending: int

    @classmethod
    def of(cls, config: EngineConfig) -> PartialView:
        """As the options say."""
        return cls(
            config.specpv_sink, config.specpv_retrieval, config.specpv_window, config.specpv_full_every,
            config.specpv_max_pending,
        )  # fmt: skip

    @property
    def seen(self) -> int:
        """Tokens of a sequence."""
        return self.sink + self.retrieval + self.window

    @property
    def shortest(self) -> int:
        """Tokens of the shortest sequence of which a part is read; of a shorter one it is hardly a part."""
        return 2 * self.seen


# Rows of one sequence in a table of positions are a multiple of this: chunks of the kernels.
APART = 256


def judging_format(config: EngineConfig, model: EngineModel) -> str:
    """The format of the weights of partial steps.

    What a step reads is mostly weights where only a part of the cache is read. Full steps judge its tokens with the
    model's own, so rounded ones change no token, only how many are kept. UserError for a format that does not go with
    the model's.
    """
    format = config.specpv_dtype
    if format in ("model", model.format):
        return model.format
    plain = model.format == "bfloat16" and model.device.type == "cpu"
    if format != "auto":
        if not plain:
            raise UserError(
                f"specpv_dtype = {format} is for bfloat16 models on a CPU; this one is {model.format} on "
                f"{model.device.type}: use model"
            )
        return format
    # Experts are most of a model: a second copy of them is no small thing.
    experts = any(layer.moe for layer in model.spec.layers)
    return "int4" if plain and not experts and hasattr(kernels(), "linear_int8") else model.format


# Tokens that may be pending at first, and at the least; and how old what was retrieved may be, in tokens.
FIRST_PENDING, LEAST_PENDING, FRESH = 4, 2, 8


class PartialVerification:
    """Drafts that the target has judged under a partial view, as the options say; `drafter` proposes their tokens.

    `model` and `runner` make partial steps. `final`: what these agree to stays, and full steps only mend its rows: the
    paper's rule, which may change the text. Sequences that draw their tokens, and those that hardly hold more than a
    view, get the drafter's own tokens.
    """

    def __init__(
        self, config: EngineConfig, drafter: Drafter, model: EngineModel, runner: Runner, tables: BlockTables
    ):  # fmt: skip
        self.drafter, self.model, self.runner, self.tables = drafter, model, runner, tables
        self.count, self.pattern = config.num_speculative_tokens, PartialView.of(config)
        self.final = config.specpv == "lossy"
        self.policy = DraftPolicy(self.count) if config.adaptive_speculation else None
        # Of the target: the cache group of the layers that see everything, and how many they are.
        full = [layer.attention.group for layer in model.layers if tables.groups[layer.attention.group].window is None]
        self.group, self.layers = (full[0] if full else None), len(full)
        # By a sequence's number what its last full step attended to most, and how many tokens may be pending next.
        self.retrieved: dict[int, Retrieved] = {}
        self.room: dict[int, int] = {}

    def applies(self, sequence: Sequence) -> bool:
        """Whether the sequence's tokens are judged under a partial view first."""
        params, long = sequence.request.params, sequence.computed >= self.pattern.shortest
        # What stays unjudged must heed whatever was asked for.
        plain = params.greedy and (not self.final or (sequence.state.plain and params.logprobs is None))
        return bool(self.layers) and plain and long

    def watch(self, sequences: abc.Sequence[Sequence]) -> Watched | None:
        """What a full step of these sequences, with their drafts, is to be asked for; None where nobody retrieves."""
        here = {sequence.number for sequence in sequences}
        self.retrieved = {number: own for number, own in self.retrieved.items() if number in here}
        self.room = {number: own for number, own in self.room.items() if number in here}
        wanted = [i for i, sequence in enumerate(sequences) if self.pattern.retrieval and self.applies(sequence)]
        # It costs about a third of a step that is asked for nothing: what is new enough stays.
        wanted = [i for i in wanted if self._age(sequences[i]) >= FRESH]
        return Watched(wanted) if wanted else None

    def _age(self, sequence: Sequence) -> int:
        """Tokens since the last retrieval."""
        known = self.retrieved.get(sequence.number)
        return FRESH if known is None else sequence.computed - self.pattern.window - known.tail

    def learn(self, sequence: Sequence, pending: int, kept: int) -> None:
        """A full step has kept so many of a sequence's pending tokens. Where all were, twice as many may wait next;
        else as many as were kept: texts have easy stretches and hard ones."""
        most = self.pattern.max_pending
        self.room[sequence.number] = min(most, 2 * pending) if kept == pending else max(LEAST_PENDING, kept)

    def saw(self, sequences: abc.Sequence[Sequence], watched: Watched) -> None:
        """What came of it."""
        sink, window, count = self.pattern.sink, self.pattern.window, self.pattern.retrieval
        for place, masses in zip(watched.wanted, zip(*watched.layers, strict=True), strict=True):
            sequence = sequences[place]
            # Drafts may be refused: what stands before them counts.
            tail = max(sink, sequence.computed - window)
            self.retrieved[sequence.number] = Retrieved(heaviest(masses, sink, tail, count).cpu().numpy(), tail)

    def propose(self, budgets: abc.Sequence[tuple[Sequence, int]], min_probability: float) -> list[Draft | None]:
        """As Drafter.propose."""
        partial = [(s, count) for s, count in budgets if self.applies(s)]
        plain = [(s, min(count, self.count)) for s, count in budgets if not self.applies(s)]
        drafts = dict(zip((s for s, _ in plain), self.drafter.propose(plain, min_probability), strict=True))
        if partial:
            drafts |= self._pending(partial, min_probability)
        return [drafts[s] for s, _ in budgets]

    @torch.inference_mode()
    def _pending(self, budgets: abc.Sequence[tuple[Sequence, int]], min_probability: float) -> dict[Sequence, Draft]:
        """Tokens that the target agrees to under its partial view."""
        room = {s.number: min(count, self.room.get(s.number, FIRST_PENDING)) for s, count in budgets}
        texts = [dataclasses.replace(s, token_ids=list(s.token_ids)) for s, _ in budgets]
        begin = {text.number: len(text.token_ids) for text in texts}
        active, steps = texts, dict.fromkeys(begin, 0)
        view: View | None = None
        for _ in range(self.pattern.full_every):
            left = {t.number: room[t.number] - (len(t.token_ids) - begin[t.number]) for t in active}
            active = [text for text in active if left[text.number] > 0]
            if not active:
                break
            if view is None or len(active) < len(view.texts):
                view = self._view(active, [begin[text.number] + room[text.number] for text in active])
            began = time.perf_counter()
            count = self.count if self.policy is None else self.policy.choose(len(active))
            asked = {text: most for text in active if (most := min(count, left[text.number] - 1)) > 0}
            proposed = self.drafter.propose([*asked.items()], min_probability) if asked else []
            drafts = {text: d.token_ids for text, d in zip(asked, proposed, strict=True) if d is not None}
            accepted = self._judge(active, drafts, view)
            for text in active:
                steps[text.number] += 1
                if self.policy is not None and text in drafts:
                    self.policy.record_acceptance(asked[text], accepted[text])
            if self.policy is not None:
                self.policy.record_time(len(active) + sum(asked.values()), time.perf_counter() - began)
        return {
            s: Draft(text.token_ids[begin[s.number] :], partial_steps=steps[s.number], final=self.final)
            for (s, _), text in zip(budgets, texts, strict=True)
        }

    def _judge(self, texts: list[Sequence], drafts: dict[Sequence, list[int]], view: View) -> dict[Sequence, int]:
        """One partial step: each text grows by the tokens that are agreed to, which are so many, and by the target's
        own."""
        chunks = []
        for text in texts:
            tokens = text.token_ids + drafts.get(text, [])
            chunks.append(Chunk(text.number, tokens, text.computed, len(tokens), None, True))
        both_NC = self.runner(self._seen(chunks, view))
        C = self.model.spec.hidden_size
        agreed = likeliest(self.model.logits(both_NC[:, :C])).tolist()
        starts: list[tuple[Sequence, int]] = []
        rows: list[int] = []
        row, agreements = 0, {}
        for text, chunk in zip(texts, chunks, strict=True):
            draft, start, accepted = drafts.get(text, []), text.computed, 0
            while accepted < len(draft) and draft[accepted] == agreed[row + accepted]:
                accepted += 1
            text.token_ids += [*draft[:accepted], agreed[row + accepted]]
            text.computed = len(text.token_ids) - 1
            starts.append((text, start))
            rows += range(row, row + accepted + 1)
            row += chunk.stop - chunk.start
            agreements[text] = accepted
        if self.drafter.boundaries:
            self.drafter.observe(starts, both_NC[rows, C:])
        return agreements

    def _view(self, texts: list[Sequence], ends: list[int]) -> View:
        """What these texts see from now on until they end so."""
        sink, window, size, group = self.pattern.sink, self.pattern.window, self.tables.block_size, self.group
        assert group is not None
        places: list[np.ndarray] = []
        slots: list[np.ndarray] = []
        more: list[int] = []
        for text, end in zip(texts, ends, strict=True):
            # Where the last full step was long ago, what came after it is no longer near.
            tail = max(sink, text.computed - window - self.pattern.max_pending - 1)
            chosen = self.retrieved.get(text.number, Retrieved(np.empty((self.layers, 0), dtype=np.int64), tail))
            near = np.arange(max(tail, chosen.tail), end)
            first, last = (np.broadcast_to(x, (self.layers, len(x))) for x in (np.arange(sink), near))
            places.append(np.concatenate((first, chosen.places_LK, last), axis=1))
            blocks = np.asarray(self.tables.table(text.number, group)[1])
            slots.append(blocks[places[-1] // size] * size + places[-1] % size)
            more.append(places[-1].shape[1] - end)
        K = -(-max(own.shape[1] for own in places) // APART) * APART
        both = np.zeros((2, self.layers, len(texts), K), dtype=np.int32)
        for s, own in enumerate(zip(slots, places, strict=True)):
            both[:, :, s, : own[0].shape[1]] = own
        slots_LSK, places_LSK = torch.from_numpy(both).to(self.model.device)
        return View(texts, slots_LSK, places_LSK, more)

    def _seen(self, chunks: list[Chunk], view: View) -> Batch:
        """The chunks with a partial view for each layer that sees everything."""
        batch = make_batch(chunks, self.tables, self.model.device)
        assert self.group is not None
        counts = tuple(chunk.stop + more for chunk, more in zip(chunks, view.more, strict=True))
        layers = zip(view.slots_LSK, view.places_LSK, strict=True)
        views = tuple(narrowed(batch.views[self.group], *layer, counts, True) for layer in layers)
        return dataclasses.replace(batch, partial=views)


@dataclasses.dataclass(frozen=True)
class Retrieved:
    """Of each layer the tokens that were attended to most, [L, K] rising; all stand before `tail`."""

    places_LK: np.ndarray
    tail: int


@dataclasses.dataclass(frozen=True)
class View:
    """Slots and positions, int32 [L, S, K], of what some texts see in each layer L while they grow: a text of so many
    tokens sees the first of them, `more` by number."""

    texts: list[Sequence]
    slots_LSK: Tensor
    places_LSK: Tensor
    more: list[int]
