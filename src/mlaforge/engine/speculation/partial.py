"""Partial verification (SpecPV, arXiv:2512.02337), lossless: the target judges a drafter's tokens by a part of the
cache, and now and then what it has judged so by all of it.

A partial view holds a sequence's first tokens, in each layer those that the last full step attended to most, and the
newest ones. What the target agrees to under it is pending. To the engine pending tokens are a draft like any other: the
step's own verification, which reads everything, judges them, keeps the longest right prefix, and writes their rows
anew. So nothing that was made under a partial view is ever published, streamed, or found as a prefix, and the tokens
that come out are the target's own, whatever the view left out.

Legend: S sequences, N rows of a step, K rows that a sequence may see, C hidden size.
"""

from __future__ import annotations

import dataclasses
import time
from collections import abc

import numpy as np
import torch

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
from mlaforge.ops.token_selection import narrowed


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


class PartialVerification:
    """Drafts that the target has judged under a partial view; `drafter` proposes their tokens, `count` at a time, or as
    many as `policy` learns to be best.

    Sequences that draw their tokens, and those that hardly hold more than a view, get the drafter's own tokens.
    """

    def __init__(
        self, drafter: Drafter, count: int, policy: DraftPolicy | None, pattern: PartialView, model: EngineModel,
        runner: Runner, tables: BlockTables,
    ):  # fmt: skip
        self.drafter, self.count, self.policy, self.pattern = drafter, count, policy, pattern
        self.model, self.runner, self.tables = model, runner, tables
        # Of the target: the cache group of the layers that see everything, and how many they are.
        full = [layer.attention.group for layer in model.layers if tables.groups[layer.attention.group].window is None]
        self.group, self.layers = (full[0] if full else None), len(full)
        # By a sequence's number, for each of those layers, the tokens that it attended to most in its last full step,
        # in their order.
        self.heaviest: dict[int, list[np.ndarray]] = {}

    @classmethod
    def of(
        cls, config: EngineConfig, drafter: Drafter, model: EngineModel, runner: Runner, tables: BlockTables
    ) -> PartialVerification | None:
        """As the options say; None where it is off."""
        if config.specpv == "off":
            return None
        count = config.num_speculative_tokens
        policy = DraftPolicy(count) if config.adaptive_speculation else None
        return cls(drafter, count, policy, PartialView.of(config), model, runner, tables)

    def applies(self, sequence: Sequence) -> bool:
        """Whether the sequence's tokens are judged under a partial view first."""
        long = sequence.computed >= self.pattern.shortest
        return bool(self.layers) and sequence.request.params.greedy and long

    def watch(self, sequences: abc.Sequence[Sequence]) -> Watched | None:
        """What a full step of these sequences, with their drafts, is to be asked for; None where nobody retrieves."""
        wanted = [i for i, sequence in enumerate(sequences) if self.pattern.retrieval and self.applies(sequence)]
        return Watched(wanted) if wanted else None

    def saw(self, sequences: abc.Sequence[Sequence], watched: Watched) -> None:
        """What came of it."""
        pattern = self.pattern
        found = {s.number: self.heaviest[s.number] for s in sequences if s.number in self.heaviest}
        for place, masses in zip(watched.wanted, zip(*watched.layers, strict=True), strict=True):
            last = len(masses[0]) - pattern.window
            found[sequences[place].number] = list(heaviest(masses, pattern.sink, last, pattern.retrieval).numpy())
        self.heaviest = found

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
        room = {s.number: min(count, self.pattern.max_pending) for s, count in budgets}
        texts = [dataclasses.replace(s, token_ids=list(s.token_ids)) for s, _ in budgets]
        begin = {text.number: len(text.token_ids) for text in texts}
        kept = {text.number: self._kept(text) for text in texts}
        active, steps = texts, dict.fromkeys(begin, 0)
        for _ in range(self.pattern.full_every):
            left = {t.number: room[t.number] - (len(t.token_ids) - begin[t.number]) for t in active}
            active = [text for text in active if left[text.number] > 0]
            if not active:
                break
            began = time.perf_counter()
            count = self.count if self.policy is None else self.policy.choose(len(active))
            asked = {text: most for text in active if (most := min(count, left[text.number] - 1)) > 0}
            proposed = self.drafter.propose([*asked.items()], min_probability) if asked else []
            drafts = {text: d.token_ids for text, d in zip(asked, proposed, strict=True) if d is not None}
            accepted = self._judge(active, drafts, kept)
            for text in active:
                steps[text.number] += 1
                if self.policy is not None and text in drafts:
                    self.policy.record_acceptance(asked[text], accepted[text])
            if self.policy is not None:
                self.policy.record_time(len(active) + sum(asked.values()), time.perf_counter() - began)
        return {
            s: Draft(text.token_ids[begin[s.number] :], partial_steps=steps[s.number])
            for (s, _), text in zip(budgets, texts, strict=True)
        }

    def _judge(
        self, texts: list[Sequence], drafts: dict[Sequence, list[int]], kept: dict[int, _Kept]
    ) -> dict[Sequence, int]:
        """One partial step: each text grows by the tokens that are agreed to, which are so many, and by the target's
        own."""
        chunks = []
        for text in texts:
            tokens = text.token_ids + drafts.get(text, [])
            chunks.append(Chunk(text.number, tokens, text.computed, len(tokens), None, True))
        both_NC = self.runner(self._seen(chunks, kept))
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

    def _kept(self, text: Sequence) -> _Kept:
        """What is seen of a text before its newest tokens, as things stand now."""
        tail, first = max(0, text.computed - self.pattern.window), np.arange(self.pattern.sink)
        chosen = self.heaviest.get(text.number) or [first[:0]] * self.layers
        # Drafts that were refused stood behind the newest token.
        return _Kept([np.concatenate((first, own[own < tail])) for own in chosen], tail)

    def _seen(self, chunks: list[Chunk], kept: dict[int, _Kept]) -> Batch:
        """The chunks with a partial view for each layer that sees everything."""
        batch = make_batch(chunks, self.tables, self.model.device)
        group, size = self.group, self.tables.block_size
        if group is None:
            return batch
        tables = [np.asarray(self.tables.table(chunk.seq, group)[1]) for chunk in chunks]
        views = []
        for layer in range(self.layers):
            positions = [kept[chunk.seq].upto(chunk.stop, layer) for chunk in chunks]
            counts = tuple(map(len, positions))
            stands_SK = np.zeros((len(chunks), -(-max(counts) // APART) * APART), dtype=np.int32)
            slots_SK = np.zeros_like(stands_SK)
            for s, (blocks, each) in enumerate(zip(tables, positions, strict=True)):
                stands_SK[s, : len(each)] = each
                slots_SK[s, : len(each)] = blocks[each // size] * size + each % size
            slots, stands = (torch.from_numpy(table).to(self.model.device) for table in (slots_SK, stands_SK))
            views.append(narrowed(batch.views[group], slots, stands, counts, True))
        return dataclasses.replace(batch, partial=tuple(views))


@dataclasses.dataclass(frozen=True)
class _Kept:
    """Positions that each layer sees before `tail`, rising; from there on all are seen."""

    layers: list[np.ndarray]
    tail: int

    def upto(self, stop: int, layer: int) -> np.ndarray:
        return np.concatenate((self.layers[layer], np.arange(self.tail, stop)))
