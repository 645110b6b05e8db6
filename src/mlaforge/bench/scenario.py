"""Scenario runs: the engine and its peers, interleaved round by round; results as JSON."""

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
from mlaforge.bench import gemm_shapes, machine, summary
from mlaforge.bench.checkout_peer import CheckoutPeer
from mlaforge.bench.config import BenchConfig
from mlaforge.bench.endpoint import Endpoint, PeerFailed
from mlaforge.bench.engine_peer import EnginePeer
from mlaforge.bench.gemm_shapes import Shapes
from mlaforge.bench.invariants import Audit, Finding, merge
from mlaforge.bench.peer import PLAIN, DoesNotFit, Peer, Repetition, Variant
from mlaforge.bench.prompts import Conversations, Prompts
from mlaforge.bench.recipe import Recipe, read, scope_of
from mlaforge.bench.roof import describe, layout_of, roof
from mlaforge.bench.row import Row
from mlaforge.bench.server_process import commit_of
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

# Messages of out-of-memory errors that are not torch.OutOfMemoryError: torch's CPU allocator, CUDA itself (graphs,
# streams), and the libraries that allocate with CUDA directly.
OUT_OF_MEMORY = (
    "not enough memory", "can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)  # fmt: skip


FLOATING = ("float32", "bfloat16", "float16")


class BrokenInvariant(Exception):
    """An invariant of PERF_MODE does not hold, or a case left requests or blocks behind."""


class UnavailablePeer:
    """A peer that could not be loaded: each of its cases reports the reason."""

    weight_bytes: int | None = None

    def __init__(self, name: str, model: str, dtype: str, error: DoesNotFit | PeerFailed, rows: str = ""):
        self.name, self.model, self.dtype, self.error, self.rows = name, model, dtype, error, rows

    def run(self, prompts: list[list[int]], tokens: int, variant: Variant) -> Repetition:
        raise self.error

    def close(self) -> None:
        """Nothing to release."""


@dataclasses.dataclass(frozen=True)
class Model:
    name: str
    source: SourceModel
    plan: Plan


@contextlib.contextmanager
def capacity(change: str) -> Iterator[None]:
    """Convert out-of-memory errors to DoesNotFit. change: the setting to change."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, CacheTooSmall) as error:
        raise DoesNotFit(str(error).split("\n")[0] or "out of memory", change) from error
    except RuntimeError as error:
        if not any(message in str(error) for message in OUT_OF_MEMORY):
            raise
        raise DoesNotFit(str(error).split("\n")[0], change) from error


class Eta:
    """Progress log with the estimated remaining time, from the share of `total` tokens computed so far."""

    def __init__(self, label: str, total: float):
        self.label, self.total, self.completed, self.start = label, total, 0.0, time.monotonic()

    def advance(self, weight: float, message: str) -> None:
        self.completed += weight
        remaining = (time.monotonic() - self.start) * (self.total - self.completed) / self.completed
        log(f"{self.label} {100 * self.completed / self.total:.0f} %, {remaining / 60:.1f} min left: {message}")


def run(
    scenario: str, models: list[str], config: BenchConfig, folder: Path, permit: Callable[[str, dict[str, Any]], bool]
) -> dict[str, Any]:
    """Run one scenario, write `folder/<scenario>.json` after every context and batch, and return its content.

    `permit(scope, header)` returns whether the run was forced, or raises UserError if it may not begin. Raise
    BrokenInvariant if an invariant does not hold (most are checked under --perf only), after writing the findings.
    """
    device = resolve_device(config.device)
    recipe = read(scenario, scope_of(config, device), config)
    if not models:
        raise UserError("MODEL is missing: mlaforge bench SCENARIO MODEL [CONVERTED ...]")
    resolved = [_model(model) for model in models]
    names = [model.name for model in resolved]
    if len(set(names)) < len(names):
        duplicate = max(names, key=names.count)
        raise UserError(f"two models are called {duplicate}; rename one directory, as results identify models by name")
    header = machine.header("scenario", device, config.tuned)
    forced = permit(recipe.scope, header)
    imported = [case for file in config.import_ or () for case in _imported(Path(file), scenario)]
    gpu, start = roof(config.roof, device), time.monotonic()
    # All models of a run read the same text, tokenized by their tokenizers.
    texts = {model.name: _prompts_of(recipe, model) for model in resolved}
    text_files = texts[names[0]].describe()
    unknown = check_unseen(recipe.head, text_files) if recipe.head is not None else ""
    if unknown:
        log(unknown)
    body: dict[str, Any] = header | {
        "scenario": scenario, "scope": recipe.scope, "description": recipe.description, "forced": forced,
        "seconds": 0.0, "config": _recorded(recipe), "prompts": text_files, "unknown": unknown, "roof": describe(gpu),
        "models": [
            {"name": m.name, "path": record_path(m.source.path), "sha256": m.source.fingerprint,
             "layout": layout_of(m.plan), "numbers_per_token": m.plan.cached_per_token, **_quality(m.source.path)}
            for m in resolved
        ],
        "base": config.base and commit_of(Path(config.base)), "perf": None, "cases": [],
    }  # fmt: skip
    path, findings = folder / f"{scenario}.json", list[Finding]()
    # The scenarios of a run add to one file.
    shapes_file = folder / gemm_shapes.FILE
    shapes = Shapes.read(shapes_file) if shapes_file.exists() else Shapes()
    groups = [(c, b) for c in sorted(recipe.contexts) for b in sorted(recipe.batches)]
    total = recipe.rounds + recipe.warm_up
    prompts_of = {(c, b): {name: prompts(c, b, total) for name, prompts in texts.items()} for c, b in groups}
    longest = max(len(ids) for of in prompts_of.values() for rounds in of.values() for batch in rounds for ids in batch)
    eta = Eta(f"bench {scenario}", sum(_weight(recipe, c, b) for c, b in groups) * len(recipe.cache_fractions))
    try:
        for number, fraction in enumerate(recipe.cache_fractions):
            with loaded(resolved, recipe, config, device, fraction, longest, baselines=number == 0) as peers:
                for context, batch in groups:
                    rows = [Row(peer, variant) for peer in peers for variant in variants(peer, recipe, context)]
                    try:
                        _rounds(rows, prompts_of[context, batch], recipe, config.perf, eta, context, batch)
                    finally:
                        findings += [finding for row in rows for finding in row.findings]
                        body["perf"] = merge(findings) if config.perf else None
                        for row in rows:
                            shapes.update(row.shapes)
                        if config.perf:
                            shapes.write(shapes_file)
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
    """Run the warm-up, the audit of the engine's rows, then the measured rounds; a round runs every row once."""
    weight = _weight(recipe, context, batch) / (recipe.rounds + recipe.warm_up) / len(rows)
    for number in range(recipe.rounds + recipe.warm_up):
        measured = number >= recipe.warm_up
        for row in rows:
            if row.status == "ok":
                _repeat(row, prompts[row.peer.model][number], recipe.tokens, measured)
            case = f"{context}x{batch} {row.peer.name} {row.peer.model} {row.peer.dtype} {label(row.variant)}"
            rate = f"{row.repetitions[-1].tokens / row.repetitions[-1].seconds:.1f} tok/s" if row.repetitions else ""
            eta.advance(weight, f"{case}: {row.limit['what'] if row.limit else rate or 'warm-up'}")
        if perf and number == max(0, recipe.warm_up - 1):
            for row in rows:
                if isinstance(row.peer, EnginePeer) and row.status == "ok":
                    _audit(row, prompts[row.peer.model][number], recipe.tokens)


@contextlib.contextmanager
def _fitting(row: Row) -> Iterator[None]:
    """Record DoesNotFit as the row's limit, which ends its repetitions. Raise BrokenInvariant if the engine is not idle
    afterwards."""
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
            detail = f"{error or 'tables and pools disagree'} after a case ({row.peer.model}, {label(row.variant)})"
            raise BrokenInvariant(f"cache_integrity: {detail}") from error


def _repeat(row: Row, prompts: list[list[int]], tokens: int, measured: bool) -> None:
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
                # On a CPU the pages of a cache become resident when they are first written.
                new_pages = (
                    repetition.cache_bytes or 0 if row.activations is None and memory.device.type == "cpu" else 0
                )
                row.activations = max(row.activations or 0, memory.peak() - before - new_pages)
            if measured:
                row.repetitions.append(repetition)
    except PeerFailed as error:
        row.status, row.repetitions = "failed", []
        change = "the peer's file (docs/bench.md), or leave the peer out"
        row.limit = {"what": str(error), "change": change, "tokens": None}


def _audit(row: Row, prompts: list[list[int]], tokens: int) -> None:
    """Check PERF_MODE's invariants on an untimed repetition. Raise BrokenInvariant for the first that fails."""
    assert isinstance(row.peer, EnginePeer)
    with _fitting(row):
        audit = Audit(row.peer)
        row.findings = audit.run(prompts, tokens, row.variant)
        row.shapes.update(audit.shapes)
    for finding in row.findings:
        if not finding.passed:
            raise BrokenInvariant(f"{finding.name}: {finding.detail} ({row.peer.model}, {label(row.variant)})")


def variants(peer: Peer, recipe: Recipe, context: int) -> list[Variant]:
    """Decoding variants of a peer for prompts of `context` tokens: plain decoding, the baseline, first. Log partial
    verification that does not apply and is skipped."""
    if peer.name != EnginePeer.name:
        return [PLAIN]
    plain, counts, specpvs = [PLAIN] if 0 in recipe.counts else [], [k for k in recipe.counts if k], recipe.specpvs
    reason = peer.no_partial_reason(context) if isinstance(peer, EnginePeer) else None
    if reason and counts and set(specpvs) != {"off"}:
        log(f"no partial verification of {peer.model} at {context:,} tokens: {reason}")
        specpvs = tuple(specpv for specpv in specpvs if specpv == "off")
    # Adaptive drafting chooses the number itself.
    numbers = {draft: counts[-1:] if draft == "default" else counts for draft in recipe.drafts}
    return plain + [Variant(k, draft, specpv) for draft in recipe.drafts for k in numbers[draft] for specpv in specpvs]


def label(variant: Variant) -> str:
    """`k3 ngram`, `k3 ngram specpv`, or `plain`."""
    partial = " specpv" if variant.specpv != "off" else ""
    if variant.draft == "default":
        return f"default{partial}"
    return f"k{variant.count} {variant.draft}{partial}" if variant.count else "plain"


@contextlib.contextmanager
def loaded(
    models: list[Model], recipe: Recipe, config: BenchConfig, device: torch.device, fraction: float, longest: int,
    baselines: bool,
) -> Iterator[list[Peer]]:  # fmt: skip
    """All peers of a run, in memory together because their repetitions are interleaved. The engines share `fraction`
    equally. longest: tokens of the longest prompt. baselines: load transformers and other engines too."""
    max_length, max_batch = longest + recipe.tokens + 1, max(recipe.batches)
    peers: list[Peer] = []

    def load(name: str, model: Model, dtype: str, make: Callable[..., Peer], *arguments: Any, rows: str = "") -> None:
        try:
            with capacity("fewer models at once, another --dtype, a larger --cache-fraction, or a smaller model"):
                peers.append(make(model.source.path, model.name, *arguments))
        except (DoesNotFit, PeerFailed) as error:
            peers.append(UnavailablePeer(name, model.name, dtype, error, rows))
        except UserError as error:
            # Not every model has every format of rows.
            if rows in ("", "auto"):
                raise
            peers.append(UnavailablePeer(name, model.name, dtype, PeerFailed(str(error)), rows))

    try:
        # Resolved once for all models: `auto` may differ between models, and may duplicate another dtype.
        formats = dict.fromkeys(choose_format(dtype, models[0].source, device) for dtype in recipe.dtypes)
        rows_of = {
            model.name: recipe.kv_cache_dtypes if model.plan.stored != "coded" else ("auto",) for model in models
        }
        engines = [(model, dtype, rows) for model in models for dtype in formats for rows in rows_of[model.name]]
        for model, dtype, rows in engines:
            settings = EngineConfig(
                dtype=dtype, device=config.device, kv_cache_dtype=rows, cache_fraction=fraction / len(engines),
                prefix_caching=recipe.prefix_caching, num_speculative_tokens=max(1, *recipe.counts), tuned=config.tuned,
            )  # fmt: skip
            arguments = (recipe.head, settings, max_length, max_batch, recipe.prompts_once)
            load(EnginePeer.name, model, dtype, EnginePeer, *arguments, rows=rows)
        for model in models if baselines else ():
            engine_dtype = next(peer.dtype for peer in peers if peer.model == model.name)
            auto_dtype = engine_dtype if engine_dtype in FLOATING else "bfloat16"
            dtypes = [dtype for dtype in recipe.transformers if dtype != "none"]
            for dtype in dict.fromkeys(auto_dtype if dtype == "auto" else dtype for dtype in dtypes):
                load("transformers", model, dtype, Transformers, dtype, device)
        if config.base is not None and baselines:
            dtype = next(peer.dtype for peer in peers if peer.model == models[0].name)
            options = {
                "dtype": dtype, "device": config.device, "cache_bytes": _cache_bytes(models[0], max_length, max_batch),
                "max_num_seqs": max_batch,
            }  # fmt: skip
            load(CheckoutPeer.name, models[0], dtype, CheckoutPeer, Path(config.base), options)
        for file in config.peer or () if baselines else ():
            for model in models:
                make = functools.partial(Endpoint, Path(file))
                load(Path(file).stem, model, "bfloat16", make, max_length, max_batch)
        # As a server does: a full garbage collection visits every object, and would be timed as a slow token.
        gc.collect()
        gc.freeze()
        yield peers
    finally:
        gc.unfreeze()
        for peer in peers:
            peer.close()
        peers.clear()
        gc.collect()


def _prompts_of(recipe: Recipe, model: Model) -> Prompts:
    if recipe.prompts is None:
        return Prompts(recipe.text, model.source.tokenizer)
    return Conversations(recipe.prompts, recipe.text, model.source.tokenizer)


def _cache_bytes(model: Model, length: int, batch: int) -> int:
    """Bytes of a cache with room for `batch` sequences, in fp32 and full blocks."""
    return dataclasses.replace(model.plan, stored="fp32", plain="fp32").cache_bytes(length + 64, batch)


def _model(name: str) -> Model:
    source = SourceModel.open(name)
    return Model(source.name, source, plan_of(source.config, source.spec))


def _quality(path: Path) -> dict[str, Any]:
    """Perplexity ratio to the original from the manifest of `convert`, with its 95 % interval; None elsewhere."""
    metrics = manifest.metrics if (manifest := Manifest.load(path)) and manifest.stage == "convert" else {}
    ratio, error, windows = (metrics.get(name) for name in ("ratio", "log_ratio_stderr", "windows"))
    ends = interval(math.log(ratio), error, windows) if ratio and error is not None and windows else None
    return {"ratio": ratio, "ratio_interval": ends and [math.exp(end) for end in ends]}


def _weight(recipe: Recipe, context: int, batch: int) -> float:
    """Estimated duration of a group of cases in prompt tokens; a decoded token takes as long as about twenty."""
    return batch * (context + 20 * recipe.tokens)


def _recorded(recipe: Recipe) -> dict[str, Any]:
    fields = dataclasses.asdict(recipe)
    names = {"contexts": "context", "batches": "batch", "counts": "num_speculative_tokens", "drafts": "draft",
             "specpvs": "specpv", "cache_fractions": "cache_fraction", "dtypes": "dtype",
             "kv_cache_dtypes": "kv_cache_dtype"}  # fmt: skip
    excluded = ("scenario", "scope", "description")
    recorded = {names.get(key, key): value for key, value in fields.items() if key not in excluded}
    return recorded | {"head": recipe.head and record_path(recipe.head), "text": [*map(record_path, recipe.text)],
                       "prompts": recipe.prompts and record_path(recipe.prompts)}  # fmt: skip


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
    """Cases of another run's results, marked as imported. Raise UserError if they are not of this scenario."""
    try:
        body = json.loads(file.read_text(encoding="utf-8"))
        kind, name, cases = body["kind"], body["scenario"], body["cases"]
        origin = {"file": record_path(file), **{key: body[key] for key in ("device", "commit", "time")}}
        marked = [{**case, "id": f"{case['id']} @ {body['device']}", "imported": origin} for case in cases]
    except OSError as error:
        raise UserError(f"results {file} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} contains no results of `mlaforge bench`") from error
    if kind != "scenario" or name != scenario:
        raise UserError(f"{file} contains results of {name}; only results of {scenario} can be imported here")
    # Cases that the other run imported are not imported again.
    return [case for case, original in zip(marked, cases, strict=True) if not original.get("imported")]
