"""Runs a scenario: the engine beside its peers, interleaved round by round; results as JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from mlaforge.artifact import Manifest, record_path
from mlaforge.bench import machine, summary
from mlaforge.bench.config import BenchConfig
from mlaforge.bench.endpoint import Endpoint, PeerFailed
from mlaforge.bench.engine_peer import EnginePeer
from mlaforge.bench.invariants import Audit, Finding, together
from mlaforge.bench.peer import PLAIN, DoesNotFit, Peer, Repetition, Variant
from mlaforge.bench.prompts import Prompts
from mlaforge.bench.recipe import Recipe, read, scope_of
from mlaforge.bench.roof import describe, layout_of, roof
from mlaforge.bench.row import Row
from mlaforge.bench.transformers_peer import Transformers
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.drafting.dataset import check_unseen
from mlaforge.engine.cache.kv_cache import CacheTooSmall
from mlaforge.engine.config import EngineConfig
from mlaforge.engine.execution.model import choose_format
from mlaforge.planning.costs import Gpu
from mlaforge.planning.plan import Plan, plan_of
from mlaforge.rendering.page import interval
from mlaforge.runtime import UserError, log, resolve_device

# What is said where memory is not there by other errors than that of torch's CUDA allocator: by its allocator on a CPU,
# by CUDA itself (graphs, streams), and by the libraries that ask CUDA for their own.
FULL = (
    "not enough memory", "can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)  # fmt: skip


FLOATING = ("float32", "bfloat16", "float16")


class BrokenInvariant(Exception):
    """An invariant does not hold: one of PERF_MODE, or that a case leaves nothing behind."""


class UnavailablePeer:
    """A peer that could not be loaded: every case of it says why."""

    weight_bytes: int | None = None

    def __init__(self, name: str, model: str, dtype: str, error: DoesNotFit | PeerFailed):
        self.name, self.model, self.dtype, self.error = name, model, dtype, error

    def run(self, prompts: list[list[int]], tokens: int, variant: Variant) -> Repetition:
        raise self.error

    def close(self) -> None:
        """Nothing."""


@dataclasses.dataclass(frozen=True)
class Model:
    name: str
    source: SourceModel
    plan: Plan


@contextlib.contextmanager
def capacity(change: str) -> Iterator[None]:
    """Memory that is not there becomes DoesNotFit, with the setting to change."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, CacheTooSmall) as error:
        raise DoesNotFit(str(error).split("\n")[0] or "out of memory", change) from error
    except RuntimeError as error:
        if not any(words in str(error) for words in FULL):
            raise
        raise DoesNotFit(str(error).split("\n")[0], change) from error


class Eta:
    """Tells the watcher what was done and how long the rest takes, by the tokens that it computes."""

    def __init__(self, what: str, total: float):
        self.what, self.total, self.done, self.start = what, total, 0.0, time.monotonic()

    def step(self, weight: float, message: str) -> None:
        self.done += weight
        left = (time.monotonic() - self.start) * (self.total - self.done) / self.done
        log(f"{self.what} {100 * self.done / self.total:.0f} %, {left / 60:.1f} min left: {message}")


def run(
    what: str, models: list[str], config: BenchConfig, folder: Path, permit: Callable[[str, dict[str, Any]], bool]
) -> dict[str, Any]:
    """Runs one scenario and writes `folder/<what>.json`, after every context and batch; returns what was written.

    `permit(scope, header)` says whether the run was forced, or raises UserError where it may not begin. Raises
    BrokenInvariant where an invariant does not hold, most of them under --perf alone; what was found is written first.
    """
    device = resolve_device(config.device)
    recipe = read(what, scope_of(config, device), config)
    if not models:
        raise UserError("MODEL is missing: mlaforge bench SCENARIO MODEL [CONVERTED ...]")
    resolved = [_model(model) for model in models]
    names = [model.name for model in resolved]
    if len(set(names)) < len(names):
        raise UserError(f"two models are called {max(names, key=names.count)}; rename one directory, results name them")
    header = machine.header("scenario", device)
    forced = permit(recipe.scope, header)
    imported = [case for file in config.import_ or () for case in _imported(Path(file), what)]
    gpu, start = roof(config.roof, device), time.monotonic()
    # All models of a run read the same text; each with its own tokenizer.
    texts = {model.name: Prompts(recipe.text, model.source.tokenizer) for model in resolved}
    judged = texts[names[0]].describe()
    unknown = check_unseen(recipe.head, judged) if recipe.head is not None else ""
    if unknown:
        log(unknown)
    body: dict[str, Any] = header | {
        "scenario": what, "scope": recipe.scope, "told": recipe.description, "forced": forced, "seconds": 0.0,
        "config": _recorded(recipe), "prompts": judged, "unknown": unknown, "roof": describe(gpu),
        "models": [
            {"name": m.name, "path": record_path(m.source.path), "sha256": m.source.fingerprint,
             "layout": layout_of(m.plan), "numbers_per_token": m.plan.cached_per_token, **_quality(m.source.path)}
            for m in resolved
        ],
        "perf": None, "cases": [],
    }  # fmt: skip
    path, findings = folder / f"{what}.json", list[Finding]()
    groups = [(c, b) for c in sorted(recipe.contexts) for b in sorted(recipe.batches)]
    eta = Eta(f"bench {what}", sum(_weight(recipe, c, b) for c, b in groups) * len(recipe.cache_fractions))
    try:
        for number, fraction in enumerate(recipe.cache_fractions):
            with loaded(resolved, recipe, config, device, fraction, others=number == 0) as peers:
                for context, batch in groups:
                    rows = [Row(peer, variant) for peer in peers for variant in variants(peer, recipe, context)]
                    prompts = {n: p(context, batch, recipe.rounds + recipe.warm_up) for n, p in texts.items()}
                    try:
                        _rounds(rows, prompts, recipe, config.perf, eta, context, batch)
                    finally:
                        findings += [finding for row in rows for finding in row.findings]
                        body["perf"] = together(findings) if config.perf else None
                        body["seconds"] = time.monotonic() - start
                        body["cases"] += _cases(rows, resolved, recipe, gpu, fraction, context, batch)
                        machine.write(path, body)
    finally:
        body["cases"] += imported
        machine.write(path, body)
    return body


def _rounds(
    rows: list[Row], prompts: dict[str, list[list[list[int]]]], recipe: Recipe, perf: bool, eta: Eta, context: int,
    batch: int,
) -> None:  # fmt: skip
    """Warm-up, the audit of every row of ours, then the measured rounds: every row once, one after another."""
    weight = _weight(recipe, context, batch) / (recipe.rounds + recipe.warm_up) / len(rows)
    for number in range(recipe.rounds + recipe.warm_up):
        measured = number >= recipe.warm_up
        for row in rows:
            if row.status == "ok":
                _once(row, prompts[row.peer.model][number], recipe.tokens, measured)
            case = f"{context}x{batch} {row.peer.name} {row.peer.model} {row.peer.dtype} {label(row.variant)}"
            rate = f"{row.repetitions[-1].tokens / row.repetitions[-1].seconds:.1f} tok/s" if row.repetitions else ""
            eta.step(weight, f"{case}: {row.limit['what'] if row.limit else rate or 'warm-up'}")
        if perf and number == max(0, recipe.warm_up - 1):
            for row in rows:
                if isinstance(row.peer, EnginePeer) and row.status == "ok":
                    _audit(row, prompts[row.peer.model][number], recipe.tokens)


@contextlib.contextmanager
def _fitting(row: Row) -> Iterator[None]:
    """A row that does not fit says so and is not repeated; the engine is idle again behind either."""
    try:
        with capacity("a smaller --context or --batch, a smaller --cache-fraction (caches leave room for activations)"):
            yield
    except DoesNotFit as error:
        limit = {"what": error.what, "change": error.change, "tokens": error.tokens}
        row.status, row.limit, row.repetitions = "capacity", limit, []
        gc.collect()
        torch.cuda.empty_cache()
    if isinstance(row.peer, EnginePeer):
        try:
            row.peer.check_idle()
        except AssertionError as error:
            told = f"{error or 'tables and pools disagree'} after a case ({row.peer.model}, {label(row.variant)})"
            raise BrokenInvariant(f"cache_integrity: {told}") from error


def _once(row: Row, prompts: list[list[int]], tokens: int, measured: bool) -> None:
    memory = (
        machine.Memory(row.peer.device) if isinstance(row.peer, Transformers) else getattr(row.peer, "memory", None)
    )
    try:
        with _fitting(row):
            if memory is not None:
                memory.reset()
                before = memory.now()
            repetition = row.peer.run(prompts, tokens, row.variant)
            if memory is not None:
                # On a CPU a cache's pages are the system's until they are first written.
                first = repetition.cache_bytes or 0 if row.activations is None and memory.device.type == "cpu" else 0
                row.activations = max(row.activations or 0, memory.peak() - before - first)
            if measured:
                row.repetitions.append(repetition)
    except PeerFailed as error:
        row.status, row.repetitions = "failed", []
        change = "the peer's file (docs/bench.md), or leave the peer out"
        row.limit = {"what": str(error), "change": change, "tokens": None}


def _audit(row: Row, prompts: list[list[int]], tokens: int) -> None:
    """PERF_MODE's invariants on a repetition that is not timed; raises BrokenInvariant for the first that fails."""
    assert isinstance(row.peer, EnginePeer)
    with _fitting(row):
        row.findings = Audit(row.peer).run(prompts, tokens, row.variant)
    for finding in row.findings:
        if not finding.passed:
            raise BrokenInvariant(f"{finding.name}: {finding.detail} ({row.peer.model}, {label(row.variant)})")


def variants(peer: Peer, recipe: Recipe, context: int) -> list[Variant]:
    """How a peer decodes prompts of `context` tokens; plain decoding first, which the others are compared with. What is
    left out because it would be no other way is logged."""
    if peer.name != EnginePeer.name:
        return [PLAIN]
    plain, counts, specpvs = [PLAIN] if 0 in recipe.counts else [], [k for k in recipe.counts if k], recipe.specpvs
    whole = peer.reads_all(context) if isinstance(peer, EnginePeer) else None
    if whole and counts and set(specpvs) != {"off"}:
        log(f"no partial verification of {peer.model} at {context:,} tokens: {whole}")
        specpvs = tuple(specpv for specpv in specpvs if specpv == "off")
    return plain + [Variant(k, draft, specpv) for draft in recipe.drafts for k in counts for specpv in specpvs]


def label(variant: Variant) -> str:
    """`k3 ngram`, `k3 ngram specpv`, or `plain`."""
    partial = " specpv" if variant.specpv != "off" else ""
    return f"k{variant.count} {variant.draft}{partial}" if variant.count else "plain"


@contextlib.contextmanager
def loaded(
    models: list[Model], recipe: Recipe, config: BenchConfig, device: torch.device, fraction: float, others: bool
) -> Iterator[list[Peer]]:
    """All engines of a run, in memory together because they take turns; each has its share of `fraction`."""
    longest, most = max(recipe.contexts) + recipe.tokens + 1, max(recipe.batches)
    peers: list[Peer] = []

    def load(name: str, model: Model, dtype: str, make: Callable[..., Peer], *words: Any) -> None:
        try:
            with capacity("fewer models at once, another --dtype, a larger --cache-fraction, or a smaller model"):
                peers.append(make(model.source.path, model.name, *words))
        except (DoesNotFit, PeerFailed) as error:
            peers.append(UnavailablePeer(name, model.name, dtype, error))

    try:
        # One choice for all models: `auto` may come out differently for each, and may stand for another word.
        formats = dict.fromkeys(choose_format(dtype, models[0].source, device) for dtype in recipe.dtypes)
        engines = [(model, dtype) for model in models for dtype in formats]
        for model, dtype in engines:
            settings = EngineConfig(
                dtype=dtype, device=config.device, cache_fraction=fraction / len(engines),
                prefix_caching=recipe.prefix_caching, num_speculative_tokens=max(1, *recipe.counts),
            )  # fmt: skip
            load(EnginePeer.name, model, dtype, EnginePeer, recipe.head, settings, longest, most, recipe.prompts_once)
        for model in models if others else ():
            own = next(peer.dtype for peer in peers if peer.model == model.name)
            floating = own if own in FLOATING else "bfloat16"
            words = [word for word in recipe.transformers if word != "none"]
            for dtype in dict.fromkeys(floating if word == "auto" else word for word in words):
                load("transformers", model, dtype, Transformers, dtype, device)
        for file in config.peer or () if others else ():
            for model in models:
                load(Path(file).stem, model, "bfloat16", functools.partial(Endpoint, Path(file)), longest, most)
        yield peers
    finally:
        for peer in peers:
            peer.close()
        peers.clear()
        gc.collect()


def _model(name: str) -> Model:
    source = SourceModel.open(name)
    return Model(source.name, source, plan_of(source.config, source.spec))


def _quality(path: Path) -> dict[str, Any]:
    """What `convert` measured of a model: perplexity over the original's, and its 95 % interval; None elsewhere."""
    metrics = made.metrics if (made := Manifest.load(path)) and made.stage == "convert" else {}
    ratio, error, windows = (metrics.get(name) for name in ("ratio", "log_ratio_stderr", "windows"))
    ends = interval(math.log(ratio), error, windows) if ratio and error is not None and windows else None
    return {"ratio": ratio, "ratio_interval": ends and [math.exp(end) for end in ends]}


def _weight(recipe: Recipe, context: int, batch: int) -> float:
    """What a group of cases takes, in tokens of a prompt; a decoded one takes as long as some twenty."""
    return batch * (context + 20 * recipe.tokens)


def _recorded(recipe: Recipe) -> dict[str, Any]:
    fields = dataclasses.asdict(recipe)
    names = {"contexts": "context", "batches": "batch", "counts": "num_speculative_tokens", "drafts": "draft",
             "specpvs": "specpv", "cache_fractions": "cache_fraction", "dtypes": "dtype"}  # fmt: skip
    left_out = ("scenario", "scope", "description")
    recorded = {names.get(key, key): value for key, value in fields.items() if key not in left_out}
    return recorded | {"head": recipe.head and record_path(recipe.head), "text": [*map(record_path, recipe.text)]}


def _cases(
    rows: list[Row], models: list[Model], recipe: Recipe, gpu: Gpu | None, fraction: float, context: int, batch: int
) -> list[dict[str, Any]]:
    plans = {model.name: model.plan for model in models}
    return [
        summary.case(row, rows, plans[row.peer.model], gpu, recipe, fraction, context, batch)
        for row in rows
        if row.repetitions or row.limit
    ]


def _imported(file: Path, scenario: str) -> list[dict[str, Any]]:
    """The cases of another run's file, marked. UserError where it is none of this scenario."""
    try:
        body = json.loads(file.read_text(encoding="utf-8"))
        kind, name, cases = body["kind"], body["scenario"], body["cases"]
        where = {"file": record_path(file), **{key: body[key] for key in ("device", "commit", "time")}}
        own = [{**case, "id": f"{case['id']} @ {body['device']}", "imported": where} for case in cases]
    except OSError as error:
        raise UserError(f"results {file} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} holds no results of `mlaforge bench`") from error
    if kind != "scenario" or name != scenario:
        raise UserError(f"{file} holds results of {name}; only those of {scenario} can stand beside it")
    # What was itself imported stays where it was measured.
    return [case for case, original in zip(own, cases, strict=True) if not original.get("imported")]
