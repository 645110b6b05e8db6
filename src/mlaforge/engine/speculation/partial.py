"""Partial verification (SpecPV, arXiv:2512.02337), lossless: the target judges a drafter's tokens by a part of the
cache, and now and then what it has judged so by all of it.

A partial view holds a sequence's first tokens, in each layer those that the last full step attended to most, and the
newest ones. What the target agrees to under it is pending. To the engine pending tokens are a draft like any other: the
step's own verification, which reads everything, judges them, keeps the longest right prefix, and writes their rows
anew. So nothing that was made under a partial view is ever published, streamed, or found as a prefix, and the tokens
that come out are the target's own, whatever the view left out (to the token where a row has one result, which
engine/speculation/verification.py says). Where a request draws its tokens, what is pending is
drawn from the target's distribution under the partial view, and judged by rejection as a head's drawn drafts are.

Legend: L layers that see everything, S sequences, N rows of a step, K rows that a sequence may see, C hidden size,
V vocabulary.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import time
from collections import abc

import numpy as np
import torch
from torch import Tensor

from mlaforge.engine.cache.block_tables import BlockTables
from mlaforge.engine.cache.kv_cache import Cache
from mlaforge.engine.config import EngineConfig
from mlaforge.engine.execution.batch import AttentionProbe, Batch, Chunk, make_batch
from mlaforge.engine.execution.model import EngineModel, Layer
from mlaforge.engine.execution.runner import Runner
from mlaforge.engine.execution.step_bytes import StepBytes, StepBytesModel
from mlaforge.engine.request.sequence import Sequence
from mlaforge.engine.sampling.sampler import NO_TOKEN, Sampler, checked, likeliest, rejection_sampled
from mlaforge.engine.speculation.drafter import Draft, Drafter, TreeDrafter
from mlaforge.engine.speculation.policy import DraftPolicy
from mlaforge.ops.attention_mass import top_tokens
from mlaforge.ops.native import kernels
from mlaforge.ops.token_selection import narrowed
from mlaforge.runtime import UserError, on_device, uploaded


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
    def of(cls, config: EngineConfig, layers: abc.Iterable[Layer] = ()) -> PartialView:
        """As the options say; where layers are sparse, as many tokens are retrieved as they read."""
        read = [layer.attention.sparse.topk for layer in layers if layer.attention.sparse is not None]
        return cls(
            config.specpv_sink, max(read, default=config.specpv_retrieval), config.specpv_window,
            config.specpv_full_every, config.specpv_max_pending,
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
    return "int4" if plain and not experts and kernels() is not None else model.format


# What stood in a text before where its newest tokens did, at most so many of its tokens (copies.py).
Copy = abc.Callable[[Sequence, int], Draft | None]
NOTHING = Draft([])
# Tokens that may be pending at first, and at the least; and how old what was retrieved may be, in tokens.
FIRST_PENDING, LEAST_PENDING, FRESH = 4, 2, 8


class PartialVerification:
    """Drafts that the target has judged under a partial view, as the options say; `drafter` proposes their tokens.

    `model` and `runner` make partial steps, which read what `step_bytes` says. `final`: what these agree to stays, and
    full steps only mend its rows: the paper's rule, which may change the text. Sequences that hardly hold more than a
    view get the drafter's own tokens.
    """

    def __init__(
        self, config: EngineConfig, drafter: Drafter, model: EngineModel, runner: Runner, step_bytes: StepBytesModel,
        tables: BlockTables, cache: Cache,
    ):  # fmt: skip
        self.drafter, self.model, self.runner, self.step_bytes = drafter, model, runner, step_bytes
        self.tables, self.cache = tables, cache
        # What the partial steps of the newest proposal have read.
        self.read = StepBytes()
        self.sampler = Sampler()
        self.count, self.pattern = config.drafted, PartialView.of(config, model.layers)
        self.final = config.specpv == "lossy"
        self.policy = DraftPolicy(self.count) if config.adaptive_speculation else None
        # Of the target: the cache group of the layers that see everything, and how many they are.
        full = [layer.attention.group for layer in model.layers if tables.groups[layer.attention.group].window is None]
        self.group, self.layers = (full[0] if full else None), len(full)
        # By a sequence's number what its last full step attended to most, and how many tokens may be pending next.
        self.retrieved: dict[int, Retrieved] = {}
        self.room: dict[int, int] = {}
        # Numbers of sequences on which partial steps of the newest proposal had logits with NaN or infinity.
        self.non_finite: set[int] = set()

    def applies(self, sequence: Sequence, computed: int | None = None) -> bool:
        """Whether the sequence's tokens are judged under a partial view first, once so many of them are in the cache;
        by default as many as are now."""
        # What stays unjudged must heed whatever was asked for. A grammar is not followed ahead of the text, and log
        # probabilities are those of the token that a full step would have made. Where all is judged, neither matters.
        params = sequence.request.params
        heeds = not self.final or (sequence.state.constraint is None and params.logprobs is None)
        long = (sequence.computed if computed is None else computed) >= self.pattern.shortest
        return bool(self.layers) and params.speculate and heeds and long

    def watch(self, ends: abc.Sequence[tuple[Sequence, int]]) -> AttentionProbe | None:
        """What a full step is to be asked for that computes so many of each sequence's own tokens; None where nobody
        retrieves. Those do whose tokens it computes to the last, prompts too: what a view holds, and so what is drawn
        under it, depends neither on how a prompt was cut into chunks nor on what was found of it."""
        here = {sequence.number for sequence, _ in ends}
        self.retrieved = {number: own for number, own in self.retrieved.items() if number in here}
        self.room = {number: own for number, own in self.room.items() if number in here}
        # It costs about a third of a step that is asked for nothing: what is new enough stays.
        wanted = [
            i for i, (sequence, stop) in enumerate(ends)
            if self.pattern.retrieval and stop == len(sequence.token_ids) and self.applies(sequence, stop - 1)
            and self._age(sequence, stop - 1) >= FRESH
        ]  # fmt: skip
        return AttentionProbe(wanted) if wanted else None

    def _age(self, sequence: Sequence, computed: int) -> int:
        """Tokens since the last retrieval."""
        known = self.retrieved.get(sequence.number)
        return FRESH if known is None else computed - self.pattern.window - known.tail

    def wanted(self, sequence: Sequence) -> int:
        """How many drafted tokens the sequence is to have room for: as many as may be pending, else the drafter's."""
        if not self.applies(sequence):
            return self.count
        return min(self.pattern.max_pending, self.room.get(sequence.number, FIRST_PENDING))

    def learn(self, sequence: Sequence, pending: int, kept: int) -> None:
        """A full step has kept so many of a sequence's pending tokens. Where all were, twice as many may wait next;
        else as many as were kept: texts have easy stretches and hard ones."""
        self.room[sequence.number] = 2 * pending if kept == pending else max(LEAST_PENDING, kept)

    def record(self, ends: abc.Sequence[tuple[Sequence, int]], probe: AttentionProbe) -> None:
        """Keeps the tokens with the largest attention mass of each recorded sequence, for its next sparse views."""
        sink, window, count = self.pattern.sink, self.pattern.window, self.pattern.retrieval
        first = np.arange(sink)
        # Drafts may be refused: what stands before them counts.
        tails = [max(sink, ends[place][1] - 1 - window) for place in probe.sequences]
        retrieved: list[Tensor] = []
        for layers, tail in zip(zip(*probe.layers, strict=True), tails, strict=True):
            attention_mass = [mass for mass in layers if mass.is_floating_point()]
            most = iter(top_tokens(attention_mass, sink, tail, count) if attention_mass else ())
            retrieved += [next(most) if own.is_floating_point() else own.long() for own in layers]
        # The host waits once, for all layers of all sequences.
        read = iter(torch.cat(retrieved).cpu().split([len(own) for own in retrieved]))
        for place, layers, tail in zip(probe.sequences, zip(*probe.layers, strict=True), tails, strict=True):
            places = []
            for own in layers:
                chosen = next(read).numpy()
                places.append(np.concatenate((first, chosen)) if own.is_floating_point() else chosen[chosen < tail])
            self.retrieved[ends[place][0].number] = Retrieved(places, tail)

    def propose(
        self, budgets: abc.Sequence[tuple[Sequence, int]], min_probability: float, copy: Copy, tree: int = 0
    ) -> dict[Sequence, Draft | None]:
        """As Drafter.propose. `copy` gives what stood in the text before, which may go on behind what is pending. Where
        `tree` is not 0, which is for one sequence alone, its partial steps judge trees of so many tokens."""
        self.read = StepBytes()
        partial = [(s, count) for s, count in budgets if self.applies(s)]
        plain = [(s, min(count, self.count)) for s, count in budgets if not self.applies(s)]
        drafts = dict(zip((s for s, _ in plain), self.drafter.propose(plain, min_probability), strict=True))
        return drafts | (self._pending(partial, min_probability, copy, tree) if partial else {})

    @torch.inference_mode()
    def _pending(
        self, budgets: abc.Sequence[tuple[Sequence, int]], min_probability: float, copy: Copy, tree: int
    ) -> dict[Sequence, Draft | None]:
        """Tokens that the target agrees to under its partial view; behind them those that are copied from the text, for
        the full step to judge: that is cheaper, and a copy is right as often."""
        # Tokens that may wait, and all that there is room for.
        room, whole = {s.number: min(count, self.wanted(s)) for s, count in budgets}, {s.number: c for s, c in budgets}
        copied: dict[Sequence, list[int]] = {}
        texts = [s.ahead() for s, _ in budgets]
        qs: dict[Sequence, list[Tensor]] = {text: [] for text in texts}
        begin = {text.number: len(text.token_ids) for text in texts}
        self.non_finite.clear()
        active, steps = texts, dict.fromkeys(begin, 0)
        view: View | None = None
        for step in range(self.pattern.full_every + 1):
            grown = {text.number: len(text.token_ids) - begin[text.number] for text in active}
            # What is to stay must have been judged.
            for text in active if step and not self.final else []:
                if draft := copy(text, whole[text.number] - grown[text.number]):
                    copied[text] = draft.token_ids
            left = {number: room[number] - count for number, count in grown.items()}
            active = [text for text in active if text not in copied and left[text.number] > 0]
            if not active or step == self.pattern.full_every:
                break
            if view is None or len(active) < len(view.texts):
                view = self._view(active, [(begin[text.number], whole[text.number]) for text in active])
            # Of trees acceptance and times are others.
            began, policy = time.perf_counter(), None if tree else self.policy
            alone = active[0].number if len(active) == 1 else None
            count = self.count if policy is None else policy.choose(len(active), alone=alone)
            asked = {text: most for text in active if (most := min(count, left[text.number] - 1)) > 0}
            if tree:
                assert isinstance(self.drafter, TreeDrafter)
                nodes = {text: min(tree, whole[text.number] - grown[text.number]) for text in asked}
                proposed = [self.drafter.propose_tree(text, nodes[text], depth) for text, depth in asked.items()]
            else:
                proposed = self.drafter.propose([*asked.items()], min_probability) if asked else []
            drafts = {text: draft for text, draft in zip(asked, proposed, strict=True) if draft is not None}
            accepted = self._judge(active, drafts, view, qs)
            for text in active:
                steps[text.number] += 1
                if policy is not None and text in drafts:
                    policy.acceptance.record(asked[text], accepted[text])
            if policy is not None:
                policy.record_time(len(active) + sum(asked.values()), time.perf_counter() - began)
        for text, tokens in copied.items():
            # All of q is on the token itself.
            if qs[text]:
                ids_K = on_device(tokens, torch.int64, self.model.device)
                qs[text] += qs[text][0].new_zeros(len(tokens), len(qs[text][0])).scatter_(1, ids_K[:, None], 1.0)
        return {
            s: None if s.number in self.non_finite else Draft(
                text.token_ids[begin[s.number] :] + copied.get(text, []), torch.stack(qs[text]) if qs[text] else None,
                partial_steps=steps[s.number], final=self.final, copied=len(copied.get(text, [])),
            )
            for (s, _), text in zip(budgets, texts, strict=True)
        }  # fmt: skip

    def _judge(
        self, texts: list[Sequence], drafts: dict[Sequence, Draft], view: View, qs: dict[Sequence, list[Tensor]]
    ) -> dict[Sequence, int]:
        """One partial step: each text grows by the tokens that are agreed to, which are so many, and by the target's
        own. `qs` grow by the distributions of what was drawn."""
        chunks = []
        for text in texts:
            draft = drafts.get(text, NOTHING)
            tokens = text.token_ids + draft.token_ids
            chunks.append(Chunk(text.number, tokens, text.computed, len(tokens), draft.tree, True))
        batch = self._seen(chunks, view)
        both_NC = self.runner(batch)
        both = zip(chunks, map(max, zip(*view.more, strict=True)), strict=True)
        self.read += self.step_bytes((c.stop - c.start, c.stop, c.stop + more) for c, more in both)
        C = self.model.spec.hidden_size
        starts = [(text, text.computed) for text in texts]
        firsts = dict(zip(texts, itertools.accumulate((c.stop - c.start for c in chunks), initial=0), strict=False))
        agreed = self._agreed(texts, drafts, firsts, self.model.logits(both_NC[:, :C]), qs)
        rows: list[int] = []
        for text in texts:
            text.computed = len(text.token_ids) - 1
            rows += [firsts[text], *(firsts[text] + 1 + place for place in agreed[text])]
        if chunks[0].tree is not None:
            self.cache.move(batch.views, rows)
        if self.drafter.boundaries:
            self.drafter.observe(starts, both_NC[:, C:].index_select(0, self._rows(rows)))
        return {text: len(places) for text, places in agreed.items()}

    def _agreed(
        self, texts: list[Sequence], drafts: dict[Sequence, Draft], firsts: dict[Sequence, int], logits_NV: Tensor,
        qs: dict[Sequence, list[Tensor]],
    ) -> dict[Sequence, list[int]]:  # fmt: skip
        """The places in each draft of the tokens that are agreed to, which are appended to its text, and the target's
        own. The row that follows a text is its first; rows after it follow its draft's tokens. The host waits once
        where all texts are plain, else for each token of the longest draft."""
        agreed: dict[Sequence, list[int]] = {text: [] for text in texts}
        newest = dict.fromkeys(texts, -1)
        # Nothing of it depends on the tokens before: all rows at once, and the host waits once.
        plain = checked(likeliest(logits_NV), logits_NV).tolist() if all(t.state.plain for t in texts) else None
        active = texts
        while active:
            rows = [firsts[text] + 1 + newest[text] for text in active]
            if plain is not None:
                tokens = [plain[row] for row in rows]
            else:
                states = [text.state for text in active]
                logits_SV = logits_NV.index_select(0, self._rows(rows))
                p_SV = self.sampler.probabilities(logits_SV, states)
                proposed = [drafts.get(text, NOTHING).drawn(newest[text] + 1) for text in active]
                tokens = checked(rejection_sampled(p_SV, states, proposed), logits_SV).tolist()
                for text, p_V in zip(active, p_SV, strict=True):
                    if not text.request.params.greedy:
                        qs[text].append(p_V)
            longer = []
            for text, token in zip(active, tokens, strict=True):
                if token == NO_TOKEN:
                    # A partial step may overflow where a full one does not: nothing of this text is to be judged.
                    self.non_finite.add(text.number)
                    token = 0
                text.token_ids.append(token)
                text.state.append([token])
                place = drafts.get(text, NOTHING).after(newest[text], token)
                if place is not None:
                    newest[text] = place
                    agreed[text].append(place)
                    longer.append(text)
            active = longer
        return agreed

    def _rows(self, rows: list[int]) -> Tensor:
        """Numbers of a step's rows, on the device."""
        return on_device(rows, torch.int64, self.model.device)

    def _view(self, texts: list[Sequence], spans: list[tuple[int, int]]) -> View:
        """What these texts see that have room for so many tokens behind the first of them. It does not depend on how
        many are already: views are made anew where another text of the step has all of its own."""
        sink, window, size, group = self.pattern.sink, self.pattern.window, self.tables.block_size, self.group
        assert group is not None
        places: list[list[np.ndarray]] = []
        for text, (begin, room) in zip(texts, spans, strict=True):
            # Where the last full step was long ago, what came after it is no longer near.
            tail = max(sink, begin - window - self.pattern.max_pending - 2)
            chosen = self.retrieved.get(text.number, Retrieved([np.arange(sink)] * self.layers, tail))
            near = np.arange(max(tail, chosen.tail), begin + room)
            places.append([np.concatenate((own, near)) for own in chosen.places])
        counts_SL = np.array([[len(own) for own in layers] for layers in places])
        K = -(-counts_SL.max() // APART) * APART
        both = np.zeros((2, self.layers, len(texts), K), dtype=np.int32)
        for s, (text, layers) in enumerate(zip(texts, places, strict=True)):
            blocks, own = np.asarray(self.tables.table(text.number, group)[1]), np.concatenate(layers)
            both[:, :, s][:, np.arange(K) < counts_SL[s, :, None]] = blocks[own // size] * size + own % size, own
        slots_LSK, places_LSK = uploaded(torch.from_numpy(both), self.model.device)
        ends = [begin + room for begin, room in spans]
        return View(texts, slots_LSK, places_LSK, [tuple(more) for more in (counts_SL.T - ends).tolist()])

    def _seen(self, chunks: list[Chunk], view: View) -> Batch:
        """The chunks with a partial view for each layer that sees everything."""
        batch = make_batch(chunks, self.tables, self.model.device)
        assert self.group is not None
        whole, stops = batch.views[self.group], [chunk.stop for chunk in chunks]
        views = tuple(
            narrowed(whole, slots_SK, places_SK, tuple(map(operator.add, stops, more)), True)
            for slots_SK, places_SK, more in zip(view.slots_LSK, view.places_LSK, view.more, strict=True)
        )
        return dataclasses.replace(batch, partial=views)


@dataclasses.dataclass(frozen=True)
class Retrieved:
    """Of each layer the first tokens and those that were attended to most, or what its index chose, rising; all stand
    before `tail`."""

    places: list[np.ndarray]
    tail: int


@dataclasses.dataclass(frozen=True)
class View:
    """Slots and positions, int32 [L, S, K], of what some texts see in each layer L while they grow: a text of so many
    tokens sees the first of them, in each layer `more` by number."""

    texts: list[Sequence]
    slots_LSK: Tensor
    places_LSK: Tensor
    more: list[tuple[int, ...]]
