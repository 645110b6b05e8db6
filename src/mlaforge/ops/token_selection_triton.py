"""Token selection in Triton: index logits, each head's softmax over its sequence, and the mean over heads.

Logits are computed twice, for the softmax's sums and for the scores: index keys are few bytes, and logits of all heads
would be many. torch.topk selects the best scores, with arbitrary ties. Launch geometry depends only on host values. Not
measured on a GPU yet.
"""

# Triton reads annotations of kernels: only constexpr is allowed.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlaforge.ops.cache_view import CacheView
from mlaforge.runtime import on_device

# Tokens per program, and per tile of logits.
STRETCH, BLOCK_N = 256, 64


@triton.jit
def _logits(
    queries, keys, blocks, start, length, key_tile, key_number, key_token,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_I: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return logits [BLOCK_H, BLOCK_N] of the tokens from `start` on, -inf for masked heads and tokens. Index keys are
    stored by 16 tokens, element by element, with any strides."""
    h, i, t = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_I), start + tl.arange(0, BLOCK_N)
    live = t < length
    # By tiles of 16 tokens, whose keys lie side by side: loads of 16 bytes.
    tile = start // 16 + tl.arange(0, BLOCK_N // 16)
    started = tile * 16 < length
    block = tl.load(blocks + tile // (BLOCK_SIZE // 16), mask=started, other=0).to(tl.int64)
    at = (block * (BLOCK_SIZE // 16) + tile % (BLOCK_SIZE // 16)) * key_tile
    key_tiles = tl.load(
        keys + at[:, None, None] + i[None, :, None] * key_number + tl.arange(0, 16)[None, None, :] * key_token,
        mask=started[:, None, None] & (i < WIDTH)[None, :, None], other=0,
    )  # fmt: skip
    key_tile = tl.permute(key_tiles, (1, 0, 2)).reshape(BLOCK_I, BLOCK_N)
    query_tile = tl.load(
        queries + h[:, None] * WIDTH + i[None, :], mask=(h < HEADS)[:, None] & (i < WIDTH)[None, :], other=0.0
    )
    # Close scores decide the selection, so use fp32 precision, on tensor cores.
    logits = tl.dot(query_tile, key_tile.to(tl.float32), input_precision="tf32x3")
    return tl.where(live[None, :] & (h < HEADS)[:, None], logits, float("-inf"))


@triton.jit(do_not_specialize=["table_row"], do_not_specialize_on_alignment=["table", "seq_lens"])
def lse_kernel(
    queries, keys, table, seq_lens, out, table_row, key_tile, key_number, key_token,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_I: tl.constexpr,
    BLOCK_N: tl.constexpr, STRETCH: tl.constexpr,
):  # fmt: skip
    """Grid (sequences, stretches): out [S, stretches, HEADS], each head's logsumexp over a stretch."""
    s, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(seq_lens + s)
    peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    for start in range(part * STRETCH, tl.minimum(part * STRETCH + STRETCH, length), BLOCK_N):
        logits = _logits(
            queries + s * HEADS * WIDTH, keys, table + s * table_row, start, length, key_tile, key_number,
            key_token, HEADS, WIDTH, BLOCK_SIZE, BLOCK_H, BLOCK_I, BLOCK_N,
        )  # fmt: skip
        higher = tl.maximum(peak, tl.max(logits, 1))
        level = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(peak - level) + tl.sum(tl.exp(logits - level[:, None]), 1)
        peak = higher
    h = tl.arange(0, BLOCK_H)
    lse = tl.where(total > 0, peak + tl.log(tl.where(total > 0, total, 1.0)), float("-inf"))
    tl.store(out + (s * tl.num_programs(1) + part) * HEADS + h, lse, mask=h < HEADS)


@triton.jit(
    do_not_specialize=["table_row", "width", "sink", "window", "stride"],
    do_not_specialize_on_alignment=["table", "seq_lens"],
)
def score_kernel(
    queries, keys, table, seq_lens, lse, out, table_row, key_tile, key_number, key_token,
    width, sink, window, stride,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_I: tl.constexpr,
    BLOCK_N: tl.constexpr, STRETCH: tl.constexpr,
):  # fmt: skip
    """Grid (sequences, stretches): out [S, width], the mean over heads of exp(logit - lse); inf for tokens that are
    always read, -1 beyond the sequence."""
    s, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(seq_lens + s)
    h = tl.arange(0, BLOCK_H)
    # 0 for padding heads, whose logits are -inf.
    level = tl.load(lse + s * HEADS + h, mask=h < HEADS, other=0.0)
    for start in range(part * STRETCH, part * STRETCH + STRETCH, BLOCK_N):
        logits = _logits(
            queries + s * HEADS * WIDTH, keys, table + s * table_row, start, length, key_tile, key_number,
            key_token, HEADS, WIDTH, BLOCK_SIZE, BLOCK_H, BLOCK_I, BLOCK_N,
        )  # fmt: skip
        score = tl.sum(tl.exp(logits - level[:, None]), 0) / HEADS
        t = start + tl.arange(0, BLOCK_N)
        forced = (t < sink) | (t >= length - window)
        if stride > 0:
            forced = forced | (t % stride == 0)
        score = tl.where(t < length, tl.where(forced, float("inf"), score), -1.0)
        tl.store(out + s * width + t, score, mask=t < width)


INTERPRETED = not isinstance(score_kernel, triton.JITFunction)


def supports(keys: Tensor, queries: Tensor, view: CacheView) -> Literal[True] | str:
    """Return True, or the reason why the kernels cannot run on index keys, queries and a view."""
    for name, tensor in (("index keys", keys), ("queries", queries), ("the block table", view.block_table_SB)):
        if tensor.device.type != "cuda" and not INTERPRETED:
            return f"it needs CUDA tensors, {name} are on {tensor.device.type}"
    if keys.dtype != torch.int8:
        return f"index keys are {keys.dtype}, not int8"
    return True


def launches(keys: Tensor, queries_SHI: Tensor, view: CacheView) -> tuple[tuple[int, int], dict[str, Any]]:
    """Return the grid of both kernels, and their common arguments by name."""
    S, H, I = queries_SHI.shape  # noqa: E741
    sizes = {
        "HEADS": H, "WIDTH": I, "BLOCK_SIZE": view.block_size, "BLOCK_H": max(16, triton.next_power_of_2(H)),
        "BLOCK_I": max(16, triton.next_power_of_2(I)), "BLOCK_N": BLOCK_N, "STRETCH": STRETCH,
    }  # fmt: skip
    arguments = {
        "queries": queries_SHI, "keys": keys, "table": view.block_table_SB, "seq_lens": view.seq_lens_S,
        "table_row": view.block_table_SB.stride(0), "key_tile": keys.stride(0), "key_number": keys.stride(1),
        "key_token": keys.stride(2), **sizes,
    }  # fmt: skip
    return (S, triton.cdiv(view.max_seq_len, STRETCH)), arguments


def choose(
    keys: Tensor, queries_SHI: Tensor, view: CacheView, counts: Sequence[int], multiple: int, sinks_H: Tensor | None,
    sink: int, window: int, stride: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As TokenIndex.choose, from the fp32 index queries of each sequence's last token."""
    queries_SHI = queries_SHI.contiguous()
    (S, H, _), device, L = queries_SHI.shape, queries_SHI.device, view.max_seq_len
    grid, arguments = launches(keys, queries_SHI, view)
    parts = torch.empty(*grid, H, device=device)
    lse_kernel[grid](**arguments, out=parts)
    lse_SH = torch.logsumexp(parts, dim=1)
    if sinks_H is not None:
        lse_SH = torch.logaddexp(lse_SH, sinks_H.expand_as(lse_SH))
    scores_SL = torch.empty(S, L, device=device)
    score_kernel[grid](
        **arguments, lse=lse_SH.contiguous(), out=scores_SL, width=L, sink=sink, window=window, stride=stride,
    )  # fmt: skip
    max_count, size = max(counts), view.block_size
    best = scores_SL.topk(max_count, dim=1).indices
    # Positions beyond a sequence's count are masked.
    within = torch.arange(max_count, device=device) < on_device(list(counts), torch.int64, device)[:, None]
    positions = best.masked_fill(~within, L).sort(dim=1).values
    positions = torch.where(within, positions, 0)
    slots = view.block_table_SB.gather(1, positions // size) * size + positions % size
    return tuple(torch.nn.functional.pad(x, (0, -max_count % multiple)).int() for x in (slots, positions))  # type: ignore[return-value]
