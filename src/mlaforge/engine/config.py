"""What a user may set of the engine: of `generate`, `chat` and `serve`, and of `LLM`."""

from __future__ import annotations

import dataclasses

from mlaforge.config import DTYPES, option


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Options of the engine: of `generate`, `chat` and `serve`, and of `LLM`."""

    dtype: str = option(
        "auto", "weights; auto: the checkpoint's dtype on a GPU, on a CPU the faster of float32 and bfloat16; int8 and "
        "int4 (CPU) round them, which costs quality", choices=(*DTYPES, "int8", "int4"),
    )  # fmt: skip
    device: str = option("auto", "where to compute: auto, cpu, cuda, cuda:1, ...")
    cache_fraction: float = option(0.5, "share of the free memory that the KV cache may take", "fraction")
    cache_bytes: int | None = option(None, "size of the KV cache, instead of --cache-fraction", "bytes")
    block_size: int = option(16, "tokens per cache block", "tokens")
    max_num_seqs: int = option(64, "sequences that decode together", "sequences")
    max_num_batched_tokens: int = option(512, "tokens per step; longer prompts are computed in chunks", "tokens")
    max_model_len: int | None = option(None, "longest prompt and answer together (the model's own limit)", "tokens")
    prefix_caching: bool = option(True, "keep what was computed of a prompt for later prompts that begin alike")
    speculative: str = option(
        "none", "who drafts tokens that one step then verifies: none, ngram (what followed the same words earlier in "
        "the text), or the directory of an EAGLE-3 head",
    )  # fmt: skip
    num_speculative_tokens: int = option(3, "drafted tokens per step and sequence, 1 to 8", "tokens")
    speculative_tree_tokens: int = option(
        0, "where one sequence runs alone, verify a tree of so many of a head's likeliest tokens, no deeper than "
        "num-speculative-tokens; 0 for a chain", "tokens",
    )  # fmt: skip
    adaptive_speculation: bool = option(
        True, "draft fewer tokens, or none, where measurement says that it does not pay"
    )
