"""What a user may set of the engine: of `generate`, `chat` and `serve`, and of `LLM`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from mlaforge.config import DTYPES, Options, option

if TYPE_CHECKING:
    import torch

# What the engine can hold weights as.
ENGINE_DTYPES = (*DTYPES, "int8", "int4")
# How the cache can store its rows: names of ops/row_format.py.
CACHE_DTYPES = ("auto", "bf16", "fp8", "int8", "int4", "coded")
# Whether drafted tokens are judged by a part of the cache first.
SPECPV = ("off", "lossless", "lossy")
# max_num_batched_tokens and cache_fraction by the device's type. A CPU shares its memory with other programs, and
# longer chunks gain nothing there (docs/engine.md); on a GPU every chunk reads all weights and experts once more.
STEP_TOKENS = {"cpu": 512, "cuda": 4096}
CACHE_FRACTION = {"cpu": 0.5, "cuda": 0.85}
# Tokens drafted in a row where nothing is said of it, and the most of them, and of tokens in a tree.
DRAFTED, MOST_DRAFTED, LARGEST_TREE = 3, 8, 64


@dataclasses.dataclass(frozen=True)
class EngineConfig(Options):
    """Options of the engine: of `generate`, `chat` and `serve`, and of `LLM`."""

    dtype: str = option(
        "auto", "weights; auto: the checkpoint's dtype on a GPU, on a CPU bfloat16 where the processor or compiled "
        "kernels multiply it, else float32; int8 and int4 (CPU) round them, which costs quality", choices=ENGINE_DTYPES,
    )  # fmt: skip
    device: str = option("auto", "where to compute: auto, cpu, cuda, cuda:1, ...")
    cache_fraction: float | None = option(
        None, "share of the memory beside the weights that the KV cache may take (0.5; 0.85 on a GPU)", "fraction",
        above=0, most=1,
    )  # fmt: skip
    cache_bytes: int | None = option(None, "size of the KV cache, instead of --cache-fraction", "bytes", least=1)
    kv_cache_dtype: str = option(
        "auto",
        "how the KV cache stores its rows; auto: coded where the model is (convert --bits), else in its dtype",
        choices=CACHE_DTYPES,
    )
    dense: bool = option(False, "read all that is cached, though the model is sparse (sparsify)")
    generation_config: str = option(
        "auto", "auto: the sampling parameters in the model's generation_config.json stand for what is left unset; "
        "none: they are ignored", choices=("auto", "none"),
    )  # fmt: skip
    block_size: int | None = option(
        None, "tokens per cache block (16; with --kv-cache-dtype int4, which packs so many at a time, 32)", "tokens",
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
        False, "run only where a token's result does not depend on what is computed beside it: on a CPU in bfloat16, "
        "int8 or int4 with compiled kernels, which need no other setting for it; not on a GPU yet",
    )  # fmt: skip
    prefix_caching: bool = option(True, "keep what was computed of a prompt for later prompts that begin alike")
    speculative: str = option(
        "none", "who drafts tokens that one step then verifies: none, ngram (what followed the same words earlier in "
        "the text), or the directory of an EAGLE-3 head",
    )  # fmt: skip
    num_speculative_tokens: int | None = option(
        None, f"drafted tokens per step and sequence ({DRAFTED}, and up to {MOST_DRAFTED} that are copied from the text"
        " where the newest ones stood in it before)", "tokens", least=1, most=MOST_DRAFTED,
    )  # fmt: skip
    speculative_tree_tokens: int = option(
        0, "where one sequence runs alone, verify a tree of so many of a head's likeliest tokens, no deeper than "
        "num-speculative-tokens; 0 for a chain", "tokens", least=0, most=LARGEST_TREE,
    )  # fmt: skip
    specpv: str = option(
        "off", "at long context judge drafted tokens by a part of the cache first, and by all of it now and then; "
        "lossless: all tokens are verified by all of it; lossy: what was judged by a part stays, as in the paper",
        choices=SPECPV,
    )  # fmt: skip
    specpv_sink: int = option(16, "first tokens that a partial view holds", "tokens", least=1)
    specpv_retrieval: int = option(
        1024, "tokens that a partial view holds because the last full step attended to them most", "tokens", least=0
    )
    specpv_window: int = option(256, "newest tokens that a partial view holds", "tokens", least=16)
    specpv_full_every: int = option(6, "partial steps before a full one", "steps", least=1)
    specpv_max_pending: int = option(16, "tokens that wait for a full step at the most", "tokens", least=1, most=64)
    specpv_dtype: str = option(
        "auto", "weights of partial steps, which full ones judge: the model's, or rounded ones beside them; auto: int4 "
        "for a bfloat16 model without experts on a CPU that multiplies int8, else the model's",
        choices=("auto", "model", "int8", "int4"),
    )  # fmt: skip
    adaptive_speculation: bool = option(
        True,
        "draft fewer tokens, or none, where measurement says that it does not pay, and copy what stood in the "
        "text before",
    )

    def for_device(self, device: torch.device) -> EngineConfig:
        """The same with those defaults set that depend on the device."""
        tokens, fraction = self.max_num_batched_tokens, self.cache_fraction
        return dataclasses.replace(
            self,
            max_num_batched_tokens=STEP_TOKENS[device.type] if tokens is None else tokens,
            cache_fraction=CACHE_FRACTION[device.type] if fraction is None else fraction,
        )

    @property
    def drafted(self) -> int:
        """Tokens that a drafter proposes at the most."""
        return self.num_speculative_tokens or DRAFTED

    @property
    def copied(self) -> int:
        """Tokens that are copied from a text at the most."""
        return self.num_speculative_tokens or MOST_DRAFTED
