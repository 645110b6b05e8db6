"""Tiles, stages and splits of paged attention's Triton kernel, chosen from shapes and the GPU's properties, and the
candidates that `mlaforge tune` measures instead. Not tuned on a GPU yet."""

from __future__ import annotations

import functools

import triton

from mlaforge.ops.gpu_properties import KIB, GpuProperties
from mlaforge.ops.work_list import MOST_PIECES, UNIT


def pieces(width: int) -> tuple[int, int]:
    """Return powers of two (at least 16, a tensor core's depth) that cover the width: two if that wastes less."""
    whole = max(16, triton.next_power_of_2(width))
    half = max(16, whole // 2)
    rest = max(16, triton.next_power_of_2(width - half)) if width > half else 0
    return (half, rest) if 0 < rest < half else (whole, 0)


@functools.lru_cache(maxsize=256)
def cut(D: int, V: int, v_in_k: bool) -> tuple[tuple[int, int, int], tuple[int, int]]:
    """Return the pieces of keys and of values. A value that is a prefix of the key is cut alike, and the rest of the
    key follows."""
    if not v_in_k:
        return (*pieces(D), 0), pieces(V)
    return (*pieces(V), max(16, triton.next_power_of_2(D - V)) if D > V else 0), pieces(V)


# Shared memory that Triton needs besides the tiles, and bytes that CUDA reserves per block.
OVERHEAD, RESERVED = 5 * KIB, KIB


@functools.lru_cache(maxsize=4096)
def tile_sizes(
    rows: int, keys: int, values: int, v_in_k: bool, itemsize: int, gpu: GpuProperties
) -> tuple[int, int, int, int] | None:
    """Return BLOCK_M, BLOCK_N, warps and stages for `rows` query rows and padded widths; None if nothing fits.

    Hopper's asynchronous tensor cores need at least 64 rows; more are used only for narrow rows, and fewer only if 64
    do not fit into the GPU's shared memory. Fewer rows are limited by memory, so two programs should share a
    multiprocessor. Every two stages after the first keep one more tile in flight: block numbers take every other stage,
    because addresses depend on them. Tiles of 64 positions take fewer instructions and fewer reads of the queries from
    shared memory per position than tiles of 32, also where they spill. Chosen from planning/kernel_loops.json; not
    tuned on a GPU yet.
    """
    row_bytes = (keys if v_in_k else keys + values) * itemsize
    # Two programs, and what CUDA reserves for them, share a multiprocessor's memory.
    whole, half = gpu.shared_memory - OVERHEAD, (gpu.shared_memory + RESERVED) // 2 - RESERVED - OVERHEAD
    if itemsize == 4:
        # For parity only: exact products have no tensor core.
        return (16, 16, 4, 2) if 16 * (keys * itemsize + row_bytes) <= whole else None
    # Few classes, because each is compiled: decoding, and everything else.
    BLOCK_M = 16 if rows <= 16 else 64
    if rows >= 512 and max(keys, values) <= 128:
        BLOCK_M = 128
    while BLOCK_M >= 16:
        warps = 8 if BLOCK_M == 128 or values > 256 or (BLOCK_M == 64 and values > 128) else 4
        for budget in (half, whole) if BLOCK_M < 64 else (whole,):
            for BLOCK_N in (64, 32):
                for stages in (7, 5, 3):
                    if _shared(BLOCK_M, BLOCK_N, stages, keys, row_bytes, itemsize, gpu) <= budget:
                        return BLOCK_M, BLOCK_N, warps, stages
        BLOCK_M //= 2
    return None


def _shared(
    BLOCK_M: int, BLOCK_N: int, stages: int, keys: int, row_bytes: int, itemsize: int, gpu: GpuProperties
) -> int:  # fmt: skip
    """Bytes of shared memory of a program's tiles."""
    tiles = (stages - 1) // 2
    if asynchronous := BLOCK_M >= 64 and gpu.asynchronous:
        # The tile that the tensor cores still read.
        tiles += 1
    # Synchronous tensor cores take their left factor, the weights, from registers through shared memory.
    weights = 0 if asynchronous else BLOCK_M * BLOCK_N * itemsize
    return BLOCK_M * keys * itemsize + tiles * BLOCK_N * row_bytes + weights


def candidates(
    rows: int, keys: int, values: int, v_in_k: bool, itemsize: int, gpu: GpuProperties
) -> list[dict[str, int]]:  # fmt: skip
    """Return configurations to measure instead of `tile_sizes`' and of the number of programs, that fit into shared
    memory. BLOCK_N divides the unit of pieces: only a sequence's last tile may be partial. `waves`: programs per
    multiprocessor among which a step's rows are divided."""
    default = tile_sizes(rows, keys, values, v_in_k, itemsize, gpu)
    if default is None:
        return []
    row_bytes = (keys if v_in_k else keys + values) * itemsize
    return [
        {"BLOCK_N": BLOCK_N, "num_warps": warps, "num_stages": stages, "waves": waves}
        for BLOCK_N in (32, UNIT)
        for warps in (4, 8)
        for stages in (3, 5, 7)
        for waves in (1, 2, 4)
        if _shared(default[0], BLOCK_N, stages, keys, row_bytes, itemsize, gpu) <= gpu.shared_memory - OVERHEAD
    ]


@functools.lru_cache(maxsize=4096)
def choose_splits(programs: int, most: int, room: int) -> int:
    """Return the fewest splits, at most `most` and MOST_PIECES, with at least 90 % of the best occupancy.

    `room` programs run at a time, in waves; occupancy is how full the waves are.
    """

    def fill(splits: int) -> float:
        return programs * splits / (triton.cdiv(programs * splits, room) * room)

    candidates = range(1, max(1, min(most, MOST_PIECES)) + 1)
    best = max(map(fill, candidates))
    return next(splits for splits in candidates if fill(splits) >= 0.9 * best)
