"""Healing text: documents cut, split and packed into rows without gaps, and which rows a step reads.

Documents lie one after another in a row, and none sees another: positions begin anew with each, from which
transformers makes a block-diagonal mask. Which rows a step reads is a function of the seed and the step alone, so
that a run that goes on needs to remember nothing but its step.

Legend: N rows, T tokens of a row.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mlaforge.artifact import record_name
from mlaforge.data import corpus, overlap
from mlaforge.runtime import UserError, log

# At most this share of the text is kept back for validation.
MOST_HELD = 0.25
# Label of a token that has no next one.
NO_LABEL = -100


@dataclasses.dataclass(frozen=True)
class Rows:
    """Packed token ids [N, T], positions in the document's part of its row [N, T], and each row's number [N]; `answer`
    [N, T], where it is known: whether a token is what a model answered."""

    ids: Tensor
    positions: Tensor
    number: Tensor
    answer: Tensor | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: Tensor) -> Rows:
        answer = None if self.answer is None else self.answer[rows]
        return Rows(self.ids[rows], self.positions[rows], self.number[rows], answer)

    def to(self, device: torch.device) -> Rows:
        answer = None if self.answer is None else self.answer.to(device)
        return Rows(self.ids.to(device), self.positions.to(device), self.number, answer)

    @property
    def last(self) -> Tensor:
        """Whether a token is its document's last in the row, bool [N, T]."""
        last = torch.ones_like(self.ids, dtype=torch.bool)
        last[:, :-1] = self.positions[:, 1:] == 0
        return last

    @property
    def labels(self) -> Tensor:
        """The next token of each, [N, T]; NO_LABEL where its document ends in the row."""
        return self.ids.roll(-1, dims=1).masked_fill(self.last, NO_LABEL)


def pack(documents: list[Tensor], length: int) -> Rows:
    """Documents (token ids) one after another in rows of `length`; what is left of the last row is dropped.

    A document that a row's end cuts goes on in the next row as one of its own.
    """
    flat = torch.cat(documents) if documents else torch.empty(0, dtype=torch.int64)
    starts = torch.zeros(len(flat), dtype=torch.bool)
    if documents:
        ends = torch.tensor([len(d) for d in documents]).cumsum(0)
        starts[ends[:-1]] = True
    n = len(flat) // length
    ids, starts = flat[: n * length].view(n, length), starts[: n * length].view(n, length)
    column = torch.arange(length).expand(n, length)
    began = torch.where(starts, column, 0).cummax(dim=1).values if n else column
    return Rows(ids, column - began, torch.arange(n))


def place(documents: list[tuple[list[int], int]], length: int) -> Rows:
    """Documents (token ids, and how many of the first are no answer) whole in rows of `length`, each in the first row
    with room for it; one that is longer is cut. What is left of a row are documents of one token, 0."""
    rows: list[list[tuple[list[int], int]]] = []
    room: list[int] = []
    for ids, prompt_length in documents:
        ids = ids[:length]
        at = next((at for at, left in enumerate(room) if left >= len(ids)), None)
        if at is None:
            at = len(rows)
            rows.append([])
            room.append(length)
        rows[at].append((ids, prompt_length))
        room[at] -= len(ids)
    shape = len(rows), length
    packed = Rows(torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64), torch.arange(len(rows)),
                 torch.zeros(shape, dtype=torch.bool))  # fmt: skip
    assert packed.answer is not None
    for row, placed in enumerate(rows):
        start = 0
        for ids, prompt_length in placed:
            stop = start + len(ids)
            packed.ids[row, start:stop] = torch.tensor(ids)
            packed.positions[row, start:stop] = torch.arange(len(ids))
            packed.answer[row, start + prompt_length : stop] = True
            start = stop
    return packed


@dataclasses.dataclass(frozen=True)
class Text:
    """Documents of at most `longest` tokens to train on, those kept back for validation, and where they came from."""

    train: list[Tensor]
    validation: list[Tensor]
    source: str
    passages: list[int]

    def describe(self) -> dict[str, Any]:
        """What a manifest records."""
        digest = hashlib.sha256()
        for document in (*self.train, *self.validation):
            digest.update(document.numpy().tobytes() + b"|")
        tokens = {name: sum(map(len, getattr(self, name))) for name in ("train", "validation")}
        return {"source": self.source, "sha256": digest.hexdigest(), "tokens": tokens}


def _order(piece: Tensor) -> bytes:
    """A piece's place in an order that depends on nothing but its tokens."""
    return hashlib.sha256(piece.numpy().tobytes()).digest()


def passages(pieces: list[Tensor]) -> list[int]:
    """`corpus.passages` of documents one after another."""
    return overlap.passages(corpus.Windows(torch.cat(pieces)[None], ""))


def _without(pieces: list[Tensor], known: list[int]) -> list[Tensor]:
    """The pieces that share none of these passages."""
    shared = overlap.sharing(pieces, known)
    return [piece for n, piece in enumerate(pieces) if n not in shared]


def read(tokenizer: Any, sources: Sequence[str], longest: int, validation: int, tuned: list[int]) -> Text:
    """Reads texts (files, folders, `embedded`), in pieces of at most `longest` tokens.

    `validation` tokens of them (0: none) are kept back, chosen by hash. tuned: passages of the text that the model
    was converted on; pieces that repeat them are left out, so that no document serves two purposes. Raises UserError
    where too little is left.
    """
    pieces, source = [], ",".join(sources)
    for name in sources:
        for document in corpus.documents(name, tokenizer=tokenizer):
            ids = corpus.tokens(tokenizer, document)
            pieces += [piece for piece in ids.split(longest) if len(piece) > 1]
    fresh = _without(pieces, tuned)
    if len(fresh) < len(pieces):
        dropped = sum(map(len, pieces)) - sum(map(len, fresh))
        log(f"{source}: {dropped} tokens left out; the model was converted on text that shares passages with them")
    total, held, count = sum(map(len, fresh)), set[int](), 0
    for number in sorted(range(len(fresh)), key=lambda n: _order(fresh[n])) if validation else ():
        if count >= validation or count + len(fresh[number]) > MOST_HELD * total:
            break
        held.add(number)
        count += len(fresh[number])
    train = [piece for n, piece in enumerate(fresh) if n not in held]
    kept = [piece for n, piece in enumerate(fresh) if n in held]
    least = longest if not validation else min(longest, validation)
    if sum(map(len, train)) < longest or (validation and sum(map(len, kept)) < least):
        raise UserError(
            f"text {source!r} has {total} tokens to heal on, too few for rows of {longest} and validation beside them; "
            "give more text, or a smaller --seqlen"
        )
    if kept:
        # Boilerplate that training sees proves nothing.
        kept = _without(kept, passages(train))
        if sum(map(len, kept)) < least:
            raise UserError(f"text {source!r} repeats itself: too little is left to validate on; give more text")
    return Text(train, kept, ",".join(map(record_name, sources)), passages(fresh))


@dataclasses.dataclass(frozen=True)
class Phase:
    """Some steps on rows of one length; `kinds`: which layers learn, by whether they have a window (None: all)."""

    rows: Rows
    steps: int
    windowed: bool | None = None


@dataclasses.dataclass(frozen=True)
class Feed:
    """What every step reads: about `tokens` tokens of its phase's rows, in an order drawn anew for every epoch."""

    phases: tuple[Phase, ...]
    tokens: int
    seed: int

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    def phase(self, step: int) -> tuple[int, int]:
        """The phase of a step (from 0), and which of its steps it is."""
        for number, phase in enumerate(self.phases):
            if step < phase.steps:
                return number, step
            step -= phase.steps
        raise IndexError(step)

    def rows_per_step(self, number: int) -> int:
        return max(1, self.tokens // self.phases[number].rows.ids.shape[1])

    def batch(self, step: int) -> Rows:
        """The rows of a step."""
        number, offset = self.phase(step)
        rows, count = self.phases[number].rows, self.rows_per_step(number)
        chosen: list[int] = []
        for k in range(offset * count, (offset + 1) * count):
            epoch, place = divmod(k, len(rows))
            chosen.append(int(self._permutation(number, epoch, len(rows))[place]))
        return rows.take(torch.tensor(chosen))

    def _permutation(self, number: int, epoch: int, n: int) -> Tensor:
        draw = torch.Generator().manual_seed((self.seed * 1009 + number) * 100_003 + epoch)
        return torch.randperm(n, generator=draw)
