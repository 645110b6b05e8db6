"""What a user may set of `bench`."""

from __future__ import annotations

import dataclasses

from mlaforge.config import DTYPES, Options, option
from mlaforge.engine.config import ENGINE_DTYPES, MAX_DRAFT_TOKENS, SPECPV


@dataclasses.dataclass(frozen=True)
class BenchConfig(Options):
    """Options of `bench`. What is not given is as the scenario's file says (bench/scenarios)."""

    first = ("scope", "context", "batch", "num_speculative_tokens", "draft")

    scope: str = option(
        "auto", "how much: full, micro (the cases that gates ask for) or cpu (scaled-down twins); auto: cpu without a "
        "GPU, else micro", choices=("auto", "cpu", "micro", "full"),
    )  # fmt: skip
    context: tuple[int, ...] | None = option(None, "prompt of each request; k is 1024", "tokens", least=2)
    batch: tuple[int, ...] | None = option(None, "requests that decode together", "requests", least=1)
    num_speculative_tokens: tuple[int, ...] | None = option(
        None, "drafted tokens per step, 0 for plain decoding", "tokens", least=0, most=MAX_DRAFT_TOKENS
    )
    draft: tuple[str, ...] | None = option(
        None, "who drafts: ngram, replay (what plain decoding gave: the ceiling of any drafter), or the directory of "
        "an EAGLE-3 head",
    )  # fmt: skip
    specpv: tuple[str, ...] | None = option(
        None, "how drafted tokens are judged: off, by all of the cache at once; lossless, by a part of it first, at "
        "every step; lossy, by a part alone", choices=SPECPV,
    )  # fmt: skip
    tokens: int | None = option(None, "decoded tokens of each request that are timed", "tokens", least=1)
    rounds: int | None = option(None, "measured repetitions", "repetitions", least=1)
    warm_up: int | None = option(None, "repetitions before them that do not count", "repetitions", least=0)
    cache_fraction: tuple[float, ...] | None = option(
        None, "share of the free memory for caches, all models together", "fraction", above=0, most=1
    )
    prefix_caching: bool | None = option(None, "keep what was computed of a prompt")
    dtype: tuple[str, ...] | None = option(
        None, "dtype of the engine's weights, as in `generate`", choices=ENGINE_DTYPES
    )
    transformers: tuple[str, ...] | None = option(
        None, "dtype of transformers beside it; auto: the engine's, none: without it", choices=(*DTYPES, "none")
    )
    text: tuple[str, ...] | None = option(
        None, "text that prompts are cut from: a file, a folder, or embedded, which is the default", repeat=True
    )
    peer: tuple[str, ...] | None = option(
        None, "YAML file of another engine with an OpenAI endpoint (docs/bench.md)", repeat=True
    )
    import_: tuple[str, ...] | None = option(
        None, "results of another run, to stand beside these and be marked so", repeat=True
    )
    perf: bool = option(False, "check the invariants of PERF_MODE first; a broken one ends the run")
    force: bool = option(False, "begin the full scope though the micro gates were not green; this is recorded")
    roof: str = option("auto", "machine whose roof counts, as in `plan`; auto: this one")
    op: str = option("paged_attention", "kernels: the operation")
    implementation: str | None = option(None, "kernels: by whom (default: what would be chosen)")
    device: str = option("auto", "where to compute: auto, cpu, cuda, cuda:1, ...")
    out: str = option("results", "folder; each run gets a folder in it, named by its time")
