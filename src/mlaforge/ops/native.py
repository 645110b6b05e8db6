"""CPU kernels of cpu/, compiled once per machine by the local C++ compiler.

There are three forms, of which the fastest that the processor supports is used: AMX, AVX-512 BF16, AVX2. Without a
compiler torch's operations are used, and the reason is logged once. Libraries are cached in runtime.cache_home(), by a
hash of the source and of torch's version.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from mlaforge import runtime

FOLDER = Path(__file__).with_name("cpu")
SOURCE = FOLDER / "native.cpp"
# -ffp-contract=off: a sum must not depend on whether the compiler fuses its products. Hidden symbols cannot be resolved
# to another form's.
FLAGS = ("-O3", "-std=c++20", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-ffp-contract=off")
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mavx512vnni")
# Instruction sets of each form, the fastest form first.
FORMS = {"amx": (*AVX512, "-mamx-tile", "-mamx-bf16", "-mamx-int8"), "avx512": AVX512, "avx2": AVX2}


def why_not() -> str | None:
    """Return the reason why the kernels are not available, or None."""
    if runtime.native_choice() == "0":
        return "MLAFORGE_NATIVE is 0"
    if form() is None:
        return (
            f"this processor supports none of {', '.join(FORMS)}, or MLAFORGE_NATIVE names one that it does not support"
        )
    if compiler() is None:
        return "there is no C++ compiler (g++)"
    return None


def runs(name: str) -> bool:
    """Whether this processor can run a form of the kernels."""
    if name == "amx":
        return runs("avx512") and torch.cpu._is_amx_tile_supported() and bool(torch.cpu._init_amx())
    if name == "avx512":
        return torch.cpu._is_avx512_bf16_supported() and torch.cpu._is_vnni_supported()
    return torch.cpu._is_avx2_supported()


def form() -> str | None:
    """Return the form to use: the fastest supported one, or the one that runtime.native_choice() names; None if there
    is none."""
    choice = runtime.native_choice()
    return next((name for name in FORMS if choice in ("1", name) and runs(name)), None)


def compiler() -> str | None:
    return shutil.which(runtime.compiler_name())


@functools.cache
def kernels() -> Any | None:
    """Return the compiled kernels as torch operations, or None. Compiles them on the first call on a machine."""
    reason, name = why_not(), form()
    if reason is None and name is not None:
        reason = load(name)
    if reason is not None or name is None:
        runtime.log(f"compiled CPU kernels are not used: {reason}")
        return None
    return operations(name)


def kernel(name: str) -> Any:
    """Return one compiled kernel; they must be available. A call takes a third of the time of a call through
    `kernels()`, which selects an overload every time."""
    return _overload(kernels(), name)


@functools.cache
def _overload(library: Any, name: str) -> Any:
    return getattr(library, name).default


def is_available() -> bool:
    """Whether there are compiled kernels on this machine. Compiles them on the first call."""
    return kernels() is not None


def supports_bfloat16(x: Tensor, *others: Any) -> Literal[True] | str:
    """Return True, or the reason why a kernel that takes bf16 on a CPU cannot take `x`, the first input of its op."""
    if x.device.type == "cpu" and x.dtype != torch.bfloat16:
        return f"it supports bfloat16, the inputs are {x.dtype}"
    return supports_device(x.device)


def supports_device(device: torch.device) -> Literal[True] | str:
    """Return True, or the reason why no kernel can take inputs on this device."""
    if device.type != "cpu":
        return f"it needs CPU tensors, the inputs are on {device.type}"
    return True if is_available() else "it is not compiled"


def install_sigbus_handler(message: str) -> None:
    """Print `message` and exit with code 2 if a file that is mapped into memory is cut short; without compiled kernels
    nothing is mapped."""
    if kernels() is not None:
        kernel("install_sigbus_handler")(message)


def operations(name: str) -> Any:
    """Return the operations of a loaded form."""
    return getattr(torch.ops, f"mlaforge_{name}")


def pack(weight_MK: Tensor, step: int = 1) -> Tensor:
    """Pack a weight [M, K] for `linear`: bf16 [M / 16, K / 2, 16, 2], outputs zero-padded; K must be even. With `step`
    32, as for `latent`, inputs are padded too, to a multiple of it."""
    M, K = weight_MK.shape
    padded = torch.nn.functional.pad(weight_MK.bfloat16(), (0, -K % step, 0, -M % 16)).contiguous()
    return padded.view(len(padded) // 16, 16, -1, 2).transpose(1, 2).contiguous()


def unpack(packed: Tensor) -> Tensor:
    """Return the padded weight of `pack`, fp32 [M, K]."""
    return packed.transpose(1, 2).reshape(len(packed) * 16, -1).float()


def _sources() -> bytes:
    return b"".join(path.read_bytes() for path in sorted(FOLDER.rglob("*")) if path.is_file())


def load(name: str) -> str | None:
    """Compile a form of the kernels, unless the library exists, and load it. Returns the reason if that fails."""
    assert runs(name), f"this processor lacks {name}"
    key = hashlib.sha256(_sources() + f"{torch.__version__} {FLAGS} {FORMS[name]}".encode()).hexdigest()[:16]
    library = runtime.cache_home() / "native" / f"{name}-{key}.so"
    if not library.is_file():
        runtime.log("compiling the CPU kernels, once per machine (about half a minute)")
        if (failed := _compile(library, name)) is not None:
            return failed
    torch.ops.load_library(library)
    return None


def _compile(library: Path, name: str) -> str | None:
    """Write `library`. On failure, write nothing and return the compiler's first error."""
    from torch.utils.cpp_extension import include_paths

    libraries = Path(torch.__file__).parent / "lib"
    # Link torch's own OpenMP runtime: a second one would start threads that compete for the cores.
    openmp = next(iter(sorted(libraries.glob("libgomp*"))), None)
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        shared_object, unit = Path(scratch) / "native.so", Path(scratch) / "native.o"
        defined = [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}", f"-DFORM=mlaforge_{name}"]
        includes = [f"-I{path}" for path in (FOLDER, *include_paths())]
        runs = [
            [compiler(), *FLAGS, *FORMS[name], *defined, *includes, "-c", str(SOURCE), "-o", str(unit)],
            [compiler(), "-shared", str(unit), "-o", str(shared_object), f"-L{libraries}", "-ltorch_cpu", "-lc10"]
            + ([str(openmp)] if openmp else ["-fopenmp"]),
        ]
        for command in runs:
            done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
            if done.returncode:
                complaint = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
                return f"the compiler failed: {complaint}"
        os.replace(shared_object, library)
    return None
