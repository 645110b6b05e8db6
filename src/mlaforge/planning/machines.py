"""The machine that a plan is computed for: a GPU's datasheet, or this CPU as measured now.

A datasheet is a bound. A CPU's figures are what decoding steps reach of its measured speeds: their shares were fitted
to the engine's measured steps on two processors, with and without AMX (docs/plan.md; tests/planning/test_machines.py
holds them to benchmarks/engine-rows*.json).
"""

from __future__ import annotations

import functools
import time

import psutil
import torch

from mlaforge.planning.costs import GPUS, Gpu
from mlaforge.runtime import UserError

# Of memory's speed and of a product's, what decoding steps on a CPU reach; and bytes of cached rows per second that a
# thread's attention goes through: int8 rows are multiplied as they are, int4 rows are decoded by vector instructions,
# and rows of `latent_rope` are scored by every head.
READ, MULTIPLIED = 0.68, 0.78
ROWS_READ = {"bf16": 6.2e9, "int8": 5.0e9, "int4": 2.1e9, "latent_rope": 3.4e9}


def memory_speed(passes: int = 5) -> float:
    """Bytes per second at which this machine reads memory, the best of several passes over 400 MB."""
    numbers = torch.ones(100_000_000)
    best = 0.0
    for _ in range(passes):
        start = time.perf_counter()
        numbers.sum()
        best = max(best, 4e8 / (time.perf_counter() - start))
    return best


def product_speed(passes: int = 5, dtype: torch.dtype = torch.float32, size: int = 1024) -> float:
    """FLOP per second of a product of two matrices of `size` x `size`, the best of several."""
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    best = 0.0
    for _ in range(passes + 1):
        start = time.perf_counter()
        a @ b
        best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best


@functools.cache
def measured() -> Gpu:
    """This CPU's roof as measured now: no step is faster."""
    memory = psutil.virtual_memory().total / 2**30
    source = "measured at the start of the run: 400 MB read, products in fp32 and bf16"
    flops = max(product_speed(dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    return Gpu("cpu", flops / 1e12, memory_speed() / 1e12, memory, source, achievable=1.0)


@functools.cache
def this_cpu() -> Gpu:
    """This CPU as the engine's steps use it: its kernels multiply in bf16 or widen to fp32, whichever is faster.

    Products are one thread's, times the threads: what else runs on the machine would stop a product of all of them.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        flops = threads * max(product_speed(40, dtype, 512) for dtype in (torch.float32, torch.bfloat16))
    finally:
        torch.set_num_threads(threads)
    return decoding(flops, memory_speed(10), psutil.virtual_memory().total / 2**30, threads)


def decoding(flops: float, bandwidth: float, memory_gib: float, threads: int) -> Gpu:
    """A CPU of which product and memory speed were measured, as decoding steps on so many threads use it."""
    source = "this CPU, measured now; a decoding step reaches the shares that docs/plan.md tells"
    return Gpu(
        "cpu", flops / 1e12, bandwidth / 1e12, round(memory_gib, 1), source, achievable=MULTIPLIED, read=READ,
        rows_read={rows: threads * speed for rows, speed in ROWS_READ.items()}, keys_on_chip=True,
    )  # fmt: skip


def by_name(name: str) -> Gpu:
    """The GPU of that name, `cpu` as measured now, or `auto`: what this machine has. UserError for a GPU without a
    datasheet here."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return this_cpu()
    if name != "auto":
        return GPUS[name]
    if found := of_device(own := torch.cuda.get_device_name()):
        return found
    raise UserError(f"no datasheet of {own} is known; name the nearest: --gpu {', '.join(GPUS)}")


def of_device(device: str) -> Gpu | None:
    """The datasheet of a GPU by the name that its driver tells; None where there is none."""
    own = device.replace(" ", "").lower()
    return next((gpu for gpu in GPUS.values() if gpu.name in own), None)
