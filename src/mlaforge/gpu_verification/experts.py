"""Stage experts: MXFP4 experts of 20B's sizes part by part: routing, gate and up, down, the weighted sum."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mlaforge.bench.layer_operations import experts_inputs
from mlaforge.gpu_verification.case import Case, Outcome, Prediction
from mlaforge.gpu_verification.context import Context
from mlaforge.gpu_verification.predictions import PARTS, ROUTE_US, experts_cost, experts_time
from mlaforge.ops import mxfp4_experts_triton as experts
from mlaforge.planning.costs import Cost

# Experts, experts per token, hidden size, intermediate size.
SIZES, TWIN_SIZES = (32, 4, 2880, 2880), (4, 2, 64, 96)
TOKENS, TWIN_TOKENS = (1, 4, 8, 64, 512), (1,)
# Share of the roofline, and minimum microseconds, that are expected of kernels outside of the table of loops.
SHARE, MINIMUM_US = 0.4, 10.0


def cases(context: Context) -> Iterator[Case]:
    """The stage's cases."""
    for tokens in TWIN_TOKENS if context.twin else TOKENS:
        for part in ("route", *PARTS, "whole"):
            predicted = predicted_us(context, part, tokens)
            share = context.roof.seconds(cost(context, part, tokens)) * 1e6 / predicted
            yield Case(
                f"{part}, {tokens} tokens", Prediction(predicted, "us", share=None if part == "route" else share),
                functools.partial(measure, context, part, tokens),
            )  # fmt: skip


def predicted_us(context: Context, part: str, tokens: int) -> float:
    """Predicted microseconds of a part: the model's, or an expected share of the roofline."""
    if part == "route":
        return ROUTE_US
    if part == "whole":
        return ROUTE_US + sum(predicted_us(context, other, tokens) for other in PARTS)
    time = experts_time(sizes(context), part, tokens, context.dtype, context.chip)
    if time:
        return time.total * 1e6
    return max(context.roof.seconds(cost(context, part, tokens)) / SHARE * 1e6, MINIMUM_US)


def sizes(context: Context) -> tuple[int, int, int, int]:
    """Sizes of the measured experts (E, K, hidden, intermediate)."""
    return TWIN_SIZES if context.twin else SIZES


def cost(context: Context, part: str, tokens: int) -> Cost:
    """Minimum bytes and FLOPs of a part."""
    return experts_cost(sizes(context), part, tokens, context.dtype.itemsize)


def measure(context: Context, part: str, tokens: int) -> Outcome:
    """Time of one part, replayed from a graph. An eighth of a layer's 32 experts has 13 MB of weights: only from a few
    tokens on does the mixture exceed the chip's cache, so a share above 1 is possible at one token."""
    arguments = context.shared(
        f"experts {tokens}", lambda: experts_inputs(tokens, sizes(context), context.dtype, context.device)
    )
    x, chosen, weights, *packed, alpha, limit = arguments
    (N, K), (E, C) = chosen.shape, packed[5].shape
    order, offsets = experts.route(chosen, E)
    gated = x.new_empty(N * K, packed[2].shape[1] // 2)
    parts = torch.empty(N * K, C, dtype=torch.float32, device=x.device)
    out = x.new_empty(N, C)
    runs: dict[str, Callable[[], Any]] = {
        "route": lambda: experts.route(chosen, E),
        "gate and up": lambda: experts.product(x, order, offsets, packed[:3], gated, K, alpha, limit, gated=True),
        "down": lambda: experts.product(gated, order, offsets, packed[3:], parts, K, alpha, limit, gated=False),
        "sum": lambda: experts.weighted_sum(parts, weights, out),
        "whole": lambda: experts.mixture(*arguments),
    }
    for run in list(runs.values())[:-1]:
        run()
    seconds = context.seconds(runs[part])
    minimum = cost(context, part, tokens)
    detail = f"{minimum.bytes / seconds / 1e9:,.0f} GB/s, {minimum.flops / seconds / 1e12:.3g} TFLOP/s"
    return Outcome(seconds * 1e6, None if part == "route" else context.share(minimum, seconds), detail)
