"""`bench kernels --sweep`: time and throughput of every candidate, and statistics of attention's tiles.

On a CPU the compiled products and experts are swept, and attention is measured with its constants (docs/ops.md says why
none is a candidate); on a GPU all kernels that `tune` tunes. Candidates are interleaved; `us` is the median of all
repetitions, `least_us` the least, which other processes disturb less. `mlaforge tune` decides more carefully.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from mlaforge.bench import kernels, machine
from mlaforge.bench.config import BenchConfig
from mlaforge.bench.draft_products import PRODUCTS
from mlaforge.bench.gemm_shapes import Shape
from mlaforge.bench.roof import describe, roof
from mlaforge.engine.execution.linear import BITS
from mlaforge.families.spec import MoeSpec
from mlaforge.ops import tuned
from mlaforge.ops.tuned import Key
from mlaforge.planning.costs import Cost, Gpu, experts_touched
from mlaforge.rendering.table import markdown_table
from mlaforge.runtime import UserError, log, resolve_device
from mlaforge.tuning.attention_case import AttentionCase
from mlaforge.tuning.cases import Case, correct_candidates, make_case
from mlaforge.tuning.gpu_cases import case_of_launch
from mlaforge.tuning.tile_statistics import cpu_tiling, tile_statistics

REPEATS = 11
FILE = "kernels-sweep.json"
# Outputs and inputs of a layer of SmolLM2-135M and of GPT-OSS, and rows.
LAYERS = ((960, 576), (3072, 576), (576, 1536), (5120, 2880), (2880, 4096))
ROWS, EXPERT_ROWS = (1, 4, 512), (1, 4)
EXPERTS = (32, 4, 2880, 2880)
# Batch 1; batch >= 4 with at least 8K; a selection of 1,024 tokens.
STEPS = ((1, 2048, 1, False), (1, 32768, 1, False), (4, 8192, 1, False), (8, 8192, 4, False), (8, 1024, 1, True))

# Keys of launches of `latent` (64 query heads, 8 KV heads of 64) and of selections (64 heads of 64) at these steps.
LAUNCHES: tuple[tuple[str, Key], ...] = (
    *(
        ("latent", ("latent", 64, 832, 64, 8, format, T, S, P, "sparse" if sparse else "dense"))
        for format in ("bf16", "coded")
        for S, P, T, sparse in STEPS
    ),
    *(("selection", (64, 64, S, P)) for S, P, _, sparse in STEPS if not sparse),
)


def run(config: BenchConfig, folder: Path, small: bool = False) -> dict[str, Any]:
    """Sweep, write `folder`/kernels-sweep.json and return its content. small: tiny shapes, for tests."""
    device = resolve_device(config.device)
    gpu = roof(config.roof, device)
    if gpu is None:
        raise UserError("the roofline of this machine is unknown; name the most similar machine with --roof")
    body = {**machine.header("kernels-sweep", device, config.tuned), "roof": describe(gpu), "rows": list[Any]()}
    if device.type == "cpu":
        body["rows"] += [_cpu_attention(*step, gpu, small) for step in kernels.grid("small" if small else "cpu")]
    try:
        for case, cost in _cases(device, small):
            body["rows"] += _rows(case, cost, gpu, 3 if small else REPEATS)
            log(f"{case.op} {tuned.text(case.key)}: {len(case.candidates())} candidates")
            machine.write(folder / FILE, body)
    finally:
        tuned.load(device, config.tuned)
    return body


def _cases(device: torch.device, small: bool) -> Iterator[tuple[Case, Cost]]:
    """Cases of a device with the least bytes and FLOPs of a call."""
    for shape in _shapes(device, small):
        case = make_case(shape)
        if case is not None:
            yield case, _cost(shape)
    if device.type == "cuda":
        for name, (S, P, T, sparse) in itertools.product(kernels.LAYOUTS, STEPS):
            layout = kernels.LAYOUTS[name]
            if not (sparse and layout.window):
                attention = AttentionCase(layout, S, P, T, device, torch.bfloat16, sparse)
                yield attention, attention.minimum
        for op, key in LAUNCHES:
            if (launched := case_of_launch(op, key, device)) is not None:
                yield launched, launched.minimum


def _shapes(device: torch.device, small: bool) -> Iterator[Shape]:
    if device.type == "cpu":
        layers = {(rows, *sizes) for rows, sizes in itertools.product(ROWS, LAYERS)}
        draft = {(rows, *sizes) for (_, rows), sizes in PRODUCTS.items()}
        products = [(1, 96, 64), (40, 96, 64)] if small else sorted(layers | draft)
        for (M, N, K), format in itertools.product(products, ("bfloat16", "int8")):
            yield Shape("layer", M, N, K, format, "cpu")
    else:
        for M, (N, K) in itertools.product((1, 4), LAYERS[:1] if small else LAYERS):
            yield Shape("layer", M, N, K, "bfloat16", device.type)
    E, top_k, C, I = (4, 2, 64, 96) if small else EXPERTS  # noqa: E741
    for rows in EXPERT_ROWS[:1] if small else EXPERT_ROWS:
        yield Shape("experts", rows, I, C, "mxfp4", device.type, E, top_k)


def _cost(shape: Shape) -> Cost:
    if not shape.experts:
        return Cost(2.0 * shape.M * shape.N * shape.K, shape.N * shape.K * BITS[shape.dtype] / 8)
    weights = 3.0 * shape.N * shape.K
    read = experts_touched(MoeSpec(shape.experts, shape.top_k), shape.M) * weights * 4.25 / 8
    return Cost(2.0 * shape.M * shape.top_k * weights, read)


def _rows(case: Case, cost: Cost, gpu: Gpu, repeats: int) -> list[dict[str, Any]]:
    """A row for each candidate, the default first."""
    candidates = [configuration for configuration, _ in correct_candidates(case)]
    times: list[list[float]] = [[] for _ in candidates]
    for _ in range(repeats):
        for configuration, values in zip(candidates, times, strict=True):
            values.append(case.seconds(configuration))
    rows = []
    for configuration, values in zip(candidates, times, strict=True):
        tiles = dataclasses.asdict(case.tiles(configuration)) if isinstance(case, AttentionCase) else None
        rows.append({
            "op": case.op, "key": tuned.text(case.key), "configuration": configuration,
            **_speed(statistics.median(values), cost, gpu), "least_us": min(values) * 1e6, "tiles": tiles,
        })  # fmt: skip
    return rows


def _speed(seconds: float, cost: Cost, gpu: Gpu) -> dict[str, float]:
    return {
        "us": seconds * 1e6, "gbs": cost.bytes / seconds / 1e9, "tflops": cost.flops / seconds / 1e12,
        "of_the_roof": gpu.seconds(cost) / seconds,
    }  # fmt: skip


def _cpu_attention(name: str, step: tuple[int, int, int], gpu: Gpu, small: bool) -> dict[str, Any]:
    """A row of the compiled kernel of attention."""
    (S, P, T), layout = step, kernels.LAYOUTS[name]
    row = kernels.measure(name, S, P, T, None, "cpu", torch.bfloat16, gpu, "small" if small else None)
    tiles = tile_statistics([P] * S, [T] * S, cpu_tiling(layout.heads, layout.key_heads), layout.window)
    speed = {key: row[key] for key in ("us", "gbs", "tflops", "of_the_roof")}
    key = f"{name}, {S} x {P}, {T} queries"
    row = {"op": "attention", "key": key, "configuration": {}, **speed, "least_us": speed["us"]}
    return {**row, "tiles": dataclasses.asdict(tiles)}


def table(body: dict[str, Any]) -> str:
    """Markdown table: for every shape the default and the fastest candidate."""
    lines = [("kernel", "default, us", "best, us", "ratio", "of the roof", "configuration", "tiles")]
    for name, rows in itertools.groupby(body["rows"], lambda row: f"{row['op']} {row['key']}"):
        default, *_ = candidates = list(rows)
        best = min(candidates, key=lambda row: row["us"])
        words = ", ".join(f"{key} {value}" for key, value in best["configuration"].items()) or "default"
        tiles = default["tiles"] and f"{default['tiles']['executed']} of {default['tiles']['total']}"
        times = f"{default['us']:.1f}", f"{best['us']:.1f}", f"{default['us'] / best['us']:.3f}"
        lines.append((name, *times, f"{best['of_the_roof']:.0%}", words, tiles or ""))
    return markdown_table(lines)


def short(body: dict[str, Any]) -> dict[str, Any]:
    """Facts and a row per shape, for a file of tables: the default, the fastest candidate and their times."""
    rows = []
    for _, group in itertools.groupby(body["rows"], lambda row: (row["op"], row["key"])):
        default, *_ = candidates = list(group)
        best = min(candidates, key=lambda row: row["least_us"])
        names = ("op", "key", "of_the_roof", "us", "least_us", "tiles")
        rows.append({
            **{name: default[name] for name in names}, "best_least_us": best["least_us"], "best": best["configuration"],
        })  # fmt: skip
    facts = ("device", "kernels", "commit", "time", "command")
    return {**{fact: body[fact] for fact in facts}, "rows": rows}
