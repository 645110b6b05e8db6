"""The synchronous engine: `add` requests, `step`, and receive new outputs per step. `LLM` and the server use it."""

from __future__ import annotations

import dataclasses
import itertools
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.engine.builder import Builder
from mlaforge.engine.config import EngineConfig
from mlaforge.engine.execution.batch import make_batch
from mlaforge.engine.execution.nvtx import span
from mlaforge.engine.request import grammar_wait
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
from mlaforge.engine.scheduler import SchedulerOutput
from mlaforge.engine.speculation.drafter import Drafter
from mlaforge.engine.speculation.policy import Decision
from mlaforge.engine.speculation.sparse_view import SparseViewConfig
from mlaforge.engine.speculation.speculation import Proposal, Speculation
from mlaforge.engine.speculation.verification import Verified, verify
from mlaforge.engine.stats import EngineStats
from mlaforge.engine.step import Computed, Drawn, Part, Settled, parts, read_prompt_logprobs
from mlaforge.ops import tuned
from mlaforge.runtime import UserError, log, on_device


class Engine:
    """A model, its paged cache, scheduler, sampler and drafter. Not thread-safe: one caller at a time.

    `model` is a directory (original or converted), a .gguf file or a hub id. Raises UserError for a model that cannot
    be loaded, an invalid setting, or a cache that is too small for one sequence.
    """

    def __init__(self, model: str | Path | SourceModel, config: EngineConfig | None = None):
        self._builder = build = Builder(model, config or EngineConfig())
        self.config, self.device, source = build.config, build.device, build.source
        self.model_name, self.tokenizer = source.path.name, source.tokenizer
        self.vocab_size, self.max_model_len = source.spec.vocab_size, build.max_model_len
        self.eos_token_ids = end_token_ids(source)
        # For callers, which set what a request leaves unset. `add` uses SamplingParams as they are.
        self.sampling_defaults = sampling_defaults(
            source.generation_config if self.config.generation_config == "auto" else {}
        )
        self.model, self.runner, self.cache, self.tables = build.model, build.runner, build.cache, build.tables
        self.step_bytes, self.scheduler = build.step_bytes(build.model), build.scheduler()
        self.sampler, self.grammars = Sampler(), Grammars(self.tokenizer, self.eos_token_ids)
        self.speculation: Speculation | None = None
        self.set_drafter(build.drafter())
        self._sequence_numbers = itertools.count()
        self._requests: dict[str, Request] = {}
        self._stats = EngineStats(cache_blocks=self.tables.num_blocks, cache_bytes=self.cache.bytes)

    def set_drafter(
        self, drafter: Drafter | None, num_tokens: int | None = None, prompt_lookup: bool | None = None,
        view: SparseViewConfig | None = None, **options: Any,
    ) -> None:  # fmt: skip
        """Draft up to `num_tokens` tokens with `drafter` from the next step on; None: draft nothing.

        prompt_lookup  drafts by prompt lookup go first; by default where speculation is adaptive
        view           tokens of sparse-view steps, instead of those that the options give
        options        speculation options of EngineConfig, which replace the engine's from now on

        A drafter that reads captured states must be set before the first request: it lacks the states of tokens that
        were computed earlier."""
        if num_tokens is not None:
            options["num_speculative_tokens"] = num_tokens
        self.config = config = dataclasses.replace(self.config, **options)
        self.speculation, self.model.boundaries = None, ()
        if drafter is not None:
            lookup = config.adaptive_speculation if prompt_lookup is None else prompt_lookup
            self.speculation = self._builder.speculation(drafter, config, lookup, view)

    def add(self, request_id: str, prompt_ids: list[int], params: SamplingParams) -> None:
        """Queue a request. Raises UserError, without any effect, where the request can never run.

        Waits until its grammar is compiled, unless `check_grammar` was called before.
        """
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
        """Raise UserError where the parameters' grammar cannot be followed or costs too much. May be called in any
        thread."""
        self.grammars.check(params)

    def _sequence(self, request: Request, index: int) -> Sequence:
        params, prompt = request.params, request.prompt_ids
        constraint = Constraint(self.grammars, params) if params.constrained else None
        return Sequence(
            next(self._sequence_numbers), request, index, list(prompt),
            SamplingState(params, prompt, self.vocab_size, self.eos_token_ids, self.device, constraint, index),
            Stopping(self.tokenizer, params, prompt, self.eos_token_ids, self.max_model_len),
        )  # fmt: skip

    def abort(self, request_id: str) -> None:
        """Stop a request and free its blocks; an unknown or finished id has no effect."""
        if request_id not in self._requests:
            return
        request = self._remove(request_id)
        for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
            if sequence.request is request:
                self.scheduler.finish(sequence)
        self._stats.aborted_requests += 1

    def _remove(self, request_id: str) -> Request:
        request = self._requests.pop(request_id)
        for sequence in request.sequences:
            if sequence.state.constraint is not None:
                sequence.state.constraint.close()
        return request

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix, for measurements. Raises UserError while there are requests."""
        if self.has_work:
            raise UserError("the prefix cache can only be reset while no request runs or waits")
        self.tables.reset_prefix_cache()

    def warm_up(self) -> None:
        """Compile the GPU kernels that steps of any lengths use, by computing chunks of prompts of three lengths and
        decoding; statistics and the prefix cache start anew. Without a GPU there is nothing to compile. Raises
        UserError while there are requests."""
        if self.device.type != "cuda":
            return
        log("compiling GPU kernels for steps of any length")
        most = max(1, min(self.scheduler.max_num_batched_tokens, self.max_model_len - 2))
        for length in sorted({1, min(24, most), most}):
            self.add("warm-up", [0] * length, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
            while self.has_work:
                self.step()
        self.reset_prefix_cache()
        self._stats = EngineStats(cache_blocks=self.tables.num_blocks, cache_bytes=self.cache.bytes)

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """Compute one step and return the new outputs per request. engine/step.py has the phases."""
        speculation, queue, began = self.speculation, self.scheduler, time.perf_counter()
        failed = [self._fail(request, reason) for request, reason in grammar_wait.resume(queue.running).items()]
        decision = speculation.policy.decide(queue.running, bool(queue.waiting)) if speculation else Decision()
        scheduled = queue.schedule(decision.tokens)
        if not scheduled.chunks:
            grammar_wait.resume(queue.running, grammar_wait.IDLE_SECONDS)
            return failed
        grammar_wait.start_compilation(sequence for sequence, _ in scheduled.chunks)
        settled = self._settle(self._draw(self._compute(self._propose(decision, scheduled)), began), began)
        outputs = self._make_outputs(self._commit(settled))
        return failed + outputs + [self._fail_non_finite(request) for request in settled.non_finite]

    def _fail_non_finite(self, request: Request) -> RequestOutput:
        """End a request whose logits have NaN or infinity, and remove its tokens from the prefix cache: NaN reaches
        earlier tokens too, where a masked value is multiplied by 0."""
        for sequence in self.scheduler.running:
            if sequence.request is request:
                self.tables.unpublish(sequence.number)
        self._stats.non_finite_requests += 1
        return self._fail(request, NonFiniteLogits.explain(self.model.format), non_finite=True)

    def _fail(self, request: Request, reason: str, **fields: Any) -> RequestOutput:
        """End a request that cannot be continued."""
        self.abort(request.id)
        ended = [Completion(s.index, [], "", None, "error") for s in request.sequences if not s.stopping.finished]
        return _output(request, ended, finished=True, error=reason, **fields)

    def _propose(self, decision: Decision, scheduled: SchedulerOutput) -> Proposal:
        """Propose drafts. They are written to the reserved room, so shared blocks are copied first."""
        self.cache.copy(scheduled.copies)
        if self.speculation is None:
            return Proposal(scheduled.chunks)
        return self.speculation.propose(decision, scheduled.chunks)

    def _compute(self, proposal: Proposal) -> Computed:
        """Run the model on every sequence's chunk, with its draft."""
        step_parts = parts(proposal)
        batch = make_batch([part.chunk for part in step_parts], self.tables, self.device)
        if proposal.probe is not None:
            batch = dataclasses.replace(batch, probe=proposal.probe)
        # Hidden states, then the captured states.
        hidden_and_states_NX = self.runner(batch)
        self._stats.steps += 1
        self._stats.computed_tokens += len(hidden_and_states_NX)
        read = self.step_bytes((len(part.rows), part.chunk.stop, part.chunk.stop) for part in step_parts)
        total = proposal.sparse_bytes + read
        self._stats.weight_bytes_read += total.weights
        self._stats.cache_bytes_read += total.cache
        C = self.model.spec.hidden_size
        hidden_NC, states_NS = hidden_and_states_NX[:, :C], hidden_and_states_NX[:, C:]
        return Computed(proposal, step_parts, batch, hidden_NC, states_NS, read)

    def _draw(self, computed: Computed, began: float) -> Drawn:
        """Draw the next tokens of the sequences whose tokens have all been computed, and append them. `began`: start of
        the step (time.perf_counter())."""
        non_finite = read_prompt_logprobs(computed, self.model.logits)
        grammar_wait.wait_for_masks([part.sequence for part in computed.parts if part.draws], began)
        drawing: list[tuple[Sequence, Part]] = []
        ended: list[tuple[Sequence, Completion]] = []
        forks: list[tuple[Sequence, Sequence]] = []
        for part in computed.parts:
            sequence = part.sequence
            if part.chunk.stop < len(sequence.token_ids) or sequence.waiting_for_grammar:
                continue
            children = [] if part.prefilled else self._finish_prefill(sequence.request)
            forks += [(sequence, child) for child in children]
            for continuation in (sequence, *children):
                if sequence.request.params.max_tokens == 0:
                    ended.append((continuation, Completion(continuation.index, [], "", None, "length")))
                else:
                    drawing.append((continuation, part))
        verified = self._verify(computed.hidden_NC, drawing) if drawing else {}
        completions = [(sequence, result.completion) for sequence, result in verified.items()]
        non_finite += [sequence.request for sequence, result in verified.items() if result.non_finite]
        return Drawn(computed, verified, completions + ended, forks, [*dict.fromkeys(non_finite)], time.perf_counter())

    def _finish_prefill(self, request: Request) -> list[Sequence]:
        """Mark the prompt of a request as computed, and return the continuations to fork from the first one."""
        for sequence in request.sequences:
            sequence.prefilled = True
        self._stats.cached_prompt_tokens += request.num_cached_tokens
        return request.sequences[1:]

    def _verify(self, hidden_NC: Tensor, drawing: list[tuple[Sequence, Part]]) -> dict[Sequence, Verified]:
        """Draw and verify the next tokens of the sequences that end these parts of the step."""
        rows: list[int] = []
        first_rows: list[int] = []
        for _, part in drawing:
            first_rows.append(len(rows))
            # The newest token's row, and those of the draft after it.
            rows += part.rows[-1 - len(part.draft.token_ids) if part.draft else -1 :]
        # No copy where all rows are needed.
        if rows != list(range(len(hidden_NC))):
            hidden_NC = hidden_NC[on_device(rows, torch.int64, self.device)]
        sequences = [sequence for sequence, _ in drawing]
        with span("SAMPLE", self.device):
            logits = self.model.logits(hidden_NC)
            verified = verify(self.sampler, logits, sequences, [part.draft for _, part in drawing], first_rows)
        self._stats.generated_tokens += sum(len(result.completion.token_ids) for result in verified)
        return dict(zip(sequences, verified, strict=True))

    def _settle(self, drawn: Drawn, began: float) -> Settled:
        """Move the rows of a tree's accepted path together, and show the step to the drafter, while the step holds all
        of its blocks and they are not yet published. `began`: start of the step."""
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
            speculation.observe(starts, drawn.states() if self.model.boundaries else None)
            decoded = [
                (part.sequence, drawn.verified[part.sequence]) for part in computed.parts
                if part.decoding and not part.sequence.waiting_for_grammar
            ]  # fmt: skip
            alone = len(decoded) == len(sequences)
            speculation.record(computed.proposal, decoded, began, drawn.at, alone, computed.read)
        ended = drawn.non_finite
        return Settled(
            [sequence for sequence in sequences if sequence.request not in ended],
            [(sequence, new) for sequence, new in drawn.completions if sequence.request not in ended],
            [(parent, child) for parent, child in drawn.forks if parent.request not in ended], ended,
        )  # fmt: skip

    def _commit(self, settled: Settled) -> list[tuple[Sequence, Completion]]:
        """Publish what was computed to the prefix cache, and fork continuations."""
        for sequence in settled.sequences:
            self.tables.commit(sequence.number, sequence.token_ids, sequence.computed)
            if self.speculation is not None:
                # Free the room of drafted tokens that were rejected or not proposed.
                self.tables.rewind(sequence.number, sequence.computed)
        for parent, child in settled.forks:
            self.scheduler.fork(parent, child)
        return settled.completions

    def _make_outputs(self, completions: list[tuple[Sequence, Completion]]) -> list[RequestOutput]:
        """Return the new outputs per request, and remove finished sequences and requests."""
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
                    self._remove(request.id)
                    self._stats.finished_requests += 1
        return list(outputs.values())

    def stats(self) -> EngineStats:
        """Return counters since the start and the current usage."""
        self._stats.running, self._stats.waiting = len(self.scheduler.running), len(self.scheduler.waiting)
        self._stats.preemptions = self.scheduler.preemptions
        self._stats.cache_blocks_used = self.tables.used
        self._stats.speculation = None if self.speculation is None else self.speculation.stats.copy()
        self._stats.cache_bytes_used = sum(self.cache.bytes_used(self.tables))
        calls = tuned.totals()
        self._stats.tuned_hits, self._stats.tuned_defaults = calls["hit"], calls["default"]
        self._stats.tuned_misses = calls["miss"]
        return dataclasses.replace(self._stats)

    def check_integrity(self) -> None:
        """Raise AssertionError unless tables, pools and sequences agree. For tests: visits every block."""
        self.tables.check_integrity()
        numbers = {sequence.number for sequence in self.scheduler.running}
        assert self.tables.sequences == numbers, f"{self.tables.sequences} are in the cache, {numbers} are running"


def _output(request: Request, completions: list[Completion], **fields: Any) -> RequestOutput:
    return RequestOutput(
        request.id, request.prompt_ids, completions, num_cached_tokens=request.num_cached_tokens,
        arrived=request.arrived, first_token=request.first_token, **fields,
    )  # fmt: skip
