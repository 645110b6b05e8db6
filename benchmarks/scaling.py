"""The tables of docs/scaling.md: what `mlaforge plan` computes for GPT-OSS, by ranks of tensor parallelism. Seconds.

python -m benchmarks.scaling
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mlaforge.checkpoint.source_model import read_spec
from mlaforge.demo import geometry
from mlaforge.planning.costs import GPUS, Gpu, weight_bytes
from mlaforge.planning.plan import Plan, make_plan, unconverted
from mlaforge.vllm_plugin.heads import Heads

MODELS = {"20B": geometry.settings("20b"), "120B": geometry.settings("120b")}
MACHINES = {"H100": GPUS["h100"], "H200": GPUS["h200"]}
CONTEXTS = {"32K": 32 * 1024, "128K": 128 * 1024}
KINDS, RANKS = ("GQA", "converted"), (1, 2, 4, 8)


def plan(raw: dict[str, Any], kind: str) -> Plan:
    """As recipes/ convert: full layers to a latent of 512 and a rotary key of 64."""
    spec = read_spec(raw)
    return unconverted(spec) if kind == "GQA" else make_plan(spec, 0.5, "latent_rope", "auto", 512, 64)


def cache_bytes(raw: dict[str, Any], kind: str, context: int, ranks: int) -> int:
    """Cache bytes of a request per rank, with heads sharded as in the plugin; latents are replicated."""
    sharded_spec = read_spec(Heads(raw["num_key_value_heads"], 0, ranks).config(raw))
    return Plan(sharded_spec, plan(raw, kind).layers).cache_bytes(context)


def requests(raw: dict[str, Any], kind: str, gpu: Gpu, context: int, ranks: int) -> int:
    """Requests that fit next to a rank's share of the weights."""
    free = gpu.memory_gib * 2**30 - weight_bytes(plan(raw, kind)) / ranks
    return int(free // cache_bytes(raw, kind, context, ranks))


def lines() -> Iterator[str]:
    """Rows of the tables in docs/scaling.md."""
    for model, raw in MODELS.items():
        for name, gpu in MACHINES.items():
            counts = [requests(raw, kind, gpu, context, 1) for context in CONTEXTS.values() for kind in KINDS]
            yield _row(model, name, *counts)
    for context, tokens in CONTEXTS.items():
        for kind in KINDS:
            mib = [round(cache_bytes(MODELS["120B"], kind, tokens, ranks) / 2**20) for ranks in RANKS]
            yield _row(f"{context}, {kind}", f"{mib[0]:,} MiB", *mib[1:])
    for model, raw in MODELS.items():
        for name, gpu in MACHINES.items():
            for kind in KINDS:
                counts = [8 // ranks * requests(raw, kind, gpu, CONTEXTS["32K"], ranks) for ranks in RANKS]
                yield _row(f"{model}, {name}, {kind}", *counts)


def _row(*cells: str | int) -> str:
    return f"| {' | '.join(cell if isinstance(cell, str) else f'{cell:,}' for cell in cells)} |"


if __name__ == "__main__":
    print("\n".join(lines()))
