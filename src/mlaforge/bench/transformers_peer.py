"""transformers' `generate` as a peer."""

from __future__ import annotations

import inspect
import itertools
import time
from pathlib import Path

import torch
from transformers import DynamicCache, LogitsProcessor

from mlaforge.bench.machine import Memory
from mlaforge.bench.peer import Repetition, Variant
from mlaforge.checkpoint import loading


class Clock(LogitsProcessor):
    """Logits processor that records the time of each token's logits."""

    def __init__(self, device: torch.device) -> None:
        self.times: list[float] = []
        self.device = device

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.times.append(time.perf_counter())
        return scores


class Transformers:
    """`generate` on a DynamicCache: one prefill pass, then one token at a time. Prompts must have equal lengths."""

    name = "transformers"

    def __init__(self, directory: Path, model: str, dtype: str, device: torch.device):
        self.model, self.dtype, self.device = model, dtype, device
        self.memory = Memory(device)
        self.causal_lm = loading.load_model(directory, dtype, device)
        self.weight_bytes: int | None = sum(p.numel() * p.element_size() for p in self.causal_lm.parameters())

    def close(self) -> None:
        del self.causal_lm

    @torch.inference_mode()
    def prepare(self, prompts: list[list[int]]) -> None:
        """Prefill all but the last token of every prompt."""
        self.ids = torch.tensor(prompts, device=self.device)
        self.cache = DynamicCache(config=self.causal_lm.config)
        # Positional: transformers 5.24 renamed the cache's keyword.
        self.causal_lm.model(self.ids[:, :-1], None, None, self.cache, use_cache=True)

    @torch.inference_mode()
    def generate(self, count: int) -> tuple[list[float], list[list[int]]]:
        """Decode `count` tokens per prompt. Return the time of each step and the token ids."""
        clock = Clock(self.device)
        # transformers 5.24 renamed the keyword.
        renamed = "cache" in inspect.signature(self.causal_lm.forward).parameters
        token_ids = self.causal_lm.generate(
            self.ids, attention_mask=torch.ones_like(self.ids), do_sample=False, max_new_tokens=count,
            min_new_tokens=count, logits_processor=[clock],
            **{"cache" if renamed else "past_key_values": self.cache},
        )  # fmt: skip
        return clock.times, token_ids[:, self.ids.shape[1] :].tolist()

    def rewind(self) -> None:
        """Restore the cache to its state after `prepare`."""
        self.cache.crop(self.ids.shape[1] - 1 - self.cache.get_seq_length())

    def run(self, prompts: list[list[int]], tokens: int, variant: Variant) -> Repetition:
        """See Peer.run."""
        start = time.perf_counter()
        self.prepare(prompts)
        times, token_ids = self.generate(tokens + 1)
        token_seconds = [b - a for a, b in itertools.pairwise(times) for _ in prompts]
        del self.cache
        return Repetition(times[0] - start, tokens * len(prompts), times[-1] - times[0], token_seconds, token_ids)
