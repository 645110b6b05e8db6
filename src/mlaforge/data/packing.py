"""Healing text: documents packed into rows, the validation split, and the batches of training steps.

Documents in a row do not attend to each other: positions restart with each document, from which transformers makes a
block-diagonal mask. The batch of a step is a function of the seed and the step alone, so that a resumed run needs only
its step.

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

# Maximum share of the text for validation.
MAX_VALIDATION = 0.25
# Label of a token without a next one.
NO_LABEL = -100


@dataclasses.dataclass(frozen=True)
class Rows:
    """Packed rows. `ids`: token ids [N, T]; `positions`: within the document's part of the row [N, T]; `number`: index
    of each row [N]; `answer` [N, T], if known: whether a token is part of a model's answer."""

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
        """Mask of the last token of each document in a row, bool [N, T]."""
        last = torch.ones_like(self.ids, dtype=torch.bool)
        last[:, :-1] = self.positions[:, 1:] == 0
        return last

    @property
    def labels(self) -> Tensor:
        """Next token of every token, [N, T]; NO_LABEL at the end of a document in the row."""
        return self.ids.roll(-1, dims=1).masked_fill(self.last, NO_LABEL)


def pack(documents: list[Tensor], length: int) -> Rows:
    """Concatenate documents (token ids) and split them into rows of `length`; an incomplete last row is dropped.

    The part of a document after the end of a row is a separate document in the next row.
    """
    flat = torch.cat(documents) if documents else torch.empty(0, dtype=torch.int64)
    starts = torch.zeros(len(flat), dtype=torch.bool)
    if documents:
        ends = torch.tensor([len(d) for d in documents]).cumsum(0)
        starts[ends[:-1]] = True
    n = len(flat) // length
    ids, starts = flat[: n * length].view(n, length), starts[: n * length].view(n, length)
    column = torch.arange(length).expand(n, length)
    document_start = torch.where(starts, column, 0).cummax(dim=1).values if n else column
    return Rows(ids, column - document_start, torch.arange(n))


def first_fit(documents: list[tuple[list[int], int]], length: int) -> Rows:
    """Pack whole documents (token ids and prompt length) into rows of `length`, each into the first row with enough
    space; longer ones are truncated. The rest of a row is filled with documents of one token, 0."""
    rows: list[list[tuple[list[int], int]]] = []
    space: list[int] = []
    for ids, prompt_length in documents:
        ids = ids[:length]
        row = next((row for row, free in enumerate(space) if free >= len(ids)), None)
        if row is None:
            row = len(rows)
            rows.append([])
            space.append(length)
        rows[row].append((ids, prompt_length))
        space[row] -= len(ids)
    shape = len(rows), length
    packed = Rows(torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64), torch.arange(len(rows)),
                 torch.zeros(shape, dtype=torch.bool))  # fmt: skip
    assert packed.answer is not None
    for row, packed_documents in enumerate(rows):
        start = 0
        for ids, prompt_length in packed_documents:
            stop = start + len(ids)
            packed.ids[row, start:stop] = torch.tensor(ids)
            packed.positions[row, start:stop] = torch.arange(len(ids))
            packed.answer[row, start + prompt_length : stop] = True
            start = stop
    return packed


@dataclasses.dataclass(frozen=True)
class Text:
    """Documents for training and for validation, of limited length, with their source."""

    train: list[Tensor]
    validation: list[Tensor]
    source: str
    passages: list[int]

    def describe(self) -> dict[str, Any]:
        """Return the record for a manifest."""
        digest = hashlib.sha256()
        for document in (*self.train, *self.validation):
            digest.update(document.numpy().tobytes() + b"|")
        tokens = {name: sum(map(len, getattr(self, name))) for name in ("train", "validation")}
        return {"source": self.source, "sha256": digest.hexdigest(), "tokens": tokens}


def _order(piece: Tensor) -> bytes:
    """Return a sort key that depends only on the tokens of a piece."""
    return hashlib.sha256(piece.numpy().tobytes()).digest()


def passages(pieces: list[Tensor]) -> list[int]:
    """Return the `overlap.passages` of concatenated documents."""
    return overlap.passages(corpus.Windows(torch.cat(pieces)[None], ""))


def _without(pieces: list[Tensor], excluded: list[int]) -> list[Tensor]:
    """Return the pieces that share none of the passages `excluded`."""
    shared = overlap.sharing(pieces, excluded)
    return [piece for n, piece in enumerate(pieces) if n not in shared]


def read(tokenizer: Any, sources: Sequence[str], longest: int, validation: int, tuned: list[int]) -> Text:
    """Read texts (files, folders, `embedded`) in pieces of at most `longest` tokens.

    `validation` tokens of them (0: none) are reserved for validation, selected by hash. tuned: passages of the
    calibration text; pieces that repeat them are left out, so that no document is used twice. Raises UserError if too
    little text remains.
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
    total, validation_indices, count = sum(map(len, fresh)), set[int](), 0
    for number in sorted(range(len(fresh)), key=lambda n: _order(fresh[n])) if validation else ():
        if count >= validation or count + len(fresh[number]) > MAX_VALIDATION * total:
            break
        validation_indices.add(number)
        count += len(fresh[number])
    train = [piece for n, piece in enumerate(fresh) if n not in validation_indices]
    validation_pieces = [piece for n, piece in enumerate(fresh) if n in validation_indices]
    minimum = longest if not validation else min(longest, validation)
    if sum(map(len, train)) < longest or (validation and sum(map(len, validation_pieces)) < minimum):
        raise UserError(
            f"text {source!r} has {total} tokens to heal on, too few for rows of {longest} and a validation split; "
            "give more text, or a smaller --seqlen"
        )
    if validation_pieces:
        # Boilerplate that is also in the training text is no evidence.
        validation_pieces = _without(validation_pieces, passages(train))
        if sum(map(len, validation_pieces)) < minimum:
            raise UserError(f"text {source!r} repeats itself: too little remains for validation; give more text")
    return Text(train, validation_pieces, ",".join(map(record_name, sources)), passages(fresh))


@dataclasses.dataclass(frozen=True)
class Phase:
    """Training steps on rows of one length; `windowed`: train only the layers with (True) or without (False) a sliding
    window; None: all."""

    rows: Rows
    steps: int
    windowed: bool | None = None


@dataclasses.dataclass(frozen=True)
class Feed:
    """Batches of training steps: about `tokens` tokens of the phase's rows, in a new random order every epoch."""

    phases: tuple[Phase, ...]
    tokens: int
    seed: int

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    def phase(self, step: int) -> tuple[int, int]:
        """Return the phase of a step (from 0), and the step within the phase."""
        for number, phase in enumerate(self.phases):
            if step < phase.steps:
                return number, step
            step -= phase.steps
        raise IndexError(step)

    def rows_per_step(self, number: int) -> int:
        return max(1, self.tokens // self.phases[number].rows.ids.shape[1])

    def batch(self, step: int) -> Rows:
        """Return the rows of a step."""
        number, offset = self.phase(step)
        rows, count = self.phases[number].rows, self.rows_per_step(number)
        indices: list[int] = []
        for k in range(offset * count, (offset + 1) * count):
            epoch, position = divmod(k, len(rows))
            indices.append(int(self._permutation(number, epoch, len(rows))[position]))
        return rows.take(torch.tensor(indices))

    def _permutation(self, number: int, epoch: int, n: int) -> Tensor:
        generator = torch.Generator().manual_seed((self.seed * 1009 + number) * 100_003 + epoch)
        return torch.randperm(n, generator=generator)
