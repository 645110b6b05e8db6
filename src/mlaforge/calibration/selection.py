"""Clusters of embeddings to calibration sets: of each cluster the typical and the hard, and nothing twice.

Legend: N texts, D dimensions, K clusters.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator

import numpy as np

from mlaforge.calibration.embedder import EXTRA
from mlaforge.runtime import UserError

# Embeddings that the clusters are found on; all of them are then assigned.
SAMPLE = 50_000
# Share of a cluster, the farthest from its centroid, that is hard.
FARTHEST = 0.05
# Cosine from which two texts are near-duplicates.
SAME = 0.95
# How far to look for neighbours in place of near-duplicates, in neighbours.
LOOK = 8

# The embeddings [N, D] block after block, as often as it is called.
Blocks = Callable[[], Iterator[np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Choice:
    """A text by its number; `distance` is Euclidean, from the centroid; `kind` typical or hard."""

    row: int
    cluster: int
    distance: float
    kind: str


def _gather(blocks: Blocks, rows: np.ndarray) -> np.ndarray:
    """Some of the embeddings; `rows` rise."""
    parts, start = [], 0
    for block in blocks():
        low, high = np.searchsorted(rows, (start, start + len(block)))
        parts.append(block[rows[low:high] - start])
        start += len(block)
    return np.concatenate(parts)


def assign(blocks: Blocks, usable_N: np.ndarray, clusters: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Cluster and distance of every text [N], by mini-batch k-means on at most SAMPLE of the usable ones."""
    try:
        from sklearn.cluster import MiniBatchKMeans
        from sklearn.exceptions import ConvergenceWarning
        from threadpoolctl import threadpool_limits
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is missing: {EXTRA}") from error

    rows = np.flatnonzero(usable_N)
    if len(rows) > SAMPLE:
        rows = np.sort(np.random.default_rng(seed).choice(rows, SAMPLE, replace=False))
    # One thread: sums of several come in any order, and the same input must give the same bytes.
    with threadpool_limits(1), warnings.catch_warnings():
        # Of texts that are all alike some clusters stay empty: they give nothing.
        warnings.simplefilter("ignore", ConvergenceWarning)
        means = MiniBatchKMeans(clusters, random_state=seed, n_init=3, batch_size=4096).fit(_gather(blocks, rows))
        near = [(each.argmin(1), each.min(1)) for each in map(means.transform, blocks())]
    label_N, distance_N = (np.concatenate(column) for column in zip(*near, strict=True))
    return label_N, distance_N


def choose(
    blocks: Blocks, score_N: np.ndarray, usable_N: np.ndarray, clusters: int, neighbours: int, seed: int
) -> tuple[list[Choice], int]:
    """What a set takes, clusters in turn, and how many near-duplicates were left out.

    Of each cluster only the half with the higher score counts. Of that half: `neighbours` texts nearest the centroid,
    and the FARTHEST share. A text whose cosine to one that is taken reaches SAME is left out.
    """
    label_N, distance_N = assign(blocks, usable_N, clusters, seed)
    candidates: list[tuple[np.ndarray, np.ndarray]] = []
    for cluster in range(clusters):
        members = np.flatnonzero((label_N == cluster) & usable_N)
        if len(members):
            members = members[score_N[members] >= np.median(score_N[members])]
        members = members[np.lexsort((members, distance_N[members]))]
        hard = min(math.ceil(FARTHEST * len(members)), max(0, len(members) - 1))
        typical = members[: len(members) - hard]
        candidates.append((typical[: LOOK * neighbours], members[len(members) - hard :][::-1]))
    rows = np.sort(np.concatenate([part for both in candidates for part in both]))
    vectors = _gather(blocks, rows)
    kept, count, duplicates = np.empty_like(vectors), 0, 0
    by_cluster: list[list[Choice]] = [[] for _ in candidates]
    for kind, limit in (("typical", neighbours), ("hard", len(rows))):
        for cluster, both in enumerate(candidates):
            left = limit
            for row in both[kind == "hard"]:
                if not left:
                    break
                vector = vectors[np.searchsorted(rows, row)]
                if count and float((kept[:count] @ vector).max()) >= SAME:
                    duplicates += 1
                    continue
                kept[count], count, left = vector, count + 1, left - 1
                by_cluster[cluster].append(Choice(int(row), cluster, float(distance_N[row]), kind))
    return _in_turn(by_cluster), duplicates


def _in_turn(by_cluster: list[list[Choice]]) -> list[Choice]:
    """The choices so that any beginning holds every cluster, the typical and the hard, in about their shares."""
    ranked = []
    for own in by_cluster:
        for kind in ("typical", "hard"):
            part = [choice for choice in own if choice.kind == kind]
            ranked += [((i + 0.5) / len(part), choice.cluster, choice) for i, choice in enumerate(part)]
    return [choice for *_, choice in sorted(ranked, key=lambda entry: (entry[0], entry[1], entry[2].row))]
