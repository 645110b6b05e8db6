"""Libraries of the compiled CPU kernels: sources in cpu/, flags, file names, and compilation.

A library's name is its form and a hash of the sources, the flags and torch's version. It is looked up in
$MLAFORGE_KERNELS, for images whose kernels are compiled ahead (`mlaforge build-kernels`), and in the cache.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from mlaforge import runtime

FOLDER = Path(__file__).with_name("cpu")
# -ffp-contract=off: a sum must not depend on whether the compiler fuses its products. Hidden symbols cannot be resolved
# to another form's.
FLAGS = ("-O3", "-std=c++20", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-ffp-contract=off")
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mavx512vnni")
# Instruction sets of each form, the fastest form first.
FORMS = {"amx": (*AVX512, "-mamx-tile", "-mamx-bf16", "-mamx-int8"), "avx512": AVX512, "avx2": AVX2}
# What to do where nothing can be compiled or written.
AHEAD = "`mlaforge build-kernels --out DIR` compiles ahead, on any machine; set MLAFORGE_KERNELS=DIR"


class CompilationError(Exception):
    """No library was written. The message is one line."""


def compiler() -> str | None:
    return shutil.which(runtime.compiler_name())


def cache_folder() -> Path:
    """Return the folder of libraries that are compiled on first use."""
    return runtime.cache_home() / "native"


@dataclasses.dataclass(frozen=True)
class KernelLibrary:
    """Library of one form. name: of the torch.ops namespace, mlaforge_<name>; instructions: flags of its instruction
    sets; source: folder with native.cpp; flags: of the compiler, for all forms."""

    name: str
    instructions: tuple[str, ...]
    source: Path = FOLDER
    flags: tuple[str, ...] = FLAGS

    @classmethod
    def of(cls, form: str) -> KernelLibrary:
        return cls(form, FORMS[form])

    def file_name(self) -> str:
        import torch

        files = [path for path in sorted(self.source.rglob("*")) if path.is_file()]
        parts = [path.read_bytes() for path in files]
        parts.append(f"{self.row_formats()} {torch.__version__} {self.flags} {self.instructions}".encode())
        return f"{self.name}-{hashlib.sha256(b''.join(parts)).hexdigest()[:16]}.so"

    def find(self) -> Path | None:
        """Return the compiled library; None if there is none."""
        folders = [folder for folder in (runtime.kernels_folder(), cache_folder()) if folder is not None]
        name = self.file_name()
        return next((folder / name for folder in folders if (folder / name).is_file()), None)

    def row_formats(self) -> str:
        """Return the header row_formats.h: the list of row formats, one per file rows/<name>_rows.h."""
        files = sorted((self.source / "rows").glob("*_rows.h"))
        structs = ["".join(map(str.capitalize, path.stem.split("_"))) for path in files]
        includes = [f'#include "rows/{path.name}"' for path in files]
        lines = ["#pragma once", *includes, '#include "rows/row_format.h"']
        return "\n".join([*lines, f"using RowFormats = FormatList<{', '.join(structs)}>;", ""])

    def build(self, folder: Path) -> Path:
        """Compile into `folder` and return the library; on failure, write nothing. Raises CompilationError."""
        if compiler() is None:
            raise CompilationError(f"there is no C++ compiler ({runtime.compiler_name()}); {AHEAD}")
        library = folder / self.file_name()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                os.replace(self._compile(Path(scratch)), library)
        except OSError as error:
            raise CompilationError(f"{folder}: {error.strerror or error}; {AHEAD}") from error
        return library

    def _compile(self, scratch: Path) -> Path:
        import torch
        from torch.utils.cpp_extension import include_paths

        libraries = Path(torch.__file__).parent / "lib"
        # Link torch's own OpenMP runtime: a second one would start threads that compete for the cores.
        openmp = next(iter(sorted(libraries.glob("libgomp*"))), None)
        shared_object, unit = scratch / "native.so", scratch / "native.o"
        (scratch / "row_formats.h").write_text(self.row_formats(), encoding="utf-8")
        defined = [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}", f"-DFORM=mlaforge_{self.name}"]
        includes = [f"-I{path}" for path in (scratch, self.source, *include_paths())]
        source = self.source / "native.cpp"
        commands = [
            [compiler(), *self.flags, *self.instructions, *defined, *includes, "-c", source, "-o", unit],
            [compiler(), "-shared", unit, "-o", shared_object, f"-L{libraries}", "-ltorch_cpu", "-lc10"]
            + ([openmp] if openmp else ["-fopenmp"]),
        ]
        for command in commands:
            done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
            if done.returncode:
                complaint = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
                raise CompilationError(f"the compiler failed: {complaint}")
        return shared_object
