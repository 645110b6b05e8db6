"""What a user may set of `bench`."""

from __future__ import annotations

import dataclasses

from mlaforge.config import option


@dataclasses.dataclass(frozen=True)
class BenchConfig:
    """Options of `bench`. What is not given is as the scenario's file says (bench/scenarios)."""

    scope: str = option(
        "auto", "how much: full, micro (the cases that gates ask for) or cpu (scaled-down twins); auto: cpu without a "
        "GPU, else micro", choices=("auto", "cpu", "micro", "full"),
    )  # fmt: skip
    context: str | None = option(None, "prompt of each request; k is 1024; several with commas", "tokens")
    batch: str | None = option(None, "requests that decode together; several with commas", "requests")
    num_speculative_tokens: str | None = option(
        None, "drafted tokens per step, 0 for plain decoding; several with commas", "tokens"
    )
    draft: str | None = option(
        None, "who drafts: ngram, replay (what plain decoding gave: the ceiling of any drafter), or the directory of "
        "an EAGLE-3 head; several with commas",
    )  # fmt: skip
    tokens: int | None = option(None, "decoded tokens of each request that are timed", "tokens")
    rounds: int | None = option(None, "measured repetitions", "repetitions")
    warm_up: int | None = option(None, "repetitions before them that do not count", "repetitions")
    cache_fraction: str | None = option(
        None, "share of the free memory for caches, all models together; several with commas", "fraction"
    )
    prefix_caching: bool | None = option(None, "keep what was computed of a prompt")
    dtype: str | None = option(None, "dtype of the engine's weights, as in `generate`; several with commas")
    transformers: str | None = option(None, "dtype of transformers beside it, auto: the engine's; several with commas")
    text: tuple[str, ...] | None = option(
        None, "text that prompts are cut from: a file, a folder, or embedded, which is the default"
    )
    peer: tuple[str, ...] | None = option(None, "YAML file of another engine with an OpenAI endpoint (docs/bench.md)")
    import_: tuple[str, ...] | None = option(None, "results of another run, to stand beside these and be marked so")
    perf: bool = option(False, "check the invariants of PERF_MODE first; a broken one ends the run")
    force: bool = option(False, "begin the full scope though the micro gates were not green; this is recorded")
    roof: str = option("auto", "machine whose roof counts, as in `plan`; auto: this one")
    op: str = option("paged_attention", "kernels: the operation")
    implementation: str | None = option(None, "kernels: by whom (default: what would be chosen)")
    device: str = option("auto", "where to compute: auto, cpu, cuda, cuda:1, ...")
    out: str = option("results", "folder; each run gets a folder in it, named by its time")
