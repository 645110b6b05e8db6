"""Options of `diagnose`."""

from __future__ import annotations

import dataclasses

from mlaforge.config import SHORTEST_WINDOW, Options, option


@dataclasses.dataclass(frozen=True)
class DiagnoseConfig(Options):
    """Options of `diagnose`. Budget, layout and layers apply to the suggested plan."""

    first = ("text", "windows", "budget", "layout", "layers")

    text: str = option("embedded", "text to diagnose on: a file, a folder, or embedded (English and Python)")
    windows: int = option(16, "random windows of the text", "windows", least=1)
    seqlen: int = option(2048, "length of a window", "tokens", least=SHORTEST_WINDOW)
    budget: float = option(
        0.5, "cache size of the suggested plan, as a share of the converted layers' cache", "fraction", above=0, most=1
    )
    layout: str = option("latent", "cache layout of the suggested plan", choices=("latent", "latent_rope"))
    layers: str = option("auto", "layers that the suggested plan converts, as in `convert`")
    report: bool = option(True, "draw the heat maps and write the HTML page, if OUT is given")
    device: str = option("auto", "device: auto, cpu, cuda, cuda:1, ...")
    seed: int = option(0, "seed of all random choices")
