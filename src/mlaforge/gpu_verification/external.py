"""Stage external: the installed ones of the libraries that ops/external/ calls, against fp64 references, with their
times beside the Triton kernels'. Both are launched by the host, as the engine launches other libraries' kernels.

Sequences are ragged, and one is empty; rows that no query token sees hold NaN. Libraries that are not installed are
listed as skipped, and so are cases that a library refuses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from mlaforge.bench import kernels
from mlaforge.bench.layer_operations import experts_inputs
from mlaforge.gpu_verification.case import AT_MOST, Case, Outcome, Prediction, Unsupported
from mlaforge.gpu_verification.context import Context
from mlaforge.gpu_verification.correctness import LAYOUTS, LENGTHS, TOLERANCES, UNIT, difference, inputs
from mlaforge.gpu_verification.correctness import reference_attention as fp64_attention
from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.external.attention_library import AttentionLibrary
from mlaforge.ops.external.library import DEEP_GEMM, EXTERNAL, FLASH_MLA, needs_gpu
from mlaforge.ops.mxfp4_experts import OP as EXPERTS
from mlaforge.ops.packed_attention import LATENTS
from mlaforge.ops.paged_attention import LIBRARIES, paged_attention
from mlaforge.ops.paged_rows import PagedRows
from mlaforge.ops.row_formats.fp8_ds_mla import Fp8DsMla

# Tokens of a block, sequences and cached tokens of a timed call.
BLOCK, SEQUENCES, CACHED = 64, 8, 8192
# Experts, experts per token, hidden size, intermediate size; relative error of 8-bit inputs.
SIZES, FP8_ERROR = (32, 4, 2880, 2880), 0.06


def cases(context: Context) -> Iterator[Case]:
    """The stage's cases."""
    for library in EXTERNAL.values():
        if reason := library.missing() or needs_gpu(context.device):
            yield Case(library.name, Prediction(0.0, UNIT, AT_MOST), functools.partial(unsupported, reason))
    if context.twin:
        return
    bound = Prediction(TOLERANCES[context.dtype], UNIT, AT_MOST)
    for adapter in LIBRARIES:
        if adapter.library.missing():
            continue
        for name in LAYOUTS:
            for T in (1, 4):
                run = functools.partial(attention, context, adapter, name, T)
                yield Case(f"{adapter.library.name}, {name}, T={T}", bound, run, limit=120)
    if not FLASH_MLA.missing():
        for size in (BLOCK, 1):
            rows = "a selection" if size == 1 else "all rows"
            run = functools.partial(packed_latents, context, size)
            yield Case(f"flash_mla, fp8_ds_mla, {rows}", bound, run, limit=120)
    if not DEEP_GEMM.missing():
        for tokens in (1, 64):
            run = functools.partial(experts, context, tokens)
            yield Case(f"deep_gemm, {tokens} tokens", Prediction(FP8_ERROR, UNIT, AT_MOST), run, limit=120)


def unsupported(reason: str) -> Outcome:
    """Report a library that cannot run."""
    raise Unsupported(reason)


def attention(context: Context, adapter: AttentionLibrary, name: str, T: int) -> Outcome:
    """Error of a library's attention, and its time beside the Triton kernel's."""
    layout, dtype, lengths = LAYOUTS[name], context.dtype, LENGTHS[T]
    arguments = inputs(context, layout, dtype, dtype, [T] * len(lengths), lengths, BLOCK)
    if (reason := adapter.supports(*arguments[:4])) is not True:
        raise Unsupported(reason)
    run = functools.partial(paged_attention, implementation=adapter.library.name)
    error = difference(context, lambda: run(*arguments), fp64_attention(*arguments), arguments)
    timed = kernels.make_inputs(layout, SEQUENCES, CACHED, T, context.device.type, dtype)
    triton = functools.partial(paged_attention, implementation="triton")
    return outcome(context, adapter.library.name, error, lambda: run(*timed), lambda: triton(*timed))


def packed_latents(context: Context, size: int) -> Outcome:
    """Error of FlashMLA over rows of 656 bytes, in blocks of `size` tokens."""
    lengths, rank = LENGTHS[1], 512
    q, k, _, view, scale = inputs(
        context, LAYOUTS["mla 512+64"], context.dtype, context.dtype, [1] * len(lengths), lengths, size
    )
    slots = torch.arange(len(k), device=context.device)
    rows = PagedRows.empty(Fp8DsMla(rank), -(-len(k) // BLOCK) * BLOCK, context.dtype, context.device)
    rows.packed.fill_(255)
    rows.write(slots, k[:, 0])
    if (reason := LATENTS.implementations["flash_mla"].supports(q, rows, rank, view)) is not True:
        raise Unsupported(str(reason))
    decoded = rows.format.read(rows.packed, slots)[:, None]

    def run() -> tuple[Tensor, Tensor]:
        out, lse = LATENTS(q, rows, rank, view, scale, None, implementation="flash_mla")
        return out, lse

    error = difference(context, run, fp64_attention(q, decoded, decoded[..., :rank], view, scale), ())
    plain = functools.partial(_plain, q, decoded, rank, view, scale)
    return outcome(context, "flash_mla", error, run, plain)


def _plain(q: Tensor, rows_L1W: Tensor, rank: int, view: CacheView, scale: float) -> Any:
    return paged_attention(q, rows_L1W, rows_L1W[..., :rank], view, scale, implementation="triton")


def experts(context: Context, tokens: int) -> Outcome:
    """Error of DeepGEMM's mixture, and its time beside the Triton kernel's."""
    arguments = experts_inputs(tokens, SIZES, context.dtype, context.device)
    if (reason := EXPERTS.implementations["deep_gemm"].supports(*arguments)) is not True:
        raise Unsupported(str(reason))
    run = functools.partial(EXPERTS, *arguments, implementation="deep_gemm")
    reference = EXPERTS(*arguments, implementation="reference")[0].double()
    error = difference(context, run, [reference], ())
    return outcome(context, "deep_gemm", error, run, lambda: EXPERTS(*arguments, implementation="triton"))


def outcome(context: Context, name: str, error: float, run: Callable[[], Any], triton: Callable[[], Any]) -> Outcome:
    """The error, with the times of a library's call and of the Triton kernel's."""
    times = {who: context.seconds(call, graph=False) * 1e6 for who, call in ((name, run), ("triton", triton))}
    detail = ", ".join(f"{who} {us:.1f} us" for who, us in times.items())
    return Outcome(
        error, detail=f"{detail}; {EXTERNAL[name].version}", more={f"{who}_us": us for who, us in times.items()}
    )
