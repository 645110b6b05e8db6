"""Stage probe: versions, and what the machine reaches: every share of the later stages is of these figures."""

from __future__ import annotations

import importlib
import platform
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import torch

from mlaforge.gpu_verification.case import AT_LEAST, AT_MOST, Case, Outcome, Prediction, Wrong
from mlaforge.gpu_verification.context import Context
from mlaforge.planning import machines

# What a run from a checkout needs; more may be there.
PACKAGES = ("torch", "triton", "transformers", "safetensors", "typer", "tqdm", "psutil", "pyyaml", "jinja2")
MODULES = {"pyyaml": "yaml"}
# Shares of a datasheet that a copy and a large product reach on a healthy card; and what the datasheet is taken to be
# where it is not known, in bytes and FLOP per second.
COPY_SHARE, PRODUCT_SHARE = 0.85, 0.7
UNKNOWN = (1e12, 2e14)
# Microseconds that the host needs to launch a small kernel, and a graph to replay one.
LAUNCH, REPLAY = 10.0, 4.0


def cases(context: Context) -> Iterator[Case]:
    """The stage's cases."""
    gpu = machines.of_device(torch.cuda.get_device_name(context.device)) if context.device.type == "cuda" else None
    bandwidth, flops = (gpu.bandwidth_tbs * 1e12, gpu.bf16_tflops * 1e12) if gpu else UNKNOWN
    yield Case("versions", Prediction(0, "missing packages", AT_MOST), lambda: versions(context))
    yield Case("device", Prediction(0 if context.twin else 1, "GPUs", AT_LEAST), lambda: device(context))
    yield Case("copy", Prediction(COPY_SHARE * bandwidth / 1e9, "GB/s"), lambda: copy(context))
    yield Case("product", Prediction(PRODUCT_SHARE * flops / 1e12, "TFLOP/s"), lambda: product(context))
    yield Case("launch", Prediction(LAUNCH, "us"), lambda: launch(context, graph=False))
    yield Case("graph replay", Prediction(REPLAY, "us"), lambda: launch(context, graph=True))


def versions(context: Context) -> Outcome:
    """Versions of the packages; Wrong where one cannot be imported."""
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
        raise Wrong(f"missing: {', '.join(missing)}")
    return Outcome(0.0, detail=", ".join(f"{name} {value}" for name, value in facts.items()), facts=facts)


def device(context: Context) -> Outcome:
    """What the card is and has."""
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
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().split("\n")[0] or None


def copy(context: Context) -> Outcome:
    """Bytes read and written per second by a copy of memory within the device."""
    size = (16 << 20) if context.twin else (2 << 30)
    source = torch.zeros(size // 4, dtype=torch.int32, device=context.device)
    target = torch.empty_like(source)
    speed = 2 * size / context.seconds(lambda: target.copy_(source))
    return Outcome(speed / 1e9, facts={"bandwidth": speed})


def product(context: Context) -> Outcome:
    """FLOP per second of a large product in bf16, of random numbers: zeros take less power and run faster."""
    size = 512 if context.twin else 8192
    a, b = (torch.randn(size, size, device=context.device, dtype=context.dtype) for _ in range(2))
    out = torch.empty_like(a)
    speed = 2 * size**3 / context.seconds(lambda: torch.mm(a, b, out=out))
    return Outcome(speed / 1e12, facts={"flops": speed})


def launch(context: Context, graph: bool) -> Outcome:
    """Time of one small kernel among many."""
    numbers, count = torch.zeros(32, device=context.device), 100

    def many() -> None:
        for _ in range(count):
            numbers.add_(1.0)

    took = context.seconds(many, graph=graph) / count * 1e6
    return Outcome(took, facts={"replay_us" if graph else "launch_us": took})
