"""Stage probe: versions and peak speeds of the machine, on which the shares of all later stages are based."""

from __future__ import annotations

import importlib
import platform
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import torch

from mlaforge.gpu_verification.case import AT_LEAST, AT_MOST, Case, Outcome, Prediction, WrongResult
from mlaforge.gpu_verification.context import Context
from mlaforge.planning import machines

# Packages required by a run from a checkout.
PACKAGES = ("torch", "triton", "transformers", "safetensors", "typer", "tqdm", "psutil", "pyyaml", "jinja2")
MODULES = {"pyyaml": "yaml"}
# Shares of a datasheet that a copy and a large product reach on a healthy card; and figures assumed without a
# datasheet, in bytes and FLOP per second.
COPY_SHARE, PRODUCT_SHARE = 0.85, 0.7
DEFAULT_PEAKS = (1e12, 2e14)
# Microseconds per small kernel, launched by the host and replayed from a graph.
LAUNCH_US, REPLAY_US = 10.0, 4.0


def cases(context: Context) -> Iterator[Case]:
    """The stage's cases."""
    gpu = machines.of_device(torch.cuda.get_device_name(context.device)) if context.device.type == "cuda" else None
    bandwidth, flops = (gpu.bandwidth_tbs * 1e12, gpu.bf16_tflops * 1e12) if gpu else DEFAULT_PEAKS
    yield Case("versions", Prediction(0, "missing packages", AT_MOST), lambda: versions(context))
    yield Case("device", Prediction(0 if context.twin else 1, "GPUs", AT_LEAST), lambda: device(context))
    yield Case("copy", Prediction(COPY_SHARE * bandwidth / 1e9, "GB/s"), lambda: copy(context))
    yield Case("product", Prediction(PRODUCT_SHARE * flops / 1e12, "TFLOP/s"), lambda: product(context))
    yield Case("launch", Prediction(LAUNCH_US, "us"), lambda: launch(context, graph=False))
    yield Case("graph replay", Prediction(REPLAY_US, "us"), lambda: launch(context, graph=True))


def versions(context: Context) -> Outcome:
    """Versions of the packages. Raise WrongResult if one cannot be imported."""
    facts = {"python": platform.python_version()}
    missing = []
    for name in PACKAGES:
        try:
            importlib.import_module(MODULES.get(name, name))
            facts[name] = version(name)
        except (ImportError, PackageNotFoundError) as error:
            missing.append(f"{name} ({error})")
    facts["cuda"] = str(torch.version.cuda)
    if missing:
        raise WrongResult(f"missing: {', '.join(missing)}")
    return Outcome(0.0, detail=", ".join(f"{name} {value}" for name, value in facts.items()), facts=facts)


def device(context: Context) -> Outcome:
    """Number of GPUs; properties of the GPU as facts."""
    if context.device.type != "cuda":
        return Outcome(0.0, detail="no GPU: a twin", facts={"device": "cpu"})
    properties = torch.cuda.get_device_properties(context.device)
    free, total = torch.cuda.mem_get_info(context.device)
    facts = {
        "device": properties.name, "capability": list(torch.cuda.get_device_capability(context.device)),
        "multiprocessors": properties.multi_processor_count, "memory_gib": total / 2**30,
        "shared_memory": getattr(properties, "shared_memory_per_block_optin", None),
        "l2_bytes": getattr(properties, "L2_cache_size", None), "driver": _driver(),
    }  # fmt: skip
    detail = ", ".join(f"{name} {value}" for name, value in facts.items())
    return Outcome(torch.cuda.device_count(), detail=f"{detail}, free {free / 2**30:.1f} GiB", facts=facts)


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip().split("\n")[0] or None


def copy(context: Context) -> Outcome:
    """Bytes per second, read plus written, of a copy within device memory."""
    size = (16 << 20) if context.twin else (2 << 30)
    source = torch.zeros(size // 4, dtype=torch.int32, device=context.device)
    target = torch.empty_like(source)
    speed = 2 * size / context.seconds(lambda: target.copy_(source))
    return Outcome(speed / 1e9, facts={"bandwidth": speed})


def product(context: Context) -> Outcome:
    """FLOP/s of a large bf16 matrix product of random values, as zeros take less power and run faster."""
    size = 512 if context.twin else 8192
    a, b = (torch.randn(size, size, device=context.device, dtype=context.dtype) for _ in range(2))
    out = torch.empty_like(a)
    speed = 2 * size**3 / context.seconds(lambda: torch.mm(a, b, out=out))
    return Outcome(speed / 1e12, facts={"flops": speed})


def launch(context: Context, graph: bool) -> Outcome:
    """Mean microseconds of a small kernel in a sequence of 100."""
    tensor, count = torch.zeros(32, device=context.device), 100

    def run_kernels() -> None:
        for _ in range(count):
            tensor.add_(1.0)

    microseconds = context.seconds(run_kernels, graph=graph) / count * 1e6
    return Outcome(microseconds, facts={"replay_us" if graph else "launch_us": microseconds})
