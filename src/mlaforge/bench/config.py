"""Options of `bench`."""

from __future__ import annotations

import dataclasses

from mlaforge.config import DTYPES, Options, option
from mlaforge.engine.config import CACHE_DTYPES, ENGINE_DTYPES, MAX_DRAFT_TOKENS


@dataclasses.dataclass(frozen=True)
class BenchConfig(Options):
    """Options of `bench`. Defaults come from the scenario's file (bench/scenarios)."""

    first = ("scope", "context", "batch", "num_speculative_tokens", "draft")

    scope: str = option(
        "auto", "size of the run: full, micro (the cases that gates need) or cpu (scaled down); auto: cpu without a "
        "GPU, else micro", choices=("auto", "cpu", "micro", "full"),
    )  # fmt: skip
    context: tuple[int, ...] | None = option(
        None, "prompt length of each request; the suffix k means 1024", "tokens", least=0
    )
    batch: tuple[int, ...] | None = option(None, "requests that decode together", "requests", least=1)
    num_speculative_tokens: tuple[int, ...] | None = option(
        None, "drafted tokens per step; 0: plain decoding", "tokens", least=0, most=MAX_DRAFT_TOKENS
    )
    draft: tuple[str, ...] | None = option(
        None, "drafter: ngram, replay (the output of plain decoding: the upper bound of any drafter), the directory of "
        "a draft head, tree (that head's, of twice as many tokens) or default (adaptive, prompt lookup first)",
    )  # fmt: skip
    specpv: tuple[str, ...] | None = option(
        None, "verification of drafted tokens: off, full cache; lossless, a part of the cache first at every step",
        choices=("off", "lossless"),
    )  # fmt: skip
    tokens: int | None = option(None, "timed decoded tokens of each request", "tokens", least=1)
    rounds: int | None = option(None, "measured repetitions", "repetitions", least=1)
    warm_up: int | None = option(None, "unmeasured repetitions before the measured ones", "repetitions", least=0)
    cache_fraction: tuple[float, ...] | None = option(
        None, "share of the free memory for the caches of all models together", "fraction", above=0, most=1
    )
    prefix_caching: bool | None = option(None, "reuse cached prompt prefixes")
    dtype: tuple[str, ...] | None = option(
        None, "dtype of the engine's weights, as in `generate`", choices=ENGINE_DTYPES
    )
    kv_cache_dtype: tuple[str, ...] | None = option(
        None, "format of the engine's cached rows, as in `generate`", choices=CACHE_DTYPES
    )
    transformers: tuple[str, ...] | None = option(
        None, "dtype of the transformers baseline; auto: the engine's; none: no baseline", choices=(*DTYPES, "none")
    )
    text: tuple[str, ...] | None = option(
        None, "source of the prompts: a file, a folder, or embedded (default)", repeat=True
    )
    prompts: str | None = option(
        None,
        "file of prompts (.jsonl) to answer as conversations; --context (0): tokens of --text before each",
    )
    base: str | None = option(None, "another checkout of mlaforge, measured with the first MODEL as `base`")
    peer: tuple[str, ...] | None = option(
        None, "YAML file of another engine with an OpenAI endpoint (docs/bench.md)", repeat=True
    )
    import_: tuple[str, ...] | None = option(
        None, "results of another run to show beside these, marked as imported", repeat=True
    )
    perf: bool = option(False, "check the invariants of PERF_MODE first and stop if one is broken")
    force: bool = option(False, "run the full scope before the micro gates are green; results record it")
    roof: str = option("auto", "machine of the roofline, as in `plan`; auto: this machine")
    tuned: str | None = option(None, "table of tuned kernels, as in `serve`; none: no table")
    op: str = option(
        "paged_attention", "kernels: paged_attention, experts, layer (its small operations) or draft (an EAGLE-3 head)"
    )
    sweep: bool = option(False, "kernels: measure every candidate of `tune` at shapes of public models instead")
    implementation: str | None = option(None, "kernels: implementation to measure (default: the dispatched one)")
    device: str = option("auto", "compute device: auto, cpu, cuda, cuda:1, ...")
    out: str = option("results", "output folder; each run writes a subfolder named by its time")
    summary: str | None = option(None, "file of tables (JSON) to which short tables of the results are added")
    table: str | None = option(None, "name of the table in --summary (default: the scenario's name)")
