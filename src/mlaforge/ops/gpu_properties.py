"""GPU properties by which Triton kernels and the engine choose tiles and formats."""

from __future__ import annotations

import dataclasses
import functools

import torch

KIB = 1024
# Maximum opt-in shared memory per block, by compute capability (CUDA C++ Programming Guide, table of technical
# specifications), for compilation without a GPU.
SHARED_MEMORY = {
    (7, 5): 64 * KIB, (8, 0): 163 * KIB, (8, 6): 99 * KIB, (8, 7): 163 * KIB, (8, 9): 99 * KIB, (9, 0): 227 * KIB,
    (10, 0): 227 * KIB, (10, 3): 227 * KIB, (12, 0): 99 * KIB, (12, 1): 99 * KIB,
}  # fmt: skip
# First compute capability with float8_e4m3fn conversions.
FP8_CAPABILITY = (8, 9)


@dataclasses.dataclass(frozen=True)
class GpuProperties:
    """`shared_memory`: maximum opt-in bytes per block."""

    capability: tuple[int, int]
    multiprocessors: int
    shared_memory: int

    @classmethod
    def of_capability(cls, major: int, minor: int, multiprocessors: int = 4) -> GpuProperties:
        """Return the properties of a GPU that is not present; with few multiprocessors, interpreted kernels split their
        work too."""
        return cls((major, minor), multiprocessors, SHARED_MEMORY[major, minor])

    @property
    def asynchronous(self) -> bool:
        """Whether Triton's products of 64 rows or more are asynchronous (wgmma, tcgen05), from shared memory."""
        return self.capability[0] in (9, 10)

    def why_no_fp8(self) -> str | None:
        """Return the reason why kernels cannot read float8_e4m3fn here, or None."""
        if self.capability >= FP8_CAPABILITY:
            return None
        needed, present = map(capability_name, (FP8_CAPABILITY, self.capability))
        return f"float8_e4m3fn needs compute capability {needed}, this GPU has {present}"


def capability_name(capability: tuple[int, int]) -> str:
    """Return a compute capability as NVIDIA writes it: 9.0."""
    return ".".join(map(str, capability))


@functools.cache
def gpu_properties(device: torch.device) -> GpuProperties:
    """Return the properties of a CUDA device; for other devices, where kernels are interpreted or compiled ahead, of a
    Hopper GPU."""
    if device.type != "cuda":
        return GpuProperties.of_capability(9, 0)
    properties = torch.cuda.get_device_properties(device)
    capability = properties.major, properties.minor
    # ROCm builds and torch's type stubs lack the attribute. Every GPU has 48 KiB.
    known = SHARED_MEMORY.get(capability, 48 * KIB)
    shared_memory = getattr(properties, "shared_memory_per_block_optin", known)
    return GpuProperties(capability, properties.multi_processor_count, shared_memory)
