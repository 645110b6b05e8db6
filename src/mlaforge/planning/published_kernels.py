"""Published kernels with public figures on Hopper GPUs, which kernel_time.py is compared with.

Loops were counted in binaries that other projects publish, or that Triton compiled: `cuobjdump -xelf`, `nvdisasm -c`,
instructions between the label of the loop with the tensor-core instructions and its branch. Nothing of their code is
here. No constant of the model was fitted to these figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mlaforge.planning.costs import GPUS
from mlaforge.planning.kernel_loops import Loop
from mlaforge.planning.kernel_time import Chip, KernelTime, Work, describe, predict

# H800 SXM5 and H100 SXM5 differ in links and fp64 alone.
HOPPER = describe(GPUS["h100"], 90, 132)


@dataclass(frozen=True)
class PublishedKernel:
    """A kernel, its published figure in `unit`, where the figure and the loop come from, and the launches of which its
    authors' tuner takes the fastest. amount: FLOP or bytes of a call, as its authors count them. clock: Hz, as
    stated by them."""

    name: str
    figure: float
    unit: str
    source: str
    counted: str
    amount: float
    launches: Sequence[tuple[Loop, Work]]
    clock: float = HOPPER.clock

    @property
    def chip(self) -> Chip:
        """The GPU at the clock of the measurement."""
        scale = self.clock / HOPPER.clock
        return replace(HOPPER, clock=self.clock, l2=HOPPER.l2 * scale)

    @property
    def time(self) -> KernelTime:
        """Predicted time of the fastest launch."""
        return min((predict(loop, work, self.chip) for loop, work in self.launches), key=lambda time: time.total)

    @property
    def predicted(self) -> float:
        """Predicted figure, in `unit`."""
        return self.amount / self.time.total / {"TFLOP/s": 1e12, "GB/s": 1e9}[self.unit]


def flash_attention_3() -> PublishedKernel:
    """Forward, fp16, head width 128, not causal: tiles of 128 x 176, two consumer warpgroups."""
    batch, tokens, heads, width = 4, 8448, 16, 128
    rows, keys = 128, 176
    programs = batch * heads * tokens // rows
    tensors = 4 * batch * heads * tokens * width * 2
    loop = Loop(612, 90, 0, 8, 240, (rows + 2 * 2 * keys) * width * 2)
    work = Work(
        programs, tokens / keys, 4.0 * rows * keys * width, tensors, programs * tokens * width * 2 * 2,
        asynchronous=True, streams=2,
    )  # fmt: skip
    return PublishedKernel(
        "FlashAttention-3, forward, width 128", 661, "TFLOP/s",
        "Shah et al. 2024 (arXiv:2407.08608), table 2; H100 SXM5 at 1.83 GHz",
        "FlashAttention-3 (BSD-3-Clause) in the wheel of vllm 0.11.0: instructions of a consumer warp",
        4.0 * batch * heads * tokens * tokens * width, [(loop, work)], 1.83e9,
    )  # fmt: skip


def flash_mla(heads: int) -> PublishedKernel:
    """Dense MLA decoding, bf16, 576 and 512 wide, batch 128: two warpgroups hold half of the values of 64 rows each and
    read 128 positions per iteration. 128 heads are limited by products, 64 by memory."""
    batch, tokens, keys, values, rows, positions = 128, 16384, 576, 512, 64, 128
    tiles = batch * -(-heads // rows)
    # Tiles are scheduled to as many programs as there are multiprocessors.
    iterations = tiles * tokens / positions / HOPPER.multiprocessors
    cache = batch * tokens * keys * 2.0
    io = batch * heads * (keys + values) * 2
    loop = Loop((969 + 1178) / 2, 34, 0, 8, 246, 226 << 10)
    work = Work(
        HOPPER.multiprocessors, iterations, 2.0 * rows * positions * (keys + values), cache + io,
        tiles * tokens * keys * 2.0 + io, asynchronous=True, streams=2,
    )  # fmt: skip
    flops = 2.0 * batch * heads * tokens * (keys + values)
    figure, unit, amount = (660, "TFLOP/s", flops) if heads > rows else (3000, "GB/s", cache)
    return PublishedKernel(
        f"FlashMLA, dense decoding, {heads} heads", figure, unit,
        "README of github.com/deepseek-ai/FlashMLA, and its deep dive of April 2025; H800 SXM5 throttled to 1.6 GHz",
        "FlashMLA (MIT) in the wheel of vllm 0.11.0: mean of a warp of the two warpgroups (969, 1178)",
        amount, [(loop, work)], 1.6e9,
    )  # fmt: skip


# Tile and a warp's instructions, exponentials, instructions outside of the loop, registers, shared memory.
TUTORIAL = {
    (128, 64): (701, 68, 1739, 255, 131076), (64, 64): (389, 34, 980, 152, 114692),
    (128, 32): (544, 36, 1548, 255, 81924), (64, 32): (303, 18, 898, 128, 65540),
}  # fmt: skip


def triton_tutorial() -> PublishedKernel:
    """Triton's tutorial of fused attention, forward, fp16, width 128, not causal; four warps, one stream."""
    heads, tokens, width = 16, 16384, 128
    launches = []
    for (rows, keys), (instructions, exponentials, outside, registers, shared) in TUTORIAL.items():
        programs = heads * tokens // rows
        work = Work(
            programs, tokens / keys, 4.0 * rows * keys * width, 4.0 * heads * tokens * width * 2,
            programs * tokens * width * 2.0 * 2, asynchronous=True,
        )  # fmt: skip
        launches.append((Loop(instructions, exponentials, outside, 4, registers, shared), work))
    return PublishedKernel(
        "Triton tutorial 06, fused attention, width 128", 477, "TFLOP/s",
        "github.com/pytorch/benchmark, pull request 2391 (July 2024); H100",
        "Triton 3.0.0 (MIT), python/tutorials/06-fused-attention.py, compiled for sm_90 with three stages",
        4.0 * heads * tokens * tokens * width, launches,
    )  # fmt: skip


def published_kernels() -> list[PublishedKernel]:
    """The kernels of this module."""
    return [flash_attention_3(), flash_mla(128), flash_mla(64), triton_tutorial()]
