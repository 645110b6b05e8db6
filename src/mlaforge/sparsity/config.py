"""Options of `sparsify`."""

from __future__ import annotations

import dataclasses

from mlaforge.config import SHORTEST_WINDOW, Options, option
from mlaforge.planning.selection import DEFAULT_SINK, DEFAULT_TOPK, DEFAULT_WINDOW


@dataclasses.dataclass(frozen=True)
class SparsifyConfig(Options):
    """Options of `sparsify`."""

    first = ("topk", "text", "share", "width", "window")

    topk: int = option(
        DEFAULT_TOPK,
        "tokens that a generated token reads per layer, including those that are always read",
        "tokens",
        least=2,
    )
    text: str = option("embedded", "calibration text for the indexes: a file, a folder or embedded")
    share: int = option(1, "layers that share one selection; the first of them has the index", "layers", least=1)
    placement: str = option(
        "even",
        "measured: each layer's topk (with this mean) and which layers have an index follow from their measured loss",
        choices=("even", "measured"),
    )
    width: int | None = option(
        None, "elements of a token's index key, one byte each (by the number of cached elements: 32 for 512)",
        "numbers", least=8,
    )  # fmt: skip
    sink: int = option(DEFAULT_SINK, "first tokens that are always read", "tokens", least=0)
    window: int = option(DEFAULT_WINDOW, "newest tokens that are always read", "tokens", least=1)
    stride: int = option(0, "every stride-th token is always read; 0: none", "tokens", least=0)
    nsamples: int = option(4, "calibration windows", "windows", least=1)
    seqlen: int = option(2048, "length of a calibration window", "tokens", least=SHORTEST_WINDOW)
    device: str = option("auto", "device: auto, cpu, cuda, cuda:1, ...")
    seed: int = option(0, "seed for the choice of windows")
