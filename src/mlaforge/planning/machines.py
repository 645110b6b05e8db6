"""Target machines of a plan: a GPU from its datasheet, or this CPU as measured now.

A datasheet is a bound. A CPU's figures are the shares of its measured speeds that decoding steps reach, fitted to the
engine's measured steps on two processors, with and without AMX (docs/plan.md; tests/planning/test_machines.py compares
them with benchmarks/speed.json).
"""

from __future__ import annotations

import functools
import time

import psutil
import torch

from mlaforge.planning.costs import GPUS, Gpu
from mlaforge.runtime import UserError

# Shares of the memory and matrix-product speed that decoding steps on a CPU reach; and bytes of cached rows per second
# that one thread's attention reads: int8 rows are multiplied directly, int4 rows are decoded by vector instructions,
# and rows of `latent_rope` are scored by every head.
READ_SHARE, PRODUCT_SHARE = 0.68, 0.78
CODED_PRODUCTS = 1.3  # products of bytes, for the keys alone
ROW_BANDWIDTHS = {"bf16": 6.2e9, "int8": 5.0e9, "int4": 2.1e9, "latent_rope": 3.4e9}


def memory_speed(passes: int = 5) -> float:
    """Memory read bandwidth in bytes per second, the best of several passes over 400 MB."""
    numbers = torch.ones(100_000_000)
    best = 0.0
    for _ in range(passes):
        start = time.perf_counter()
        numbers.sum()
        best = max(best, 4e8 / (time.perf_counter() - start))
    return best


def product_speed(passes: int = 5, dtype: torch.dtype = torch.float32, size: int = 1024) -> float:
    """FLOP/s of a `size` x `size` matrix product, the best of several."""
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    best = 0.0
    for _ in range(passes + 1):
        start = time.perf_counter()
        a @ b
        best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best


@functools.cache
def cpu_peaks() -> Gpu:
    """Measured peaks of this CPU, an upper bound of any step."""
    memory = psutil.virtual_memory().total / 2**30
    source = "measured at the start of the run: 400 MB read, products in fp32 and bf16"
    flops = max(product_speed(dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    return Gpu("cpu", flops / 1e12, memory_speed() / 1e12, memory, source, achievable=1.0)


@functools.cache
def this_cpu() -> Gpu:
    """This CPU at the speed of the engine's steps, which multiply in bf16 or widen to fp32, whichever is faster.

    Products are measured on one thread and multiplied by the number of threads, as other processes would stall a
    product on all of them.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        flops = threads * max(product_speed(40, dtype, 512) for dtype in (torch.float32, torch.bfloat16))
    finally:
        torch.set_num_threads(threads)
    return decoding_cpu(flops, memory_speed(10), psutil.virtual_memory().total / 2**30, threads)


def decoding_cpu(flops: float, bandwidth: float, memory_gib: float, threads: int) -> Gpu:
    """A CPU at the speed of decoding steps on `threads` threads. flops: FLOP/s; bandwidth: bytes/s, both measured."""
    source = "this CPU, measured now; a decoding step reaches the shares given in docs/plan.md"
    return Gpu(
        "cpu", flops / 1e12, bandwidth / 1e12, round(memory_gib, 1), source, achievable=PRODUCT_SHARE, read=READ_SHARE,
        row_bandwidths={rows: threads * speed for rows, speed in ROW_BANDWIDTHS.items()},
        coded_products=CODED_PRODUCTS, caches_keys=True,
    )  # fmt: skip


def by_name(name: str) -> Gpu:
    """The machine called `name` in GPUS; `cpu` is this CPU as measured now, `auto` this machine. Raise UserError if
    this machine's GPU has no datasheet here."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return this_cpu()
    if name != "auto":
        return GPUS[name]
    device = torch.cuda.get_device_name()
    if gpu := of_device(device):
        return gpu
    raise UserError(f"the datasheet of {device} is unknown; choose the most similar GPU: --gpu {', '.join(GPUS)}")


def of_device(device: str) -> Gpu | None:
    """Datasheet of a GPU by its driver's device name; None if unknown."""
    normalized = device.replace(" ", "").lower()
    return next((gpu for gpu in GPUS.values() if gpu.name in normalized), None)
