"""Windows of text and their embeddings on disk, shard by shard: what `calibrate` holds of text that fits no memory.

A window is a slice of a document of at most so many characters; a passage is a run of windows of one document. Each
file appears whole or not at all, so that a run that was killed goes on with the next shard.

Legend: N windows or passages of a shard, D dimensions of an embedding.
"""

from __future__ import annotations

import dataclasses
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch

from mlaforge.calibration.embedder import Embedder, unit
from mlaforge.calibration.sources import Document
from mlaforge.tensor_store import TensorStore

# Windows of a shard, at least: what a killed run loses.
SHARD = 512
# Where a window may end, the best first; never in its first half.
BOUNDARIES = ("\n\n", "\n", ". ", " ")
# A window of less than this share of the longest one is no text of its own.
LEAST = 0.25


@dataclasses.dataclass(frozen=True)
class Passage:
    """Consecutive windows of one document; joined they are its text as it stands there."""

    source: str
    document: str
    windows: tuple[str, ...]

    @property
    def text(self) -> str:
        return "".join(self.windows)


def cut(text: str, size: int) -> Iterator[str]:
    """Slices of `text`, which they are when joined, of `size` characters at most; the last may be a quarter longer,
    so that none is a scrap."""
    start = 0
    while len(text) - start > size * (1 + LEAST):
        ends = (text.rfind(mark, start + size // 2, start + size) + len(mark) for mark in BOUNDARIES)
        # rfind gives -1: what is left is shorter than any mark's place.
        end = next((at for at in ends if at > start + size // 2), start + size)
        yield text[start:end]
        start = end
    yield text[start:]


def passages(source: str, documents: Iterable[Document], size: int, longest: int) -> Iterator[Passage]:
    """Every document in passages of about one length, of at most `longest` windows of `size` characters."""
    for document in documents:
        windows = [window for part in document.parts for window in cut(part.rstrip() + "\n\n", size)]
        count = -(-len(windows) // longest)
        for i in range(count):
            own = windows[len(windows) * i // count : len(windows) * (i + 1) // count]
            yield Passage(source, document.name, tuple(own))


def long_enough(text: str, size: int) -> bool:
    """Whether a window is a text of its own."""
    return len(text.strip()) >= size * LEAST


def density(text: str) -> float:
    """Bytes after zlib (level 9) by bytes before: what repeats itself, as tables and rulers do, has less."""
    raw = text.strip().encode()
    return len(zlib.compress(raw, 9)) / max(1, len(raw))


def spread(vectors_ND: np.ndarray) -> float:
    """1 - |mean| of unit vectors: 0 where all windows say the same, near 1 where they have nothing in common."""
    return max(0.0, 1.0 - float(np.linalg.norm(vectors_ND.mean(0))))


class Shards:
    """A folder of shards: text-<n>.jsonl, and in the store the embeddings and measures of each."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.store = TensorStore(folder)

    def __len__(self) -> int:
        return len(list(self.folder.glob("text-*.jsonl")))

    def write(self, all_passages: Iterable[Passage]) -> None:
        """Every passage, in shards of at least SHARD windows (the last may have fewer)."""
        number, shard, windows = 0, [], 0
        for passage in all_passages:
            shard.append(passage)
            windows += len(passage.windows)
            if windows >= SHARD:
                self._write(number, shard)
                number, shard, windows = number + 1, [], 0
        if shard:
            self._write(number, shard)

    def _path(self, number: int) -> Path:
        return self.folder / f"text-{number:05d}.jsonl"

    def _write(self, number: int, shard: list[Passage]) -> None:
        lines = (json.dumps(dataclasses.asdict(passage), ensure_ascii=False) + "\n" for passage in shard)
        unfinished = self._path(number).with_suffix(".unfinished")
        # Half a character may stand in a string, but not in a file.
        unfinished.write_text("".join(lines), encoding="utf-8", errors="replace")
        os.replace(unfinished, self._path(number))

    def read(self, number: int) -> list[Passage]:
        """The passages of a shard."""
        with self._path(number).open(encoding="utf-8", newline="\n") as lines:
            return [Passage(own["source"], own["document"], tuple(own["windows"])) for own in map(json.loads, lines)]

    def embed(self, number: int, embedder: Embedder, size: int) -> None:
        """Leaves `windows` and `passages` [N, D], `density` and `complexity` [N], and which of either can be chosen.

        A passage that is longer than the embedder's context is the mean of its windows, weighted by length.
        """
        shard = self.read(number)
        texts = [window for passage in shard for window in passage.windows]
        windows_ND = embedder(texts)
        passages_ND, complexity = np.empty((len(shard), windows_ND.shape[1]), np.float32), np.empty(len(shard))
        ends = np.cumsum([len(passage.windows) for passage in shard])
        for i, (passage, own) in enumerate(zip(shard, np.split(windows_ND, ends[:-1]), strict=True)):
            weights = np.array([[len(window)] for window in passage.windows], np.float32)
            passages_ND[i] = unit((own * weights).sum(0))
            complexity[i] = len(passage.text) * spread(own)
        whole = [i for i, passage in enumerate(shard) if len(passage.windows) > 1 and embedder.holds(passage.text)]
        if whole:
            passages_ND[whole] = embedder([shard[i].text for i in whole])
        self.store[f"vectors-{number:05d}"] = {
            "windows": torch.from_numpy(windows_ND),
            "passages": torch.from_numpy(passages_ND),
            "density": torch.tensor([density(text) for text in texts]),
            "complexity": torch.from_numpy(complexity),
            "windows_usable": torch.tensor([long_enough(text, size) for text in texts]),
            "passages_usable": torch.tensor([long_enough(passage.text, size) for passage in shard]),
        }

    def embedded(self, number: int) -> bool:
        return f"vectors-{number:05d}" in self.store

    def column(self, name: str) -> np.ndarray:
        """A measure of every window or passage."""
        return np.concatenate([self.store[f"vectors-{n:05d}"][name].numpy() for n in range(len(self))])

    def vectors(self, name: str) -> Iterator[np.ndarray]:
        """`windows` or `passages` [N, D], shard after shard."""
        for number in range(len(self)):
            yield self.store[f"vectors-{number:05d}"][name].numpy()
