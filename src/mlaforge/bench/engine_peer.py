"""mlaforge's engine as a peer: loaded once per model and dtype and shared by all drafters."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from mlaforge.bench.decode import decode
from mlaforge.bench.machine import Memory
from mlaforge.bench.peer import PLAIN, DoesNotFit, Repetition, Variant
from mlaforge.bench.replay import Replay
from mlaforge.engine.config import EngineConfig
from mlaforge.engine.engine import Engine
from mlaforge.engine.llm import LLM
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.engine.speculation.drafter import Drafter
from mlaforge.engine.speculation.lookup import PromptLookupDrafter
from mlaforge.engine.speculation.policy import Policy
from mlaforge.engine.speculation.sparse_view import SparseViewConfig, sparse_view_format
from mlaforge.ops import native
from mlaforge.runtime import UserError, resolve_device

# Replay passes until the replayed text must be stable: in bf16 verification may differ from plain decoding at a tie.
MAX_REPLAY_PASSES = 6


class EnginePeer:
    """mlaforge's engine. max_length: prompt and answer tokens of the longest case. max_batch: the largest batch.
    keep_prefixes: keep the prefix cache between repetitions."""

    name = "mlaforge"

    def __init__(
        self, directory: Path, model: str, head: Path | None, config: EngineConfig, max_length: int, max_batch: int,
        keep_prefixes: bool = False,
    ):  # fmt: skip
        self.model, self.keep_prefixes, self.rows = model, keep_prefixes, config.kv_cache_dtype
        device = resolve_device(config.device)
        config = config.for_device(device)
        assert config.max_num_batched_tokens is not None
        drafted = max(config.max_draft_tokens, SparseViewConfig.from_options(config).max_provisional)
        config = dataclasses.replace(
            config, max_model_len=max_length, max_num_seqs=max_batch, adaptive_speculation=False,
            speculative=str(head) if head else "none",
            max_num_batched_tokens=max(config.max_num_batched_tokens, max_batch * (1 + drafted)),
        )  # fmt: skip
        self.memory = Memory(device)
        before = self.memory.now()
        self.llm = LLM(directory, config)
        self.engine: Engine = self.llm.engine
        self.dtype = self.engine.model.format
        # View and weight format of partial verification steps.
        self.view = SparseViewConfig.from_options(config, self.engine.model.layers)
        self.sparse_view_format_name = sparse_view_format(config, self.engine.model)
        cache_bytes = self.engine.cache.bytes if self.engine.device.type == "cuda" else 0
        self.weight_bytes: int | None = max(0, self.memory.now() - before - cache_bytes)
        self.head: Drafter | None = self.engine.speculation.drafter if self.engine.speculation else None
        # Output of plain decoding, by the hashes of the prompts.
        self.answers: dict[tuple[int, ...], list[list[int]]] = {}
        # Of adaptive variants: what was measured in one repetition is known in the next.
        self.policies: dict[Variant, Policy] = {}

    def close(self) -> None:
        del self.llm, self.engine, self.head, self.policies

    def check_room(self, context: int, batch: int, tokens: int) -> None:
        """Raise DoesNotFit if the case exceeds the model's context or the cache."""
        engine, length = self.engine, context + tokens + 1
        max_positions = engine.model.spec.max_position_embeddings
        if length > max_positions:
            message = f"the model's context is {max_positions:,} tokens, {length:,} are needed"
            raise DoesNotFit(message, "a smaller --context", batch * max_positions)
        size = engine.tables.block_size
        capacities = [group.num_blocks for group in engine.cache.groups if group.window is None]
        required = batch * -(-length // size)
        if capacities and required > min(capacities):
            raise DoesNotFit(
                f"the cache holds {min(capacities) * size:,} tokens, {batch} x {length:,} need {required * size:,}",
                "a larger --cache-fraction, a smaller --batch or --context, or a model converted with a smaller budget",
                min(capacities) * size,
            )

    def no_partial_reason(self, context: int) -> str | None:
        """Why partial verification does not apply to prompts of `context` tokens, or has no kernel worth measuring;
        None if it applies."""
        model, groups = self.engine.model, self.engine.tables.groups
        if all(groups[layer.attention.group].window is not None for layer in model.layers):
            return "all layers have a window"
        if context < self.view.min_length:
            return f"a view needs at least {self.view.min_length:,} tokens"
        if model.device.type == "cpu" and (model.dtype != torch.bfloat16 or not native.is_available()):
            return f"this machine has no kernel that reads a part of the cache in {self.dtype}"
        return None

    def check_idle(self) -> None:
        """Raise AssertionError if a case left a request or an allocated block behind."""
        assert not self.engine.has_work, "requests are left"
        # Without sequences, every block that is not free is a leak.
        self.engine.check_integrity()

    def set_variant(self, variant: Variant, answers: list[list[int]], prompts: list[list[int]]) -> None:
        """Switch to the drafting of `variant` and reset the counters. answers: token ids that a replay proposes."""
        engine = self.engine
        drafter = self.head if variant.count else None
        if variant.draft == "ngram" or (variant.draft == "default" and drafter is None):
            drafter = PromptLookupDrafter() if variant.count else None
        elif variant.count and variant.draft == "replay":
            pairs = enumerate(zip(prompts, answers, strict=True))
            drafter = Replay({str(index): prompt + answer for index, (prompt, answer) in pairs})
        assert drafter is not None or not variant.count
        adaptive, count = variant.draft == "default", variant.count or None
        engine.set_drafter(
            drafter, None if adaptive else count, view=self.view, specpv=variant.specpv != "off",
            speculative_tree_tokens=2 * variant.count if variant.draft == "tree" else 0, adaptive_speculation=adaptive,
        )  # fmt: skip
        if adaptive and engine.speculation is not None:
            # Repetitions go on with what earlier ones measured, as a server does.
            policy = self.policies.setdefault(variant, engine.speculation.policy)
            engine.speculation.policy.resume(policy)

    def run(self, prompts: list[list[int]], tokens: int, variant: Variant) -> Repetition:
        """See Peer.run. The prompts are computed without a cache, or with that of earlier repetitions under
        `keep_prefixes`; then they are found in the cache and continued, so that all requests begin to decode together.
        """
        self.check_room(max(map(len, prompts)), len(prompts), tokens)
        key = tuple(hash(tuple(prompt)) for prompt in prompts)
        answers = self.answers.get(key, [])
        if variant.draft == "replay" and not answers:
            raise UserError("draft replay needs the output of plain decoding; add 0 to --num-speculative-tokens")
        try:
            if not self.keep_prefixes:
                self.engine.reset_prefix_cache()
            self.set_variant(variant, answers, prompts)
            before = self.engine.stats().cached_prompt_tokens
            ttft = self.decode(prompts, 0).ttft
            cached_tokens = self.engine.stats().cached_prompt_tokens - before
            for _ in range(MAX_REPLAY_PASSES if variant.draft == "replay" else 0):
                replayed = self.decode(prompts, tokens).token_ids
                if replayed == answers:
                    break
                answers = replayed
                self.set_variant(variant, answers, prompts)
            self.set_variant(variant, answers, prompts)
            repetition = self.decode(prompts, tokens)
        finally:
            for index in range(len(prompts)):
                self.engine.abort(str(index))
        if variant == PLAIN:
            self.answers[key] = repetition.token_ids
        ttft_cached = repetition.ttft if self.engine.config.prefix_caching else None
        return dataclasses.replace(repetition, ttft=None if cached_tokens else ttft, ttft_cached=ttft_cached)

    def decode(self, prompts: list[list[int]], tokens: int) -> Repetition:
        """Compute the prompts (cached prefixes are reused) and decode `tokens` tokens after the first of each."""
        engine, peak_bytes = self.engine, 0

        def count_bytes() -> None:
            nonlocal peak_bytes
            peak_bytes = max(peak_bytes, self.used_cache_bytes())

        decoded = decode(engine, SamplingParams, prompts, tokens, count_bytes)
        stats = engine.speculation.stats if engine.speculation else None
        return Repetition(**decoded, cache_bytes=peak_bytes or None, speculation=stats)

    def used_cache_bytes(self) -> int:
        """Cache bytes that requests use, without a draft head's rows."""
        engine = self.engine
        used = zip(engine.cache.groups, engine.cache.bytes_used(engine.tables), strict=True)
        return sum(size for group, size in used if group.name != "draft")
