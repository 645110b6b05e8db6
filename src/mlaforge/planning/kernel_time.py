"""Predicted time of a GPU kernel: a roofline with occupancy, from the instructions of the kernel's inner loop.

Bytes from memory and from L2 bound a kernel as in any roofline. Within a multiprocessor an iteration of the loop takes
time of the tensor cores, of the issue slots and of the special functions. Its instructions depend on each other, so a
stream of warps uses one of the three at a time, and only other streams overlap with it. That is a closed queueing
network, whose exact mean value analysis (Reiser and Lavenberg, Journal of the ACM 27, 1980) needs no further constant:
one stream takes the sum of the three, many streams approach the largest. Loads from memory are asynchronous and overlap
with everything.

A call takes max(memory, L2, overlap), the latency of the first loads, and a launch. `overlap` is the time of the
multiprocessor with the most programs: full rounds of the programs that fit, a partial one, and the code outside of the
loop. It is never below the largest of tensor cores, issue slots and special functions.

Left out: latencies between dependent instructions, bank conflicts and bandwidth of shared memory (asynchronous products
of fewer than 64 columns are limited by it), partial tiles, power limits, contention of the two L2 partitions, variation
between calls, and the next kernel's start before the last one's end. `outside` counts branches that exclude each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mlaforge.planning.costs import Gpu
from mlaforge.planning.kernel_loops import Loop

# FLOP per cycle and multiprocessor of dense bf16 products with fp32 accumulation: datasheets' FLOP/s over
# multiprocessors and boost clock (an H100 SXM: 989e12 / 132 / 1.83 GHz). By compute capability.
TENSOR = {80: 2048, 89: 1024, 90: 4096, 100: 8192, 120: 1024}
# Share of it that instructions reach. Hopper's wgmma 96.4 %, mma.sync 62.9 % on average (Dissecting the NVIDIA Hopper
# Architecture through Microbenchmarking, arXiv:2501.12084). Assumed: as wgmma for other GPUs; on sm_100 mma.sync has
# sm_80's rate.
PRODUCT_SHARE, SYNCHRONOUS_SHARE = 0.964, {90: 0.629, 100: 0.25}
# Shared memory per multiprocessor in bytes, registers, warps; warp instructions issued and results of special functions
# per cycle (CUDA C++ Programming Guide, technical specifications and arithmetic throughput of 8.0 to 12.0).
SHARED = {80: 164 << 10, 89: 100 << 10, 90: 228 << 10, 100: 228 << 10, 120: 100 << 10}
REGISTERS, WARPS = 65536, {80: 64, 89: 48, 90: 64, 100: 64, 120: 48}
ISSUED, SPECIAL = 4, 16
# Shared memory that CUDA reserves per program (same guide).
RESERVED = 1 << 10
# Share of the datasheet's bandwidth that a copying Triton kernel reaches on an H100 (github.com/meta-pytorch/torchrec,
# pull request 4634).
MEMORY_SHARE = 0.908
# Bytes per cycle and multiprocessor from L2: 6.65 TB/s measured on an H100 (openxla/xla,
# gpu_dot_fusion_cost_model.cc). Assumed for other GPUs.
L2_BYTES = 6.65e12 / 132 / 1.83e9
# Seconds of a load from memory and from L2: pointer chasing on an H100 SXM5, 570 and 260 cycles at 1.98 GHz (CUDA
# Performance Study - NVIDIA H100 SXM5, micro_benchmarks/latency.cu).
MEMORY_LATENCY, L2_LATENCY = 288e-9, 131e-9
# Seconds between the kernels of a CUDA graph on an H100 (Look Ma, No Bubbles, Hazy Research, May 2025).
LAUNCH = 1.3e-6


@dataclass(frozen=True)
class Chip:
    """A GPU. capability: such as 90. clock: Hz. memory, l2: bytes per second that kernels reach."""

    capability: int
    multiprocessors: int
    clock: float
    memory: float
    l2: float

    def known(self, table: dict[int, int]) -> int:
        """Entry of a table by compute capability: this one, or the closest lower one."""
        return table[max((at for at in table if at <= self.capability), default=min(table))]

    def product_rate(self, asynchronous: bool) -> float:
        """FLOP per second and multiprocessor of products. asynchronous: wgmma or tcgen05, instead of mma.sync."""
        share = PRODUCT_SHARE if asynchronous else SYNCHRONOUS_SHARE.get(self.capability, PRODUCT_SHARE)
        return self.known(TENSOR) * share * self.clock


def describe(gpu: Gpu, capability: int, multiprocessors: int, memory: float | None = None) -> Chip:
    """Chip of a datasheet. memory: measured bytes per second, if there are."""
    chip = Chip(capability, multiprocessors, 0.0, memory or MEMORY_SHARE * gpu.bandwidth_tbs * 1e12, 0.0)
    clock = gpu.bf16_tflops * 1e12 / (multiprocessors * chip.known(TENSOR))
    return replace(chip, clock=clock, l2=L2_BYTES * multiprocessors * clock)


@dataclass(frozen=True)
class Work:
    """What a launch computes. iterations: of a program, its longest one. flops: executed by a program in an iteration,
    padding and repetitions included. memory, l2: bytes of all programs. first_loads: seconds of the loads that depend
    on each other before the loop. streams: groups of a program's warps that do not wait for each other."""

    programs: int
    iterations: float
    flops: float
    memory: float
    l2: float
    first_loads: float = 0.0
    asynchronous: bool = False
    streams: int = 1


@dataclass(frozen=True)
class KernelTime:
    """Seconds of one launch by limit. overlap: of the fullest multiprocessor, see the module."""

    memory: float
    l2: float
    tensor: float
    issue: float
    special: float
    overlap: float
    latency: float
    launch: float

    @property
    def total(self) -> float:
        """Seconds of the call."""
        return max(self.memory, self.l2, self.overlap) + self.latency + self.launch

    @property
    def limits(self) -> dict[str, float]:
        """Seconds by the name of the limit. `issue slots+`: the units' times add up, issue slots being the largest."""
        units = {"tensor cores": self.tensor, "issue slots": self.issue, "special functions": self.special}
        unit = max(units, key=lambda name: units[name])
        suffix = "+" if self.overlap > 1.1 * units[unit] else ""
        return {"memory": self.memory, "L2": self.l2, unit + suffix: self.overlap}

    @property
    def limit(self) -> str:
        """Name of the largest limit; `latency` if launch and first loads take longer than it."""
        limits = {**self.limits, "latency": self.latency + self.launch}
        return max(limits, key=lambda name: limits[name])


def resident(loop: Loop, chip: Chip) -> int:
    """Programs that share a multiprocessor, at least one."""
    # Registers are allocated to a warp in units of 256.
    registers = loop.warps * math.ceil(loop.registers * 32 / 256) * 256
    by_shared = chip.known(SHARED) // (loop.shared + RESERVED)
    return max(1, min(REGISTERS // registers, by_shared, chip.known(WARPS) // loop.warps))


def cycle_seconds(demands: Sequence[float], streams: int) -> float:
    """Seconds in which `streams` streams complete one iteration, which needs `demands` seconds of several units: exact
    mean value analysis of a closed queueing network."""
    queues, seconds = [0.0] * len(demands), 0.0
    for number in range(1, streams + 1):
        waits = [demand * (1 + queue) for demand, queue in zip(demands, queues, strict=True)]
        seconds = sum(waits)
        queues = [number * wait / seconds if seconds else 0.0 for wait in waits]
    return seconds


def predict(loop: Loop, work: Work, chip: Chip) -> KernelTime:
    """Seconds of a launch of `loop`'s kernel on a chip."""
    tensor = work.flops / chip.product_rate(work.asynchronous)
    issue = loop.warps * loop.instructions / (ISSUED * chip.clock)
    special = loop.warps * 32 * loop.exponentials / (SPECIAL * chip.clock)
    outside = loop.warps * loop.outside / (ISSUED * chip.clock)
    fullest = math.ceil(work.programs / chip.multiprocessors)
    rounds, rest = divmod(fullest, resident(loop, chip))
    demands = [seconds / work.streams for seconds in (tensor, issue, special)]
    iteration = sum(
        count * cycle_seconds(demands, programs * work.streams)
        for count, programs in ((rounds, resident(loop, chip)), (1, rest))
    )
    return KernelTime(
        memory=work.memory / chip.memory,
        l2=work.l2 / chip.l2,
        tensor=fullest * work.iterations * tensor,
        issue=fullest * (work.iterations * issue + outside),
        special=fullest * work.iterations * special,
        overlap=work.iterations * iteration + fullest * outside,
        latency=work.first_loads,
        launch=LAUNCH,
    )
