"""What two texts share: passages by hash, so that nothing is judged on what it was tuned on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mlaforge.config import SHORTEST_WINDOW
from mlaforge.data.corpus import EMBEDDED, Windows
from mlaforge.runtime import UserError

# The file of a converted model that holds the `passages` of its calibration text.
PASSAGES = "calibration_passages.json"
# Two texts overlap where they share this many tokens in a row (a shorter run may be a common phrase) ...
SHINGLE = SHORTEST_WINDOW
# ... with at least this much variety: blank lines and rulers are no evidence.
DISTINCT = 16
# One in so many runs is remembered of windows that hold more than LONG tokens: of two texts that share 150 tokens in
# a row, this misses one pair in a million. Short windows hold few runs, so all of theirs are remembered.
KEPT = 8
LONG = 256
# Runs that are hashed at once.
RUNS = 1 << 16


def _shingles(flat: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Every run of SHINGLE tokens of a text and its hash, [n, SHINGLE] and [n], RUNS runs at a time."""
    # Runs across the border of two windows that are not neighbours in the text match nothing.
    if len(flat) < SHINGLE:
        return
    factors = np.random.default_rng(0).integers(1, 2**63, SHINGLE, dtype=np.uint64) | np.uint64(1)
    every = np.lib.stride_tricks.sliding_window_view(flat, SHINGLE)
    for start in range(0, len(every), RUNS):
        runs = every[start : start + RUNS]
        with np.errstate(over="ignore"):
            yield runs, (runs.astype(np.uint64) * factors).sum(-1, dtype=np.uint64)


def passages(windows: Windows) -> list[int]:
    """What to remember of a text so that overlap with it can be told later without it: sorted hashes."""
    kept = np.uint64(KEPT if windows.ids.shape[1] > LONG else 1)
    remembered: set[int] = set()
    for runs, hashes in _shingles(windows.ids.flatten().numpy()):
        # The low bits of a sum of odd multiples are poor; the high ones decide.
        chosen = (hashes >> np.uint64(40)) % kept == 0
        varied = (np.diff(np.sort(runs[chosen], axis=-1), axis=-1) != 0).sum(-1) + 1 >= DISTINCT
        remembered.update(hashes[chosen][varied].tolist())
    return sorted(remembered)


def write_passages(folder: Path, hashes: list[int]) -> None:
    """Leaves `passages` in the directory of a model that they tuned."""
    (folder / PASSAGES).write_text(json.dumps(hashes), encoding="utf-8")


def read_passages(path: Path) -> list[int]:
    """The `passages` that a conversion wrote; UserError where the file holds something else."""
    try:
        hashes = json.loads(path.read_text(encoding="utf-8"))
        return np.array(hashes, dtype=np.uint64).reshape(-1).tolist()
    except (ValueError, TypeError, OverflowError) as error:
        raise UserError(f"{path} is damaged; without it nobody can tell what the model was tuned on") from error


def overlapping(judged: Windows, tuned: list[int]) -> set[int]:
    """Windows of `judged` that share a passage with the text whose `passages` are given."""
    return sharing(list(judged.ids), tuned)


def sharing(documents: list[Tensor], tuned: list[int]) -> set[int]:
    """The same of documents (token ids) of any lengths."""
    if not documents:
        return set()
    ends = np.cumsum([len(ids) for ids in documents])
    known, at = np.array(tuned, dtype=np.uint64), 0
    shared: set[int] = set()
    # What is remembered was varied, so that what equals it is.
    for runs, hashes in _shingles(torch.cat(documents).numpy()):
        places = at + np.flatnonzero(np.isin(hashes, known))
        shared.update(np.searchsorted(ends, places, side="right").tolist())
        at += len(runs)
    return shared


def refuse_overlap(judged: Windows, tuned: list[int], tuned_source: str) -> Windows:
    """`judged`, if it shares no passage with what was tuned on; raises UserError otherwise.

    From the embedded text, windows that repeat a passage (licences, boilerplate) are dropped instead.
    """
    shared = overlapping(judged, tuned)
    if not shared:
        return judged
    if judged.source == EMBEDDED:
        keep = [i for i in range(len(judged.ids)) if i not in shared]
        if keep:
            return Windows(judged.ids[keep], judged.source)
    raise UserError(
        f"{len(shared)} of {len(judged.ids)} evaluation windows ({judged.source}) share text with the calibration "
        f"text ({tuned_source}); nothing may be judged on what it was tuned on: give other text for one of them"
    )
