"""Sharded on-disk store for windows of text and their embeddings, which are too large for memory.

A window is a slice of a document with a maximum number of characters; a passage consists of consecutive windows of one
document. Files are written atomically, so an interrupted run resumes with the next shard.

Legend: N windows or passages of a shard, W windows of a passage, D dimensions of an embedding.
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

from mlaforge.calibration.embedder import Embedder, normalize
from mlaforge.calibration.sources import Document
from mlaforge.tensor_store import TensorStore

# Minimum number of windows per shard; an interrupted run loses at most one shard of work.
MIN_SHARD_WINDOWS = 512
# Where a window may end, in order of preference; never in its first half.
BOUNDARIES = ("\n\n", "\n", ". ", " ")
# A window below this fraction of the maximum length is never selected, nor split off from its predecessor.
MIN_WINDOW_FRACTION = 0.25


@dataclasses.dataclass(frozen=True)
class Passage:
    """Consecutive windows of one document; their concatenation is the original text."""

    source: str
    document: str
    windows: tuple[str, ...]

    @property
    def text(self) -> str:
        return "".join(self.windows)


def split_windows(text: str, size: int) -> Iterator[str]:
    """Split `text` into slices of at most `size` characters; the last may be a quarter longer, so that none is tiny."""
    start = 0
    while len(text) - start > size * (1 + MIN_WINDOW_FRACTION):
        ends = (text.rfind(mark, start + size // 2, start + size) + len(mark) for mark in BOUNDARIES)
        # Without a match rfind returns -1, which is never in range.
        end = next((position for position in ends if position > start + size // 2), start + size)
        yield text[start:end]
        start = end
    yield text[start:]


def passages(source: str, documents: Iterable[Document], size: int, max_windows: int) -> Iterator[Passage]:
    """Split every document into passages of about equal length, with at most `max_windows` windows of `size`
    characters."""
    for document in documents:
        windows = [window for text in document.parts for window in split_windows(text.rstrip() + "\n\n", size)]
        count = -(-len(windows) // max_windows)
        for i in range(count):
            part = windows[len(windows) * i // count : len(windows) * (i + 1) // count]
            yield Passage(source, document.name, tuple(part))


def long_enough(text: str, size: int) -> bool:
    """Return whether a window is long enough to be selected."""
    return len(text.strip()) >= size * MIN_WINDOW_FRACTION


def density(text: str) -> float:
    """Return compressed size (zlib, level 9) / original size: low for repetitive text such as tables and rulers."""
    data = text.strip().encode()
    return len(zlib.compress(data, 9)) / max(1, len(data))


def spread(vectors_ND: np.ndarray) -> float:
    """Return 1 - |mean| of unit vectors: 0 for identical windows, near 1 for unrelated ones."""
    return max(0.0, 1.0 - float(np.linalg.norm(vectors_ND.mean(0))))


class Shards:
    """A folder of shards: text-<n>.jsonl each, with embeddings and scores in a tensor store."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.store = TensorStore(folder)

    def __len__(self) -> int:
        return len(list(self.folder.glob("text-*.jsonl")))

    def write(self, all_passages: Iterable[Passage]) -> None:
        """Write all passages in shards of at least MIN_SHARD_WINDOWS windows (the last may have fewer)."""
        number, shard, windows = 0, [], 0
        for passage in all_passages:
            shard.append(passage)
            windows += len(passage.windows)
            if windows >= MIN_SHARD_WINDOWS:
                self._write(number, shard)
                number, shard, windows = number + 1, [], 0
        if shard:
            self._write(number, shard)

    def _path(self, number: int) -> Path:
        return self.folder / f"text-{number:05d}.jsonl"

    def _write(self, number: int, shard: list[Passage]) -> None:
        lines = (json.dumps(dataclasses.asdict(passage), ensure_ascii=False) + "\n" for passage in shard)
        unfinished = self._path(number).with_suffix(".unfinished")
        # Strings may contain lone surrogates, which UTF-8 cannot encode.
        unfinished.write_text("".join(lines), encoding="utf-8", errors="replace")
        os.replace(unfinished, self._path(number))

    def read(self, number: int) -> list[Passage]:
        """Return the passages of a shard."""
        with self._path(number).open(encoding="utf-8", newline="\n") as lines:
            return [Passage(r["source"], r["document"], tuple(r["windows"])) for r in map(json.loads, lines)]

    def embed(self, number: int, embedder: Embedder, size: int) -> None:
        """Store the embeddings `windows` and `passages` [N, D], the scores `density` and `complexity` [N], and which
        windows and passages are usable [N].

        The embedding of a passage longer than the embedder's context is the mean of its windows', weighted by length.
        """
        shard = self.read(number)
        texts = [window for passage in shard for window in passage.windows]
        windows_ND = embedder(texts)
        passages_ND, complexity = np.empty((len(shard), windows_ND.shape[1]), np.float32), np.empty(len(shard))
        ends = np.cumsum([len(passage.windows) for passage in shard])
        for i, (passage, vectors_WD) in enumerate(zip(shard, np.split(windows_ND, ends[:-1]), strict=True)):
            weights = np.array([[len(window)] for window in passage.windows], np.float32)
            passages_ND[i] = normalize((vectors_WD * weights).sum(0))
            complexity[i] = len(passage.text) * spread(vectors_WD)
        fitting = [i for i, passage in enumerate(shard) if len(passage.windows) > 1 and embedder.fits(passage.text)]
        if fitting:
            passages_ND[fitting] = embedder([shard[i].text for i in fitting])
        self.store[f"vectors-{number:05d}"] = {
            "windows": torch.from_numpy(windows_ND),
            "passages": torch.from_numpy(passages_ND),
            "density": torch.tensor([density(text) for text in texts]),
            "complexity": torch.from_numpy(complexity),
            "windows_usable": torch.tensor([long_enough(text, size) for text in texts]),
            "passages_usable": torch.tensor([long_enough(passage.text, size) for passage in shard]),
        }

    def is_embedded(self, number: int) -> bool:
        return f"vectors-{number:05d}" in self.store

    def column(self, name: str) -> np.ndarray:
        """Return one score or flag of every window or passage, over all shards."""
        return np.concatenate([self.store[f"vectors-{n:05d}"][name].numpy() for n in range(len(self))])

    def vectors(self, name: str) -> Iterator[np.ndarray]:
        """Yield the embeddings `windows` or `passages` [N, D], shard by shard."""
        for number in range(len(self)):
            yield self.store[f"vectors-{number:05d}"][name].numpy()
