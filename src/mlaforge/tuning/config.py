"""Options of `tune`."""

from __future__ import annotations

import dataclasses

from mlaforge.config import Options, option
from mlaforge.engine.config import CACHE_DTYPES, ENGINE_DTYPES


@dataclasses.dataclass(frozen=True)
class TuneConfig(Options):
    """Options of `tune`."""

    first = ("shapes", "budget", "dtype", "kv_cache_dtype", "device")

    shapes: str | None = option(
        None, "gemm_shapes.json of a run of `bench --perf`; without it MODEL runs a short load of its own"
    )
    budget: float = option(240.0, "time for measurements; shapes that take least get the defaults", "seconds", above=0)
    share: float = option(
        0.99, "shapes are measured until they cover this share of the time of all products", "fraction", above=0, most=1
    )
    retune: bool = option(False, "measure shapes again that the table has")
    dtype: str = option("auto", "format of the weights, as in `generate`", choices=ENGINE_DTYPES)
    kv_cache_dtype: str = option("auto", "format of the cached rows, as in `generate`", choices=CACHE_DTYPES)
    speculative: str = option("none", "drafter of the load, as in `generate`: its head's products are tuned too")
    device: str = option("auto", "compute device: auto, cpu, cuda, cuda:1, ...")
