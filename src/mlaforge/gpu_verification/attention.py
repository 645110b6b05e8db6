"""Stage attention: paged attention against its predicted time (predictions.py) and the roofline (minimum bytes at the
measured copy speed, or FLOPs at the measured product speed, whichever takes longer), and the time of the merge.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator

import torch

from mlaforge.bench import kernels
from mlaforge.bench.latent_attention import LatentSizes, latent_inputs
from mlaforge.gpu_verification.case import Case, Outcome, Prediction
from mlaforge.gpu_verification.context import Context
from mlaforge.gpu_verification.predictions import LATENT_FORMS, TOPK, attention_times, latent_roof, latent_times
from mlaforge.ops import paged_attention_triton as attention
from mlaforge.ops.latent_attention import LATENT

# Name -> layout of bench/kernels.py, dtype of rows (None: the queries').
FORMS = {
    "gqa-64": ("gqa 64/8 x 64", None),
    "gqa-64 fp8": ("gqa 64/8 x 64", torch.float8_e4m3fn),
    "gqa-64 window 128": ("gqa 64/8 x 64, window 128", None),
    "mla 512+64": ("mla 64, 512+64", None),
}
# By priority: a deadline cuts the end of the list.
BATCHES, CONTEXTS, QUERIES = (1, 8, 64), (8192, 32768, 131072), (1, 4)
# Share of the roofline, and minimum microseconds (two launches in a graph), that are expected of kernels outside of the
# table of loops.
SHARE, MINIMUM_US = 0.5, 6.0
# Bytes of cached rows read before any is read again: several times the chip's cache.
COLD = 256 << 20


def cases(context: Context) -> Iterator[Case]:
    """The stage's cases."""
    grid: Iterator[tuple[int, int, int]] = itertools.product(CONTEXTS, BATCHES, QUERIES)
    if context.twin:
        grid = iter([(96, 2, 1)])
    for (P, S, T), name in itertools.product(list(grid), FORMS):
        layout, rows = FORMS[name]
        if context.twin and rows is not None:
            continue
        yield Case(
            f"{name}, {S} x {P}, T={T}", predicted(context, layout, rows, S, P, T),
            functools.partial(measure, context, layout, rows, S, P, T),
        )  # fmt: skip
    yield from latent_cases(context)


def latent_cases(context: Context) -> Iterator[Case]:
    """Latent attention over plain and coded rows, all of them and a selection."""
    grid = [(96, 2)] if context.twin else [(32768, 8), (32768, 64), (32768, 1)]
    for (P, S), (name, shape) in itertools.product(grid, LATENT_FORMS.items()):
        topk = 0 if "read" not in name else 48 if context.twin else TOPK
        code = ((64, 64, 64, 32) if isinstance(shape.code, tuple) else 64) if context.twin else shape.code
        sizes = LatentSizes(shape.heads, shape.kv_heads, shape.head_dim, code)
        times = latent_times(dataclasses.replace(shape, S=S, P=topk or P, selected=bool(topk)), context.chip)
        value = sum(time.total for time in times.values()) if times else 0.0
        roof = latent_roof(shape, S, topk or P, False)
        bound = Prediction(max(value * 1e6, MINIMUM_US), "us", share=roof / value if value else None)
        run = functools.partial(measure_latents, context, sizes, S, P, topk, roof)
        yield Case(f"{name.replace('1,024', str(topk))}, {S} x {P}", bound, run)


def measure_latents(context: Context, sizes: LatentSizes, S: int, P: int, topk: int, roof: float) -> Outcome:
    """Time of a layer's latent attention after its projections, with the write of the new rows and W_uv."""
    width = sizes.code if isinstance(sizes.code, int) else sizes.code[0]
    context.need(2 * S * P * width * 2 + 3 * COLD)
    inputs = latent_inputs(sizes, S, P, 1, context.dtype, context.device, topk)
    seconds = context.seconds(lambda: LATENT(*inputs, implementation="triton"))
    return Outcome(seconds * 1e6, roof / seconds)


def predicted(context: Context, name: str, rows: torch.dtype | None, S: int, P: int, T: int) -> Prediction:
    """Predicted microseconds of a call: the model's, or an expected share of the roofline."""
    layout, dtype = kernels.LAYOUTS[name], rows or context.dtype
    roof_us = context.roof.seconds(kernels.cost(layout, S, P, T, dtype.itemsize)) * 1e6
    times = attention_times(layout, S, P, T, context.dtype, dtype, context.chip)
    value = sum(time.total for time in times) * 1e6 if times else max(roof_us / SHARE, MINIMUM_US)
    return Prediction(value, "us", share=roof_us / value)


def measure(context: Context, name: str, rows: torch.dtype | None, S: int, P: int, T: int) -> Outcome:
    """Time of a call for one layout and step, by graph replay over more cached rows than the chip's cache holds."""
    layout, dtype = kernels.LAYOUTS[name], context.dtype
    itemsize = 1 if rows is not None else dtype.itemsize
    # Random rows are generated in the queries' dtype and then cast.
    context.need(S * (P + kernels.BLOCK) * layout.row * (dtype.itemsize + itemsize) + 3 * COLD)
    q, k, v, view, scale = kernels.make_inputs(layout, S, P, T, context.device.type, dtype)
    if rows is not None:
        k, v = kernels.split(layout, k.as_strided((len(k), layout.row), (layout.row, 1), 0).to(rows))
    minimum = kernels.cost(layout, S, P, T, itemsize)
    inputs = (q, k, v, view, scale)
    copies = [inputs] if context.twin else kernels.layers(layout, inputs, minimum.bytes, COLD)

    def run_layers() -> None:
        for layer_inputs in copies:
            attention.attend(*layer_inputs)

    seconds = context.seconds(run_layers) / len(copies)
    launch = attention.make_launch(*inputs)
    pieces, merge_seconds = len(launch.pieces) or S * launch.most_splits, 0.0
    if launch.most_splits > 1:
        attention.run(launch)
        grid, arguments = attention.merge_launch(launch)

        def merge() -> None:
            attention.merge_kernel[grid](**arguments, num_warps=4)

        merge_seconds = context.seconds(merge)
    detail = f"{minimum.bytes / seconds / 1e9:,.0f} GB/s, {pieces} pieces, merge {merge_seconds * 1e6:.1f} us"
    more = {
        "gbs": minimum.bytes / seconds / 1e9, "tflops": minimum.flops / seconds / 1e12, "pieces": pieces,
        "merge_us": merge_seconds * 1e6, "limit": context.roof.bound(minimum),
        "tile": [launch.arguments[n] for n in TILE],
    }  # fmt: skip
    return Outcome(seconds * 1e6, context.share(minimum, seconds), detail, more)


TILE = ("BLOCK_M", "BLOCK_N")
