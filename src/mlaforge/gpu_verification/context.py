"""Context shared by the cases of a stage: device, figures of the probe, and a folder in memory."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from mlaforge.gpu_verification.case import Unsupported
from mlaforge.planning import machines
from mlaforge.planning.costs import GPUS, Cost, Gpu
from mlaforge.planning.kernel_time import Chip, describe

T = TypeVar("T")


@dataclasses.dataclass
class Context:
    """Context of a stage. twin: a CPU replaces the GPU, sizes are tiny and times are meaningless. facts: figures of the
    probe. folder: in memory, removed after the run."""

    device: torch.device
    twin: bool
    facts: dict[str, Any]
    folder: Path
    _shared: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        """bf16; fp32 on a twin, as Triton's interpreter multiplies bf16 wrongly."""
        return torch.float32 if self.twin else torch.bfloat16

    @property
    def roof(self) -> Gpu:
        """Peaks measured by the probe; without it the machine's datasheet, or an H100's."""
        facts = self.facts
        if "bandwidth" in facts and "flops" in facts:
            memory = facts.get("memory_gib", 0.0)
            return Gpu("measured", facts["flops"] / 1e12, facts["bandwidth"] / 1e12, memory, "probe", achievable=1.0)
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else ""
        return machines.of_device(name) or GPUS["h100"]

    @property
    def chip(self) -> Chip:
        """The GPU for predictions of kernels: the clock from its datasheet, or if that is unknown from the measured
        product; the measured copy speed. On a twin, an H100."""
        if self.device.type != "cuda":
            return describe(GPUS["h100"], 90, 132)
        properties = torch.cuda.get_device_properties(self.device)
        roof = self.roof
        # A good product reaches the share `achievable` of a datasheet.
        estimated = dataclasses.replace(roof, bf16_tflops=roof.flops / Gpu.achievable / 1e12)
        datasheet = machines.of_device(properties.name) or estimated
        capability = 10 * properties.major + properties.minor
        return describe(datasheet, capability, properties.multi_processor_count, self.facts.get("bandwidth"))

    def share(self, cost: Cost, seconds: float) -> float:
        """Achieved share of the roofline."""
        return self.roof.seconds(cost) / seconds

    def shared(self, name: str, make: Callable[[], T]) -> T:
        """Return the object cached as `name`, created by `make` if needed. Only one object is cached at a time, so that
        memory is freed before the next is created."""
        if name not in self._shared:
            self._shared.clear()
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            self._shared[name] = make()
        value: T = self._shared[name]
        return value

    def need(self, size: float) -> None:
        """Raise Unsupported unless `size` bytes are free on the device."""
        if self.device.type == "cuda":
            free = torch.cuda.mem_get_info(self.device)[0]
            free += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            if size > 0.95 * free:
                raise Unsupported(f"{size / 2**30:.1f} GiB are needed, {free / 2**30:.1f} GiB are free")

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, run: Callable[[], Any], graph: bool = True, repetitions: int = 20) -> float:
        """Median seconds of a call: replayed from a CUDA graph, or without `graph` launched by the host. On a twin, the
        time of one call."""
        if self.device.type != "cuda":
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        if graph:
            from triton.testing import do_bench_cudagraph

            return float(do_bench_cudagraph(run, rep=repetitions, return_mode="median")) * 1e-3
        for _ in range(3):
            run()
        times = []
        for _ in range(repetitions):
            self.synchronize()
            start = time.perf_counter()
            run()
            self.synchronize()
            times.append(time.perf_counter() - start)
        return sorted(times)[len(times) // 2]
