"""PERF_MODE: invariants of a decoding engine, checked on an untimed repetition.

tuned_kernels     every call of an op ran the fastest implementation available on this device, with an entry of the
                  tuned table if there is one for the op, and on CUDA every decoding step, except those of partial
                  verification, replayed a graph
drafting_goes_on  every decoding sequence got room for all drafts that fit before its end, and the drafter filled it
cache_integrity   tables, pools and sequences agree; every view agrees with the tables; no slot is written twice
no_host_reads     per decoding step at most one read of a device tensor (the sampled tokens), one per proposal of a head
                  (a tree: one per level) and those of partial verification, and no other synchronisation
no_debug_copies   no cached row or weight is cloned or copied to the host
deterministic     the same prompts give the same tokens again
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mlaforge.bench.engine_peer import EnginePeer
from mlaforge.bench.gemm_shapes import Recorder, Shapes
from mlaforge.bench.peer import Variant
from mlaforge.engine.engine import Engine
from mlaforge.engine.execution.batch import Batch
from mlaforge.engine.execution.runner import Runner
from mlaforge.engine.speculation.block import BlockDrafter
from mlaforge.engine.speculation.drafter import TreeDrafter
from mlaforge.engine.speculation.eagle3 import EagleDrafter
from mlaforge.engine.speculation.policy import Decision
from mlaforge.engine.speculation.sparse_view import LEAST_PROVISIONAL, SparseView
from mlaforge.engine.speculation.speculation import Proposal
from mlaforge.ops import native, tuned
from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.dispatch import Op, hooked
from mlaforge.runtime import ops_choice

NOT_COMPILED = "it is not compiled"
# Missing shapes that a finding names.
SHOWN = 5
CLONES = ("aten::clone", "aten::_to_copy", "aten::copy_")


@dataclasses.dataclass(frozen=True)
class Finding:
    """Result of one invariant. allowed: minimum of `value` for tuned_kernels, maximum for the others. detail: a
    sentence for the report."""

    name: str
    passed: bool
    value: float
    allowed: float
    detail: str


def merge(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """One entry per invariant: its first failed finding, else its first, and the number of cases."""
    entries = []
    for name in dict.fromkeys(finding.name for finding in findings):
        matches = [finding for finding in findings if finding.name == name]
        example = next((finding for finding in matches if not finding.passed), matches[0])
        entries.append({
            "name": example.name, "passed": example.passed, "value": example.value, "allowed": example.allowed,
            "detail": example.detail, "cases": len(matches),
        })  # fmt: skip
    return entries


class Audit:
    """Check of all invariants on one engine while it decodes."""

    def __init__(self, peer: EnginePeer):
        self.peer, self.engine = peer, peer.engine
        self.calls: Counter[str] = Counter()
        self.untuned: Counter[str] = Counter()
        # Drafting opportunities: all, without enough room, not filled by the drafter.
        self.drafts = Counter[str]()
        self.views = 0
        self.broken_views: list[str] = []
        self.hook = Hook(self.engine)
        self.recorder = Recorder(self.engine)
        self.missed: Counter[tuple[str, str]] = Counter()
        # Calls of kernels by their tuned configuration: hit, default, miss.
        self.tuned_calls: Counter[str] = Counter()

    def run(self, prompts: list[list[int]], tokens: int, variant: Variant) -> list[Finding]:
        """Run two repetitions, the first instrumented, and return the finding of every invariant."""
        before, calls = tuned.missing(), tuned.totals()
        with self.recorder.active(), self.instrumented():
            first = self.peer.run(prompts, tokens, variant).token_ids
        self.missed = tuned.missing() - before + self._missing_products()
        self.tuned_calls = tuned.totals() - calls
        repeated = self.peer.run(prompts, tokens, variant).token_ids
        # Adaptive drafting leaves room unused on purpose.
        drafting = [self.drafting(variant)] if variant.count and variant.draft != "default" else []
        return [self.tuned(), *drafting, self.integrity(), *self.hook.findings(), _deterministic(first, repeated)]

    @contextlib.contextmanager
    def instrumented(self) -> Iterator[None]:
        """Install all counters; remove them on exit."""
        # mypy forbids replacing methods of an object, which instrumentation needs.
        engine, peer_set_variant = self.engine, self.peer.set_variant
        runner, step = engine.runner, engine.step

        def set_variant(variant: Variant, answers: list[list[int]], prompts: list[list[int]]) -> None:
            peer_set_variant(variant, answers, prompts)
            if engine.speculation is not None:
                engine.speculation.propose = self._count_drafts(engine.speculation.propose)  # type: ignore[method-assign]
                if (sparse_view := engine.speculation.sparse_view) is not None:
                    sparse_view.runner = functools.partial(run, runner=sparse_view.runner)  # type: ignore[assignment]

        def run(batch: Batch, runner: Runner = runner) -> Tensor:
            self.views += 1
            with self.hook.paused():
                self.broken_views += check_batch(batch, engine)
            if (
                self.hook.decoding
                and engine.speculation is not None
                and (sparse_view := engine.speculation.sparse_view)
            ):
                # A partial step reads the accepted tokens, a full one the top tokens of each layer's attention.
                self.hook.extra_reads += 1 if batch.sparse_views else 0
                self.hook.extra_reads += (
                    sparse_view.num_layers * len(batch.probe.sequences) if batch.probe is not None else 0
                )
            return runner(batch)

        def counted_step() -> Any:
            # The hook counts steps in which all sequences decode, as only these must not synchronise.
            self.hook.decoding = bool(engine.scheduler.running) and not engine.scheduler.waiting
            self.hook.decoding &= all(sequence.decoding for sequence in engine.scheduler.running)
            self.hook.steps += self.hook.decoding
            with self.hook:
                outputs = step()
            engine.check_integrity()
            return outputs

        def eager(batch: Batch) -> Tensor:
            # Partial verification has no graphs.
            self.hook.eager_decodes += self.hook.decoding and not batch.sparse_views and batch.probe is None
            return runner_eager(batch)

        def uncounted_capture(run: Callable[[], Tensor]) -> Any:
            # PyTorch synchronises before a capture, once per bucket.
            with self.hook.paused():
                return capture(run)

        runner_eager = runner.eager
        with contextlib.ExitStack() as cleanup:
            if (graphs := runner.graphs) is not None:
                capture, graphs.capture = graphs.capture, uncounted_capture
                cleanup.callback(setattr, graphs, "capture", capture)
            cleanup.enter_context(hooked(self._count_call))
            engine.runner = run  # type: ignore[assignment]
            cleanup.callback(setattr, engine, "runner", runner)
            replacements = (
                (self.peer, "set_variant", set_variant), (engine, "step", counted_step), (runner, "eager", eager),
            )  # fmt: skip
            for owner, name, value in replacements:
                setattr(owner, name, value)
                cleanup.callback(delattr, owner, name)
            cleanup.enter_context(self.hook.synchronisation())
            yield

    def _count_call(self, op: Op, name: str, inputs: Sequence[Any]) -> None:
        self.calls[f"{op.name} by {name}"] += 1
        if (reason := untuned(op, name, inputs)) is not None:
            self.untuned[f"{op.name} by {name}: {reason}"] += 1

    def _count_drafts(self, propose: Callable[..., Proposal]) -> Callable[..., Proposal]:
        def counted_propose(decision: Decision, chunks: list[tuple[Any, int]]) -> Proposal:
            reserved = {sequence: upto - len(sequence.token_ids) for sequence, upto in chunks if sequence.decoding}
            proposal = propose(decision, chunks)
            speculation = self.engine.speculation
            assert speculation is not None
            if self.hook.decoding and proposal.budgets and isinstance(speculation.drafter, EagleDrafter | BlockDrafter):
                self.hook.extra_reads += decision.length if isinstance(decision.drafter, TreeDrafter) else 1
            sparse = isinstance(decision.drafter, SparseView)
            for sequence, room in reserved.items():
                params = sequence.request.params
                remaining = min(
                    params.max_tokens - sequence.state.generated - 1,
                    self.engine.max_model_len - len(sequence.token_ids) - 1,
                )
                # Under partial verification the number of pending tokens adapts.
                limit = speculation.policy.max_tokens
                expected = max(0, min(min(limit, LEAST_PROVISIONAL) if sparse else limit, remaining))
                self.drafts["expected"] += expected > 0
                self.drafts["disabled"] += room < expected
                draft = proposal.drafts.get(sequence)
                required = min(room, LEAST_PROVISIONAL) if sparse else room
                self.drafts["empty"] += room > 0 and (draft is None or len(draft.token_ids) < required)
            return proposal

        return counted_propose

    @property
    def shapes(self) -> Shapes:
        """Matrix products of the instrumented repetition."""
        return self.recorder.shapes

    def _missing_products(self) -> Counter[tuple[str, str]]:
        """Calls of the compiled products whose shape the tuned table lacks, by op and key."""
        missing: Counter[tuple[str, str]] = Counter()
        for shape, usage in self.shapes.usage.items():
            op, key = shape.key
            compiled = self.engine.device.type == "cpu" and native.is_available() and shape.dtype in tuned.COMPILED
            if compiled and tuned.is_tuned(op) and tuned.entry(op, key) is None:
                missing[op, tuned.text(key)] += usage.count
        return missing

    def tuned(self) -> Finding:
        calls, untuned_calls = sum(self.calls.values()), sum(self.untuned.values())
        # Replayed steps call no op: the counts are of captured and eager steps.
        graphs = self.engine.runner.graphs
        eager = self.hook.eager_decodes if graphs is not None else 0
        share = (calls - untuned_calls - eager) / calls if calls else 1.0
        detail = ", ".join(f"{count} of {calls} calls {name}" for name, count in (self.untuned or self.calls).items())
        if eager:
            detail = f"{eager} decoding steps without a graph; {detail}"
        if "check" in ops_choice().split(","):
            return Finding("tuned_kernels", False, 0.0, 1.0, "MLAFORGE_OPS=check computes everything twice")
        if self.missed:
            lacking = [f"{op} {key}" for (op, key), _ in self.missed.most_common()]
            more = f" and {len(lacking) - SHOWN} more" if len(lacking) > SHOWN else ""
            return Finding(
                "tuned_kernels", False, 0.0, 1.0,
                f"the tuned table lacks {', '.join(lacking[:SHOWN])}{more}; `mlaforge tune` adds them",
            )  # fmt: skip
        detail = detail or "no op with several implementations was called"
        if digest := tuned.identity()["hash"]:
            hits, total = self.tuned_calls["hit"], self.tuned_calls.total()
            detail = f"{hits} of {total} kernel calls by the tuned table {digest}; {detail}"
        return Finding("tuned_kernels", share == 1.0, share, 1.0, detail)

    def drafting(self, variant: Variant) -> Finding:
        steps, disabled = self.drafts["expected"], self.drafts["disabled"]
        # Prompt lookup may find nothing; a head and a replay always propose.
        empty = 0 if variant.draft == "ngram" else self.drafts["empty"]
        detail = (
            f"of {steps} steps {disabled} reserved too little room for drafts, "
            f"the drafter left {self.drafts['empty']} unfilled"
        )
        return Finding("drafting_goes_on", not disabled and not empty, disabled + empty, 0, detail)

    def integrity(self) -> Finding:
        errors = self.broken_views
        detail = errors[0] if errors else f"the views of {self.views} steps agree with the tables"
        return Finding("cache_integrity", not errors, len(errors), 0, detail)


def _deterministic(first: list[list[int]], repeated: list[list[int]]) -> Finding:
    differing = sum(a != b for a, b in zip(first, repeated, strict=True))
    detail = f"{differing} of {len(first)} answers differ when they are repeated"
    return Finding("deterministic", not differing, differing, 0, detail)


def untuned(op: Op, name: str, inputs: Sequence[Any]) -> str | None:
    """Why implementation `name` is not the fastest one available here; None if it is, as is the reference where no
    kernel is for these inputs."""
    for candidate, implementation in op.implementations.items():
        if implementation.device_type != inputs[0].device.type:
            continue
        if candidate == name:
            return None
        reason = implementation.supports(*inputs)
        if reason is True:
            return f"{candidate} would run here"
        # Unsupported inputs or another processor: no faster implementation is available.
        if reason == NOT_COMPILED and native.form() is not None:
            return f"not {candidate}: {reason}"
        if not implementation.quiet:
            return f"not {candidate}: {reason}"
    return None


def check_batch(batch: Batch, engine: Engine) -> list[str]:
    """Disagreements between the views of a step and the engine's tables; empty if they agree."""
    errors: list[str] = []
    numbers = [sequence.number for sequence in engine.scheduler.running]
    for group, view in enumerate(batch.views):
        tables = [engine.tables.table(number, group) for number in numbers]
        errors += [f"group {group}: {error}" for error in check_view(view, batch.positions_N.tolist(), tables)]
    return errors


def check_view(view: CacheView, positions: list[int], tables: list[tuple[int, list[int]]]) -> list[str]:
    """Disagreements of one group's view with the (first position, blocks) of the running sequences, and with itself."""
    errors, size = [], view.block_size
    starts, lengths = view.query_start_S1.tolist(), view.seq_lens_S.tolist()
    slots, rows = view.slots_N.tolist(), view.block_table_SB.tolist()
    for s, (length, first) in enumerate(zip(lengths, view.first_S.tolist(), strict=True)):
        queries = starts[s + 1] - starts[s]
        expected = list(range(length - queries, length))
        span = slice(starts[s], starts[s + 1])
        if positions[span] != expected:
            errors.append(f"sequence {s}: query positions are {positions[span][:4]}, not {expected[:4]}")
        blocks = rows[s][: -(-(length - first) // size)]
        if not any(begin == first and table[: len(blocks)] == blocks for begin, table in tables):
            errors.append(f"sequence {s}: blocks {blocks[:4]} from position {first} on belong to no running sequence")
        expected_slots = [blocks[(p - first) // size] * size + (p - first) % size for p in expected]
        if slots[span] != expected_slots:
            errors.append(f"sequence {s}: writes to slots {slots[span][:4]}, not {expected_slots[:4]}")
        run_slots = [slot for start, count in view.runs[s] for slot in range(start, start + count)]
        block_slots = [blocks[row // size] * size + row % size for row in range(length - first)]
        if run_slots != block_slots:
            errors.append(f"sequence {s}: its runs of slots do not match its blocks")
    if len(set(slots)) < len(slots):
        errors.append("a slot is written twice")
    return errors


class Hook(TorchDispatchMode):
    """Counter of host reads, waits and copies in decoding steps, by dispatched operation."""

    def __init__(self, engine: Engine):
        super().__init__()
        self.engine = engine
        self.decoding = False
        # extra_reads: allowed reads of draft heads and of partial verification.
        self.steps = self.eager_decodes = self.reads = self.waits = self.extra_reads = 0
        self.copies: Counter[str] = Counter()
        self.storages = {tensor.untyped_storage().data_ptr() for tensor in engine.cache.tensors}
        self.storages |= {tensor.untyped_storage().data_ptr() for tensor in weights(engine)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # In inference mode `item`, `to` and `contiguous` arrive undecomposed; their parts are counted.
        with self:
            parts = func.decompose(*args, **(kwargs or {}))
        if parts is not NotImplemented:
            return parts
        out = func(*args, **(kwargs or {}))
        if self.decoding:
            self._count(func._schema.name, args, out)
        return out

    def _count(self, name: str, args: Any, out: Any) -> None:
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        if name == "aten::_local_scalar_dense":
            self.reads += 1
        if name not in CLONES or not tensors:
            return
        source = tensors[-1]
        target = tensors[0] if name == "aten::copy_" else out
        self.reads += source.device.type != "cpu" and target.device.type == "cpu"
        # A cast computes in another precision; a copy in the same dtype is redundant.
        same = source.dtype == target.dtype
        if same and source.untyped_storage().data_ptr() in self.storages:
            self.copies[f"{name.removeprefix('aten::')} of {list(source.shape)}"] += 1

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop counting inside the context."""
        decoding, self.decoding = self.decoding, False
        try:
            yield
        finally:
            self.decoding = decoding

    @contextlib.contextmanager
    def synchronisation(self) -> Iterator[None]:
        """Count calls of CUDA's synchronize functions inside the context."""
        targets = [(torch.cuda, "synchronize"), (torch.cuda.Stream, "synchronize"), (torch.cuda.Event, "synchronize")]
        originals = [getattr(owner, name) for owner, name in targets]

        def counting(synchronize: Callable[..., Any]) -> Callable[..., Any]:
            def counted(*args: Any, **kwargs: Any) -> Any:
                self.waits += self.decoding
                return synchronize(*args, **kwargs)

            return counted

        try:
            for (owner, name), original in zip(targets, originals, strict=True):
                setattr(owner, name, counting(original))
            yield
        finally:
            for (owner, name), original in zip(targets, originals, strict=True):
                setattr(owner, name, original)

    def findings(self) -> list[Finding]:
        """Findings of no_host_reads and no_debug_copies."""
        # On a CPU the sampled tokens are read without a copy.
        allowed = self.steps + self.extra_reads if self.engine.device.type != "cpu" else 0
        total = self.reads + self.waits
        copied = ", ".join(f"{count} x {name}" for name, count in self.copies.most_common(2)) or "nothing"
        return [
            Finding("no_host_reads", total <= allowed, total, allowed,
                    f"{self.reads} reads and {self.waits} waits in {self.steps} decoding steps"),
            Finding("no_debug_copies", not self.copies, sum(self.copies.values()), 0,
                    f"{copied} of cache or weights copied in {self.steps} decoding steps"),
        ]  # fmt: skip


def weights(engine: Engine) -> Iterator[Tensor]:
    """All weight tensors reachable from the model's attributes, including packed ones."""
    seen: set[int] = set()
    stack: list[Any] = [engine.model]
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            if item.layout == torch.strided and not item.is_mkldnn:
                yield item
        elif isinstance(item, torch.nn.Module):
            stack += [*item.parameters(), *item.buffers()]
        elif isinstance(item, list | tuple):
            stack += item
        elif callable(item) and getattr(item, "__closure__", None):
            stack += [cell.cell_contents for cell in item.__closure__]
        elif type(item).__module__.startswith("mlaforge.") and hasattr(item, "__dict__"):
            stack += vars(item).values()
