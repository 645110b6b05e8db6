"""What a user may set of `convert` and `export`."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from mlaforge.config import DTYPES, SHORTEST_WINDOW, Options, option

# What a converted model can be rewritten as.
EXPORTS = ("deepseek",)


@dataclasses.dataclass(frozen=True)
class ConvertConfig(Options):
    """Options of `convert`. Names of TransMLA's converter are accepted with their meaning."""

    first = ("bits", "budget", "layout", "layers", "calibration")
    panels: ClassVar[dict[str, tuple[str, ...]]] = {
        "Options as TransMLA names them": ("qk_mqa_dim", "collapse", "freqfold", "deepseek_style")
    }

    bits: float | None = option(
        None, "mean bits of a cached number, of the converted layers' K and V cache in full: ranks and bits are chosen "
        "together, and rows are coded (4, a quarter of bf16's bytes, unless an option asks for plain rows: budget, "
        "kv-lora-rank, ranks, plan, or one that means latent_rope)", "bits", above=0, most=8,
    )  # fmt: skip
    budget: float | None = option(
        None, "cache to keep in plain rows, as a share of the converted layers' K and V cache (0.5, where rows are "
        "plain)", "fraction", above=0, most=1,
    )  # fmt: skip
    layout: str | None = option(
        None, "what a token caches (latent; latent_rope where an option of TransMLA's says so)",
        choices=("latent", "latent_rope"),
    )  # fmt: skip
    kv_lora_rank: int | None = option(None, "latent rank of every converted layer, instead of --budget", "numbers")
    qk_rope_head_dim: int | None = option(
        None, "shared rotary key of latent_rope (64, or half the budget)", "numbers", least=2
    )
    q_lora_rank: int | None = option(None, "factor the query projection to this rank", "numbers", least=1)
    layers: str = option(
        "auto", "layers to convert: all, full (those without a sliding window), a list such as 0,2,5-9, or auto: full "
        "where a model has both kinds, else all",
    )  # fmt: skip
    ranks: str = option(
        "allocated", "ranks over layers: by predicted loss, or the same for all", choices=("allocated", "uniform")
    )
    plan: str | None = option(
        None, "ranks of every layer as `mlaforge diagnose` suggests them: its folder, or a plan.json; decides layout, "
        "layers and budget too",
    )  # fmt: skip
    calibration: tuple[str, ...] | None = option(
        None, "calibration text: self (what the model itself writes, which takes it minutes, once), embedded (English "
        "and Python), a file, a folder, or what `calibrate` wrote; several have equal shares. Else self and embedded, "
        "or embedded alone where the model writes none", repeat=True,
    )  # fmt: skip
    nsamples: int = option(32, "calibration windows", "windows", least=1)
    seqlen: int = option(2048, "length of calibration and evaluation windows", "tokens", least=SHORTEST_WINDOW)
    batch_size: int = option(1, "calibration windows at once", "windows", least=1)
    evaluation: str = option("embedded", "text of the perplexities; may not overlap the calibration text")
    eval_windows: int = option(8, "evaluation windows, 0 to measure nothing", "windows", least=0)
    refit: str = option("auto", "closed-form refit of o_proj; auto: for latent_rope", choices=("auto", "on", "off"))
    dtype: str = option("auto", "dtype of the converted weights", choices=DTYPES)
    device: str = option("auto", "where to compute: auto, cpu, cuda, cuda:1, ...")
    seed: int = option(0, "seed of every random choice")
    qk_mqa_dim: int | None = option(None, "the rotary key's dimensions; means latent_rope", "numbers", least=2)
    collapse: str | None = option(None, "head_dim / rotary dimensions, or auto; means latent_rope")
    freqfold: str | None = option(
        None, "neighbouring frequencies that turn as one, or auto (none do); means latent_rope", "pairs"
    )
    deepseek_style: bool = option(
        False, "only what DeepSeek's format can express: latent_rope, uniform ranks, its frequencies"
    )


@dataclasses.dataclass(frozen=True)
class ExportConfig(Options):
    """Options of `export`."""

    kv_lora_rank: int | None = option(
        None, "fill the latent up to this rank with zeros: most of vLLM's MLA kernels want 512", "numbers"
    )
    dtype: str = option("auto", "dtype of the exported weights", choices=("auto", "float32", "bfloat16"))
