"""CPU kernels of cpu/ as torch operations: the choice of their form, compilation on first use, loading.

There are three forms, of which the fastest that the processor supports is used: AMX, AVX-512 BF16, AVX2. Without a
compiled library and a compiler, torch's operations are used, and the reason is logged once.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch
from torch import Tensor

from mlaforge import runtime
from mlaforge.ops.kernel_library import (
    AHEAD,
    AVX512,
    FLAGS,
    FORMS,
    CompilationError,
    KernelLibrary,
    cache_folder,
    compiler,
)

__all__ = [
    "AVX512", "FLAGS", "FORMS", "compiler", "form", "kernels", "load", "operations", "pack", "runs", "why_not",
]  # fmt: skip


def why_not() -> str | None:
    """Return the reason why the kernels are not available, or None."""
    if runtime.native_choice() == "0":
        return "MLAFORGE_NATIVE is 0"
    if (name := form()) is None:
        return (
            f"this processor supports none of {', '.join(FORMS)}, or MLAFORGE_NATIVE names one that it does not support"
        )
    if compiler() is None and KernelLibrary.of(name).find() is None:
        return f"there is no C++ compiler (g++); {AHEAD}"
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


def is_loaded() -> bool:
    """Whether this process has loaded compiled kernels. Compiles nothing."""
    return bool(_loaded)


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


def supports_row_format(id: int) -> bool:
    """Whether the kernels have a header for packed rows of a format, by RowFormat.id. They must be available."""
    return id in _row_formats(kernels())


@functools.cache
def _row_formats(library: Any) -> frozenset[int]:
    return frozenset(library.row_formats())


def install_sigbus_handler(message: str) -> None:
    """Print `message` and exit with code 2 if a file that is mapped into memory is cut short; without compiled kernels
    nothing is mapped."""
    if kernels() is not None:
        kernel("install_sigbus_handler")(message)


def operations(name: str) -> Any:
    """Return the operations of a loaded form."""
    return getattr(torch.ops, f"mlaforge_{name}")


def pack(weight_MK: Tensor, step: int = 1) -> Tensor:
    """Pack a weight [M, K] for `linear`: bf16 [M / 16, K / 2, 16, 2], outputs zero-padded; K must be even. With
    `step` 32, as for `latent`, inputs are padded too, to a multiple of it."""
    M, K = weight_MK.shape
    padded = torch.nn.functional.pad(weight_MK.bfloat16(), (0, -K % step, 0, -M % 16)).contiguous()
    return padded.view(len(padded) // 16, 16, -1, 2).transpose(1, 2).contiguous()


def unpack(packed: Tensor) -> Tensor:
    """Return the padded weight of `pack`, fp32 [M, K]."""
    return packed.transpose(1, 2).reshape(len(packed) * 16, -1).float()


# Forms that this process has loaded. A second library of the same form, from another folder, would register its
# operations a second time, which aborts the process.
_loaded: set[str] = set()


def load(name: str) -> str | None:
    """Load a form of the kernels once per process, compiled into the cache if there is no library. Returns the reason
    if that fails."""
    assert runs(name), f"this processor lacks {name}"
    if name in _loaded:
        return None
    library = KernelLibrary.of(name)
    path, ahead = library.find(), runtime.kernels_folder()
    if ahead is not None and (path is None or path.parent != ahead):
        runtime.log(f"MLAFORGE_KERNELS={ahead} has no {library.file_name()}, the library of this version; {AHEAD}")
    if path is None:
        runtime.log("compiling the CPU kernels, once per machine (about half a minute)")
        try:
            path = library.build(cache_folder())
        except CompilationError as error:
            return str(error)
    try:
        torch.ops.load_library(path)
    except OSError as error:
        return f"{path} cannot be loaded ({error.__cause__ or error}); delete it or compile it again"
    _loaded.add(name)
    return None
