"""`tune`: the fastest configuration of each kernel at the shapes of a model, into the table of this device.

The shapes that take most time are measured: candidates against the reference, then against the default (search.py); the
others get the default, so that a table that was tuned for a model has an entry for every bucket of its shapes. The
table is written after each shape: an interrupted run resumes where it was.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch

from mlaforge.bench.gemm_shapes import Shape, Shapes
from mlaforge.ops import tuned
from mlaforge.ops.tuned import Configuration, Key
from mlaforge.ops.vector_product import MOST_ROWS
from mlaforge.rendering.table import markdown_table
from mlaforge.runtime import UserError, log, progress_bar, resolve_device
from mlaforge.tuning.cases import Case, correct_candidates, make_case
from mlaforge.tuning.config import TuneConfig
from mlaforge.tuning.gpu_cases import case_of_launch
from mlaforge.tuning.load import shapes_of_load
from mlaforge.tuning.search import Choice, search

# Cores that other processes may use.
BUSY_CORES = 0.3
# Ops that are tuned at the keys of their launches, and sequences and cached tokens of decoding steps beside them, which
# are longer than those of a short load.
LAUNCHED, LONG_STEPS = ("attention", "latent", "selection"), ((1, 2048), (1, 32768), (4, 8192))
Entries = dict[str, dict[str, dict[str, Any]]]
MakeCase = Callable[[Shape], Case | None]


@dataclasses.dataclass
class Work:
    """A key to measure: the shape of its that takes most time (None: the key is of a launch), the tags and the seconds
    of all of them."""

    op: str
    key: Key
    shape: Shape | None
    tags: tuple[str, ...]
    seconds: float


@dataclasses.dataclass
class Tuning:
    """Result of a run: the table's file, rows for the terminal, and the keys by what happened to them."""

    path: Path
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    resumed: int = 0
    defaults: int = 0

    def table(self) -> str:
        """Markdown table of the measured shapes."""
        lines = [("kernel", "tags", "share of time", "default, us", "tuned, us", "configuration")]
        for row in self.rows:
            words = ", ".join(f"{name} {value}" for name, value in row["configuration"].items()) or "default"
            times = f"{row['default_us']:.1f}", f"{row['us']:.1f}"
            lines.append((f"{row['op']} {row['key']}", row["tags"], f"{row['share']:.1%}", *times, words))
        faster = sum(bool(row["configuration"]) for row in self.rows)
        summary = (
            f"{len(self.rows)} shapes measured, {faster} faster than their default; {self.resumed} were in the table, "
            f"{self.defaults} have the default without a measurement"
        )
        return f"{markdown_table(lines)}\n\n{summary}"


def run(model: str | None, config: TuneConfig, out: Path | None = None, make: MakeCase | None = None) -> Tuning:
    """Tune the kernels of MODEL, or of the shapes of option `shapes`, and write the table `out` (the cache's of this
    device). `make`: from a shape to its case. Raise UserError where there is nothing to tune."""
    device = resolve_device(config.device)
    others = used_cores()
    if busy := device.type == "cpu" and others > BUSY_CORES:
        # A thread that waits for a core makes all wait: a busy machine would choose one thread.
        log(f"other processes use {others:.1f} cores: numbers of threads stay, and measurements are less certain")
    make = make or functools.partial(make_case, threads=not busy)
    facts = tuned.metadata(device)
    path = out or tuned.cache_file(facts)
    entries = _existing(path, facts)
    if config.shapes is None and model is None:
        raise UserError("give MODEL, or --shapes gemm_shapes.json of a run of `mlaforge bench SCENARIO MODEL --perf`")
    try:
        shapes = Shapes.read(Path(config.shapes)) if config.shapes else shapes_of_load(str(model), config)
        tuning = Tuning(path)
        work = [*_launched_work(device), *_work(shapes, device)]
        if not work:
            raise UserError(f"no product on {device.type} has a kernel with candidates: see docs/ops.md")
        _fill(entries, work)
        tuned.save(path, facts, entries)
        _measure(entries, work, config, tuning, facts, make, device)
        tuning.defaults = sum(record["us"] is None for of_op in entries.values() for record in of_op.values())
    finally:
        tuned.load(device, "none")
    return tuning


def used_cores(seconds: float = 1.0) -> float:
    """Return the cores that all processes use while this one waits."""
    return float(psutil.cpu_percent(seconds)) / 100 * (psutil.cpu_count() or 1)


def _existing(path: Path, facts: dict[str, Any]) -> Entries:
    """Entries of an earlier run whose source is today's."""
    try:
        return tuned.read(path, facts).entries
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except tuned.Refused as error:
        log(f"a new table is begun: {error}")
        return {}


def _work(shapes: Shapes, device: torch.device) -> Iterator[Work]:
    """Keys of a device's products that have a kernel with candidates, those that take most time first."""
    by_key: dict[tuple[str, Key], list[tuple[float, Shape]]] = {}
    for shape, usage in shapes.usage.items():
        if shape.device == device.type and _is_tunable(shape):
            by_key.setdefault(shape.key, []).append((usage.seconds, shape))
    works = []
    for (op, key), uses in by_key.items():
        _, shape = max(uses, key=lambda use: use[0])
        tags = tuple(sorted({shape.tag for _, shape in uses}))
        works.append(Work(op, key, shape, tags, sum(seconds for seconds, _ in uses)))
    return iter(sorted(works, key=lambda work: -work.seconds))


def _is_tunable(shape: Shape) -> bool:
    """Whether a kernel with candidates computes a product."""
    if shape.device == "cpu" or shape.experts:
        return shape.dtype in tuned.COMPILED
    return shape.dtype in ("bfloat16", "float16") and shape.M <= MOST_ROWS


def _launched_work(device: torch.device) -> list[Work]:
    """Keys of the launches of LAUNCHED that this process has made on a GPU, the most frequent first, then those of
    LONG_STEPS, as long as which no selection is."""
    if device.type != "cuda":
        return []
    launches = Counter({(op, key): count for (op, key), count in tuned.seen().items() if op in LAUNCHED})
    long = [
        (op, _key_of_step(op, key, *step)) for op, key in launches if key[-1] != "sparse" for step in LONG_STEPS
    ]  # fmt: skip
    work = dict.fromkeys((*(launch for launch, _ in launches.most_common()), *long))
    return [Work(op, key, None, (op,), 0.0) for op, key in work]


def _key_of_step(op: str, key: Key, sequences: int, span: int) -> Key:
    """Return the key of a launch of the same sizes in a decoding step."""
    return (*key[:-2], sequences, span) if op == "selection" else (*key[:-4], 1, sequences, span, key[-1])


def _keys(item: Work) -> Iterator[Key]:
    """All keys of the buckets of a kernel's sizes."""
    rows, spans = (*tuned.ROWS, tuned.MORE_ROWS), (1 << power for power in range(4, 18))
    if item.op == "vector_product":
        yield item.key
    elif item.shape is not None:
        yield from ((*item.key[:-1], bucket) for bucket in rows)
    elif item.op == "selection":
        yield from ((*item.key[:-2], *step) for step in itertools.product(tuned.SEQUENCES, spans))
    else:
        *sizes, _, _, _, reading = item.key
        yield from ((*sizes, *step, reading) for step in itertools.product(rows, tuned.SEQUENCES, spans))


def _fill(entries: Entries, work: list[Work]) -> None:
    """Give the default to every bucket of the shapes that the table lacks."""
    for item in work:
        of_op = entries.setdefault(item.op, {})
        for key in map(tuned.text, _keys(item)):
            if key not in of_op:
                of_op[key] = _entry({}, None, None, item.tags)


def _entry(
    configuration: Configuration, choice: Choice | None, error: float | None, tags: tuple[str, ...]
) -> dict[str, Any]:
    us = choice and round(choice.seconds * 1e6, 3)
    default_us = choice and round(choice.default_seconds * 1e6, 3)
    date = datetime.now(UTC).date().isoformat()
    return {
        "configuration": configuration, "us": us, "default_us": default_us, "error": error, "date": date,
        "tags": list(tags),
    }  # fmt: skip


def _measure(
    entries: Entries,
    work: list[Work],
    config: TuneConfig,
    tuning: Tuning,
    facts: dict[str, Any],
    make: MakeCase,
    device: torch.device,
) -> None:
    """Measure the keys in order until they cover `share` of the time or the budget is spent."""
    total, covered, end = sum(item.seconds for item in work), 0.0, time.monotonic() + config.budget
    bar = progress_bar("tune", len(work))
    for number, item in enumerate(work):
        bar.update()
        of_op, key = entries[item.op], tuned.text(item.key)
        if (total and covered >= config.share * total) or time.monotonic() >= end:
            break
        covered += item.seconds
        if of_op[key]["us"] is not None and not config.retune:
            tuning.resumed += 1
            continue
        case = make(item.shape) if item.shape else case_of_launch(item.op, item.key, device)
        if case is None:
            continue
        errors = correct_candidates(case)
        configurations = [configuration for configuration, _ in errors]
        choice = search(configurations, case.seconds, (end - time.monotonic()) / (len(work) - number))
        error = errors[configurations.index(choice.configuration)][1]
        of_op[key] = _entry(choice.configuration, choice, error, item.tags)
        tuned.save(tuning.path, facts, entries)
        share = item.seconds / total if total else 0.0
        tuning.rows.append({"op": item.op, "key": key, "share": share, **of_op[key], "tags": ", ".join(item.tags)})
    bar.close()
