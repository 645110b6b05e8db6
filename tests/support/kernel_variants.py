"""Variants of Triton kernels that steps of random lengths would compile, counted without compiling any.

`python -m support.kernel_variants` prints {"kernel, geometry": number of variants} as JSON. Triton must not interpret.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections import defaultdict
from typing import Any

import torch

from mlaforge.engine.execution.bucket import QUERIES
from mlaforge.gpu_verification.compilation import TargetDriver
from mlaforge.gpu_verification.kernel_launches import EXPERTS, LATENT, absorbed, routing
from mlaforge.ops import latent_attention_triton as latent_kernels
from mlaforge.ops import mxfp4_experts_triton as experts
from mlaforge.ops import paged_attention_triton as attention
from mlaforge.ops import token_selection_triton as selection
from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.gpu_properties import GpuProperties
from mlaforge.ops.integer_rows_triton import integers_kernel

STEPS = 40
# Query heads, KV heads, key and value width (0: a prefix of the key), window.
GEOMETRIES = {
    "gpt-oss": (64, 8, 64, 64, None), "gpt-oss window": (64, 8, 64, 64, 128), "llama": (32, 8, 128, 128, None),
    "latent_rope": (64, 1, 576, 0, None), "latent_rope of rank 360": (64, 1, 424, 0, None),
}  # fmt: skip


def view_of(queries: list[int], lengths: list[int], window: int | None) -> CacheView:
    """A step of sequences with so many query tokens and lengths."""
    S = len(queries)
    numbers = torch.zeros(S + 1, dtype=torch.int32)
    # Tensors that begin anywhere, as parts of one upload do.
    table = torch.zeros(S, max(lengths) // 16 + 1, dtype=torch.int32)
    return CacheView(table, numbers[:S], numbers[1:], numbers, torch.zeros(sum(queries), dtype=torch.int64), 16,
                     max(queries), max(lengths), window, lengths=tuple(lengths))  # fmt: skip


def steps(count: int) -> list[tuple[list[int], list[int]]]:
    """Chunks of prompts of random lengths, alone or beside decoding sequences, and decoding steps."""
    rng = random.Random(0)
    batches = []
    for i in range(count):
        queries = [rng.randint(1, 2048)] * (i % 4 < 3) + [1] * (0 if i % 4 == 0 else rng.randint(1, 40))
        batches.append((queries, [T + rng.randint(0, 9000) for T in queries]))
    return batches


def main() -> None:
    from triton import knobs
    from triton.runtime import driver

    driver.set_active(TargetDriver(90))
    gpu = GpuProperties((9, 0), 132, GpuProperties.of_capability(9, 0).shared_memory)
    attention.gpu_properties = experts.gpu_properties = lambda device: gpu
    variants: dict[str, set[str]] = defaultdict(set)

    def hook(*, key: str, fn: Any, **others: Any) -> bool:
        variants[f"{fn.name.rpartition('.')[2]}, {geometry}"].add(key)
        return True  # not compiled

    knobs.runtime.jit_cache_hook = hook

    def launch(kernel: Any, arguments: dict[str, Any], **options: Any) -> None:
        kernel.run(**arguments, **options, grid=(1,), warmup=True)

    geometry = ""  # read by `hook`
    for geometry, (H, G, D, V, window) in GEOMETRIES.items():  # noqa: B007
        rows = torch.zeros(32, G, D + V, dtype=torch.bfloat16)
        k, v = (rows[..., :D], rows[..., D:]) if V else (rows, rows[..., : D - 64])
        for queries, lengths in steps(STEPS):
            q = torch.zeros(sum(queries), H, D, dtype=torch.bfloat16)
            chosen = attention.make_launch(q, k, v, view_of(queries, lengths, window), 0.1)
            launch(attention.attend_kernel, chosen.arguments, **chosen.options)
            if chosen.most_splits > 1:
                launch(attention.merge_kernel, attention.merge_launch(chosen)[1], num_warps=4)
    geometry = "index of 64"
    for queries, lengths in steps(STEPS):
        view = view_of([1] * len(queries), lengths, None)
        S, L = len(queries), view.max_seq_len
        _, arguments = selection.launches(
            torch.zeros(512, 64, 16, dtype=torch.int8),
            torch.zeros(S, 2, 64, 64, dtype=torch.float16),
            torch.zeros(S, 64),
            view,
        )
        launch(selection.lse_kernel, arguments | {"out": torch.zeros(S, 1, 64)})
        lse = torch.zeros(S, 1, 64)
        score = {"lse": lse, "sinks": lse, "out": torch.zeros(S, L), "width": L, "sink": 4, "window": 128, "stride": 0,
                 "SINKS": True}  # fmt: skip
        selected = selection.select_launch(torch.zeros(S, L), [min(n, 1024) for n in lengths], view, 1024)
        launch(selection.select_kernel, selected, num_warps=16)
        launch(selection.score_kernel, arguments | score)
    for geometry in ("latent 832", "latent coded"):
        for queries, lengths in steps(STEPS):
            if max(queries) <= QUERIES[-1]:
                shape = dataclasses.replace(LATENT[geometry], S=len(queries), P=max(lengths), T=max(queries))
                of = shape.launches(gpu)
                launch(latent_kernels.logits_kernel, of.logits[1], **of.logits[2])
                launch(latent_kernels.latent_sum_kernel, of.sum[1], **of.sum[2])
                if of.integers is not None:
                    launch(integers_kernel, of.integers[1], num_warps=4)
    geometry = "latent_rope"
    for queries, _ in steps(STEPS):
        for part in ("absorb", "up-project"):
            of = absorbed(part, sum(queries), gpu)
            launch(of.kernel, of.arguments, **of.options)
    for geometry in ("20b", "120b"):
        E, K, C, I = EXPERTS[geometry]  # noqa: E741
        for queries, _ in steps(STEPS):
            N = sum(queries)
            if N * E <= experts.ROUTED:
                of = routing(geometry, N, gpu)
                launch(of.kernel, of.arguments, **of.options)
            with torch.device("meta"):
                blocks = torch.empty(E, 2 * I, C // 32, 16, dtype=torch.uint8)
                x, out = torch.empty(N, C, dtype=torch.bfloat16), torch.empty(N * K, I, dtype=torch.bfloat16)
                order, offsets = torch.empty(N * K, dtype=torch.int64), torch.empty(E + 1, dtype=torch.int32)
                bias = torch.empty(E, 2 * I, dtype=torch.bfloat16)
            chosen = experts.make_launch(x, order, offsets, blocks, blocks[..., 0], bias, out, K, 1.702, 7.0, True)
            launch(experts.product_kernel, chosen.arguments, **chosen.options)
    print(json.dumps({name: len(keys) for name, keys in variants.items()}))


if __name__ == "__main__":
    main()
