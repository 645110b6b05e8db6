"""Mixture of MXFP4 experts in Triton: tokens grouped by expert, weights unpacked within the tile that multiplies them.

(token, expert) pairs are sorted by expert on the device. A program processes work items: a tile of pairs of one expert
and a tile of its outputs. Offsets of the experts' pairs are read on the device, and the grid depends only on host
values, so a launch needs no synchronisation and can be captured in a graph. Four launches: the routing of few tokens,
gate and up with the activation, down, and the weighted sum of a token's experts.

Sums run over the inputs in the same order for any tile, and a token's experts are added by rank. Weights are the left
factor: outputs fill the 64 rows of Hopper's asynchronous tensor cores, and 16 pairs suffice on the other side. Not
measured on a GPU yet.

Legend: N tokens, C hidden size, I intermediate size, E experts, K experts per token, P = N K pairs sorted by expert.
"""

# Triton reads annotations of kernels: only constexpr is allowed.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlaforge.ops import tuned
from mlaforge.ops.expert_routing import route
from mlaforge.ops.gpu_properties import GpuProperties, gpu_properties
from mlaforge.ops.mxfp4 import BLOCK

# Inputs per tile in 16 bits; outputs and inputs per tile in 32, which is for parity only: exact products have no tensor
# core.
BLOCK_K, EXACT_TILE = 128, (16, 32)
# Columns per program of the weighted sum.
SUM_BLOCK = 1024


@triton.jit
def _lower(bits, power):
    """Return the numbers whose E2M1 codes are the lowest exponent bits and the highest mantissa bit of bf16, in the
    lower 16 bits, times a power. Such a bf16 is the number times 2^-126; 0.5 is subnormal, without an implicit leading
    one, in both."""
    if power.dtype == tl.bfloat16:
        value = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        value = (bits << 16).to(tl.float32, bitcast=True)
    return value * tl.full([], 8.507059173023462e37, power.dtype) * power


@triton.jit
def _weights(
    words, scales, rows, live, start, INPUTS: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Return exact weights [BLOCK_O, BLOCK_K] in DTYPE, bf16 or fp32: inputs from `start` on of the outputs `rows`; 0
    if masked. A word has eight codes, of which two are placed at once: input i and, 16 bits higher, input i + 4."""
    word, group = start // 8 + tl.arange(0, BLOCK_K // 8), start // 32 + tl.arange(0, BLOCK_K // 32)
    mask, group_mask = live[:, None], live[:, None]
    if INPUTS % BLOCK_K:
        mask, group_mask = mask & (word < INPUTS // 8)[None, :], group_mask & (group < INPUTS // 32)[None, :]
    codes = tl.load(words + rows[:, None] * (INPUTS // 8) + word[None, :], mask=mask, other=0)
    scale = tl.load(scales + rows[:, None] * (INPUTS // 32) + group[None, :], mask=group_mask, other=0).to(tl.int32)
    # 2^-127 has no implicit leading one either; 255 becomes infinity, as in transformers.
    if tl.bfloat16 == DTYPE:
        power = tl.where(scale == 0, 0x40, scale << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        power = tl.where(scale == 0, 0x400000, scale << 23).to(tl.float32, bitcast=True)
    power = tl.broadcast_to(power[:, :, None], (BLOCK_O, BLOCK_K // 32, 4)).reshape(BLOCK_O, BLOCK_K // 8)
    # -0x7fff8000 is 0x80008000, the signs of inputs 3 and 7.
    pair0 = ((codes & 0x00070007) << 6) | ((codes & 0x00080008) << 12)
    pair1 = ((codes & 0x00700070) << 2) | ((codes & 0x00800080) << 8)
    pair2 = ((codes & 0x07000700) >> 2) | ((codes & 0x08000800) << 4)
    pair3 = ((codes >> 6) & 0x01C001C0) | (codes & -0x7FFF8000)
    even = tl.interleave(
        tl.interleave(_lower(pair0, power), _lower(pair0 >> 16, power)),
        tl.interleave(_lower(pair2, power), _lower(pair2 >> 16, power)),
    )
    odd = tl.interleave(
        tl.interleave(_lower(pair1, power), _lower(pair1 >> 16, power)),
        tl.interleave(_lower(pair3, power), _lower(pair3 >> 16, power)),
    )
    return tl.interleave(even, odd)


@triton.jit(do_not_specialize=["top_k"])
def product_kernel(
    x, order, offsets, words, scales, bias, out, x_row, top_k, alpha, limit,
    EXPERTS: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, GATED: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: any number of programs. GATED: x [N, INPUTS], out [P, OUTPUTS], weights with twice as many outputs, gate
    and up alternating. Otherwise x [P, INPUTS], and out is in the pairs' order before sorting."""
    e = tl.arange(0, BLOCK_E)
    begins = tl.load(offsets + e, mask=e < EXPERTS, other=0)
    ends = tl.load(offsets + e + 1, mask=e < EXPERTS, other=0)
    tiles = (ends - begins + BLOCK_M - 1) // BLOCK_M
    tile_ends = tl.cumsum(tiles, 0)
    columns: tl.constexpr = (OUTPUTS + BLOCK_O - 1) // BLOCK_O
    DTYPE: tl.constexpr = tl.bfloat16 if x.dtype.element_ty == tl.bfloat16 else tl.float32

    for item in range(tl.program_id(0), tl.sum(tiles) * columns, tl.num_programs(0)):
        tile = item // columns
        expert = tl.sum((tile_ends <= tile).to(tl.int32))
        first = tl.sum(tl.where(e == expert, begins + (tile - tile_ends + tiles) * BLOCK_M, 0))
        p = first + tl.arange(0, BLOCK_M)
        valid = p < tl.sum(tl.where(e == expert, ends, 0))
        pair = tl.load(order + p, mask=valid, other=0)
        x_rows = x + (pair // top_k if GATED else p.to(tl.int64)) * x_row
        o = item % columns * BLOCK_O + tl.arange(0, BLOCK_O)
        live = o < OUTPUTS
        rows = expert.to(tl.int64) * (2 * OUTPUTS if GATED else OUTPUTS) + (o * 2 if GATED else o)

        acc = tl.zeros([BLOCK_O, BLOCK_M], tl.float32)
        if GATED:
            up = tl.zeros([BLOCK_O, BLOCK_M], tl.float32)
        for start in range(0, INPUTS, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            mask = valid[:, None]
            if INPUTS % BLOCK_K:
                mask = mask & (k < INPUTS)[None, :]
            x_tile = tl.trans(tl.load(x_rows[:, None] + k[None, :], mask=mask, other=0.0))
            weights = _weights(words, scales, rows, live, start, INPUTS, BLOCK_O, BLOCK_K, DTYPE)
            acc = tl.dot(weights.to(x_tile.dtype), x_tile, acc, input_precision=PRECISION)
            if GATED:
                weights = _weights(words, scales, rows + 1, live, start, INPUTS, BLOCK_O, BLOCK_K, DTYPE)
                up = tl.dot(weights.to(x_tile.dtype), x_tile, up, input_precision=PRECISION)

        acc += tl.load(bias + rows, mask=live, other=0.0).to(tl.float32)[:, None]
        if GATED:
            up += tl.load(bias + rows + 1, mask=live, other=0.0).to(tl.float32)[:, None]
            gate = tl.minimum(acc, limit)
            acc = (tl.minimum(tl.maximum(up, -limit), limit) + 1.0) * gate * tl.sigmoid(gate * alpha)
        at = out + (p.to(tl.int64) if GATED else pair)[None, :] * OUTPUTS + o[:, None]
        tl.store(at, acc.to(out.dtype.element_ty), mask=live[:, None] & valid[None, :])


@triton.jit(do_not_specialize=["tokens"])
def route_kernel(
    logits, weights, order, offsets, tokens, EXPERTS: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One program: the K largest of logits [N, EXPERTS] with their softmax, weights [N, K], and the (token, expert)
    pairs sorted by expert, as `route`. Equal logits: the lower expert. N <= BLOCK_N."""
    n, e = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_E)
    live = (n < tokens)[:, None] & (e < EXPERTS)[None, :]
    # NaN and -inf still leave K experts to choose.
    score = tl.load(logits + n[:, None] * EXPERTS + e[None, :], mask=live, other=0.0).to(tl.float32)
    score = tl.where(score > -3e38, score, -3e38)
    rest = tl.where((e < EXPERTS)[None, :] & (n >= 0)[:, None], score, float("-inf"))
    rank = tl.full([BLOCK_N, BLOCK_E], K, tl.int32)
    for k in tl.static_range(K):
        chosen = e[None, :] == tl.argmax(rest, 1)[:, None]
        rank = tl.where(chosen, k, rank)
        rest = tl.where(chosen, float("-inf"), rest)
    chosen = (rank < K) & live
    peak = tl.max(tl.where(rank < K, score, float("-inf")), 1)
    power = tl.where(rank < K, tl.exp(score - peak[:, None]), 0.0)
    share = power / tl.sum(power, 1)[:, None]
    pair = n[:, None] * K + rank
    tl.store(weights + pair, share.to(weights.dtype.element_ty), mask=chosen)
    count = tl.sum(chosen.to(tl.int32), 0)
    ends = tl.cumsum(count, 0)
    tl.store(offsets + e + 1, ends, mask=e < EXPERTS)
    tl.store(offsets + e, ends - count, mask=e == 0)
    before = tl.cumsum(chosen.to(tl.int32), 0) - chosen.to(tl.int32)
    tl.store(order + (ends - count)[None, :] + before, pair.to(tl.int64), mask=chosen)


@triton.jit
def sum_kernel(parts, weights, out, K: tl.constexpr, C: tl.constexpr, SUM_BLOCK: tl.constexpr):
    """Grid (N, columns): out [N, C] = sum over K of parts [N, K, C] in fp32 times weights [N, K], in order of K."""
    n, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * SUM_BLOCK + tl.arange(0, SUM_BLOCK)
    acc = tl.zeros([SUM_BLOCK], tl.float32)
    for k in range(K):
        part = tl.load(parts + (n * K + k) * C + c, mask=c < C, other=0.0)
        acc += part * tl.load(weights + n * K + k).to(tl.float32)
    tl.store(out + n * C + c, acc.to(out.dtype.element_ty), mask=c < C)


INTERPRETED = not isinstance(product_kernel, triton.JITFunction)


def supports(x_NC: Tensor, *packed: Tensor) -> Literal[True] | str:
    """Return True, or the reason why the kernels cannot run on hidden states and the tensors of a mixture."""
    if x_NC.device.type != "cuda" and not INTERPRETED:
        return f"it needs CUDA tensors, the inputs are on {x_NC.device.type}"
    if x_NC.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"it does not support {x_NC.dtype}"
    if INTERPRETED and x_NC.dtype == torch.bfloat16:
        return "Triton's interpreter computes wrong bfloat16 products"
    if x_NC.stride(-1) != 1 or not all(tensor.is_contiguous() for tensor in packed):
        return "rows must be contiguous"
    if any(tensor.dtype == torch.uint8 and tensor.dim() == 4 and tensor.data_ptr() % 4 for tensor in packed):
        return "codes must begin at a multiple of 4 bytes"
    return True


def mixture_supports(x_NC: Tensor, logits_NE: Tensor, top_k: int, *packed: Any) -> Literal[True] | str:
    """As `supports`, for the inputs of `mixture_of_logits`."""
    return supports(x_NC, *packed[:-2]) if logits_NE.is_contiguous() else "logits must be contiguous"


@dataclasses.dataclass(frozen=True)
class Launch:
    """A launch of the product: programs, arguments by name, compiler options."""

    programs: int
    arguments: dict[str, Any]
    options: dict[str, int]


def most_tiles(pairs: int, experts: int, size: int) -> int:
    """Return an upper bound of the tiles of `size` pairs: each expert's last one may be partial."""
    return pairs // size + min(experts, pairs)


def tile_sizes(pairs: int, experts: int, outputs: int, gpu: GpuProperties) -> tuple[int, int]:
    """Return the pairs and the outputs of a tile.

    An expert's weights are unpacked once per tile of pairs, so tiles are as large as an expert's mean share. Few tokens
    are limited by reading weights, which takes as long as the multiprocessor with the most tiles: smaller tiles are
    shared out more evenly, at the price of Hopper's asynchronous tensor cores, which need 64 outputs. Not tuned on a
    GPU yet.
    """
    sizes = (128, 64) if gpu.asynchronous else (64,)
    size = next((size for size in sizes if pairs >= size * experts), 16)
    few = most_tiles(pairs, experts, size) * triton.cdiv(outputs, 64) < 3 * gpu.multiprocessors
    return size, 32 if few else 64


def candidates() -> list[tuned.Configuration]:
    """Return configurations to measure instead of `tile_sizes`'. programs: per multiprocessor."""
    return [
        {"BLOCK_M": size, "BLOCK_O": outputs, "programs": programs}
        for size in (16, 64, 128)
        for outputs in (32, 64)
        for programs in (1, 2, 4)
    ]


def make_launch(
    x: Tensor, order_P: Tensor, offsets: Tensor, blocks: Tensor, scales: Tensor, bias: Tensor, out: Tensor,
    top_k: int, alpha: float, limit: float, gated: bool, gpu: GpuProperties | None = None,
) -> Launch:  # fmt: skip
    """Prepare a launch from shapes alone. `blocks` [E, outputs, inputs / 32, 16], `offsets` int32 [E + 1]. `gpu`: to
    compile for, if not the tensors' device."""
    E, P, OUTPUTS = len(blocks), len(order_P), out.shape[1]
    here, gpu = gpu is None, gpu or gpu_properties(x.device)
    BLOCK_M, BLOCK_O = tile_sizes(P, E, OUTPUTS, gpu)
    inputs = BLOCK_K
    if x.dtype == torch.float32:
        BLOCK_M, (BLOCK_O, inputs) = 16, EXACT_TILE
    configuration: tuned.Configuration = {}
    if here:
        width = blocks.shape[2] * BLOCK
        hidden, intermediate = (width, OUTPUTS) if gated else (OUTPUTS, width)
        configuration = tuned.config("experts", tuned.experts_key(E, top_k, hidden, intermediate, P // top_k)) or {}
    BLOCK_M, BLOCK_O = configuration.get("BLOCK_M", BLOCK_M), configuration.get("BLOCK_O", BLOCK_O)
    # A warp per 16 outputs: with more, several would unpack the same weights.
    num_warps = max(1, BLOCK_O // 16)
    room = configuration.get("programs", 8 // num_warps) * gpu.multiprocessors
    programs = min(most_tiles(P, E, BLOCK_M) * triton.cdiv(OUTPUTS, BLOCK_O), room)
    arguments = {
        "x": x, "order": order_P, "offsets": offsets,
        "words": blocks.view(torch.int32), "scales": scales, "bias": bias, "out": out,
        "x_row": x.stride(0), "top_k": top_k, "alpha": alpha, "limit": limit, "EXPERTS": E,
        "INPUTS": blocks.shape[2] * BLOCK, "OUTPUTS": OUTPUTS, "GATED": gated, "BLOCK_E": triton.next_power_of_2(E),
        "BLOCK_M": BLOCK_M, "BLOCK_O": BLOCK_O, "BLOCK_K": inputs,
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
    }  # fmt: skip
    return Launch(programs, arguments, {"num_warps": num_warps, "num_stages": 3})


def mixture(x_NC: Tensor, topk_ids_NK: Tensor, topk_weights_NK: Tensor, *packed: Any) -> Tensor:
    """ops/mxfp4_experts.py's `mxfp4_experts`: [N, C] in the dtype of x. packed: six tensors, alpha and limit."""
    down_bias = packed[5]
    return sorted_mixture(x_NC, *route(topk_ids_NK, len(down_bias)), topk_weights_NK, *packed)


def sorted_mixture(
    x_NC: Tensor, order_P: Tensor, offsets: Tensor, topk_weights_NK: Tensor, gate_up_blocks: Tensor,
    gate_up_scales: Tensor, gate_up_bias: Tensor, down_blocks: Tensor, down_scales: Tensor, down_bias: Tensor,
    alpha: float, limit: float,
) -> Tensor:  # fmt: skip
    """Return [N, C] in the dtype of x for pairs sorted by expert, as `route` returns them."""
    (N, K), C, device = topk_weights_NK.shape, down_bias.shape[1], x_NC.device
    out_NC = x_NC.new_empty(N, C)
    if not N:
        return out_NC
    gated_PI = x_NC.new_empty(N * K, gate_up_bias.shape[1] // 2)
    # fp32: rounded once, after the sum.
    parts_PC = torch.empty(N * K, C, dtype=torch.float32, device=device)
    gate_up, down = (gate_up_blocks, gate_up_scales, gate_up_bias), (down_blocks, down_scales, down_bias)
    product(x_NC, order_P, offsets, gate_up, gated_PI, K, alpha, limit, gated=True)
    product(gated_PI, order_P, offsets, down, parts_PC, K, alpha, limit, gated=False)
    weighted_sum(parts_PC, topk_weights_NK, out_NC)
    return out_NC


# Tokens times experts that the program of a routing holds in registers; beyond, torch sorts.
ROUTED = 8192


def mixture_of_logits(x_NC: Tensor, logits_NE: Tensor, top_k: int, *packed: Any) -> Tensor:
    """ops/mxfp4_experts.py's `mxfp4_mixture`."""
    return sorted_mixture(x_NC, *route_logits(logits_NE, top_k), *packed)


def route_logits(logits_NE: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the (token, expert) pairs sorted by expert and their offsets, as `route`, and weights [N, K]."""
    N, E = logits_NE.shape
    if N * triton.next_power_of_2(E) > ROUTED:
        best_NK, topk_ids_NK = logits_NE.topk(top_k)
        return *route(topk_ids_NK, E), best_NK.softmax(dim=-1)
    arguments, options = route_launch(logits_NE, top_k)
    if N:
        with torch.cuda.device_of(logits_NE):
            route_kernel[(1,)](**arguments, **options)
    return arguments["order"], arguments["offsets"], arguments["weights"]


def route_launch(logits_NE: Tensor, top_k: int) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the arguments and the options of a routing. Allocates `weights` [N, K], `order` int64 [P] and `offsets`
    int32 [E + 1]."""
    (N, E), device = logits_NE.shape, logits_NE.device
    BLOCK_E = triton.next_power_of_2(E)
    # Two classes, because each is compiled.
    few = min(16, ROUTED // BLOCK_E)
    arguments = {
        "logits": logits_NE, "weights": logits_NE.new_empty(N, top_k),
        "order": torch.empty(N * top_k, dtype=torch.int64, device=device),
        "offsets": torch.empty(E + 1, dtype=torch.int32, device=device), "tokens": N, "EXPERTS": E, "K": top_k,
        "BLOCK_N": few if few >= N else ROUTED // BLOCK_E, "BLOCK_E": BLOCK_E,
    }  # fmt: skip
    return arguments, {"num_warps": 4 if few >= N else 16}


def product(
    x: Tensor, order_P: Tensor, offsets: Tensor, weights: Sequence[Tensor], out: Tensor, top_k: int, alpha: float,
    limit: float, gated: bool,
) -> None:  # fmt: skip
    """Overwrite `out` with every pair's product; `weights` are blocks, scales and bias of all experts. `gated`: gate
    and up projections with the activation, and `x` has a row per token; otherwise one per pair."""
    blocks, scales, bias = weights
    launch = make_launch(x, order_P, offsets, blocks, scales, bias, out, top_k, alpha, limit, gated)
    with torch.cuda.device_of(x):
        product_kernel[(launch.programs,)](**launch.arguments, **launch.options)


def weighted_sum(parts_PC: Tensor, topk_weights_NK: Tensor, out_NC: Tensor) -> None:
    """Overwrite `out_NC` with the weighted sums of each token's parts."""
    (N, K), C = topk_weights_NK.shape, parts_PC.shape[1]
    with torch.cuda.device_of(out_NC):
        grid = (N, triton.cdiv(C, SUM_BLOCK))
        sum_kernel[grid](parts_PC, topk_weights_NK.contiguous(), out_NC, K=K, C=C, SUM_BLOCK=SUM_BLOCK, num_warps=4)
