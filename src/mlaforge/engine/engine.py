"""The synchronous engine: requests in, one step at a time, what is new out. `LLM` and the server stand on it."""

from __future__ import annotations

import dataclasses
import itertools
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlaforge.checkpoint.converted_config import is_sparse
from mlaforge.checkpoint.eagle3 import check_head, read_head
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.engine.cache.block_tables import BlockTables
from mlaforge.engine.cache.device_tables import DeviceTables
from mlaforge.engine.cache.kv_cache import Cache
from mlaforge.engine.config import EngineConfig
from mlaforge.engine.contradictions import check_deterministic, checked
from mlaforge.engine.execution.attention import paged
from mlaforge.engine.execution.batch import make_batch
from mlaforge.engine.execution.model import EngineModel, choose_format
from mlaforge.engine.execution.nvtx import span
from mlaforge.engine.execution.runner import Runner
from mlaforge.engine.execution.step_bytes import StepBytesModel
from mlaforge.engine.memory import cache_layout
from mlaforge.engine.request import held
from mlaforge.engine.request.ends import end_token_ids
from mlaforge.engine.request.output import Completion, NonFiniteLogits, RequestOutput
from mlaforge.engine.request.sequence import Request, Sequence, check_prompt
from mlaforge.engine.request.stopping import Stopping
from mlaforge.engine.sampling.constraint import Constraint
from mlaforge.engine.sampling.defaults import sampling_defaults
from mlaforge.engine.sampling.grammar import Grammars
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.engine.sampling.sampler import Sampler
from mlaforge.engine.sampling.state import SamplingState
from mlaforge.engine.scheduler import Plan, Scheduler
from mlaforge.engine.speculation.controller import NO_DRAFT, Controller, Decision
from mlaforge.engine.speculation.copies import Copies
from mlaforge.engine.speculation.drafter import Drafter, PromptLookupDrafter
from mlaforge.engine.speculation.eagle3 import EagleDrafter
from mlaforge.engine.speculation.partial import PartialVerification, judging_format
from mlaforge.engine.speculation.step import Proposal, Speculation
from mlaforge.engine.speculation.verification import Verified, verify
from mlaforge.engine.stats import EngineStats
from mlaforge.engine.step import Computed, Drawn, Part, Settled, parts, read_prompt_logprobs
from mlaforge.families.spec import ModelSpec
from mlaforge.modeling.eagle3 import Eagle3Head
from mlaforge.ops.token_selection import KEY_TILE
from mlaforge.runtime import UserError, log, on_device, resolve_device


class Engine:
    """A model, its paged cache and everything that runs on it. Not thread-safe: one caller at a time.

    `model` is a directory (original or converted), a .gguf file or a hub id. Raises UserError for what cannot be
    loaded, an impossible setting, or a cache that holds no sequence.
    """

    def __init__(self, model: str | Path | SourceModel, config: EngineConfig | None = None):
        config = config or EngineConfig()
        self.device = resolve_device(config.device)
        config = checked(config, self.device)
        block_size, step_tokens = config.block_size, config.max_num_batched_tokens
        assert block_size is not None and step_tokens is not None
        source = SourceModel.open(model)
        if config.dense:
            source = source.dense()
        if is_sparse(source.config) and block_size % KEY_TILE:
            raise UserError(f"block_size = {block_size} must be a multiple of {KEY_TILE} where a model is sparse")
        self.config, self.model_name = config, source.path.name
        self.tokenizer = source.tokenizer
        spec = source.spec
        format = choose_format(config.dtype, source, self.device)
        if config.deterministic:
            check_deterministic(format)
        self.model = EngineModel(source, format, self.device)
        self.vocab_size = spec.vocab_size
        self.max_model_len = min(config.max_model_len or spec.max_position_embeddings, spec.max_position_embeddings)
        self.eos_token_ids = end_token_ids(source)
        # For callers to fill what a request leaves unset; SamplingParams that reach the engine stand as they are.
        self.sampling_defaults = sampling_defaults(
            source.generation_config if config.generation_config == "auto" else {}
        )

        head = self._read_head(spec) if config.speculative not in ("none", "ngram") else None
        layers, groups = cache_layout(self.model, head, config, self.max_model_len, self.model_name)
        # Graphs write what fills up a batch to a block beyond the budget.
        spare = 1 if self.device.type == "cuda" else 0
        self.cache = Cache(layers, groups, block_size, self.model.dtype, self.device, spare)
        # On a CPU a table is where the host builds it; elsewhere a step uploads only what has changed of it.
        self.tables = (
            BlockTables(groups, block_size, config.prefix_caching)
            if self.device.type == "cpu"
            else DeviceTables(groups, block_size, config.prefix_caching, device=self.device)
        )
        self._layers = layers
        self._load(self.model)
        # No sequence outgrows the cache: it ends as at the end of the context.
        full = [group.num_blocks for group in groups if group.window is None]
        if full and min(full) * block_size < self.max_model_len:
            self.max_model_len = min(full) * block_size
            log(f"context cut to {self.max_model_len} tokens, which is what the cache holds; see --cache-bytes")
        self.runner = Runner(self.model, self.cache.scratch, config.max_num_seqs)
        self.step_bytes = self._step_bytes(self.model)
        self._source, self._judges = source, {self.model.format: (self.model, self.runner)}
        self.scheduler = Scheduler(self.tables, config.max_num_seqs, step_tokens, replays=is_sparse(source.config))
        self.sampler = Sampler()
        self.grammars = Grammars(self.tokenizer, self.eos_token_ids)
        self.speculation: Speculation | None = None
        if head is not None:
            group = len(groups) - 1
            self.speculate(EagleDrafter(
                head, self.model, self.cache.rows[-1],
                lambda chunks: make_batch(chunks, self.tables, self.device, (group,)),
            ), copying=config.adaptive_speculation)  # fmt: skip
        elif config.speculative == "ngram":
            self.speculate(PromptLookupDrafter(), copying=config.adaptive_speculation)
        self._numbers = itertools.count()
        self._requests: dict[str, Request] = {}
        self._stats = EngineStats(cache_blocks=self.tables.num_blocks, cache_bytes=self.cache.bytes)

    def _judge(self) -> tuple[EngineModel, Runner]:
        """What runs partial steps: the model, or the same with rounded weights, on the same cache."""
        format = judging_format(self.config, self.model)
        if format not in self._judges:
            judge = EngineModel(self._source, format, self.device)
            self._load(judge)
            judge.embedding = self.model.embedding
            self._judges[format] = judge, Runner(judge, self.cache.scratch, self.config.max_num_seqs)
        return self._judges[format]

    def _step_bytes(self, model: EngineModel) -> StepBytesModel:
        return StepBytesModel(model, self._layers, [group.window for group in self.tables.groups])

    def _load(self, model: EngineModel) -> None:
        """Its attention is on this engine's cache."""
        layers, own = self._layers, model.spec.layers
        model.load(
            lambda index, attention: paged(
                attention,
                layers[index].kind,
                layers[index].group,
                self.cache.rows[index],
                own[index].sinks,
                model.format,
            )
        )

    def _read_head(self, spec: ModelSpec) -> Eagle3Head:
        directory = Path(self.config.speculative)
        if not directory.is_dir():
            raise UserError(
                f"speculative = {self.config.speculative!r} must be none, ngram, or the directory of an EAGLE-3 head"
            )
        head = read_head(directory, spec.num_layers)
        check_head(head.config, spec.hidden_size, spec.vocab_size)
        return head

    def speculate(self, drafter: Drafter, copying: bool = False) -> None:
        """Lets `drafter` propose tokens. One that reads captured states must be there before the first request: what
        was computed without it is unknown to it. `copying`: what stood in a text before comes first (copies.py)."""
        config = self.config
        self.model.boundaries = drafter.boundaries
        partial = None
        if config.specpv != "off":
            judge, runner = self._judge()
            judge.boundaries = drafter.boundaries
            partial = PartialVerification(
                config, drafter, judge, runner, self._step_bytes(judge), self.tables, self.cache
            )
        lookup = drafter if isinstance(drafter, PromptLookupDrafter) else PromptLookupDrafter()
        # What is verified together shares one selection of a sparse model.
        most = config.drafted if is_sparse(self._source.config) else config.copied
        copies = Copies(most, lookup) if copying else None
        controller = Controller(
            config.drafted, config.adaptive_speculation, config.speculative_tree_tokens, partial,
            copies.most if copies else 0,
        )  # fmt: skip
        self.speculation = Speculation(drafter, controller, copies)

    def add(self, request_id: str, prompt_ids: list[int], params: SamplingParams) -> None:
        """Queue a request. Raises UserError where it can never run; nothing is kept of it then.

        Waits until its grammar is compiled, unless `check_grammar` was asked before."""
        if request_id in self._requests:
            raise UserError(f"request id {request_id!r} is in use; give another")
        check_prompt(prompt_ids, self.vocab_size, self.max_model_len, 0 if params.max_tokens == 0 else 1)
        if params.n > self.config.max_num_seqs:
            raise UserError(f"n = {params.n} is more than max_num_seqs = {self.config.max_num_seqs}")
        params.check_vocabulary(self.vocab_size)
        self.check_grammar(params)
        request = Request(request_id, list(prompt_ids), params)
        for index in range(params.n):
            request.sequences.append(self._sequence(request, index))
        request.unfinished = params.n
        self._requests[request_id] = request
        self.scheduler.add(request.sequences[0])
        self._stats.prompt_tokens += len(prompt_ids)

    def check_grammar(self, params: SamplingParams) -> None:
        """Raises UserError where the parameters' grammar cannot be followed, or costs too much. In any thread."""
        self.grammars.check(params)

    def _sequence(self, request: Request, index: int) -> Sequence:
        params, prompt = request.params, request.prompt_ids
        free = params.regex is None and params.json_schema is None
        constraint = None if free else Constraint(self.grammars, params)
        return Sequence(
            next(self._numbers), request, index, list(prompt),
            SamplingState(params, prompt, self.vocab_size, self.eos_token_ids, self.device, constraint, index),
            Stopping(self.tokenizer, params, prompt, self.eos_token_ids, self.max_model_len),
        )  # fmt: skip

    def abort(self, request_id: str) -> None:
        """Stop a request and give its blocks back; an unknown or finished id does nothing."""
        if request_id not in self._requests:
            return
        request = self._leave(request_id)
        for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
            if sequence.request is request:
                self.scheduler.finish(sequence)
        self._stats.aborted_requests += 1

    def _leave(self, request_id: str) -> Request:
        request = self._requests.pop(request_id)
        for sequence in request.sequences:
            if sequence.state.constraint is not None:
                sequence.state.constraint.close()
        return request

    def forget(self) -> None:
        """Forget every cached prefix, so that the next prompts are computed anew; for measuring. UserError while there
        are requests."""
        if self.has_work:
            raise UserError("prefixes can only be forgotten while no request runs or waits")
        self.tables.forget()

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """Computes what fits into one step and returns what is new, per request. engine/step.py has the phases."""
        speculation, queue, began = self.speculation, self.scheduler, time.perf_counter()
        failed = [self._fail(request, why) for request, why in held.release(queue.running).items()]
        decision = speculation.controller.decide(queue.running, bool(queue.waiting)) if speculation else NO_DRAFT
        plan = queue.schedule(decision.tokens)
        if not plan.chunks:
            held.release(queue.running, held.IDLE_SECONDS)
            return failed
        held.begin(sequence for sequence, _ in plan.chunks)
        settled = self._settle(self._draw(self._compute(self._propose(decision, plan)), began))
        outputs = self._hand_out(self._commit(settled))
        return failed + outputs + [self._overflowed(request) for request in settled.non_finite]

    def _overflowed(self, request: Request) -> RequestOutput:
        """Ends a request whose logits have NaN or infinity. What was computed of it is found by nobody: where a masked
        value is weighed by 0, one NaN reaches tokens before it too."""
        for sequence in self.scheduler.running:
            if sequence.request is request:
                self.tables.unpublish(sequence.number)
        self._stats.non_finite_requests += 1
        return self._fail(request, NonFiniteLogits.explain(self.model.format), non_finite=True)

    def _fail(self, request: Request, why: str, **news: Any) -> RequestOutput:
        """Ends a request that cannot be continued."""
        self.abort(request.id)
        ended = [Completion(s.index, [], "", None, "error") for s in request.sequences if not s.stopping.finished]
        return _output(request, ended, finished=True, error=why, **news)

    def _propose(self, decision: Decision, plan: Plan) -> Proposal:
        """Drafts are made in the room that was reserved, so what is shared of it is copied before."""
        self.cache.copy(plan.copies)
        if self.speculation is None:
            return Proposal(plan.chunks)
        return self.speculation.propose(decision, plan.chunks)

    def _compute(self, proposal: Proposal) -> Computed:
        """The model on every sequence's chunk, its draft included."""
        laid_out = parts(proposal)
        batch = make_batch([part.chunk for part in laid_out], self.tables, self.device)
        # Where there was no choice yet, a prompt may end whose tokens are judged so later.
        partial = self.speculation.partial if self.speculation and proposal.decision.partial is not False else None
        ends = [(part.sequence, min(part.chunk.stop, len(part.sequence.token_ids))) for part in laid_out]
        if partial is not None:
            batch = dataclasses.replace(batch, probe=partial.watch(ends))
        both_NC = self.runner(batch)
        if partial is not None and batch.probe is not None:
            partial.record(ends, batch.probe)
        self._stats.steps += 1
        self._stats.computed_tokens += len(both_NC)
        read = self.step_bytes((len(part.rows), part.chunk.stop, part.chunk.stop) for part in laid_out)
        whole = proposal.read + read
        self._stats.weight_bytes_read += whole.weights
        self._stats.cache_bytes_read += whole.cache
        C = self.model.spec.hidden_size
        return Computed(proposal, laid_out, batch, both_NC[:, :C], both_NC[:, C:], read)

    def _draw(self, computed: Computed, began: float) -> Drawn:
        """The next tokens of all whose tokens have been computed to the last, appended to them. The step began at that
        time (time.perf_counter())."""
        non_finite = read_prompt_logprobs(computed, self.model.logits)
        held.hold_late([part.sequence for part in computed.parts if part.draws], began)
        drawing: list[tuple[Sequence, Part]] = []
        ended: list[tuple[Sequence, Completion]] = []
        forks: list[tuple[Sequence, Sequence]] = []
        for part in computed.parts:
            sequence = part.sequence
            if part.chunk.stop < len(sequence.token_ids) or sequence.held:
                continue
            others = [] if part.prefilled else self._prefilled(sequence.request)
            forks += [(sequence, other) for other in others]
            for continuation in (sequence, *others):
                if sequence.request.params.max_tokens == 0:
                    ended.append((continuation, Completion(continuation.index, [], "", None, "length")))
                else:
                    drawing.append((continuation, part))
        verified = self._verify(computed.hidden_NC, drawing) if drawing else {}
        completions = [(sequence, its.completion) for sequence, its in verified.items()]
        non_finite += [sequence.request for sequence, its in verified.items() if its.non_finite]
        return Drawn(computed, verified, completions + ended, forks, [*dict.fromkeys(non_finite)], time.perf_counter())

    def _prefilled(self, request: Request) -> list[Sequence]:
        """Those of the request's continuations that begin where its first one has just computed the prompt."""
        for each in request.sequences:
            each.prefilled = True
        self._stats.cached_prompt_tokens += request.num_cached_tokens
        return request.sequences[1:]

    def _verify(self, hidden_NC: Tensor, drawing: list[tuple[Sequence, Part]]) -> dict[Sequence, Verified]:
        """The next tokens of sequences that go on where these parts of the step end."""
        rows: list[int] = []
        firsts: list[int] = []
        for _, part in drawing:
            firsts.append(len(rows))
            # The newest token's row, and those of the draft after it.
            rows += part.rows[-1 - len(part.draft.token_ids) if part.draft else -1 :]
        # Where every row is one that somebody draws from, they are all there are.
        if rows != list(range(len(hidden_NC))):
            hidden_NC = hidden_NC[on_device(rows, torch.int64, self.device)]
        sequences = [sequence for sequence, _ in drawing]
        with span("SAMPLE", self.device):
            logits = self.model.logits(hidden_NC)
            verified = verify(self.sampler, logits, sequences, [part.draft for _, part in drawing], firsts)
        self._stats.generated_tokens += sum(len(its.completion.token_ids) for its in verified)
        return dict(zip(sequences, verified, strict=True))

    def _settle(self, drawn: Drawn) -> Settled:
        """The rows of a tree's path are moved together, and the drafter is shown the step: all of its blocks are held,
        and nobody else can find them yet."""
        computed, speculation = drawn.computed, self.speculation
        for part in computed.parts:
            part.sequence.computed = drawn.length(part)
        sequences = [part.sequence for part in computed.parts]
        if speculation is not None:
            if drawn.path is not None:
                self.cache.move(computed.batch.views, drawn.path)
            starts = [
                (s, part.chunk.start) for part in computed.parts if part.chunk.start < (s := part.sequence).computed
            ]
            if speculation.drafter.boundaries and starts:
                speculation.drafter.observe(starts, drawn.states())
            decoded = [
                (part.sequence, drawn.verified[part.sequence]) for part in computed.parts
                if part.decoding and not part.sequence.held
            ]  # fmt: skip
            rows = len(computed.hidden_NC) if len(decoded) == len(sequences) else None
            speculation.end(computed.proposal, decoded, drawn.at, rows, computed.read)
        ended = drawn.non_finite
        return Settled(
            [sequence for sequence in sequences if sequence.request not in ended],
            [(sequence, new) for sequence, new in drawn.completions if sequence.request not in ended],
            [(parent, child) for parent, child in drawn.forks if parent.request not in ended], ended,
        )  # fmt: skip

    def _commit(self, settled: Settled) -> list[tuple[Sequence, Completion]]:
        """What was computed may be found as a prefix from now on; continuations share it."""
        for sequence in settled.sequences:
            self.tables.commit(sequence.number, sequence.token_ids, sequence.computed)
            if self.speculation is not None:
                # Room that was reserved for drafted tokens, refused or never proposed.
                self.tables.rewind(sequence.number, sequence.computed)
        for parent, child in settled.forks:
            self.scheduler.fork(parent, child)
        return settled.completions

    def _hand_out(self, completions: list[tuple[Sequence, Completion]]) -> list[RequestOutput]:
        """What is new per request. Those that have ended leave."""
        outputs: dict[str, RequestOutput] = {}
        for sequence, completion in completions:
            request = sequence.request
            if request.id not in outputs:
                outputs[request.id] = _output(request, [], prompt_logprobs=request.prompt_logprobs)
                request.prompt_logprobs = None
            output = outputs[request.id]
            if request.first_token is None:
                output.first_token = request.first_token = time.perf_counter()
            output.outputs.append(completion)
            if completion.finish_reason is not None:
                self.scheduler.finish(sequence)
                request.unfinished -= 1
                if not request.unfinished:
                    output.finished = True
                    self._leave(request.id)
                    self._stats.finished_requests += 1
        return list(outputs.values())

    def stats(self) -> EngineStats:
        """What was done since the start and what is held now."""
        self._stats.running, self._stats.waiting = len(self.scheduler.running), len(self.scheduler.waiting)
        self._stats.preemptions = self.scheduler.preemptions
        self._stats.cache_blocks_used = self.tables.used
        self._stats.speculation = None if self.speculation is None else self.speculation.stats.copy()
        self._stats.cache_bytes_used = sum(self.cache.bytes_used(self.tables))
        return dataclasses.replace(self._stats)

    def check_integrity(self) -> None:
        """AssertionError unless tables, pools and sequences agree. For tests: it looks at every block."""
        self.tables.check_integrity()
        numbers = {sequence.number for sequence in self.scheduler.running}
        assert self.tables.sequences == numbers, f"{self.tables.sequences} are in the cache, {numbers} are running"


def _output(request: Request, completions: list[Completion], **news: Any) -> RequestOutput:
    return RequestOutput(
        request.id, request.prompt_ids, completions, num_cached_tokens=request.num_cached_tokens,
        arrived=request.arrived, first_token=request.first_token, **news,
    )  # fmt: skip
