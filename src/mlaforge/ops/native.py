"""The CPU kernels in cpu/, compiled once per machine by the C++ compiler that is there.

Where there is none, or the processor has no AVX-512 BF16, everything runs on torch's own operations; the reason is said
once. Kept under runtime.cache_home(), by a hash of the source and of torch's version.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlaforge import runtime

FOLDER = Path(__file__).with_name("cpu")
SOURCE = FOLDER / "native.cpp"
FLAGS = (
    "-O3", "-std=c++20", "-shared", "-fPIC", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512bf16", "-mavx512vnni",
    "-mfma",
)  # fmt: skip


def why_not() -> str | None:
    """Why the kernels cannot be had here; None where they can."""
    if not runtime.native_wanted():
        return "MLAFORGE_NATIVE is 0"
    if not available():
        return "this processor has no AVX-512 BF16"
    if compiler() is None:
        return "there is no C++ compiler (g++)"
    return None


def available() -> bool:
    """Whether this processor can run the kernels, were they compiled."""
    return torch.cpu._is_avx512_bf16_supported()


def compiler() -> str | None:
    return shutil.which(runtime.compiler_name())


@functools.cache
def kernels() -> Any | None:
    """torch.ops.mlaforge_native with `linear` and `decode`, or None; compiles on the first call of a machine."""
    reason = why_not()
    if reason is None:
        reason = _load()
    if reason is not None:
        runtime.log(f"compiled CPU kernels are not used: {reason}")
        return None
    return torch.ops.mlaforge_native


@functools.cache
def tiles() -> bool:
    """Whether the kernels multiply by tiles (AMX): then they are the fastest product for any number of rows."""
    native = kernels()
    return native is not None and bool(native.tiles())


def pack(weight_MK: Tensor) -> Tensor:
    """The layout that `linear` reads: bf16 [M / 16, K / 2, 16, 2], outputs filled up with zeros. K must be even."""
    M, K = weight_MK.shape
    padded = torch.nn.functional.pad(weight_MK.bfloat16(), (0, 0, 0, -M % 16)).contiguous()
    return padded.view(-1, 16, K // 2, 2).transpose(1, 2).contiguous()


def unpack(packed: Tensor, out_features: int) -> Tensor:
    """[M, K] bf16 again."""
    return packed.transpose(1, 2).reshape(len(packed) * 16, -1)[:out_features]


def _sources() -> bytes:
    return b"".join(path.read_bytes() for path in sorted(FOLDER.iterdir()))


def _load() -> str | None:
    key = hashlib.sha256(_sources() + f"{torch.__version__} {FLAGS}".encode()).hexdigest()[:16]
    library = runtime.cache_home() / "native" / f"{key}.so"
    if not library.is_file():
        runtime.log("compiling CPU kernels, once on this machine (about half a minute)")
        if (failed := _compile(library)) is not None:
            return failed
    torch.ops.load_library(library)
    return None


def _compile(library: Path) -> str | None:
    """Writes `library`; or nothing, and the compiler's first complaint."""
    from torch.utils.cpp_extension import include_paths

    libraries = Path(torch.__file__).parent / "lib"
    # Torch's own OpenMP runtime: a second one in the process would have threads of its own that fight for the cores.
    openmp = next(iter(sorted(libraries.glob("libgomp*"))), None)
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        shared_object, unit = Path(scratch) / "native.so", Path(scratch) / "native.o"
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
        includes = [f"-I{path}" for path in include_paths()]
        flags = [flag for flag in FLAGS if flag != "-shared"]
        runs = [
            [compiler(), *flags, "-fopenmp", abi, *includes, "-c", str(SOURCE), "-o", str(unit)],
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
