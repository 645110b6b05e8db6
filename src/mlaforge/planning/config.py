"""Options of `plan`."""

from __future__ import annotations

import dataclasses

from mlaforge.config import Options, option
from mlaforge.planning.costs import GPUS
from mlaforge.planning.plan import LATENT_LAYOUTS, STORED


@dataclasses.dataclass(frozen=True)
class PlanConfig(Options):
    """Options of `plan`: workload and machine. bits, budget, layout, ranks and kv_cache_dtype add a row for that
    configuration; a converted MODEL always has a row."""

    first = ("context", "batch", "gpu", "budget", "layout")

    context: str | None = option(
        None, "tokens in the cache of each request (32k, or the model's maximum if smaller); the suffix k means 1024, "
        "m 1024²", "tokens",
    )  # fmt: skip
    batch: int = option(4, "requests decoded together", "requests", least=1)
    gpu: str = option("auto", "target machine; auto: this one; cpu: its CPU", choices=("auto", "cpu", *GPUS))
    memory: float | None = option(None, "memory of the machine, overriding its real size", "GiB", above=0)
    bandwidth: float | None = option(
        None, "memory bandwidth of the machine, overriding the measurement or datasheet", "GB/s", above=0
    )
    kv_cache_dtype: str | None = option(None, "storage of uncoded cache rows in the added row (bf16)", choices=STORED)
    drafts: int = option(0, "draft tokens that a speculative step verifies", "tokens", least=0)
    tensor_parallel: int = option(1, "GPUs that divide heads and weights, as vLLM's --tensor-parallel-size", "GPUs")
    context_parallel: int = option(
        1, "how many of these GPUs divide the tokens of a request, as vLLM's --decode-context-parallel-size", "GPUs"
    )
    bits: float | None = option(
        None, "mean bits of an element in coded rows, instead of a budget (4 for latent, a quarter of bf16)", "bits",
        above=0, most=8,
    )  # fmt: skip
    budget: float | None = option(
        None, "share of the converted layers' GQA cache to keep in plain rows (0.5 for latent_rope)", "fraction",
        above=0, most=1,
    )  # fmt: skip
    layout: str | None = option(None, "cache layout of the converted layers", choices=LATENT_LAYOUTS)
    kv_lora_rank: int | None = option(None, "width of the latent per token, instead of a budget", "elements")
    qk_rope_head_dim: int | None = option(None, "width of the rotary key per token (latent_rope)", "elements", least=2)
    layers: str = option(
        "auto", "layers to convert: all, full, auto (full if some layers slide, else all) or a list such as 0,2,5-9"
    )
