"""What a model itself writes, to calibrate it on: text of all that it knows, without data, licence or network.

It goes on from openings of many kinds (openings.yaml), answers what users ask by its chat template, and asks itself
questions. A text follows from its number and the seed, and what is asked for is the first texts that hold so many
tokens: a draw that was cut off goes on, and a longer one begins as a shorter one. Texts are kept in the cache folder by
the model's fingerprint, beside a datasheet.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import hashlib
import itertools
import json
import math
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml

from mlaforge.artifact import disk_is_full, full_disk, locked
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.data import corpus, overlap
from mlaforge.engine.cache.kv_cache import free_bytes
from mlaforge.engine.config import EngineConfig
from mlaforge.engine.execution.linear import bfloat16_unit
from mlaforge.engine.llm import LLM
from mlaforge.engine.request.output import NonFiniteLogits
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.planning.costs import weight_bytes
from mlaforge.planning.plan import unconverted
from mlaforge.rendering.table import markdown_table
from mlaforge.runtime import Interrupted, UserError, cache_home, interrupted, log, progress_bar, resolve_device
from mlaforge.synthesis.journal import Ask, Journal, Line
from mlaforge.synthesis.repetition import loop
from mlaforge.synthesis.user_turn import UserTurn

OPENINGS = Path(__file__).with_name("openings.yaml")
# What a user says, and what the model asks itself: kinds that need a chat template.
DIALOGUE, QUESTION = "dialogue", "question"
# A question that is not asked yet.
DRAWN = "drawn"
# How text is drawn; a text's new tokens, at least and at most; tokens of the longest prompt.
TEMPERATURE, TOP_P = 0.9, 0.98
SHORTEST, LONGEST, LONGEST_PROMPT = 32, 512, 512
# A draw may take so many SECONDS, and its pace is known after PACE_SECONDS. Then it is so many tokens, by what there is
# time for: a few steps apart, so that the same machine comes to the same number again.
SECONDS, PACE_SECONDS = 600.0, 10.0
TOKENS = (MOST := 65_536, 32_768, 16_384)
# A model to which ordinary words are nearly as surprising as any token is (in nats) writes noise.
NOISE, ORDINARY = 0.8, ("prose", "news")
# A model of whose first SEEN texts less than this share is kept only repeats itself.
SEEN, LEAST_KEPT = 64, 0.1
# Seeds share no stream of random numbers.
STREAMS = 1 << 32
TEXTS, LIMIT, SHEET = "texts.jsonl", "limit.json", "datasheet"


class CannotWrite(UserError):
    """The model writes no text to calibrate on, or none in the time that there is."""


@dataclasses.dataclass(frozen=True)
class OwnText:
    """A model's texts, as lines of its journal: `kind`, `number`, and `ids`, without what begins and ends a text."""

    tokenizer: Any
    lines: list[Line]

    @property
    def tokens(self) -> int:
        return sum(len(line["ids"]) for line in self.lines)

    def documents(self) -> Iterator[tuple[str, str]]:
        """Every text's name and words."""
        for line in self.lines:
            yield f"{line['kind']}/{line['number']}", self.tokenizer.decode(line["ids"])

    def windows(self, count: int, seqlen: int) -> corpus.Windows:
        """At most so many windows of `seqlen` tokens of running text."""
        between = self.tokenizer("\n\n", add_special_tokens=False)["input_ids"]
        flat = [token for line in self.lines for token in (*line["ids"], *between)]
        count = min(count, len(flat) // seqlen)
        return corpus.Windows(torch.tensor(flat[: count * seqlen], dtype=torch.int64).view(count, seqlen), corpus.SELF)


def own_text(source: SourceModel, tokens: int, seed: int, device: str, judged: list[int] | None = None) -> OwnText:
    """Texts of at least so many tokens that `source` wrote, drawn where the cache does not hold them; of fewer where
    there is no time for more, which is said.

    judged: passages (data/overlap.py) of text that something is judged on; texts that hold one are left out.
    Raises CannotWrite for a model that writes nothing usable, or not in the time that there is.
    """
    recipe = [_openings(), TEMPERATURE, TOP_P, SHORTEST, LONGEST, seed]
    key = hashlib.sha256(json.dumps([source.fingerprint, *recipe]).encode()).hexdigest()
    folder = cache_home() / "self" / f"{source.path.name}-{key[:12]}"
    with _room(folder), locked(folder / "lock", f"the text of {source.name}", wait=True):
        draw, needed = _Draw(source, seed, resolve_device(device), folder), tokens
        while True:
            draw.until(needed)
            lines = draw.first(min(needed, draw.most))
            shared = overlap.sharing([torch.tensor(line["ids"], dtype=torch.int64) for line in lines], judged or [])
            text = OwnText(source.tokenizer, [line for n, line in enumerate(lines) if n not in shared])
            if text.tokens >= tokens or needed >= draw.most:
                return text
            needed += tokens - text.tokens


@contextmanager
def _room(folder: Path) -> Iterator[None]:
    """Raises UserError where the disk is full."""
    try:
        yield
    except OSError as error:
        if not disk_is_full(error):
            raise
        choose = "or set MLAFORGE_HOME to a folder on another disk"
        raise UserError(full_disk(folder, choose, "the same command goes on from what it holds")) from error


@functools.cache
def _openings() -> dict[str, list[str]]:
    kinds: dict[str, list[str]] = yaml.safe_load(OPENINGS.read_text(encoding="utf-8"))
    return kinds


class _Draw:
    """One model's journal of texts by number, and what there is time for."""

    def __init__(self, source: SourceModel, seed: int, device: torch.device, folder: Path):
        self.source, self.seed, self.device, self.folder = source, seed, device, folder
        self.tokenizer, self.special = source.tokenizer, set(source.tokenizer.all_special_ids)
        self.journal, limit = Journal(folder / TEXTS), folder / LIMIT
        self.limit: dict[str, Any] = json.loads(limit.read_text(encoding="utf-8")) if limit.exists() else {}
        self.kinds, self.turn = dict(_openings()), None
        try:
            self.turn = UserTurn(self.tokenizer, source.name)
            self.kinds[QUESTION] = [""] * len(self.kinds[DIALOGUE])
        except UserError:
            # Nobody talks with a base model.
            del self.kinds[DIALOGUE]

    @property
    def most(self) -> float:
        """Tokens that there is time for, as far as that is known."""
        return float(self.limit.get("tokens", math.inf))

    def first(self, tokens: float) -> list[Line]:
        """The first texts that hold so many tokens, or as many of them as are written without a gap."""
        chosen: list[Line] = []
        for number in itertools.count():
            if tokens <= 0 or number not in self.journal.lines:
                break
            if "ids" in (line := self.journal.lines[number]):
                chosen.append(line)
                tokens -= len(line["ids"])
        return chosen

    def until(self, tokens: int) -> None:
        """Has the model write until the first texts hold so many tokens, or as many as there is time for."""
        if not self.most:
            raise CannotWrite(self.limit["why"])
        if self._missing(tokens) <= 0:
            return
        self._check_memory()
        wanted = int(min(tokens, self.most))
        log(f"{self.source.name} writes {wanted:,} tokens of text to calibrate on (at most {SECONDS / 60:g} minutes)")
        try:
            self._write(wanted)
        except (Exception, KeyboardInterrupt) as error:
            if interrupted(error):
                raise Interrupted(f"the same command goes on from what {self.folder} holds") from error
            if isinstance(error, UserError) and not isinstance(error, CannotWrite):
                raise CannotWrite(f"{self.source.name} writes no text to calibrate on: {error}") from error
            raise
        # What follows needs the memory.
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self._write_sheet()

    def _write(self, tokens: int) -> None:
        longest = min(self.source.spec.max_position_embeddings, LONGEST_PROMPT + LONGEST)
        llm = LLM(self.source, EngineConfig(device=str(self.device), max_model_len=longest))
        self._check_language(llm)
        engine, began, before = llm.engine, time.perf_counter(), llm.engine.stats().computed_tokens
        lines, busy = self.journal.lines, self.journal.under_way

        def following() -> int | None:
            """The next number, until what is written and what can be expected will do."""
            written = sum(map(_size, lines.values()))
            if len(lines) >= SEEN and written < LEAST_KEPT * len(lines) * LONGEST / 2:
                self._give_up("most of what it writes repeats itself")
            # Short texts end first: those that have ended may only raise what is expected of the others.
            expected = written + len(busy) * max(LONGEST / 2, written / max(1, len(lines)))
            if self._missing(tokens) <= 0 or (busy and expected >= min(tokens, self.most)):
                return None
            return next(number for number in itertools.count() if number not in lines and number not in busy)

        def done() -> int:
            """Tokens so far, of texts that go on too. After a while it is known for how many there is time."""
            if not self.limit and (took := time.perf_counter() - began) > PACE_SECONDS:
                self._allow((engine.stats().computed_tokens - before) / took)
            return min(tokens, sum(map(_size, lines.values())) + sum(map(len, busy.values())))

        with progress_bar(f"{self.source.name} writes", tokens, initial=sum(map(_size, self.first(tokens)))) as bar:
            self.journal.run(engine, following, self._begin, self._answered, bar, done)

    def _missing(self, tokens: float) -> float:
        wanted = min(tokens, self.most)
        return wanted - sum(map(_size, self.first(wanted)))

    def _allow(self, pace: float) -> None:
        """Says and remembers for how many tokens there is time at so many a second."""
        allowed = next((tokens for tokens in TOKENS if tokens <= pace * SECONDS), 0)
        if not allowed:
            self._give_up(f"{TOKENS[-1]:,} tokens would take it {TOKENS[-1] / pace / 60:.0f} minutes", pace)
        if allowed < TOKENS[0]:
            log(f"{self.source.name} writes {pace:.0f} tokens a second here: there is time for {allowed:,}")
        self._remember({"tokens": allowed, "pace": pace})

    def _give_up(self, why: str, pace: float | None = None) -> NoReturn:
        why = f"{self.source.name} writes no text to calibrate on: {why}"
        self._remember({"tokens": 0, "pace": pace, "why": why})
        raise CannotWrite(why)

    def _remember(self, limit: dict[str, Any]) -> None:
        self.limit = limit
        (half := self.folder / f"{LIMIT}.unfinished").write_text(json.dumps(limit), encoding="utf-8")
        os.replace(half, self.folder / LIMIT)

    def _check_memory(self) -> None:
        """Raises CannotWrite where the engine would not hold the model. Another time there may be more room."""
        needed, free = weight_bytes(unconverted(self.source.spec)), free_bytes(self.device)
        if self.device.type == "cpu" and self.source.dtype != torch.float32 and not bfloat16_unit():
            needed *= 2
        # What the engine counts (engine/memory.py) is known only when it is made; activations want some too.
        if needed > 0.9 * free:
            raise CannotWrite(
                f"{self.source.name} writes no text to calibrate on: its weights take {needed / 2**30:.1f} GiB, and "
                f"{free / 2**30:.1f} GiB are free"
            )

    def _check_language(self, llm: LLM) -> None:
        """Raises CannotWrite for a model that knows no language, such as a random one."""
        prompts = [text for kind in ORDINARY for text in self.kinds[kind]]
        try:
            outputs = llm.generate(prompts, SamplingParams(max_tokens=0, prompt_logprobs=0))
        except NonFiniteLogits as error:
            self._give_up(str(error))
        nats = [-entry.logprob for output in outputs for entry in output.prompt_logprobs or () if entry]
        if sum(nats) / len(nats) > NOISE * math.log(self.source.spec.vocab_size):
            self._give_up("ordinary words surprise it as much as noise")

    def _opening(self, number: int) -> tuple[str, str]:
        """Kind and words. Every round has all openings, in an order of its own in which the kinds are spread evenly."""
        turn, place = divmod(number, sum(map(len, self.kinds.values())))
        draw, order = random.Random(f"{self.seed}:{turn}"), []
        for kind, texts in self.kinds.items():
            places = [(i + draw.random()) / len(texts) for i in range(len(texts))]
            order += [(at, kind, text) for at, text in zip(places, draw.sample(texts, len(texts)), strict=True)]
        return sorted(order)[place][1:]

    def _begin(self, number: int) -> Ask | Line:
        kind, text = self._opening(number)
        if kind == QUESTION:
            assert self.turn is not None
            return dataclasses.replace(self.turn.draw(self._stream(number), []), note=DRAWN)
        if kind == DIALOGUE:
            assert self.turn is not None
            return self._ask(number, kind, self.turn.asks(text))
        return self._ask(number, kind, self.tokenizer(text)["input_ids"])

    def _stream(self, number: int) -> int:
        return self.seed * STREAMS + number

    def _ask(self, number: int, kind: str, prompt_ids: list[int]) -> Ask | Line:
        room = min(LONGEST, self.source.spec.max_position_embeddings - len(prompt_ids))
        if len(prompt_ids) > LONGEST_PROMPT or room < SHORTEST:
            return {"kind": kind, "dropped": "too long a prompt"}
        stops = (self.turn.end,) if self.turn and kind in (DIALOGUE, QUESTION) else ()
        params = SamplingParams(
            max_tokens=room, temperature=TEMPERATURE, top_p=TOP_P, seed=self._stream(number), stop_token_ids=stops
        )
        return Ask(prompt_ids, params, kind)

    def _answered(self, number: int, ask: Ask, token_ids: list[int]) -> Ask | Line:
        kind: str = ask.note
        if kind == DRAWN:
            assert self.turn is not None
            text, why = self.turn.said(ask, token_ids)
            return {"kind": QUESTION, "dropped": why} if why else self._ask(number, QUESTION, self.turn.asks(text))
        if len(token_ids) < SHORTEST:
            return {"kind": kind, "dropped": "too short"}
        if why := loop(token_ids, self.tokenizer.decode(token_ids)):
            return {"kind": kind, "dropped": why}
        ids = ask.prompt_ids + token_ids
        if kind not in (DIALOGUE, QUESTION):
            # What begins and ends a text stands in no running text.
            ids = ids[ids[0] == self.tokenizer.bos_token_id : len(ids) - (ids[-1] in self.special)]
        return {"kind": kind, "ids": ids}

    def _write_sheet(self) -> None:
        """What is in the journal, for people and for programs."""
        lines = self.journal.lines.values()
        sheet: dict[str, Any] = {
            "model": self.source.record, "seed": self.seed, "device": str(self.device),
            "licence": "what the model's own licence says of text that it writes",
            "sampling": {"temperature": TEMPERATURE, "top_p": TOP_P, "longest": LONGEST, "shortest": SHORTEST},
            "kinds": {
                kind: {
                    "openings": len(texts), "tokens": sum(_size(line) for line in lines if line["kind"] == kind),
                    "texts": sum("ids" in line for line in lines if line["kind"] == kind),
                    "dropped": Counter(line["dropped"] for line in lines if line["kind"] == kind and "dropped" in line),
                } for kind, texts in self.kinds.items()
            },
        }  # fmt: skip
        (self.folder / f"{SHEET}.json").write_text(json.dumps(sheet, indent=1) + "\n", encoding="utf-8")
        rows: list[tuple[Any, ...]] = [("kind", "openings", "texts", "tokens", "dropped")]
        for kind, own in sheet["kinds"].items():
            dropped = ", ".join(f"{count} {why}" for why, count in sorted(own["dropped"].items()))
            rows.append((kind, own["openings"], own["texts"], own["tokens"], dropped or "–"))
        (self.folder / f"{SHEET}.md").write_text(
            f"# What {self.source.name} wrote to be calibrated on\n\nTemperature {TEMPERATURE}, top-p {TOP_P}, at most "
            f"{LONGEST} new tokens a text, seed {self.seed}. Model: SHA-256 {self.source.fingerprint}. Licence: "
            f"{sheet['licence']}.\n\n{markdown_table(rows)}\n", encoding="utf-8",
        )  # fmt: skip


def _size(line: Line) -> int:
    """Tokens of a text; none of one that was dropped."""
    return len(line.get("ids", ()))
