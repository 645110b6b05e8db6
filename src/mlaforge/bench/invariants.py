"""PERF_MODE: what must hold while the engine decodes, checked on a repetition that is not timed.

tuned_kernels     every call of an op ran the fastest implementation that is made for this device and can be had here,
                  and on CUDA every decoding step, but for those of partial verification, was a graph's replay
drafting_goes_on  every decoding sequence got room for all drafts that its end left to draft, and the drafter filled it
cache_integrity   tables, pools and sequences agree; every view says what the tables say; no slot is written twice
no_host_reads     at most one reading of a device's tensor per decoding step (the drawn tokens), one per proposal of a
                  head (a tree: one per level), those that partial verification is made of, and no waiting for it
no_debug_copies   nothing that lies in the cache or among the weights is cloned or copied to the host
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
from mlaforge.bench.peer import Variant
from mlaforge.engine.engine import Engine
from mlaforge.engine.execution.batch import Batch
from mlaforge.engine.execution.runner import Runner
from mlaforge.engine.speculation.controller import Decision
from mlaforge.engine.speculation.eagle3 import EagleDrafter
from mlaforge.engine.speculation.partial import LEAST_PENDING
from mlaforge.engine.speculation.step import Proposal
from mlaforge.ops import native
from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.dispatch import OPS, Op
from mlaforge.runtime import ops_choice

NOT_COMPILED = "it is not compiled"
CLONES = ("aten::clone", "aten::_to_copy", "aten::copy_")


@dataclasses.dataclass(frozen=True)
class Finding:
    """`value` beside what is `allowed`: at least that for tuned_kernels, at most for the others; `detail` in words."""

    name: str
    passed: bool
    value: float
    allowed: float
    detail: str


def together(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """One entry per invariant: the first case in which it broke, else the first of all, and how many there were."""
    entries = []
    for name in dict.fromkeys(finding.name for finding in findings):
        own = [finding for finding in findings if finding.name == name]
        example = next((finding for finding in own if not finding.passed), own[0])
        entries.append({
            "name": example.name, "passed": example.passed, "value": example.value, "allowed": example.allowed,
            "told": example.detail, "cases": len(own),
        })  # fmt: skip
    return entries


class Audit:
    """Watches one engine while it decodes."""

    def __init__(self, peer: EnginePeer):
        self.peer, self.engine = peer, peer.engine
        self.ran: Counter[str] = Counter()
        self.untuned: Counter[str] = Counter()
        self.drafts = Counter[str]()
        self.views = 0
        self.broken_views: list[str] = []
        self.hook = Hook(self.engine)

    def run(self, prompts: list[list[int]], tokens: int, variant: Variant) -> list[Finding]:
        """Two repetitions, the first watched; every invariant's finding."""
        with self.watching():
            first = self.peer.run(prompts, tokens, variant).token_ids
        again = self.peer.run(prompts, tokens, variant).token_ids
        drafting = [self.drafting(variant)] if variant.count else []
        return [self.tuned(), *drafting, self.integrity(), *self.hook.findings(), _same(first, again)]

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """With every counter in place; afterwards they are removed."""
        # mypy lets nobody replace methods of an object that runs; watching it is just that.
        engine, peer_use = self.engine, self.peer.use
        runner, step = engine.runner, engine.step

        def use(variant: Variant, answers: list[list[int]], prompts: list[list[int]]) -> None:
            peer_use(variant, answers, prompts)
            if engine.speculation is not None:
                engine.speculation.propose = self._proposing(engine.speculation.propose)  # type: ignore[method-assign]
                if (partial := engine.speculation.partial) is not None:
                    partial.runner = functools.partial(run, runner=partial.runner)  # type: ignore[assignment]

        def run(batch: Batch, runner: Runner = runner) -> Tensor:
            self.views += 1
            with self.hook.paused():
                self.broken_views += check_batch(batch, engine)
            if self.hook.decoding and engine.speculation is not None and (partial := engine.speculation.partial):
                # A partial step reads what the target agreed to, a full one what each layer attended to most.
                self.hook.extra += 1 if batch.partial else 0
                self.hook.extra += partial.layers * len(batch.probe.sequences) if batch.probe is not None else 0
            return runner(batch)

        def counted() -> Any:
            # Steps in which all sequences decode: the loop that must not wait.
            self.hook.decoding = bool(engine.scheduler.running) and not engine.scheduler.waiting
            self.hook.decoding &= all(sequence.decoding for sequence in engine.scheduler.running)
            self.hook.steps += self.hook.decoding
            with self.hook:
                outputs = step()
            engine.check_integrity()
            return outputs

        def eager(batch: Batch) -> Tensor:
            # Partial verification has no graphs.
            self.hook.eager_decodes += self.hook.decoding and not batch.partial and batch.probe is None
            return former(batch)

        def captured(run: Callable[[], Tensor]) -> Any:
            # PyTorch waits for the device before a capture, once per bucket.
            with self.hook.paused():
                return capture(run)

        former = runner.eager
        with contextlib.ExitStack() as restored:
            if (graphs := runner.graphs) is not None:
                capture, graphs.capture = graphs.capture, captured
                restored.callback(setattr, graphs, "capture", capture)
            for op in OPS.values():
                op.hook = self._watching(op)
                restored.callback(setattr, op, "hook", None)
            engine.runner = run  # type: ignore[assignment]
            restored.callback(setattr, engine, "runner", runner)
            for owner, name, value in ((self.peer, "use", use), (engine, "step", counted), (runner, "eager", eager)):
                setattr(owner, name, value)
                restored.callback(delattr, owner, name)
            restored.enter_context(self.hook.synchronisation())
            yield

    def _watching(self, op: Op) -> Callable[[str, Sequence[Any]], None]:
        def watch(name: str, inputs: Sequence[Any]) -> None:
            self.ran[f"{op.name} by {name}"] += 1
            if (reason := untuned(op, name, inputs)) is not None:
                self.untuned[f"{op.name} by {name}: {reason}"] += 1

        return watch

    def _proposing(self, propose: Callable[..., Proposal]) -> Callable[..., Proposal]:
        def watched(decision: Decision, chunks: list[tuple[Any, int]]) -> Proposal:
            reserved = {sequence: upto - len(sequence.token_ids) for sequence, upto in chunks if sequence.decoding}
            proposal = propose(decision, chunks)
            speculation = self.engine.speculation
            assert speculation is not None
            if self.hook.decoding and proposal.budgets and isinstance(speculation.drafter, EagleDrafter):
                self.hook.extra += max(map(decision.depth, proposal.budgets)) if decision.tree else 1
            for sequence, room in reserved.items():
                params = sequence.request.params
                left = min(
                    params.max_tokens - sequence.state.generated - 1,
                    self.engine.max_model_len - len(sequence.token_ids) - 1,
                )
                # How many may be pending is learned.
                most = speculation.controller.most
                wanted = max(0, min(min(most, LEAST_PENDING) if decision.partial else most, left))
                self.drafts["asked"] += wanted > 0
                self.drafts["disabled"] += room < wanted
                draft = proposal.drafts.get(sequence)
                least = min(room, LEAST_PENDING) if decision.partial else room
                self.drafts["empty"] += room > 0 and (draft is None or len(draft.token_ids) < least)
            return proposal

        return watched

    def tuned(self) -> Finding:
        calls, wrong = sum(self.ran.values()), sum(self.untuned.values())
        # A graph's steps do not come by here: only what was captured, or ran without one.
        graphs = self.engine.runner.graphs
        eager = self.hook.eager_decodes if graphs is not None else 0
        hits = (calls - wrong - eager) / calls if calls else 1.0
        detail = ", ".join(f"{count} of {calls} calls {name}" for name, count in (self.untuned or self.ran).items())
        if eager:
            detail = f"{eager} decoding steps without a graph; {detail}"
        if "check" in ops_choice().split(","):
            return Finding("tuned_kernels", False, 0.0, 1.0, "MLAFORGE_OPS=check computes everything twice")
        detail = detail or "no op with several implementations was called"
        return Finding("tuned_kernels", hits == 1.0, hits, 1.0, detail)

    def drafting(self, variant: Variant) -> Finding:
        steps, disabled = self.drafts["asked"], self.drafts["disabled"]
        # Prompt lookup may find nothing; a head and a replay always have something to say.
        empty = 0 if variant.draft == "ngram" else self.drafts["empty"]
        detail = (
            f"of {steps} steps {disabled} got less room than drafts, the drafter left {self.drafts['empty']} unfilled"
        )
        return Finding("drafting_goes_on", not disabled and not empty, disabled + empty, 0, detail)

    def integrity(self) -> Finding:
        wrong = self.broken_views
        detail = wrong[0] if wrong else f"{self.views} steps' views agree with the tables"
        return Finding("cache_integrity", not wrong, len(wrong), 0, detail)


def _same(first: list[list[int]], again: list[list[int]]) -> Finding:
    differ = sum(a != b for a, b in zip(first, again, strict=True))
    detail = f"{differ} of {len(first)} answers differ when they are made again"
    return Finding("deterministic", not differ, differ, 0, detail)


def untuned(op: Op, name: str, inputs: Sequence[Any]) -> str | None:
    """Why what ran is not the fastest implementation that can be had here; None where it is."""
    for candidate, implementation in op.implementations.items():
        if implementation.device_type != inputs[0].device.type:
            continue
        if candidate == name:
            return None
        reason = implementation.supports(*inputs)
        if reason is True:
            return f"{candidate} would run here"
        # Made for other inputs, or for another processor: there is nothing faster to be had.
        if reason == NOT_COMPILED and native.form() is not None:
            return f"not {candidate}: {reason}"
        if not implementation.quiet:
            return f"not {candidate}: {reason}"
    return "the reference ran" if name == "reference" else None


def check_batch(batch: Batch, engine: Engine) -> list[str]:
    """What a step's views say that the engine's tables do not; nothing where they agree."""
    wrong: list[str] = []
    numbers = [sequence.number for sequence in engine.scheduler.running]
    for group, view in enumerate(batch.views):
        tables = [engine.tables.table(number, group) for number in numbers]
        wrong += [f"group {group}: {line}" for line in check_view(view, batch.positions_N.tolist(), tables)]
    return wrong


def check_view(view: CacheView, positions: list[int], tables: list[tuple[int, list[int]]]) -> list[str]:
    """The view of one group against (first position, blocks) of the running sequences, and against itself."""
    wrong, size = [], view.block_size
    starts, lengths = view.query_start_S1.tolist(), view.seq_lens_S.tolist()
    slots, rows = view.slots_N.tolist(), view.block_table_SB.tolist()
    for s, (length, first) in enumerate(zip(lengths, view.first_S.tolist(), strict=True)):
        queries = starts[s + 1] - starts[s]
        expected = list(range(length - queries, length))
        own = slice(starts[s], starts[s + 1])
        if positions[own] != expected:
            wrong.append(f"sequence {s}: queries stand at {positions[own][:4]}, not {expected[:4]}")
        blocks = rows[s][: -(-(length - first) // size)]
        if not any(begin == first and table[: len(blocks)] == blocks for begin, table in tables):
            wrong.append(f"sequence {s}: blocks {blocks[:4]} from position {first} on belong to no running sequence")
        where = [blocks[(p - first) // size] * size + (p - first) % size for p in expected]
        if slots[own] != where:
            wrong.append(f"sequence {s}: writes to slots {slots[own][:4]}, not {where[:4]}")
        run_slots = [slot for start, count in view.runs[s] for slot in range(start, start + count)]
        listed = [blocks[row // size] * size + row % size for row in range(length - first)]
        if run_slots != listed:
            wrong.append(f"sequence {s}: its stretches of the cache are not its blocks")
    if len(set(slots)) < len(slots):
        wrong.append("a slot is written twice")
    return wrong


class Hook(TorchDispatchMode):
    """Counts, operation by operation, what a decoding loop must not do."""

    def __init__(self, engine: Engine):
        super().__init__()
        self.engine = engine
        self.decoding = False
        # `extra` are the readings of heads and of partial verification.
        self.steps = self.eager_decodes = self.reads = self.waits = self.extra = 0
        self.copies: Counter[str] = Counter()
        self.storages = {tensor.untyped_storage().data_ptr() for tensor in engine.cache.tensors}
        self.storages |= {tensor.untyped_storage().data_ptr() for tensor in weights(engine)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # In inference mode `item`, `to` and `contiguous` come whole; what they are made of is what counts.
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
        # A cast is arithmetic in another precision; the same numbers a second time are not.
        same = source.dtype == target.dtype
        if same and source.untyped_storage().data_ptr() in self.storages:
            self.copies[f"{name.removeprefix('aten::')} of {list(source.shape)}"] += 1

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is counted meanwhile."""
        decoding, self.decoding = self.decoding, False
        try:
            yield
        finally:
            self.decoding = decoding

    @contextlib.contextmanager
    def synchronisation(self) -> Iterator[None]:
        """Waiting for a device counts too."""
        places = [(torch.cuda, "synchronize"), (torch.cuda.Stream, "synchronize"), (torch.cuda.Event, "synchronize")]
        formers = [getattr(owner, name) for owner, name in places]

        def counting(former: Callable[..., Any]) -> Callable[..., Any]:
            def waited(*args: Any, **kwargs: Any) -> Any:
                self.waits += self.decoding
                return former(*args, **kwargs)

            return waited

        try:
            for (owner, name), former in zip(places, formers, strict=True):
                setattr(owner, name, counting(former))
            yield
        finally:
            for (owner, name), former in zip(places, formers, strict=True):
                setattr(owner, name, former)

    def findings(self) -> list[Finding]:
        """What the decoding steps came to."""
        # On a CPU the drawn tokens are read where they lie.
        allowed = self.steps + self.extra if self.engine.device.type != "cpu" else 0
        many = self.reads + self.waits
        copied = ", ".join(f"{count} x {what}" for what, count in self.copies.most_common(2)) or "nothing"
        return [
            Finding("no_host_reads", many <= allowed, many, allowed,
                    f"{self.reads} readings and {self.waits} waits in {self.steps} decoding steps"),
            Finding("no_debug_copies", not self.copies, sum(self.copies.values()), 0,
                    f"{copied} of cache or weights copied in {self.steps} decoding steps"),
        ]  # fmt: skip


def weights(engine: Engine) -> Iterator[Tensor]:
    """The tensors that the model's layers hold as attributes, packed ones among them."""
    seen: set[int] = set()
    waiting: list[Any] = [engine.model]
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            if item.layout == torch.strided and not item.is_mkldnn:
                yield item
        elif isinstance(item, torch.nn.Module):
            waiting += [*item.parameters(), *item.buffers()]
        elif isinstance(item, list | tuple):
            waiting += item
        elif callable(item) and getattr(item, "__closure__", None):
            waiting += [cell.cell_contents for cell in item.__closure__]
        elif type(item).__module__.startswith("mlaforge.") and hasattr(item, "__dict__"):
            waiting += vars(item).values()
