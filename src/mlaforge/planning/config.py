"""What a user may set of `plan`."""

from __future__ import annotations

import dataclasses

from mlaforge.config import Options, option
from mlaforge.planning.costs import GPUS
from mlaforge.planning.plan import LATENT_LAYOUTS, STORED


@dataclasses.dataclass(frozen=True)
class PlanConfig(Options):
    """Options of `plan`: the workload and the machine; bits, budget, layout, ranks and kv_cache_dtype add a row of your
    own, which a converted MODEL is by itself."""

    first = ("context", "batch", "gpu", "budget", "layout")

    context: str | None = option(
        None, "tokens in the cache of each request (32k, or what the model was made for where that is less); k is "
        "1024, m is 1024²", "tokens",
    )  # fmt: skip
    batch: int = option(4, "requests decoded together", "requests", least=1)
    gpu: str = option("auto", "machine to compute for; auto: this one, cpu: its CPU", choices=("auto", "cpu", *GPUS))
    memory: float | None = option(None, "memory of the machine, in place of what it has", "GiB", above=0)
    bandwidth: float | None = option(
        None, "speed of the machine's memory, in place of what was measured or its datasheet says", "GB/s", above=0
    )
    kv_cache_dtype: str | None = option(
        None, "how the cache stores rows that are not coded, in a row of your own (bf16)", choices=STORED
    )
    drafts: int = option(0, "draft tokens that a speculative step verifies", "tokens", least=0)
    bits: float | None = option(
        None, "mean bits of a number in coded rows, in place of a budget (4 for latent, a quarter of bf16)", "bits",
        above=0, most=8,
    )  # fmt: skip
    budget: float | None = option(
        None, "share of the converted layers' GQA cache to keep in plain rows (0.5 for latent_rope)", "fraction",
        above=0, most=1,
    )  # fmt: skip
    layout: str | None = option(None, "cache layout of the converted layers", choices=LATENT_LAYOUTS)
    kv_lora_rank: int | None = option(None, "latent numbers per token, in place of a budget", "numbers")
    qk_rope_head_dim: int | None = option(None, "rotary key numbers per token (latent_rope)", "numbers", least=2)
    layers: str = option(
        "auto", "layers to convert: all, full, auto (full beside sliding ones) or a list such as 0,2,5-9"
    )
