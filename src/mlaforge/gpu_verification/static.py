"""Table of the compiled Triton kernels, without a GPU: registers, spills, shared memory and instructions by capability.

`python -m mlaforge.gpu_verification.static` compiles every launch of kernel_launches.py for every capability, one
process per core, and writes planning/kernel_loops.json. `source` and `constants` identify what was compiled, so that a
test can tell an outdated table without compiling.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import triton

from mlaforge.bench import machine
from mlaforge.gpu_verification.compilation import MULTIPROCESSORS, gpu_of
from mlaforge.gpu_verification.kernel_launches import LAUNCHES
from mlaforge.planning import kernel_loops
from mlaforge.planning.kernel_loops import Compiled
from mlaforge.runtime import log


@functools.cache
def source_hash(module: ModuleType) -> str:
    """Return a hash of a module's kernels, and of those modules whose functions they call: their code without comments
    and docstrings."""
    called = {sys.modules[function.fn.__module__] for function in vars(module).values() if hasattr(function, "fn")}
    kernels = []
    for part in sorted({module, *called}, key=lambda part: part.__name__):
        for node in ast.parse(inspect.getsource(part)).body:
            if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(x) for x in node.decorator_list):
                if ast.get_docstring(node) is not None:
                    node.body = node.body[1:]
                kernels.append(ast.unparse(node))
    return hashlib.sha256("\n".join(kernels).encode()).hexdigest()[:16]


def identity(name: str, capability: int) -> dict[str, Any]:
    """Return what determines a compiled launch: the hash of its source, its numbers and options."""
    launch = LAUNCHES[name](gpu_of(capability))
    module = sys.modules[launch.kernel.fn.__module__]
    # CONVERT says whether Triton compiles, which it does here.
    constants = {key: value for key, value in launch.arguments.items() if key.isupper() and key != "CONVERT"}
    return {"source": source_hash(module), "constants": {**constants, **launch.options}}


def compiled(capability: int, names: Sequence[str]) -> list[Compiled]:
    """Compile launches for a capability in one process, whose start takes as long as a compilation. Raises RuntimeError
    if one fails."""
    command = [sys.executable, "-m", "mlaforge.gpu_verification.compilation", *names, str(capability)]
    launches = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            record = json.loads(line)
            log(f"sm_{capability} {record['name']}: {record['registers']} registers, {record['spilled']} bytes spilled")
            launches.append(launch_of({**record, **identity(record["name"], capability)}))
    if process.returncode:
        raise RuntimeError(f"{names[len(launches)]} does not compile for sm_{capability}: see above")
    return launches


def launch_of(record: dict[str, Any]) -> Compiled:
    """Return what the table keeps of a record of compilation.compile_one with its identity."""
    whole, loop = record["instructions"], record["loop"]
    same = {field: record[field] for field in (*kernel_loops.IDENTITY, "registers", "spilled", "shared")}
    return Compiled(
        **same, instructions=whole["all"], tensor=whole["tensor"], loop_instructions=loop["all"],
        loop_exponentials=loop["exponential"], loop_spills=loop["spill"], loop_wide_loads=loop["wide load"],
    )  # fmt: skip


def main() -> None:
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        jobs = [
            (capability, [name for name in names if compiles(name, capability)])
            for capability in MULTIPROCESSORS for names in (list(LAUNCHES)[::2], list(LAUNCHES)[1::2])
        ]  # fmt: skip
        launches = [launch for part in pool.map(lambda job: compiled(*job), jobs) for launch in part]
    write(launches)


def write(launches: Iterable[Compiled]) -> None:
    """Write planning/kernel_loops.json."""
    command = "python -m mlaforge.gpu_verification.static"
    facts = {"command": command, "triton": triton.__version__}
    machine.write(kernel_loops.FILE, {**facts, **kernel_loops.encode(launches)})


def compiles(name: str, capability: int) -> bool:
    """Whether a GPU of this capability can run a launch: fp8 rows need 8.9."""
    return "fp8" not in name or capability >= 89


if __name__ == "__main__":
    main()
