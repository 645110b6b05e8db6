"""The AMX form of the CPU kernels on tiles emulated in memory (emulated_amx.h): runs on any AVX-512 machine, several
times slower.

`MLAFORGE_EMULATE_AMX=1 pytest ...` makes the tests of this process use it as AMX (tests/conftest.py); subprocesses of a
test do not.
"""

import hashlib
import os
from pathlib import Path

import pytest
import torch

from mlaforge.ops import native
from support.kernel_forms import EMULATED

HEADER = Path(__file__).with_suffix(".h")


def flags() -> tuple[str, ...]:
    # -O1, which overrides -O3, halves the compilation; the tests take the same time.
    # Libraries are identified by their flags. These have the header's hash and not its folder: all checkouts share a
    # library.
    key = hashlib.sha256(HEADER.read_bytes()).hexdigest()[:16]
    return (*native.AVX512, "-O1", f"-DEMULATED_AMX={key}", "-include", HEADER.name)


def replace_amx(patch: pytest.MonkeyPatch) -> None:
    """Make this processor appear to have AMX, with emulated kernels."""
    patch.setenv("CPATH", str(HEADER.parent), prepend=os.pathsep)
    patch.setitem(native.FORMS, "amx", flags())
    for answer in ("_is_amx_tile_supported", "_init_amx"):
        patch.setattr(torch.cpu, answer, lambda: True)


def replaces_amx() -> bool:
    return native.FORMS["amx"] == flags()


def add_form(patch: pytest.MonkeyPatch) -> None:
    """Register the emulated form as `EMULATED` in ops/native.py, in addition to the processor's forms; not if it
    replaces AMX."""
    processor_runs = native.runs

    def runs(name: str) -> bool:
        return processor_runs("avx512") and not replaces_amx() if name == EMULATED else processor_runs(name)

    patch.setenv("CPATH", str(HEADER.parent), prepend=os.pathsep)
    patch.setitem(native.FORMS, EMULATED, flags())
    patch.setattr(native, "runs", runs)
