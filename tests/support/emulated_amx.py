"""The AMX form of the CPU kernels on tiles that emulated_amx.h keeps in memory: it runs wherever AVX-512 does and takes
several times as long.

`MLAFORGE_EMULATE_AMX=1 pytest ...` has the tests of this process take it for AMX (tests/conftest.py); processes that a
test starts do not know of it.
"""

import hashlib
from pathlib import Path

import pytest
import torch

from mlaforge.ops import native
from support.kernel_forms import EMULATED

HEADER = Path(__file__).with_suffix(".h")


def flags() -> tuple[str, ...]:
    # What was compiled is known by its flags: those of another header are others.
    key = hashlib.sha256(HEADER.read_bytes()).hexdigest()[:16]
    return (*native.AVX512, f"-DEMULATED_AMX={key}", "-include", str(HEADER))


def replace_amx(patch: pytest.MonkeyPatch) -> None:
    """Has everything take this processor for one with AMX, whose kernels are emulated."""
    patch.setitem(native.FORMS, "amx", flags())
    for answer in ("_is_amx_tile_supported", "_init_amx"):
        patch.setattr(torch.cpu, answer, lambda: True)


def replaces_amx() -> bool:
    return native.FORMS["amx"] == flags()


def add_form(patch: pytest.MonkeyPatch) -> None:
    """Has ops/native.py know the emulated form as `EMULATED`, beside the processor's own; where it replaces AMX it
    does not run twice."""
    processor_runs = native.runs

    def runs(name: str) -> bool:
        return processor_runs("avx512") and not replaces_amx() if name == EMULATED else processor_runs(name)

    patch.setitem(native.FORMS, EMULATED, flags())
    patch.setattr(native, "runs", runs)
