"""Kernel benchmark: GB/s, TFLOP/s and share of the roofline of attention, over layouts, batches and contexts, or of
the small operations of a layer.

Every row is compared with the fp32 reference before it is timed; a wrong row stops the run. The caches of enough layers
are read in turn that the chip's cache cannot hold them (at most 128), block tables are shuffled, and on CUDA launches
are timed inside a graph, as the engine replays them. The roofline counts each visible cached row, the queries and the
outputs once, at the machine's bandwidth, or the products at its achievable FLOP/s, whichever takes longer. No GPU has
run this yet.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mlaforge.bench import machine
from mlaforge.bench.config import BenchConfig
from mlaforge.bench.draft_products import products
from mlaforge.bench.layer_operations import Run, experts_inputs, operations
from mlaforge.bench.roof import describe, roof
from mlaforge.config import DTYPES, nearest
from mlaforge.families.spec import MoeSpec
from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.check import TOLERANCES, check
from mlaforge.ops.mxfp4_experts import OP as EXPERTS
from mlaforge.ops.paged_attention import OP, reference
from mlaforge.planning.costs import Cost, Gpu, experts_touched
from mlaforge.rendering.table import markdown_table
from mlaforge.runtime import UserError, log, resolve_device

# `layer`: the small operations of a layer (layer_operations.py), on so many tokens; scaled down for a CPU. `experts`: a
# mixture of MXFP4 experts. `draft`: products of an EAGLE-3 head (draft_products.py).
OPERATIONS = ("paged_attention", "layer", "experts", "draft")
TOKENS, CPU_TOKENS, SMALL_TOKENS = (1, 8, 64, 2048), (1, 8), (3,)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Attention geometry. rope: rotary columns after the value in a latent row; None: separate keys and values."""

    heads: int
    key_heads: int
    value: int
    rope: int | None = None
    window: int | None = None

    @property
    def key(self) -> int:
        return self.value + (self.rope or 0)

    @property
    def row(self) -> int:
        """Elements cached per token."""
        return self.key if self.rope is not None else self.key_heads * (self.key + self.value)


LAYOUTS = {
    "gqa 64/8 x 64": Layout(64, 8, 64),
    "gqa 64/8 x 64, window 128": Layout(64, 8, 64, window=128),
    "gqa 32/8 x 128": Layout(32, 8, 128),
    "mla 64, 256+64": Layout(64, 1, 256, 64),
    "mla 64, 320+32": Layout(64, 1, 320, 32),
    "mla 64, 448+64": Layout(64, 1, 448, 64),
    "mla 64, 512+64": Layout(64, 1, 512, 64),
}
# Sequences, tokens in the cache, query tokens.
DECODE = [(1, 2048), (1, 32768), (1, 131072), (8, 8192), (32, 8192), (128, 2048), (128, 8192)]
STEPS = [(S, P, T) for (S, P), T in itertools.product(DECODE, (1, 4))] + [(1, 2048, 2048), (1, 32768, 2048)]
SMALL = [(1, 512, 1), (2, 256, 4), (1, 128, 64)]
# Scaled down for a CPU: the memory of a few layers, and minutes.
CPU = [(1, 2048, 1), (1, 2048, 4), (8, 2048, 1), (1, 1024, 512)]
CPU_LAYOUTS = ("gqa 64/8 x 64", "mla 64, 256+64")
BLOCK = 64
# Bytes of cached rows read before any is read again: several times an H200's 50 MB of L2.
COLD = 256 << 20


def make_inputs(layout: Layout, S: int, P: int, T: int, device: str, dtype: torch.dtype) -> tuple[Any, ...]:
    """Inputs of the op for S sequences of P tokens, the last T of each as queries; blocks in random order."""
    columns = -(-P // BLOCK)
    blocks = random.Random(0).sample(range(S * columns), S * columns)
    view = CacheView(
        block_table_SB=torch.tensor(blocks, dtype=torch.int32, device=device).view(S, columns),
        seq_lens_S=torch.full((S,), P, dtype=torch.int32, device=device),
        first_S=torch.zeros(S, dtype=torch.int32, device=device),
        query_start_S1=torch.arange(0, S * T + 1, T, dtype=torch.int32, device=device),
        slots_N=torch.zeros(S * T, dtype=torch.int64, device=device),
        block_size=BLOCK,
        max_query=T,
        max_seq_len=P,
        window=layout.window,
        queries=(T,) * S,
        lengths=(P,) * S,
        runs=tuple(
            tuple((block * BLOCK, min(BLOCK, P - i * BLOCK)) for i, block in enumerate(blocks[s * columns :][:columns]))
            for s in range(S)
        ),
    )
    slots = S * columns * BLOCK
    torch.manual_seed(0)
    k, v = split(layout, torch.randn(slots, layout.row, device=device, dtype=dtype))
    q = torch.randn(S * T, layout.heads, layout.key, device=device, dtype=dtype)
    return q, k, v, view, layout.key**-0.5


def split(layout: Layout, rows_LW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values as views of the cached rows, as the engine's layers view them."""
    if layout.rope is not None:
        return rows_LW[:, None], rows_LW[:, None, : layout.value]
    k, v = rows_LW.view(-1, 2, layout.key_heads, layout.key).unbind(1)
    return k, v


def layers(layout: Layout, inputs: tuple[Any, ...], read: float, cold: int) -> list[tuple[Any, ...]]:
    """The inputs, and copies of them with copied caches, until one pass reads `cold` bytes. read: bytes of one call."""
    q, k, _, view, scale = inputs
    rows_LW = k.as_strided((len(k), layout.row), (layout.row, 1), 0)
    copies = [inputs]
    while len(copies) * read < cold and len(copies) < 128:
        copies.append((q, *split(layout, rows_LW.clone()), view, scale))
    return copies


def cost(layout: Layout, S: int, P: int, T: int, itemsize: int) -> Cost:
    """Minimum bytes and FLOPs of any implementation."""
    window = layout.window or P
    pairs = sum(min(window, P - T + t + 1) for t in range(T))
    rows = min(P, window + T - 1)
    io = T * layout.heads * (layout.key + layout.value)
    flops = 2 * pairs * layout.heads * (layout.key + layout.value)
    return Cost(float(S * flops), float(S * (rows * layout.row + io) * itemsize))


def compare(inputs: tuple[Any, ...], outputs: tuple[torch.Tensor, ...]) -> None:
    """Compare with the reference on the first and last sequence and their last 64 query tokens, as the scores of all
    would not fit."""
    q, k, v, view, scale = inputs
    out, lse = outputs
    starts = view.query_start_S1.tolist()
    for s in sorted({0, len(starts) - 2}):
        rows = slice(max(starts[s], starts[s + 1] - 64), starts[s + 1])
        count = rows.stop - rows.start
        part = dataclasses.replace(
            view,
            block_table_SB=view.block_table_SB[s : s + 1],
            seq_lens_S=view.seq_lens_S[s : s + 1],
            first_S=view.first_S[s : s + 1],
            query_start_S1=torch.tensor([0, count], dtype=torch.int32, device=q.device),
        )
        check(
            "paged_attention",
            (q[rows], k, v, part, scale),
            (out[rows], lse[rows]),
            reference(q[rows], k, v, part, scale),
        )


def seconds(run: Callable[[], Any], device: str, milliseconds: int = 100) -> float:
    """Median seconds of one run over all layers. milliseconds: of each of the ten measurements on a GPU."""
    if device == "cuda":
        from triton.testing import do_bench_cudagraph

        return float(do_bench_cudagraph(run, rep=milliseconds, return_mode="median")) * 1e-3
    times = []
    for _ in range(5):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def grid(scope: str) -> list[tuple[str, tuple[int, int, int]]]:
    """Pairs of a layout's name and (sequences, cached tokens, query tokens). `small`: a few tiny steps for tests."""
    names, steps = {"cpu": (CPU_LAYOUTS, CPU), "small": (tuple(LAYOUTS), SMALL)}.get(scope, (tuple(LAYOUTS), STEPS))
    return list(itertools.product(names, steps))


def run(config: BenchConfig, folder: Path, scope: str | None = None) -> dict[str, Any]:
    """Measure an op over its grid, write `folder/kernels.json` and return its content. Raise UserError for an unknown
    op, AssertionError for a wrong result."""
    if config.op not in OPERATIONS:
        raise UserError(
            f"op {config.op!r} has no benchmark; use {', '.join(OPERATIONS)}{nearest(config.op, OPERATIONS)}"
        )
    device = resolve_device(config.device)
    name, *others = config.dtype or ("auto",)
    if others or name not in DTYPES:
        raise UserError(f"dtype = {','.join(config.dtype or ())} must be one of {', '.join(DTYPES)} for kernels")
    # On half the processors bf16 products are no faster than fp32, but bf16 rows are never slower to read.
    dtype = torch.bfloat16 if name == "auto" else getattr(torch, name)
    gpu = roof(config.roof, device)
    if gpu is None:
        raise UserError("the roofline of this machine is unknown; name the most similar machine with --roof")
    header, rows = machine.header("kernels", device, config.tuned), list[dict[str, Any]]()
    if config.op == "draft":
        for name, (N, minimum, run_product) in products(dtype, device, scope == "small").items():
            rows.append(measure_operation(name, N, minimum, run_product, config.implementation, device, gpu, config.op))
            log(f"{name}: {rows[-1]['us']:.1f} us")
    elif config.op != "paged_attention":
        for N in SMALL_TOKENS if scope == "small" else CPU_TOKENS if device.type == "cpu" else TOKENS:
            make = experts_operation if config.op == "experts" else operations
            for name, (minimum, run_operation) in make(N, dtype, device, scope == "small").items():
                rows.append(
                    measure_operation(name, N, minimum, run_operation, config.implementation, device, gpu, config.op)
                )
                log(f"{name}, {N} tokens: {rows[-1]['us']:.1f} us")
    if config.op != "paged_attention":
        machine.write(folder / "kernels.json", {**header, "roof": describe(gpu), "rows": rows})
        return {**header, "roof": describe(gpu), "rows": rows}
    for name, (S, P, T) in grid(scope or ("cpu" if device.type == "cpu" else "full")):
        rows.append({"op": config.op, **measure(name, S, P, T, config.implementation, device.type, dtype, gpu, scope)})
        log(f"{name}, {S} x {P} tokens, {T} queries: {rows[-1]['us']:.1f} us with {rows[-1]['by']}")
        machine.write(folder / "kernels.json", {**header, "roof": describe(gpu), "rows": rows})
    return {**header, "roof": describe(gpu), "rows": rows}


def measure(
    name: str, S: int, P: int, T: int, implementation: str | None, device: str, dtype: torch.dtype, gpu: Gpu,
    scope: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Check and time one row."""
    layout = LAYOUTS[name]
    inputs = make_inputs(layout, S, P, T, device, dtype)
    by, _ = OP.choose(*inputs, implementation=implementation)
    compare(inputs, OP(*inputs, implementation=by))
    minimum = cost(layout, S, P, T, dtype.itemsize)
    copies = layers(layout, inputs, minimum.bytes, 0 if scope == "small" else COLD)

    def run_layers() -> None:
        for layer_inputs in copies:
            OP(*layer_inputs, implementation=by)

    seconds_per_layer = seconds(run_layers, device) / len(copies)
    return {
        "layout": name, "sequences": S, "tokens": P, "queries": T, "dtype": str(dtype).removeprefix("torch."), "by": by,
        "us": seconds_per_layer * 1e6, "gbs": minimum.bytes / seconds_per_layer / 1e9,
        "tflops": minimum.flops / seconds_per_layer / 1e12,
        "of_the_roof": gpu.seconds(minimum) / seconds_per_layer, "limit": gpu.bound(minimum),
    }  # fmt: skip


def experts_operation(N: int, dtype: torch.dtype, device: torch.device, small: bool) -> dict[str, tuple[int, Run]]:
    """A mixture of MXFP4 experts on N tokens, with 20B's sizes: the least bytes that it reads, and what runs it."""
    sizes = (8, 2, 64, 96) if small else (32, 4, 2880, 2880)
    inputs = experts_inputs(N, sizes, dtype, device)
    E, K, C, I = sizes  # noqa: E741
    # A 4-bit code, and an 8-bit scale per 32 codes.
    weights = experts_touched(MoeSpec(E, K), N) * 3 * C * I * 4.25 / 8
    least = int(weights + 2 * N * C * dtype.itemsize)
    return {"experts": (least, lambda name: list(EXPERTS(*inputs, implementation=name)))}


def measure_operation(
    name: str, N: int, minimum: int, run: Run, implementation: str | None, device: torch.device, gpu: Gpu,
    op: str = "layer",
) -> dict[str, Any]:  # fmt: skip
    """Check and time an operation on N tokens, including copies of what it writes over."""
    expected = run("reference")
    tolerance = EXPERTS.tolerance if op == "experts" else TOLERANCES[expected[-1].dtype]
    check(name, (), run(implementation), expected, tolerance)
    taken = seconds(functools.partial(run, implementation), device.type)
    return {
        "op": op, "layout": name, "sequences": N, "tokens": 0, "queries": 1, "by": implementation or "dispatched",
        "us": taken * 1e6, "gbs": minimum / taken / 1e9, "tflops": 0.0,
        "of_the_roof": gpu.seconds(Cost(0.0, float(minimum))) / taken, "limit": "memory",
    }  # fmt: skip


def table(body: dict[str, Any]) -> str:
    """Markdown table of the rows."""
    heads = ("layout", "sequences", "tokens", "queries", "by")
    lines = [(*heads, "us", "GB/s", "TFLOP/s", "of the roof", "limit")]
    for row in body["rows"]:
        speed = f"{row['us']:.1f}", f"{row['gbs']:.1f}", f"{row['tflops']:.3g}", f"{row['of_the_roof']:.0%}"
        lines.append((*(row[key] for key in heads), *speed, row["limit"]))
    return markdown_table(lines)
