"""Selection of calibration texts: typical and hard texts of each embedding cluster, without near-duplicates.

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

# Maximum number of embeddings for k-means; all embeddings are then assigned to the clusters.
KMEANS_SAMPLE = 50_000
# Share of a cluster, farthest from the centroid, that counts as hard.
HARD_FRACTION = 0.05
# Two texts are near-duplicates from this cosine similarity on.
DUPLICATE_COSINE = 0.95
# Typical candidates per neighbour: reserve for near-duplicates that are skipped.
CANDIDATES_PER_NEIGHBOUR = 8

# Returns an iterator over all embeddings [N, D] in blocks of rows; may be called repeatedly.
Blocks = Callable[[], Iterator[np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Choice:
    """A selected text: row number, cluster, Euclidean distance from the centroid, and kind (typical or hard)."""

    row: int
    cluster: int
    distance: float
    kind: str


def _gather(blocks: Blocks, rows: np.ndarray) -> np.ndarray:
    """Return the embeddings of `rows`, which are in ascending order."""
    parts, start = [], 0
    for block in blocks():
        low, high = np.searchsorted(rows, (start, start + len(block)))
        parts.append(block[rows[low:high] - start])
        start += len(block)
    return np.concatenate(parts)


def assign(blocks: Blocks, usable_N: np.ndarray, clusters: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return cluster and centroid distance of every text, [N] each.

    Mini-batch k-means is fitted on at most KMEANS_SAMPLE of the usable texts. Raises UserError without scikit-learn.
    """
    try:
        from sklearn.cluster import MiniBatchKMeans
        from sklearn.exceptions import ConvergenceWarning
        from threadpoolctl import threadpool_limits
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is missing: {EXTRA}") from error

    rows = np.flatnonzero(usable_N)
    if len(rows) > KMEANS_SAMPLE:
        rows = np.sort(np.random.default_rng(seed).choice(rows, KMEANS_SAMPLE, replace=False))
    # One thread: the summation order of several varies, and the same input must give the same bytes.
    with threadpool_limits(1), warnings.catch_warnings():
        # Identical texts leave some clusters empty, which is harmless.
        warnings.simplefilter("ignore", ConvergenceWarning)
        means = MiniBatchKMeans(clusters, random_state=seed, n_init=3, batch_size=4096).fit(_gather(blocks, rows))
        nearest = [(distance_NK.argmin(1), distance_NK.min(1)) for distance_NK in map(means.transform, blocks())]
    label_N, distance_N = (np.concatenate(column) for column in zip(*nearest, strict=True))
    return label_N, distance_N


def choose(
    blocks: Blocks, score_N: np.ndarray, usable_N: np.ndarray, clusters: int, neighbours: int, seed: int
) -> tuple[list[Choice], int]:
    """Select the texts of a set; return them, clusters interleaved, and the number of near-duplicates skipped.

    Only the half of each cluster with the higher score is eligible. From that half, take `neighbours` texts nearest the
    centroid and the HARD_FRACTION farthest from it. Skip a text whose cosine to a selected one reaches
    DUPLICATE_COSINE.
    """
    label_N, distance_N = assign(blocks, usable_N, clusters, seed)
    candidates: list[tuple[np.ndarray, np.ndarray]] = []
    for cluster in range(clusters):
        members = np.flatnonzero((label_N == cluster) & usable_N)
        if len(members):
            members = members[score_N[members] >= np.median(score_N[members])]
        members = members[np.lexsort((members, distance_N[members]))]
        num_hard = min(math.ceil(HARD_FRACTION * len(members)), max(0, len(members) - 1))
        num_typical = len(members) - num_hard
        candidates.append((members[:num_typical][: CANDIDATES_PER_NEIGHBOUR * neighbours], members[num_typical:][::-1]))
    rows = np.sort(np.concatenate([part for pair in candidates for part in pair]))
    vectors = _gather(blocks, rows)
    selected, count, duplicates = np.empty_like(vectors), 0, 0
    by_cluster: list[list[Choice]] = [[] for _ in candidates]
    for kind, limit in (("typical", neighbours), ("hard", len(rows))):
        for cluster, (typical, hard) in enumerate(candidates):
            remaining = limit
            for row in hard if kind == "hard" else typical:
                if not remaining:
                    break
                vector = vectors[np.searchsorted(rows, row)]
                if count and float((selected[:count] @ vector).max()) >= DUPLICATE_COSINE:
                    duplicates += 1
                    continue
                selected[count], count, remaining = vector, count + 1, remaining - 1
                by_cluster[cluster].append(Choice(int(row), cluster, float(distance_N[row]), kind))
    return _interleave_clusters(by_cluster), duplicates


def _interleave_clusters(by_cluster: list[list[Choice]]) -> list[Choice]:
    """Order the choices so that every prefix contains clusters and kinds in about their shares."""
    ranked = []
    for choices in by_cluster:
        for kind in ("typical", "hard"):
            part = [choice for choice in choices if choice.kind == kind]
            ranked += [((i + 0.5) / len(part), choice.cluster, choice) for i, choice in enumerate(part)]
    return [choice for *_, choice in sorted(ranked, key=lambda entry: (entry[0], entry[1], entry[2].row))]
