"""Options of the engine: of `generate`, `chat` and `serve`, and of `LLM`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from mlaforge.config import DTYPES, Options, option
from mlaforge.engine import vllm_names
from mlaforge.ops.row_formats import format_names

if TYPE_CHECKING:
    import torch

# Formats of weights.
ENGINE_DTYPES = (*DTYPES, "int8", "int4")
# Formats of cached rows.
CACHE_DTYPES = ("auto", *format_names())
# max_num_batched_tokens and cache_fraction by the device's type. A CPU shares its memory with other programs, and
# longer chunks gain nothing there (docs/engine.md); on a GPU every chunk reads all weights and experts once more.
STEP_TOKENS = {"cpu": 512, "cuda": 4096}
CACHE_FRACTION = {"cpu": 0.5, "cuda": 0.85}
# Length of a draft by default and at most, and the most tokens of a tree.
DEFAULT_DRAFT_TOKENS, MAX_DRAFT_TOKENS, MAX_TREE_TOKENS = 3, 8, 64


@dataclasses.dataclass(frozen=True)
class EngineConfig(Options):
    """Options of the engine: of `generate`, `chat` and `serve`, and of `LLM`."""

    other_names = vllm_names.ENGINE

    dtype: str = option(
        "auto", "format of the weights; auto: the checkpoint's dtype on a GPU, on a CPU bfloat16 where the processor "
        "or compiled kernels multiply it, else float32; int8 and int4 (CPU) quantize them, which costs quality",
        choices=ENGINE_DTYPES, synonyms=vllm_names.DTYPES,
    )  # fmt: skip
    device: str = option("auto", "where to compute: auto, cpu, cuda, cuda:1, ...")
    cache_fraction: float | None = option(
        None, "share of the memory beside the weights for the KV cache (0.5; 0.85 on a GPU)", "fraction",
        above=0, most=1,
    )  # fmt: skip
    cache_bytes: int | None = option(None, "size of the KV cache, instead of --cache-fraction", "bytes", least=1)
    kv_cache_dtype: str = option(
        "auto",
        "format of the rows in the KV cache; auto: coded where the model is (convert --bits), else the model's dtype",
        choices=CACHE_DTYPES,
        synonyms=vllm_names.CACHE_DTYPES,
    )
    dense: bool = option(False, "attend to the whole cache, though the model is sparse")
    topk: int | None = option(
        None, "tokens that a generated token of a sparse model reads per layer, instead of the model's number; budgets "
        "of layers change in proportion", "tokens", least=2,
    )  # fmt: skip
    generation_config: str = option(
        "auto", "auto: the model's generation_config.json sets the sampling parameters that a request leaves unset; "
        "none: it is ignored", choices=("auto", "none"), synonyms=vllm_names.GENERATION_CONFIGS,
    )  # fmt: skip
    block_size: int | None = option(
        None, "tokens per cache block (16; 32 with --kv-cache-dtype int4, which packs 32 tokens together)", "tokens",
        least=1,
    )  # fmt: skip
    max_num_seqs: int = option(64, "sequences that decode together", "sequences", least=1)
    max_num_batched_tokens: int | None = option(
        None, "tokens per step; longer prompts are computed in chunks (512; 4096 on a GPU)", "tokens", least=1
    )
    max_model_len: int | None = option(
        None, "longest prompt and answer together (the model's own limit)", "tokens", least=1
    )
    deterministic: bool = option(
        False, "run only where a token's result does not depend on the rest of its batch: on a CPU in bfloat16, int8 "
        "or int4 with compiled kernels, which need no other setting for it; not on a GPU yet",
    )  # fmt: skip
    prefix_caching: bool = option(True, "keep the computed rows of a prompt for later prompts with the same prefix")
    speculative: str = option(
        "none", "drafter of tokens that one step then verifies: none, ngram (prompt lookup: what followed the same "
        "tokens earlier in the text), or the directory of a draft head",
    )  # fmt: skip
    num_speculative_tokens: int | None = option(
        None, f"drafted tokens per step and sequence ({DEFAULT_DRAFT_TOKENS}, and up to {MAX_DRAFT_TOKENS} by prompt "
        "lookup, where the newest tokens occurred in the text before)", "tokens", least=1, most=MAX_DRAFT_TOKENS,
    )  # fmt: skip
    speculative_tree_tokens: int = option(
        0, "where one sequence runs alone, verify a tree with this many of a head's likeliest tokens, no deeper than "
        "num-speculative-tokens; 0 for a chain", "tokens", least=0, most=MAX_TREE_TOKENS,
    )  # fmt: skip
    specpv: bool = option(
        False, "at long context verify drafted tokens with a sparse view of the cache first, then all of them with the "
        "whole cache: lossless",
    )  # fmt: skip
    specpv_retrieval: int = option(
        1024, "tokens of a sparse view that the last full step attended to most", "tokens", least=0
    )
    specpv_dtype: str = option(
        "auto", "weights of sparse-view steps, which full steps verify: the model's, or a quantized copy; auto: int4 "
        "for a bfloat16 model without experts on a CPU that multiplies int8, else the model's",
        choices=("auto", "model", "int8", "int4"),
    )  # fmt: skip
    tuned: str | None = option(
        None,
        "table of kernels that `mlaforge tune` wrote, used before this device's in the cache; none: no table",
    )
    adaptive_speculation: bool = option(
        True,
        "draft fewer tokens, or none, where measurements show no gain, and draft by prompt lookup beside any drafter",
    )

    def for_device(self, device: torch.device) -> EngineConfig:
        """Return the config with the defaults that depend on the device."""
        tokens, fraction = self.max_num_batched_tokens, self.cache_fraction
        return dataclasses.replace(
            self,
            max_num_batched_tokens=STEP_TOKENS[device.type] if tokens is None else tokens,
            cache_fraction=CACHE_FRACTION[device.type] if fraction is None else fraction,
        )

    @property
    def max_draft_tokens(self) -> int:
        """Most tokens of a drafter's draft."""
        return self.num_speculative_tokens or DEFAULT_DRAFT_TOKENS

    @property
    def max_lookup_tokens(self) -> int:
        """Most tokens of a draft by prompt lookup."""
        return self.num_speculative_tokens or MAX_DRAFT_TOKENS
