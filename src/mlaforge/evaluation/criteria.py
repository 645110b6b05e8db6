"""What a healed model has to fulfil: a YAML file of criteria, and the arithmetic that says whether one holds.

A criterion compares the student with its teacher on one measure. Measures by document (a document, a window, a
question) are resampled for a confidence interval, both models' together, because they see the same documents.
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
    """One line of a criteria file. Exactly one of `delta` and `relative` says how much worse the student may be."""

    measure: str = option("perplexity", "what is measured", choices=MEASURES)
    delta: float | None = option(None, "the student may be worse by this much: perplexity, nats, or share")
    relative: float | None = option(None, "the student may be worse by this share of the teacher's value", "fraction")
    text: str = option("embedded", "text of perplexity, kl and top1: a file, a folder, or embedded (its held-out part)")
    windows: int = option(16, "windows from the start of the text", "windows", least=1)
    seqlen: int = option(2048, "longest window", "tokens", least=SHORTEST_WINDOW)
    lengths: tuple[int, ...] = option((1024,), "lengths of needle's texts", "tokens", least=1)
    depths: tuple[float, ...] = option(
        (0.0, 0.25, 0.5, 0.75, 1.0), "where in them the needle is", "fraction", least=0, most=1
    )
    repeats: int = option(2, "needles of every length and depth", least=1)
    task: str | None = option(None, "lm-eval's task: a local YAML file, or the name of one that it has")
    metric: str = option("acc", "the task's metric")
    limit: int | None = option(None, "the task's first questions only", "questions", least=1)

    @property
    def place(self) -> str:
        """The text or the task that it reads, as the file has it; needle makes its own."""
        return {"needle": "", "task": str(self.task)}.get(self.measure, self.text)

    @property
    def name(self) -> str:
        """For people: the measure and what it is measured on."""
        lengths = ",".join(map(str, self.lengths))
        what = record_name(self.place) if self.place else f"{lengths} tokens"
        return f"{self.measure} ({what} {self.metric})" if self.measure == "task" else f"{self.measure} ({what})"

    def describe(self) -> dict[str, Any]:
        """What a manifest records: its text or task by name and by the SHA-256 of every file."""
        path = Path(self.place).expanduser()
        files = sorted(path.rglob("*")) if self.place and path.is_dir() else [path]
        hashes = [sha256(file) for file in files if file.is_file()]
        return {**dataclasses.asdict(self), **record_names(self, "text", "task"), "sha256": hashes}


def read(path: Path) -> tuple[list[Criterion], int]:
    """The criteria of a file with the keys `criteria` (a list) and `seed` (0). Raises UserError for what is wrong."""
    keys = configuration.read_recipe(path)
    if unknown := set(keys) - {"criteria", "seed"}:
        raise UserError(f"criteria {path}: unknown key {min(unknown)!r}; there are criteria and seed")
    seed, entries = keys.get("seed", 0), keys.get("criteria")
    if not isinstance(entries, list) or not entries or not all(isinstance(item, dict) for item in entries):
        raise UserError(f"criteria {path} must hold `criteria:` and a list of `- measure: ...` below it")
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
    """Raises UserError for a criterion that cannot be judged."""
    if (criterion.delta is None) == (criterion.relative is None):
        raise UserError(f"{where}: give one of delta and relative")
    if criterion.measure == "kl" and criterion.relative is not None:
        raise UserError(f"{where}: the teacher's KL from itself is 0, so that kl needs delta")
    if (criterion.measure == "task") != (criterion.task is not None):
        raise UserError(f"{where}: measure task and a task go together")


@dataclasses.dataclass(frozen=True)
class Measured:
    """A measure by document: sums of the student's and the teacher's values, and how many values each sum is of.

    The measure is the mean of all values, or exp of it; `higher` is better, or lower.
    """

    student: np.ndarray
    teacher: np.ndarray
    count: np.ndarray
    higher: bool
    exp: bool = False

    def _means(self, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Both measures where document d counts weights[..., d] times."""
        n = weights @ self.count
        ours, theirs = (weights @ values / n for values in (self.student, self.teacher))
        return (np.exp(ours), np.exp(theirs)) if self.exp else (ours, theirs)

    def judge(self, criterion: Criterion, seed: int) -> dict[str, Any]:
        """Whether the criterion holds, for the estimate from all documents; with the interval in which 95 % of the
        resampled estimates lie (none from a single document)."""
        D = len(self.count)

        def excess(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
            worse = theirs - ours if self.higher else ours - theirs
            return worse if criterion.relative is None else worse / np.abs(theirs)

        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            ours, theirs = self._means(np.ones(D))
            worse = float(excess(ours, theirs))
            drawn = np.random.default_rng(seed).multinomial(D, np.full(D, 1 / D), size=RESAMPLES).astype(float)
            spread = np.percentile(excess(*self._means(drawn)), INTERVAL).tolist() if D > 1 else None
        limit = criterion.delta if criterion.relative is None else criterion.relative
        assert limit is not None
        return {
            "name": criterion.name,
            "student": float(ours),
            "teacher": float(theirs),
            "worse": worse,
            "interval": spread,
            "limit": limit,
            "kind": "delta" if criterion.relative is None else "relative",
            "documents": D,
            # NaN is no pass.
            "passed": bool(worse <= limit),
        }
