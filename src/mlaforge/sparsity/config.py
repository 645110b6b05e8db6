"""What a user may set of `sparsify`."""

from __future__ import annotations

import dataclasses

from mlaforge.config import SHORTEST_WINDOW, Options, option
from mlaforge.planning.plan import DEFAULT_INDEX


@dataclasses.dataclass(frozen=True)
class SparsifyConfig(Options):
    """Options of `sparsify`."""

    first = ("topk", "text", "share", "width", "window")

    topk: int = option(
        1024, "tokens that a generated token reads in each layer, forced ones among them", "tokens", least=2
    )
    text: str = option("embedded", "text that shows what queries look for: a file, a folder or embedded")
    share: int = option(1, "layers that read one selection, the first of them with an index", "layers", least=1)
    placement: str = option(
        "even",
        "measured: topk is the mean; each layer's own, and which layers have an index, follow from what they lose",
        choices=("even", "measured"),
    )
    width: int = option(DEFAULT_INDEX, "numbers of a token's index key, a byte each", "numbers", least=8)
    sink: int = option(4, "first tokens that are always read", "tokens", least=0)
    window: int = option(128, "newest tokens that are always read", "tokens", least=1)
    stride: int = option(0, "the first of every so many tokens is always read; 0: none", "tokens", least=0)
    nsamples: int = option(4, "windows of the text", "windows", least=1)
    seqlen: int = option(2048, "their length", "tokens", least=SHORTEST_WINDOW)
    device: str = option("auto", "where to compute: auto, cpu, cuda, cuda:1, ...")
    seed: int = option(0, "seed of the choice of windows")
