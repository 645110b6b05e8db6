"""Stage experts: MXFP4 experts of 20B's sizes part by part: routing, gate and up, down, the weighted sum."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mlaforge.families.spec import MoeSpec
from mlaforge.gpu_verification.case import Case, Outcome, Prediction
from mlaforge.gpu_verification.context import Context
from mlaforge.gpu_verification.correctness import experts_inputs
from mlaforge.ops import mxfp4_experts_triton as experts
from mlaforge.planning.costs import Cost, experts_touched

# Experts, experts per token, hidden size, intermediate size.
SIZES, TWIN_SIZES = (32, 4, 2880, 2880), (4, 2, 64, 96)
TOKENS, TWIN_TOKENS = (1, 4, 8, 64, 512), (1,)
# Expected share of the roofline, and minimum microseconds, of each part: routing is half a dozen small kernels.
SHARES = {"route": 1.0, "gate and up": 0.4, "down": 0.4, "sum": 0.3, "whole": 0.35}
MINIMUM_US = {"route": 25.0, "gate and up": 10.0, "down": 10.0, "sum": 3.0, "whole": 45.0}
# Bits of a packed weight: a 4-bit code, and an 8-bit scale per 32 codes.
BITS = 4.25


def cases(context: Context) -> Iterator[Case]:
    """The stage's cases."""
    for tokens in TWIN_TOKENS if context.twin else TOKENS:
        for part, share in SHARES.items():
            predicted = max(context.roof.seconds(cost(context, part, tokens)) / share * 1e6, MINIMUM_US[part])
            yield Case(
                f"{part}, {tokens} tokens", Prediction(predicted, "us", share=share),
                functools.partial(measure, context, part, tokens),
            )  # fmt: skip


def sizes(context: Context) -> tuple[int, int, int, int]:
    """Sizes of the measured experts (E, K, hidden, intermediate)."""
    return TWIN_SIZES if context.twin else SIZES


def cost(context: Context, part: str, tokens: int) -> Cost:
    """Minimum bytes and FLOPs of a part under uniform, independent routing."""
    E, K, C, I = sizes(context)  # noqa: E741
    read = experts_touched(MoeSpec(E, K), tokens) * BITS / 8
    pairs, size = tokens * K, context.dtype.itemsize
    gate = Cost(4.0 * pairs * C * I, read * 2 * C * I + tokens * C * size + pairs * I * size)
    down = Cost(2.0 * pairs * C * I, read * C * I + pairs * I * size + pairs * C * 4)
    total = Cost(2.0 * pairs * C, float(pairs * C * 4 + tokens * C * size))
    route = Cost(0.0, float(pairs * 8))
    return {"route": route, "gate and up": gate, "down": down, "sum": total, "whole": gate + down + total}[part]


def measure(context: Context, part: str, tokens: int) -> Outcome:
    """Time of one part, replayed from a graph. An eighth of a layer's 32 experts has 13 MB of weights: only from a few
    tokens on does the mixture exceed the chip's cache, so a share above 1 is possible at one token."""
    arguments = context.shared(f"experts {tokens}", lambda: experts_inputs(context, tokens, sizes(context)))
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
