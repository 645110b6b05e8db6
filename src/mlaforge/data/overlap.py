"""Overlap of texts by passage hashes, so that no model is evaluated on text that it was tuned on."""

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

# File of a converted model with the `passages` of its calibration text.
PASSAGES = "calibration_passages.json"
# Two texts overlap if they share this many consecutive tokens (a shorter run may be a common phrase) ...
SHINGLE = SHORTEST_WINDOW
# ... with at least this many distinct ones: blank lines and rulers are no evidence.
DISTINCT = 16
# Of windows with more than LONG tokens one in SAMPLING runs is stored: this misses one in a million pairs of texts that
# share 150 consecutive tokens. Short windows have few runs, all of which are stored.
SAMPLING = 8
LONG = 256
# Runs hashed per batch.
RUNS = 1 << 16


def _shingles(flat: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield every run of SHINGLE tokens of a text and its hash, [n, SHINGLE] and [n], RUNS runs at a time."""
    # Runs across the border of two windows that are not adjacent in the text match nothing.
    if len(flat) < SHINGLE:
        return
    factors = np.random.default_rng(0).integers(1, 2**63, SHINGLE, dtype=np.uint64) | np.uint64(1)
    all_runs = np.lib.stride_tricks.sliding_window_view(flat, SHINGLE)
    for start in range(0, len(all_runs), RUNS):
        runs = all_runs[start : start + RUNS]
        with np.errstate(over="ignore"):
            yield runs, (runs.astype(np.uint64) * factors).sum(-1, dtype=np.uint64)


def passages(windows: Windows) -> list[int]:
    """Return the sorted hashes of a text's passages, from which overlap is detected later without the text."""
    sampling = np.uint64(SAMPLING if windows.ids.shape[1] > LONG else 1)
    selected: set[int] = set()
    for runs, hashes in _shingles(windows.ids.flatten().numpy()):
        # The low bits of a sum of odd multiples are of poor quality; sample by the high bits.
        sampled = (hashes >> np.uint64(40)) % sampling == 0
        distinct = (np.diff(np.sort(runs[sampled], axis=-1), axis=-1) != 0).sum(-1) + 1 >= DISTINCT
        selected.update(hashes[sampled][distinct].tolist())
    return sorted(selected)


def write_passages(folder: Path, hashes: list[int]) -> None:
    """Write `passages` to the directory of a model that was tuned on them."""
    (folder / PASSAGES).write_text(json.dumps(hashes), encoding="utf-8")


def read_passages(path: Path) -> list[int]:
    """Read the `passages` that a conversion wrote. Raises UserError for a damaged file."""
    try:
        hashes = json.loads(path.read_text(encoding="utf-8"))
        return np.array(hashes, dtype=np.uint64).reshape(-1).tolist()
    except (ValueError, TypeError, OverflowError) as error:
        raise UserError(f"{path} is damaged; it records the text that the model was tuned on") from error


def overlapping(windows: Windows, tuned: list[int]) -> set[int]:
    """Return the indices of windows that share a passage with the text of the passages `tuned`."""
    return sharing(list(windows.ids), tuned)


def sharing(documents: list[Tensor], tuned: list[int]) -> set[int]:
    """Return the indices of documents (token ids) that share a passage with the text of the passages `tuned`."""
    if not documents:
        return set()
    ends = np.cumsum([len(ids) for ids in documents])
    tuned_hashes, offset = np.array(tuned, dtype=np.uint64), 0
    shared: set[int] = set()
    # Stored passages have enough distinct tokens, and so do runs with the same hash.
    for runs, hashes in _shingles(torch.cat(documents).numpy()):
        positions = offset + np.flatnonzero(np.isin(hashes, tuned_hashes))
        shared.update(np.searchsorted(ends, positions, side="right").tolist())
        offset += len(runs)
    return shared


def refuse_overlap(eval_windows: Windows, tuned: list[int], tuned_source: str) -> Windows:
    """Return `eval_windows` if they share no passage with the tuning text. Raises UserError otherwise.

    Windows of the embedded text that repeat a passage (licences, boilerplate) are dropped instead.
    """
    shared = overlapping(eval_windows, tuned)
    if not shared:
        return eval_windows
    if eval_windows.source == EMBEDDED:
        disjoint = [i for i in range(len(eval_windows.ids)) if i not in shared]
        if disjoint:
            return Windows(eval_windows.ids[disjoint], eval_windows.source)
    raise UserError(
        f"{len(shared)} of {len(eval_windows.ids)} evaluation windows ({eval_windows.source}) share text with the "
        f"calibration text ({tuned_source}); a model may not be evaluated on text that it was tuned on: give other "
        "text for one of them"
    )
