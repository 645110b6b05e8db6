"""Acceptance criteria for a healed model: the YAML file, and the statistics that decide whether a criterion holds.

A criterion compares the student with its teacher on one measure. Values per document (a document, a window, a question)
are bootstrapped for a confidence interval, paired, because both models see the same documents.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from mlaforge import config as configuration
from mlaforge.artifact import record_name, record_names, sha256
from mlaforge.config import SHORTEST_WINDOW, Options, option
from mlaforge.runtime import UserError

MEASURES = ("perplexity", "kl", "top1", "needle", "task")
RESAMPLES = 1000
INTERVAL = (2.5, 97.5)


@dataclasses.dataclass(frozen=True)
class Criterion(Options):
    """One entry of a criteria file. Exactly one of `delta` and `relative` limits how much worse the student may be."""

    measure: str = option("perplexity", "quantity to measure", choices=MEASURES)
    delta: float | None = option(None, "allowed absolute difference: perplexity, nats, or share")
    relative: float | None = option(None, "allowed difference as a share of the teacher's value", "fraction")
    text: str = option("embedded", "text of perplexity, kl and top1: a file, a folder, or embedded (its held-out part)")
    windows: int = option(16, "windows from the start of the text", "windows", least=1)
    seqlen: int = option(2048, "maximum length of a window", "tokens", least=SHORTEST_WINDOW)
    lengths: tuple[int, ...] = option((1024,), "lengths of the needle texts", "tokens", least=1)
    depths: tuple[float, ...] = option(
        (0.0, 0.25, 0.5, 0.75, 1.0), "positions of the needle in the text", "fraction", least=0, most=1
    )
    repeats: int = option(2, "needles for every length and depth", least=1)
    task: str | None = option(None, "lm-eval task: a local YAML file, or the name of a built-in task")
    metric: str = option("acc", "metric of the task")
    limit: int | None = option(None, "use only the first questions of the task", "questions", least=1)

    @property
    def location(self) -> str:
        """The text or task as written in the file; "" for needle, which generates its texts."""
        return {"needle": "", "task": str(self.task)}.get(self.measure, self.text)

    @property
    def name(self) -> str:
        """Display name: the measure, and its text or task."""
        lengths = ",".join(map(str, self.lengths))
        subject = record_name(self.location) if self.location else f"{lengths} tokens"
        return f"{self.measure} ({subject} {self.metric})" if self.measure == "task" else f"{self.measure} ({subject})"

    def describe(self) -> dict[str, Any]:
        """Return the manifest's record: the options, with the SHA-256 of every file of its text or task."""
        path = Path(self.location).expanduser()
        files = sorted(path.rglob("*")) if self.location and path.is_dir() else [path]
        hashes = [sha256(file) for file in files if file.is_file()]
        return {**dataclasses.asdict(self), **record_names(self, "text", "task"), "sha256": hashes}


def read(path: Path) -> tuple[list[Criterion], int]:
    """Read a file with the keys `criteria` (a list) and `seed` (default 0). Raises UserError for an invalid one."""
    keys = configuration.read_recipe(path)
    if unknown := set(keys) - {"criteria", "seed"}:
        raise UserError(f"criteria {path}: unknown key {min(unknown)!r}; there are criteria and seed")
    seed, entries = keys.get("seed", 0), keys.get("criteria")
    if not isinstance(entries, list) or not entries or not all(isinstance(item, dict) for item in entries):
        raise UserError(f"criteria {path} must contain `criteria:` and a list of `- measure: ...` below it")
    if not isinstance(seed, int):
        raise UserError(f"criteria {path}: seed = {seed!r} must be a whole number")
    criteria = []
    for number, item in enumerate(entries, 1):
        try:
            criterion = configuration.resolve(Criterion, None, **item)
        except UserError as error:
            raise UserError(f"criteria {path}, number {number}: {error}") from error
        check(criterion, f"criteria {path}, number {number}")
        criteria.append(criterion)
    return criteria, seed


def check(criterion: Criterion, where: str) -> None:
    """Raise UserError for a criterion that cannot be evaluated."""
    if (criterion.delta is None) == (criterion.relative is None):
        raise UserError(f"{where}: give exactly one of delta and relative")
    if criterion.measure == "kl" and criterion.relative is not None:
        raise UserError(f"{where}: the teacher's KL from itself is 0, so kl needs delta")
    if (criterion.measure == "task") != (criterion.task is not None):
        raise UserError(f"{where}: measure task and a task go together")


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Values of a measure per document: sums for student and teacher, and the number of values in each sum.

    The measure is the mean of all values, or its exp. higher: whether higher is better. p99: the 99th percentile of the
    student's values, of KL alone.
    """

    student: np.ndarray
    teacher: np.ndarray
    count: np.ndarray
    higher: bool
    exp: bool = False
    p99: float | None = None

    def _means(self, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the measures of student and teacher with document d counted weights[..., d] times."""
        n = weights @ self.count
        student, teacher = (weights @ values / n for values in (self.student, self.teacher))
        return (np.exp(student), np.exp(teacher)) if self.exp else (student, teacher)

    def evaluate(self, criterion: Criterion, seed: int) -> dict[str, Any]:
        """Return the verdict on a criterion, decided by the estimate from all documents, with its 95 % bootstrap
        interval (None for a single document)."""
        D = len(self.count)

        def excess(student: np.ndarray, teacher: np.ndarray) -> np.ndarray:
            difference = teacher - student if self.higher else student - teacher
            return difference if criterion.relative is None else difference / np.abs(teacher)

        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            student, teacher = self._means(np.ones(D))
            worse = float(excess(student, teacher))
            resampled = np.random.default_rng(seed).multinomial(D, np.full(D, 1 / D), size=RESAMPLES).astype(float)
            interval = np.percentile(excess(*self._means(resampled)), INTERVAL).tolist() if D > 1 else None
        limit = criterion.delta if criterion.relative is None else criterion.relative
        assert limit is not None
        return {
            "name": criterion.name,
            "student": float(student),
            **({} if self.p99 is None else {"p99": self.p99}),
            "teacher": float(teacher),
            "worse": worse,
            "interval": interval,
            "limit": limit,
            "kind": "delta" if criterion.relative is None else "relative",
            "documents": D,
            # NaN fails.
            "passed": bool(worse <= limit),
        }
