"""The engine as one of a run's peers: loaded once per model and dtype, drafters take turns on it."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import torch

from mlaforge.bench.machine import Memory
from mlaforge.bench.peer import PLAIN, DoesNotFit, Repetition, Variant
from mlaforge.bench.replay import Replay
from mlaforge.engine.config import EngineConfig
from mlaforge.engine.engine import Engine
from mlaforge.engine.llm import LLM
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.engine.speculation.drafter import Drafter
from mlaforge.engine.speculation.lookup import PromptLookupDrafter
from mlaforge.engine.speculation.sparse_view import SparseViewConfig, sparse_view_format
from mlaforge.ops.native import kernels
from mlaforge.runtime import UserError, resolve_device

# Passes after which a replayed text is taken as it is: in bf16 a verified text may part from plain decoding at a tie.
PASSES = 6


class EnginePeer:
    """mlaforge's engine. `longest` is prompt and answer of the longest case, `most` the largest batch. `keeps`: what
    one repetition left in the prefix cache serves the next."""

    name = "mlaforge"

    def __init__(
        self, directory: Path, model: str, head: Path | None, config: EngineConfig, longest: int, most: int,
        keeps: bool = False,
    ):  # fmt: skip
        self.model, self.keeps = model, keeps
        device = resolve_device(config.device)
        config = config.for_device(device)
        assert config.max_num_batched_tokens is not None
        drafted = max(config.drafted, config.specpv_max_pending)
        config = dataclasses.replace(
            config, max_model_len=longest, max_num_seqs=most, adaptive_speculation=False,
            speculative=str(head) if head else "none",
            max_num_batched_tokens=max(config.max_num_batched_tokens, most * (1 + drafted)),
        )  # fmt: skip
        self.memory = Memory(device)
        before = self.memory.now()
        self.llm = LLM(directory, config)
        self.engine: Engine = self.llm.engine
        self.dtype = self.engine.model.format
        # View of sparse-view steps, and their weight format.
        self.view = SparseViewConfig.from_options(config, self.engine.model.layers)
        self.judged = sparse_view_format(config, self.engine.model)
        cache_bytes = self.engine.cache.bytes if self.engine.device.type == "cuda" else 0
        self.weight_bytes: int | None = max(0, self.memory.now() - before - cache_bytes)
        self.head: Drafter | None = self.engine.speculation.drafter if self.engine.speculation else None
        # What plain decoding gave, by the prompts.
        self.answers: dict[tuple[int, ...], list[list[int]]] = {}

    def close(self) -> None:
        del self.llm, self.engine, self.head

    def check_room(self, context: int, batch: int, tokens: int) -> None:
        """DoesNotFit where model or cache hold less than the case needs."""
        engine, length = self.engine, context + tokens + 1
        most = engine.model.spec.max_position_embeddings
        if length > most:
            told = f"the model's context is {most:,} tokens, {length:,} are needed"
            raise DoesNotFit(told, "a smaller --context", batch * most)
        size = engine.tables.block_size
        full = [group.num_blocks for group in engine.cache.groups if group.window is None]
        need = batch * -(-length // size)
        if full and need > min(full):
            raise DoesNotFit(
                f"the cache holds {min(full) * size:,} tokens, {batch} x {length:,} need {need * size:,}",
                "a larger --cache-fraction, a smaller --batch or --context, or a model converted with a smaller budget",
                min(full) * size,
            )

    def reads_all(self, context: int) -> str | None:
        """Why steps of prompts of so many tokens would not judge by a part of the cache, or by no kernel that is worth
        measuring; None where they would."""
        model, groups = self.engine.model, self.engine.tables.groups
        if all(groups[layer.attention.group].window is not None for layer in model.layers):
            return "all layers have a window"
        if context < self.view.min_length:
            return f"a view takes texts of {self.view.min_length:,} tokens or more"
        if model.device.type == "cpu" and (model.dtype != torch.bfloat16 or kernels() is None):
            return f"in {self.dtype} no kernel of this machine reads a part"
        return None

    def check_idle(self) -> None:
        """AssertionError where a case left anything behind: a request, or a block that is not free again."""
        assert not self.engine.has_work, "requests are left"
        # Of no sequence: whatever block is not free now is a leak, and is told.
        self.engine.check_integrity()

    def use(self, variant: Variant, answers: list[list[int]], prompts: list[list[int]]) -> None:
        """From now on draft as `variant` says, with counters at nothing; `answers` is what a replay proposes."""
        engine = self.engine
        engine.speculation, engine.model.boundaries = None, ()
        if not variant.count:
            return
        engine.config = dataclasses.replace(engine.config, num_speculative_tokens=variant.count, specpv=variant.specpv)
        if variant.draft == "ngram":
            engine.speculate(PromptLookupDrafter())
        elif variant.draft == "replay":
            both = enumerate(zip(prompts, answers, strict=True))
            engine.speculate(Replay({str(index): prompt + answer for index, (prompt, answer) in both}))
        else:
            assert self.head is not None
            engine.speculate(self.head)

    def run(self, prompts: list[list[int]], tokens: int, variant: Variant) -> Repetition:
        """As Peer.run. The prompts are computed with nothing cached, or found where an earlier repetition's are kept;
        then found again and continued, so that all requests begin to decode together."""
        self.check_room(len(prompts[0]), len(prompts), tokens)
        key = tuple(hash(tuple(prompt)) for prompt in prompts)
        answers = self.answers.get(key, [])
        if variant.draft == "replay" and not answers:
            raise UserError("draft replay needs plain decoding beside it; add 0 to --num-speculative-tokens")
        try:
            if not self.keeps:
                self.engine.forget()
            self.use(variant, answers, prompts)
            before = self.engine.stats().cached_prompt_tokens
            first = self.decode(prompts, 0).first
            found = self.engine.stats().cached_prompt_tokens - before
            for _ in range(PASSES if variant.draft == "replay" else 0):
                replayed = self.decode(prompts, tokens).token_ids
                if replayed == answers:
                    break
                answers = replayed
                self.use(variant, answers, prompts)
            self.use(variant, answers, prompts)
            repetition = self.decode(prompts, tokens)
        finally:
            for index in range(len(prompts)):
                self.engine.abort(str(index))
        if variant == PLAIN:
            self.answers[key] = repetition.token_ids
        cached = repetition.first if self.engine.config.prefix_caching else None
        return dataclasses.replace(repetition, first=None if found else first, first_cached=cached)

    def decode(self, prompts: list[list[int]], tokens: int) -> Repetition:
        """The prompts (as far as they are cached, found again) and `tokens` tokens each after the first."""
        engine = self.engine
        params = SamplingParams(temperature=0.0, max_tokens=tokens + 1, ignore_eos=True)
        start = time.perf_counter()
        for index, prompt in enumerate(prompts):
            engine.add(str(index), prompt, params)
        last: dict[str, float] = {}
        token_ids: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
        began, gaps, count, most = 0.0, [], 0, 0
        while engine.has_work:
            outputs = engine.step()
            now = time.perf_counter()
            decoding = len(last) == len(prompts)
            for output in outputs:
                output.raise_for_error()
                new = output.outputs[0].token_ids
                token_ids[output.request_id] += new
                if decoding:
                    gaps += [(now - last[output.request_id]) / len(new)] * len(new)
                    count += len(new)
                last[output.request_id] = now
            if not decoding and len(last) == len(prompts):
                began = now
            most = max(most, self.used_cache_bytes())
        return Repetition(
            began - start, count, time.perf_counter() - began, gaps, list(token_ids.values()), cache_bytes=most or None,
            speculation=engine.speculation.stats if engine.speculation else None,
        )  # fmt: skip

    def used_cache_bytes(self) -> int:
        """Bytes of the model's own cache that requests hold; a draft head's rows are not among them."""
        engine = self.engine
        used = zip(engine.cache.groups, engine.cache.bytes_used(engine.tables), strict=True)
        return sum(size for group, size in used if group.name != "draft")
