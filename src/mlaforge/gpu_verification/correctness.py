"""Stage correctness: kernels against fp64 references, by the norm of the difference over that of the reference.

Every case has new random inputs, memory that no kernel writes holds NaN, and a second run must equal the first bit for
bit. Every kernel in ops/ needs cases here.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mlaforge.bench.kernels import Layout, split
from mlaforge.bench.latent_attention import LatentSizes, latent_inputs
from mlaforge.bench.layer_operations import experts_inputs, operations
from mlaforge.engine.speculation.drafter import ancestry
from mlaforge.gpu_verification.case import AT_MOST, Case, Outcome, Prediction, WrongResult
from mlaforge.gpu_verification.context import Context
from mlaforge.gpu_verification.kernel_launches import CODED_832
from mlaforge.ops import mxfp4_experts_triton, paged_attention, paged_attention_triton, token_selection
from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.check import save
from mlaforge.ops.latent_attention import LATENT
from mlaforge.ops.mxfp4 import unpack
from mlaforge.ops.packed_attention import packed_attention
from mlaforge.ops.paged_rows import PagedRows
from mlaforge.ops.row_formats.int8 import Int8

UNIT = "relative error"
# Relative errors due to rounding, by the dtype of queries, to which softmax weights and outputs are rounded.
TOLERANCES = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-5}
LATENT_TOLERANCE = 2e-2
BLOCK_SIZE = 16
# Size limit of the saved inputs of a wrong case.
LARGEST_MISMATCH = 14 << 20
MISMATCH = "mismatch.safetensors"


LAYOUTS = {
    "gqa-64": Layout(64, 8, 64),
    "gqa-64 window 128": Layout(64, 8, 64, window=128),
    "gqa-128": Layout(32, 8, 128),
    "mla 512+64": Layout(64, 1, 512, 64),
    "mla 256+64": Layout(64, 1, 256, 64),
    "mla 264+64": Layout(64, 1, 264, 64),
}
SMALL = {
    "gqa-64": Layout(4, 2, 64),
    "gqa-64 window 128": Layout(4, 2, 64, window=128),
    "mla 64+16": Layout(4, 1, 64, 16),
}
# Query tokens of a sequence -> its cached tokens, including them; 0: a padding row of a graph's batch.
LENGTHS: dict[int, Sequence[int]] = {
    1: (0, 1, 63, 64, 65, 4097),
    4: (0, 4, 63, 64, 65, 4097),
    512: (512, 513, 575, 576, 577, 4097),
}
SMALL_LENGTHS: dict[int, Sequence[int]] = {1: (0, 1, 63, 65), 4: (4, 64)}


def cases(context: Context) -> Iterator[Case]:
    """The stage's cases."""
    layouts, lengths = (SMALL, SMALL_LENGTHS) if context.twin else (LAYOUTS, LENGTHS)
    first_dtype = context.dtype
    kinds = [(first_dtype, first_dtype), (torch.float16, torch.float16), (first_dtype, torch.float8_e4m3fn)]
    for (name, layout), (dtype, rows), T in itertools.product(layouts.items(), kinds, lengths):
        label = f"attention {name}, {_name(rows)}, T={T}"
        yield _case(context, label, dtype, functools.partial(attention, context, layout, dtype, rows, T, lengths[T]))
    first = next(iter(layouts.values()))
    ragged = ((5, 2), (100, 7), (64, 1), (300, 40)) if context.twin else ((5, 2), (4097, 7), (64, 1), (900, 333))
    queries, cached = tuple(T for _, T in ragged), tuple(length for length, _ in ragged)
    yield _case(
        context, "attention ragged", kinds[0][0],
        functools.partial(attention, context, first, *kinds[0], queries, cached),
    )  # fmt: skip
    for name in list(layouts)[::2]:
        yield _case(context, f"tree, {name}", first_dtype, functools.partial(tree, context, layouts[name]))
    name = next(iter(layouts))
    # Of the reference, decoded rows are rounded to bf16.
    bound = Prediction(TOLERANCES[torch.bfloat16], UNIT, AT_MOST)
    yield Case(f"attention {name}, int8", bound, functools.partial(int8, context, layouts[name]))
    for splits in (2, 7):
        yield _case(context, f"merge of {splits} splits", kinds[0][0], functools.partial(merge, context, first, splits))
    for (name, sizes), (T, topk) in itertools.product(_latent_sizes(context).items(), ((1, 0), (4, 0), (1, 48))):
        label = f"latent {name}, T={T}" + (f", {topk} read" if topk else "")
        # Weights and, of coded rows, W_uk are rounded.
        bound = Prediction(LATENT_TOLERANCE, UNIT, AT_MOST)
        yield Case(label, bound, functools.partial(latent_attention, context, sizes, T, topk))
    for length in (200,) if context.twin else (300, 5000):
        name, bound = f"token selection, {length} tokens", Prediction(0.01, "share of other tokens", AT_MOST)
        yield Case(name, bound, functools.partial(selection, context, length))
    for tokens in (1, 20):
        for name in operations(0, context.dtype, context.device, context.twin):
            yield _case(
                context, f"{name}, {tokens} tokens", context.dtype, functools.partial(operation, context, name, tokens)
            )  # fmt: skip
    for tokens in (1, 5) if context.twin else (1, 5, 64, 513):
        yield _case(context, f"experts, {tokens} tokens", context.dtype, functools.partial(experts, context, tokens))


def _latent_sizes(context: Context) -> dict[str, LatentSizes]:
    if context.twin:
        return {"plain": LatentSizes(4, 2, 16, 64), "coded": LatentSizes(4, 2, 16, (64, 64, 64, 32))}
    return {"plain": LatentSizes(64, 8, 64, 832), "coded": LatentSizes(64, 8, 64, CODED_832)}


def _case(context: Context, name: str, dtype: torch.dtype, run: Callable[[], Outcome]) -> Case:
    return Case(name, Prediction(TOLERANCES[dtype], UNIT, AT_MOST), run)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextmanager
def nan_filled_empty() -> Iterator[None]:
    """Make torch.empty return NaN, so that memory that a kernel does not write is detected."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def inputs(
    context: Context, layout: Layout, dtype: torch.dtype, rows: torch.dtype, queries: Sequence[int],
    lengths: Sequence[int], block_size: int = BLOCK_SIZE,
) -> tuple[Tensor, Tensor, Tensor, CacheView, float]:  # fmt: skip
    """Inputs of paged attention. queries, lengths: query and cached tokens per sequence. Blocks are in random order;
    unused rows of the cache are NaN."""
    device = context.device
    counts = [-(-length // block_size) for length in lengths]
    order = torch.randperm(sum(counts) + 5)
    table, at = torch.zeros(len(lengths), max(1, *counts), dtype=torch.int32), 0
    for s, count in enumerate(counts):
        table[s, :count], at = order[at : at + count], at + count
    starts = torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32)
    view = CacheView(
        table.to(device), torch.tensor(lengths, dtype=torch.int32).to(device),
        torch.zeros(len(lengths), dtype=torch.int32, device=device), starts.to(device),
        torch.zeros(sum(queries), dtype=torch.int64, device=device), block_size, max(queries), max(lengths),
        window=layout.window, queries=tuple(queries), lengths=tuple(lengths),
    )  # fmt: skip
    cache = torch.full((len(order) * block_size, layout.row), torch.nan, dtype=torch.float32, device=device)
    for s, length in enumerate(lengths):
        slots = _slots(view, s, 0, length)
        cache[slots] = torch.randn(len(slots), layout.row, device=device)
    k, v = split(layout, cache.to(rows))
    q = torch.randn(sum(queries), layout.heads, layout.key, device=device).to(dtype)
    return q, k, v, view, layout.key**-0.5


def _slots(view: CacheView, s: int, first: int, length: int) -> Tensor:
    at = torch.arange(first, length, device=view.block_table_SB.device)
    return view.block_table_SB[s, at // view.block_size].long() * view.block_size + at % view.block_size


def reference_attention(q: Tensor, k: Tensor, v: Tensor, view: CacheView, scale: float) -> tuple[Tensor, Tensor]:
    """Paged attention in fp64, one sequence at a time. Return (out, lse)."""
    (N, H, _), G = q.shape, k.shape[1]
    # Not every device indexes float8.
    k, v = (x.float() if x.dtype == torch.float8_e4m3fn else x for x in (k, v))
    out = torch.zeros(N, H, v.shape[2], dtype=torch.float64, device=q.device)
    lse = torch.full((N, H), -torch.inf, dtype=torch.float64, device=q.device)
    begin = 0
    for s, (T, length) in enumerate(zip(view.queries, view.seq_lens_S.tolist(), strict=True)):
        rows, slots = slice(begin, begin + T), _slots(view, s, 0, length)
        begin += T
        if not length:
            continue
        keys, values = (x[slots].double().repeat_interleave(H // G, dim=1) for x in (k, v))
        scores = torch.einsum("thd,phd->thp", q[rows].double(), keys) * scale
        distance = torch.arange(length - T, length, device=q.device)[:, None] - torch.arange(length, device=q.device)
        seen = (distance >= 0) & (distance < (view.window or length))
        scores = scores.masked_fill(~seen[:, None], -torch.inf)
        lse[rows] = scores.logsumexp(-1)
        out[rows] = torch.einsum("thp,phv->thv", scores.softmax(-1), values)
    return out, lse


def difference(
    context: Context, run: Callable[[], Sequence[Tensor]], references: Sequence[Tensor], inputs: Any
) -> float:
    """Largest relative error of the outputs of `run`, which is run twice. Raise WrongResult, after saving `inputs` for
    replay, for misplaced NaN or infinities or if the runs differ."""
    with nan_filled_empty():
        first, second = run(), run()
    worst = 0.0
    for number, (output, repeated, reference) in enumerate(zip(first, second, references, strict=True)):
        if not torch.equal(output, repeated):
            _save_mismatch(context, inputs)
            raise WrongResult(f"output {number}: two runs of the same inputs differ")
        finite = reference.isfinite()
        if not torch.equal(output.isfinite(), finite) or not torch.equal(output[~finite].double(), reference[~finite]):
            _save_mismatch(context, inputs)
            count = int((output.isfinite() != finite).sum())
            raise WrongResult(f"output {number}: {count} elements are NaN or misplaced infinities")
        error = (output[finite].double() - reference[finite]).norm() / reference[finite].norm().clamp_min(1e-30)
        worst = max(worst, float(error))
    return worst


def _save_mismatch(context: Context, inputs: Any) -> None:
    """Save the inputs of the run's first wrong case if they are smaller than LARGEST_MISMATCH."""
    path = context.folder / MISMATCH
    size = sum(x.untyped_storage().nbytes() for x in inputs if isinstance(x, Tensor))
    if size < LARGEST_MISMATCH and not path.exists():
        save(path, [dataclasses.replace(x, runs=()) if isinstance(x, CacheView) else x for x in inputs])


def attention(
    context: Context, layout: Layout, dtype: torch.dtype, rows: torch.dtype, T: int | Sequence[int],
    lengths: Sequence[int],
) -> Outcome:  # fmt: skip
    """Error of paged attention. T: query tokens of every sequence, or of each."""
    queries = [T] * len(lengths) if isinstance(T, int) else T
    arguments = inputs(context, layout, dtype, rows, queries, lengths)
    reason = paged_attention_triton.supports(*arguments[:3])
    if reason is not True:
        raise WrongResult(f"the kernel refuses: {reason}")
    error = difference(
        context, lambda: paged_attention_triton.attend(*arguments), reference_attention(*arguments), arguments
    )
    if error > TOLERANCES[dtype]:
        _save_mismatch(context, arguments)
    return Outcome(error)


def tree(context: Context, layout: Layout) -> Outcome:
    """Error of attention of a tree of drafted tokens."""
    dtype, rows = context.dtype, ancestry([-1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 6])
    q, k, v, view, scale = inputs(context, layout, dtype, dtype, (len(rows),), (200,))
    view = dataclasses.replace(view, tree_Tn=torch.tensor(rows, dtype=torch.int32, device=context.device))
    references = [tensor.double() for tensor in paged_attention.reference(q, k, v, view, scale)]
    error = difference(
        context, lambda: paged_attention_triton.attend(q, k, v, view, scale), references, (q, k, v, view, scale)
    )
    return Outcome(error)


def latent_attention(context: Context, sizes: LatentSizes, T: int, topk: int) -> Outcome:
    """Error of latent attention, with its writes to the cache."""
    arguments = latent_inputs(sizes, 3, 90 if context.twin else 1500, T, context.dtype, context.device, topk)
    reference = LATENT(*arguments, implementation="reference")

    def run() -> list[Tensor]:
        return [LATENT(*arguments, implementation="triton")]

    return Outcome(difference(context, run, [reference.double()], ()))


def int8(context: Context, layout: Layout) -> Outcome:
    """Error of attention over int8 rows, decoded for the reference."""
    q, k, v, view, scale = inputs(context, layout, context.dtype, context.dtype, (1, 4, 2), (65, 300, 2))
    row = torch.cat((k.flatten(1), v.flatten(1)), dim=1).nan_to_num()
    rows = PagedRows.empty(Int8((layout.key,) * 2 * k.shape[1]), len(row), context.dtype, context.device)
    rows.format.write(rows.packed, torch.arange(len(row), device=context.device), row)
    numbers = rows.format.read(rows.packed, torch.arange(len(row), device=context.device)).to(context.dtype)
    k, v = numbers.unflatten(1, (2, -1, layout.key)).unbind(1)
    error = difference(
        context, lambda: packed_attention(q, rows, view, scale, implementation="triton"),
        reference_attention(q, k, v, view, scale), (),
    )  # fmt: skip
    return Outcome(error)


def merge(context: Context, layout: Layout, splits: int) -> Outcome:
    """Error of attention in `splits` splits that are merged; for short sequences most splits are empty."""
    dtype = context.dtype
    arguments = inputs(context, layout, dtype, dtype, (1, 1, 3), (5, 400, 130))
    error = difference(
        context, lambda: paged_attention_triton.attend(*arguments, splits=splits), reference_attention(*arguments),
        arguments,
    )  # fmt: skip
    if error > TOLERANCES[dtype]:
        _save_mismatch(context, arguments)
    return Outcome(error)


def selection(context: Context, length: int) -> Outcome:
    """Share of the tokens selected by the kernels that the reference does not select: rounding may exchange tokens with
    similar scores."""
    device, S, H, W, topk = context.device, 3, 8, 32, 96
    generator = torch.Generator().manual_seed(length)
    index = token_selection.TokenIndex(
        torch.randn(W, 40, generator=generator).to(device), torch.randn(W, generator=generator).to(device),
        (torch.randn(2, W, 16, generator=generator) / 800).to(device),
        torch.randint(-1, 6, (W // 2,), generator=generator).to(device), H, sink=4, window=8, topk=topk,
    )  # fmt: skip
    lengths = (length, length // 2 + 1, 100)
    view = inputs(context, Layout(H, 2, 16), torch.float32, torch.float32, (1, 1, 1), lengths)[3]
    slots = int(view.block_table_SB.max() + 1) * BLOCK_SIZE
    keys = token_selection.empty_keys(slots, W, device)
    keys.copy_(torch.randint(-127, 128, keys.shape, generator=generator))
    q = torch.randn(S, H * 16, generator=generator).to(device)
    turn = torch.polar(torch.ones(S, 1, 6), torch.randn(S, 1, 6, generator=generator)).to(device)
    counts = tuple(min(topk, cached) for cached in lengths)
    selected, repeated = (index.choose(keys, q, turn, view, counts, implementation="triton")[1] for _ in range(2))
    reference = index.choose(keys, q, turn, view, counts, implementation="reference")[1]
    if not torch.equal(selected, repeated):
        raise WrongResult("two runs of the same inputs differ")
    differing = sum(
        len(set(selected[s, :count].tolist()) - set(reference[s, :count].tolist())) for s, count in enumerate(counts)
    )
    return Outcome(differing / sum(counts))


def operation(context: Context, name: str, tokens: int) -> Outcome:
    """Error of a small operation of a layer."""
    _, run = operations(tokens, context.dtype, context.device, context.twin)[name]
    references = [tensor.double() for tensor in run("reference")]
    return Outcome(difference(context, functools.partial(run, "triton"), references, ()))


def experts(context: Context, tokens: int) -> Outcome:
    """Error of the expert mixture at 20B's sizes."""
    sizes = (8, 2, 64, 96) if context.twin else (32, 4, 2880, 2880)
    arguments = experts_inputs(tokens, sizes, context.dtype, context.device)
    x, chosen, weights, *packed, alpha, limit = arguments
    reference = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in chosen.unique().tolist():
        rows, places = torch.where(chosen == expert)
        gate_up, down = (unpack(packed[i][expert], packed[i + 1][expert]).double() for i in (0, 3))
        hidden = x[rows].double() @ gate_up.T + packed[2][expert].double()
        gate, up = hidden[:, ::2].clamp(max=limit), hidden[:, 1::2].clamp(-limit, limit)
        out = ((up + 1) * gate * torch.sigmoid(gate * alpha)) @ down.T + packed[5][expert].double()
        reference.index_add_(0, rows, out * weights[rows, places, None].double())
    reason = mxfp4_experts_triton.supports(x, *packed)
    if reason is not True:
        raise WrongResult(f"the kernels refuse: {reason}")
    error = difference(context, lambda: (mxfp4_experts_triton.mixture(*arguments),), (reference,), arguments)
    return Outcome(error)
