"""Predicted times of this package's Triton kernels, from the launches that ops/ chooses and planning/kernel_time.py.

`python -m mlaforge.gpu_verification.predictions` writes docs/reference/kernel-times.md; a test compares the page with
the code. Stages attention and experts use the same predictions.

Legend: S sequences, P tokens of each, T query tokens of each; N tokens, K experts per token, E experts.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import torch

from mlaforge.bench import kernels
from mlaforge.families.spec import MoeSpec
from mlaforge.gpu_verification.kernel_launches import CODED_832, LatentShape
from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.gpu_properties import GpuProperties
from mlaforge.planning.costs import GPUS, Cost, experts_touched
from mlaforge.planning.kernel_loops import find
from mlaforge.planning.kernel_time import L2_LATENCY, MEMORY_LATENCY, Chip, KernelTime, Work, predict
from mlaforge.planning.published_kernels import HOPPER, published_kernels
from mlaforge.rendering.table import markdown_table

# Loads that depend on each other before the first product: lengths or offsets, a block or pair number, a row; a merge
# reads lse, then values, from L2.
FIRST_LOADS, MERGE_LOADS = 3 * MEMORY_LATENCY, 2 * L2_LATENCY
# Instructions of a program of the merge that has nothing to merge: those before the first exit of its binary (sm_90).
ENDED = 67
# Microseconds of the experts' routing, half a dozen small kernels of torch: not modelled.
ROUTE_US = 25.0
# Passes of a selection over the scores, in units of the last: a digit takes 100 of its 610 instructions (sm_90).
DIGITS = 1 + 3 * 100 / 610
# Bytes of a packed weight: a 4-bit code, and an 8-bit scale per 32 codes.
WEIGHT_BYTES = 4.25 / 8


def properties(chip: Chip) -> GpuProperties:
    """Properties by which ops/ chooses tiles."""
    return GpuProperties.of_capability(*divmod(chip.capability, 10), chip.multiprocessors)


def attention_launch(
    layout: kernels.Layout, S: int, P: int, T: int, dtype: torch.dtype, rows: torch.dtype, chip: Chip
) -> Any:
    """The launch that ops/paged_attention_triton.py chooses; tensors of the cache's size are not allocated."""
    from mlaforge.ops import paged_attention_triton as attention

    zeros = torch.zeros(S + 1, dtype=torch.int32)
    view = CacheView(
        torch.zeros(S, 1, dtype=torch.int32), zeros[:S], zeros[:S], zeros, zeros.long(), kernels.BLOCK, T, P,
        layout.window, lengths=(P,) * S,
    )  # fmt: skip
    q = torch.empty(S * T, layout.heads, layout.key, dtype=dtype)
    k, v = kernels.split(layout, torch.empty(32, layout.row, dtype=rows))
    return attention.make_launch(q, k, v, view, 0.1, gpu=properties(chip))


def attention_times(
    layout: kernels.Layout, S: int, P: int, T: int, dtype: torch.dtype, rows: torch.dtype, chip: Chip
) -> list[KernelTime] | None:
    """Time of attention over P cached tokens and, if it is split, of the merge; None if such a kernel has not been
    compiled for the table."""
    from mlaforge.ops import paged_attention_triton as attention

    launch = attention_launch(layout, S, P, T, dtype, rows, chip)
    arguments = launch.arguments
    loop = find("attend_kernel", chip.capability, {**arguments, **launch.options}, dtype_name(dtype, rows))
    if loop is None:
        return None
    M, N, V = (int(arguments[name]) for name in ("BLOCK_M", "BLOCK_N", "V"))
    keys, values = sum(arguments[name] for name in ("D0", "D1", "D2")), arguments["V0"] + arguments["V1"]
    span = min(P, (layout.window or P) + T - 1)
    if pieces := launch.pieces:
        tiles, busy, iterations = launch.grid[2], len(pieces), math.ceil(max(pieces) / N)
    else:
        # Splits that see nothing end at once.
        tiles, iterations = launch.grid[0], math.ceil(math.ceil(span / launch.grid[2]) / N)
        busy = math.ceil(span / (iterations * N))
    key_heads, split = launch.grid[1], launch.most_splits > 1 and busy > S * bool(pieces)
    # Warps that compute the same scores show by their exponentials.
    repetitions = max(1, int(loop.exponentials * 32 * loop.warps // (M * N)))
    cost = kernels.cost(layout, S, P, T, rows.itemsize)
    # Partial results of every token and head, once per piece.
    parts = 4.0 * T * layout.heads * V * busy * (1 if pieces else S) if split else 0.0
    row_bytes = layout.row // layout.key_heads * rows.itemsize
    work = Work(
        programs=tiles * key_heads * busy,
        iterations=iterations,
        flops=2.0 * M * N * (keys * repetitions + values),
        memory=cost.bytes,
        l2=tiles * key_heads * span * row_bytes * (S if pieces else 1) + parts,
        first_loads=FIRST_LOADS,
        asynchronous=M >= 64 and properties(chip).asynchronous,
    )
    times = [predict(loop, work, chip)]
    if launch.most_splits > 1:
        grid, arguments = attention.merge_launch(launch)
        merge = find("merge_kernel", chip.capability, None)
        assert merge, "every capability has a merge"
        rounds = math.ceil(busy / (S if pieces else 1) / arguments["BLOCK_S"]) if split else 0
        if not split:
            merge = dataclasses.replace(merge, outside=ENDED)
        times.append(predict(merge, Work(grid[0] * grid[1], rounds, 0.0, 0.0, parts, MERGE_LOADS), chip))
    return times


def latent_times(shape: LatentShape, chip: Chip) -> dict[str, KernelTime] | None:
    """Times of latent attention's kernels by name: `integers` of coded rows, `logits`, `sum` and, if it is split,
    `merge`; None if one has not been compiled for the table."""
    launches = shape.launches(properties(chip))
    S, P, T, H = shape.S, shape.P, shape.T, shape.heads
    dtype = "bf16" if isinstance(shape.code, int) else "coded"
    if shape.stored == "float8_e4m3fn":
        dtype = "fp8"
    (grid, logits, options), (sum_grid, sums, sum_options) = launches.logits, launches.sum
    loop = find("logits_kernel", chip.capability, {**logits, **options}, dtype)
    sum_loop = find("latent_sum_kernel", chip.capability, {**sums, **sum_options}, dtype)
    if loop is None or sum_loop is None:
        return None
    K, rows = int(logits["WIDTH"]), S * P
    item, weight_item = logits["rows"].element_size(), logits["w_uk"].element_size()
    N, outputs, depth = (
        int(logits["BLOCK_N"]),
        2 * int(logits["HEADS"]) * int(logits["BLOCK_P"]),
        int(logits["BLOCK_K"]),
    )
    asynchronous = properties(chip).asynchronous
    times = {}
    if launches.integers is not None:
        (tiles, _), arguments = launches.integers
        decode = find("integers_kernel", chip.capability, None, dtype)
        assert decode, "every capability has one"
        moved = float(rows * (arguments["row_words"] * 4 + K))
        times["integers"] = predict(decode, Work(tiles * S, 1, 0.0, moved, moved, FIRST_LOADS), chip)
    shares, programs = 2.0 * T * H * rows, math.prod(grid)
    tile_bytes = N * item + outputs * weight_item
    # Products of bytes have twice the rate.
    flops = 2.0 * N * outputs * depth / (2 if dtype == "coded" else 1)
    moved = programs * K * tile_bytes + shares
    work = Work(programs, K / depth, flops, rows * K * item + shares, moved, FIRST_LOADS, asynchronous)
    times["logits"] = predict(loop, work, chip)
    M, C, step, splits = (int(sums[name]) for name in ("BLOCK_M", "BLOCK_C", "BLOCK_N", "splits"))
    columns, groups = sum_grid[0], math.ceil(T * H / M)
    parts = 4.0 * S * T * H * K * splits if splits > 1 else 0.0
    times["sum"] = predict(sum_loop, Work(
        math.prod(sum_grid), math.ceil(min(int(sums["piece"]), P) / step), 2.0 * M * C * step,
        rows * K * item + shares, groups * rows * K * item + columns * shares + parts, FIRST_LOADS,
        M >= 64 and asynchronous,
    ), chip)  # fmt: skip
    if launches.merge is not None:
        merge_grid, arguments = launches.merge
        merge = find("merge_kernel", chip.capability, None)
        assert merge, "every capability has a merge"
        rounds = math.ceil(splits / arguments["BLOCK_S"])
        times["merge"] = predict(merge, Work(math.prod(merge_grid), rounds, 0.0, 0.0, parts, MERGE_LOADS), chip)
    return times


def selection_times(heads: int, width: int, S: int, P: int, topk: int, chip: Chip) -> dict[str, KernelTime] | None:
    """Times of a selection's kernels over P tokens of each sequence, by name, without the write of new keys."""
    from mlaforge.ops import token_selection_triton as selection

    stretch = selection.stretch_of(S, P, properties(chip))
    stretches = math.ceil(P / stretch)
    loops = {name: find(f"{name}_kernel", chip.capability, None) for name in ("query", "lse", "score", "select")}
    if None in loops.values():
        return None
    H, I = max(16, heads), max(16, width)  # noqa: E741
    keys, scores = float(S * P * width), 4.0 * S * P
    steps = stretch / selection.BLOCK_N
    flops, asynchronous = 2.0 * H * I * selection.BLOCK_N * selection.PRODUCTS, properties(chip).asynchronous
    works = {
        "query": Work(S * 8, 1, 2.0 * 16 * I * 64, 4.0 * S * heads * width, 32.0 * S * heads * width, FIRST_LOADS),
        "lse": Work(
            S * stretches, steps, flops, keys, keys + S * stretches * heads * (width + 1) * 4.0, FIRST_LOADS,
            asynchronous,
        ),
        "score": Work(
            S * stretches, steps, flops, keys + scores,
            keys + S * stretches * heads * 4.0 * (width + stretches) + scores, FIRST_LOADS, asynchronous,
        ),
        "select": Work(
            S, DIGITS * math.ceil(P / selection.BLOCK_L), 0.0, scores, 4 * scores + 16.0 * S * topk, FIRST_LOADS
        ),
    }  # fmt: skip
    return {name: predict(loop, works[name], chip) for name, loop in loops.items() if loop}


def dtype_name(dtype: torch.dtype, rows: torch.dtype) -> str:
    """Name of the loops of a dtype of queries and of cached rows."""
    if rows == torch.float8_e4m3fn:
        return "fp8"
    return "fp32" if dtype == torch.float32 else "bf16"


def expected_tiles(tokens: int, K: int, E: int, size: int) -> float:
    """Expected tiles of `size` pairs over all experts under independent, uniform routing."""
    p, total = K / E, 0.0
    if p >= 1:
        return float(E * math.ceil(tokens / size))
    for count in range(1, tokens + 1):
        log = math.lgamma(tokens + 1) - math.lgamma(count + 1) - math.lgamma(tokens - count + 1)
        total += math.ceil(count / size) * math.exp(log + count * math.log(p) + (tokens - count) * math.log1p(-p))
    return round(E * total, 6)


def experts_cost(sizes: tuple[int, int, int, int], part: str, tokens: int, itemsize: int) -> Cost:
    """Minimum bytes and FLOPs of a part of MXFP4 experts under uniform, independent routing: `route`, `gate and up`,
    `down`, `sum` or `whole`. sizes: E, K, hidden, intermediate."""
    E, K, C, I = sizes  # noqa: E741
    read, pairs = experts_touched(MoeSpec(E, K), tokens) * WEIGHT_BYTES, tokens * K
    gate = Cost(4.0 * pairs * C * I, read * 2 * C * I + tokens * C * itemsize + pairs * I * itemsize)
    down = Cost(2.0 * pairs * C * I, read * C * I + pairs * I * itemsize + pairs * C * 4)
    total = Cost(2.0 * pairs * C, float(pairs * C * 4 + tokens * C * itemsize))
    route = Cost(0.0, float(pairs * 8))
    return {"route": route, "gate and up": gate, "down": down, "sum": total, "whole": gate + down + total}[part]


def experts_time(
    sizes: tuple[int, int, int, int], part: str, tokens: int, dtype: torch.dtype, chip: Chip
) -> KernelTime | None:
    """Time of a part of MXFP4 experts: `gate and up`, `down` or `sum`; None if such a kernel has not been compiled for
    the table. sizes: E, K, hidden, intermediate."""
    from mlaforge.ops import mxfp4_experts_triton as experts

    E, K, C, I = sizes  # noqa: E741
    pairs, memory = tokens * K, experts_cost(sizes, part, tokens, dtype.itemsize).bytes
    if part == "sum":
        loop = find("sum_kernel", chip.capability, None)
        work = Work(tokens * math.ceil(C / experts.SUM_BLOCK), 1, 0.0, 0.0, memory, MERGE_LOADS)
        return predict(loop, work, chip) if loop else None
    gated = part == "gate and up"
    inputs, outputs = (C, I) if gated else (I, C)
    with torch.device("meta"):
        blocks = torch.empty(E, outputs * (1 + gated), inputs // 32, 16, dtype=torch.uint8)
        x = torch.empty(tokens if gated else pairs, inputs, dtype=dtype)
        out, order = torch.empty(pairs, outputs, dtype=dtype), torch.empty(pairs, dtype=torch.int64)
        offsets, bias = torch.empty(E + 1, dtype=torch.int32), torch.empty(E, blocks.shape[1], dtype=dtype)
    launch = experts.make_launch(
        x, order, offsets, blocks, blocks[..., 0], bias, out, K, 1.0, 1.0, gated, properties(chip)
    )
    arguments = launch.arguments
    loop = find("product_kernel", chip.capability, {**arguments, **launch.options}, dtype_name(dtype, dtype))
    if loop is None:
        return None
    M, O, depth = (arguments[name] for name in ("BLOCK_M", "BLOCK_O", "BLOCK_K"))  # noqa: E741
    items = expected_tiles(tokens, K, E, M) * math.ceil(outputs / O)
    item_bytes = O * (1 + gated) * inputs * WEIGHT_BYTES + M * inputs * dtype.itemsize
    # A program processes several items, one after another.
    programs = min(launch.programs, math.ceil(items))
    work = Work(
        programs, math.ceil(items / programs) * math.ceil(inputs / depth), 2.0 * M * O * depth * (1 + gated), memory,
        items * item_bytes, FIRST_LOADS, O >= 64 and properties(chip).asynchronous,
    )  # fmt: skip
    return predict(loop, work, chip)


PAGE = Path("docs/reference/kernel-times.md")
# Name -> layout of bench/kernels.py, dtype of cached rows.
FORMS = {
    "GQA": ("gqa 64/8 x 64", torch.bfloat16),
    "GQA, fp8 rows": ("gqa 64/8 x 64", torch.float8_e4m3fn),
    "GQA, window 128": ("gqa 64/8 x 64, window 128", torch.bfloat16),
    "latent_rope 512+64": ("mla 64, 512+64", torch.bfloat16),
}
# Latent attention of GPT-OSS: plain rows of bf16, coded ones, and TOPK of those that an index of INDEX_WIDTH numbers
# selects.
TOPK, INDEX_WIDTH = 1024, 64
LATENT_FORMS = {
    "latent 832": LatentShape(64, 8, 64, 832),
    "latent 832, coded": LatentShape(64, 8, 64, CODED_832),
    "latent 832, coded, 1,024 read": LatentShape(64, 8, 64, CODED_832),
}
CONTEXTS, BATCHES = (8192, 32768, 131072), (1, 8, 64)
PARTS = ("gate and up", "down", "sum")
# Name -> layers with full attention and as many with a window, sizes of the experts.
MODELS = {"20B": (12, (32, 4, 2880, 2880)), "120B": (18, (128, 4, 2880, 2880))}
ROOF = GPUS["h100"]
OPENING = """\
# Kernel times

`python -m mlaforge.gpu_verification.predictions` writes this page; a test compares it with the code. **Nothing here was
measured by this project**: times are predicted for an H100 SXM by `planning/kernel_time.py` from the instructions of
the compiled inner loops (`planning/kernel_loops.json`) and the launches that `ops/` chooses. `mlaforge verify-gpu`
compares them with a GPU.

The share is the datasheet's roof (3.35 TB/s, 80 % of 989 TFLOP/s, minimum bytes and FLOPs) over the predicted time. The
limit is the largest of memory, L2 and the multiprocessors; `+`: tensor cores, issue slots and special functions add up,
because too few programs share a multiprocessor. `latency`: launches and first loads. The module lists what is left out.
"""


def us(seconds: float) -> str:
    """Microseconds with two or more digits."""
    return f"{seconds * 1e6:,.1f}" if seconds < 1e-3 else f"{seconds * 1e6:,.0f}"


def published_table() -> str:
    """Published figures and the model's."""
    rows = [("kernel", "published", "predicted", "time", "limit", "figure", "instructions")]
    for kernel in published_kernels():
        rows.append((
            kernel.name, f"{kernel.figure:g} {kernel.unit}", f"{kernel.predicted:.0f} {kernel.unit}",
            f"{kernel.figure / kernel.predicted - 1:+.1%}", kernel.time.limit, kernel.source, kernel.counted,
        ))  # fmt: skip
    return markdown_table(rows)


def attention_table() -> str:
    """Attention of one layer, one token per sequence."""
    rows = [("rows", "tokens", "batch", "us", "share", "limit", "memory", "multiprocessors", "latency", "merge")]
    for (name, (layout, dtype)), P, S in itertools.product(FORMS.items(), CONTEXTS, BATCHES):
        times = attention_times(kernels.LAYOUTS[layout], S, P, 1, torch.bfloat16, dtype, HOPPER)
        assert times, name
        total, merge = sum(time.total for time in times), sum(time.total for time in times[1:])
        minimum, first = kernels.cost(kernels.LAYOUTS[layout], S, P, 1, dtype.itemsize), times[0]
        rows.append((
            name, f"{P:,}", str(S), us(total), f"{ROOF.seconds(minimum) / total:.0%}", first.limit, us(first.memory),
            us(first.overlap), us(first.latency + first.launch), us(merge) if merge else "",
        ))  # fmt: skip
    return markdown_table(rows)


def sparse_time(shape: LatentShape, S: int, P: int, chip: Chip) -> tuple[float, float]:
    """Seconds of a layer's chosen rows, and of their selection among P tokens."""
    rows = latent_times(dataclasses.replace(shape, S=S, P=TOPK, selected=True), chip)
    chosen = selection_times(shape.heads, INDEX_WIDTH, S, P, TOPK, chip)
    assert rows and chosen
    return sum(time.total for time in rows.values()), sum(time.total for time in chosen.values())


def latent_roof(shape: LatentShape, S: int, P: int, sparse: bool) -> float:
    """Seconds of a layer at the roof: of latent attention with products of bf16 over all rows or TOPK of them, and of
    the products with all index keys."""
    format = shape.format
    read = TOPK if sparse else P
    R, H, G, D = format.width, shape.heads, shape.kv_heads, shape.head_dim
    cost = Cost(2.0 * S * read * (G * D * R + H * D + H * R), float(S * read * format.unit_bytes))
    if sparse:
        return ROOF.seconds(cost) + ROOF.seconds(Cost(2.0 * S * P * H * INDEX_WIDTH, float(S * P * INDEX_WIDTH)))
    return ROOF.seconds(cost)


def latent_table() -> str:
    """Latent attention of one layer by kernel, one token per sequence."""
    names = ("integers", "logits", "sum", "merge")
    rows: list[tuple[str, ...]] = [("rows", "tokens", "batch", "us", "share", *names, "selection")]
    for (name, shape), P, S in itertools.product(LATENT_FORMS.items(), CONTEXTS, BATCHES):
        sparse = name.endswith("read")
        times = latent_times(dataclasses.replace(shape, S=S, P=TOPK if sparse else P, selected=sparse), HOPPER)
        assert times, name
        selected = sparse_time(shape, S, P, HOPPER)[1] if sparse else 0.0
        total = sum(time.total for time in times.values()) + selected
        parts = [us(times[part].total) if part in times else "" for part in names]
        share = f"{latent_roof(shape, S, P, sparse) / total:.0%}"
        rows.append((name, f"{P:,}", str(S), us(total), share, *parts, us(selected) if sparse else ""))
    return markdown_table(rows)


def experts_table() -> str:
    """Experts of one layer."""
    rows = [("experts", "tokens", "part", "us", "share", "limit", "memory", "multiprocessors")]
    for (name, (_, sizes)), tokens, part in itertools.product(MODELS.items(), BATCHES, PARTS):
        time = experts_time(sizes, part, tokens, torch.bfloat16, HOPPER)
        assert time, part
        share = ROOF.seconds(experts_cost(sizes, part, tokens, 2)) / time.total
        cells = us(time.total), f"{share:.0%}", time.limit, us(time.memory), us(time.overlap)
        rows.append((name, str(tokens), part, *cells))
    return markdown_table(rows)


def step_table() -> str:
    """Attention and experts of all layers in a decode step."""
    parts = ("attention, GQA", "attention, latent_rope", "attention, coded, 1,024 read", "experts")
    rows = [["model", "tokens", "batch", *(cell for part in parts for cell in (part, "share"))]]
    for (name, (layers, sizes)), P, S in itertools.product(MODELS.items(), CONTEXTS, BATCHES):
        cells = [name, f"{P:,}", str(S)]
        for full in ("GQA", "latent_rope 512+64"):
            total = roof = 0.0
            for layout in (kernels.LAYOUTS[FORMS[form][0]] for form in (full, "GQA, window 128")):
                times = attention_times(layout, S, P, 1, torch.bfloat16, torch.bfloat16, HOPPER)
                assert times, full
                total += layers * sum(time.total for time in times)
                roof += layers * ROOF.seconds(kernels.cost(layout, S, P, 1, 2))
            cells += [us(total), f"{roof / total:.0%}"]
        window = kernels.LAYOUTS[FORMS["GQA, window 128"][0]]
        windows = attention_times(window, S, P, 1, torch.bfloat16, torch.bfloat16, HOPPER)
        assert windows
        coded = LATENT_FORMS["latent 832, coded"]
        total = layers * (sum(sparse_time(coded, S, P, HOPPER)) + sum(time.total for time in windows))
        roof = layers * (latent_roof(coded, S, P, True) + ROOF.seconds(kernels.cost(window, S, P, 1, 2)))
        cells += [us(total), f"{roof / total:.0%}"]
        experts = [experts_time(sizes, part, S, torch.bfloat16, HOPPER) for part in PARTS]
        total = 2 * layers * sum(time.total for time in experts if time)
        roof = 2 * layers * sum(ROOF.seconds(experts_cost(sizes, part, S, 2)) for part in PARTS)
        rows.append([*cells, us(total), f"{roof / total:.0%}"])
    return markdown_table(rows)


def page() -> str:
    """The page's text."""
    sections = {
        "Published kernels": published_table(),
        "Attention: microseconds of one layer, one token per sequence": attention_table(),
        "Latent attention: microseconds of one layer, one token per sequence": latent_table(),
        "MXFP4 experts: microseconds of one layer, without routing": experts_table(),
        "Decode step: microseconds of all layers, half of them with a window of 128": step_table(),
    }
    return "\n".join([OPENING, *(f"## {title}\n\n{table}\n" for title, table in sections.items())])


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
