"""Verbs on this machine: what it has, CPU kernels compiled ahead, tuning and sweeps of kernels."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from mlaforge.bench.config import BenchConfig
from mlaforge.cli.verb import Json, quiet
from mlaforge.runtime import UserError
from mlaforge.tuning.config import TuneConfig

Forms = Annotated[
    list[str] | None,
    typer.Option("--form", metavar="all|amx|avx512|avx2", help="instruction set, also of another machine; repeatable"),
]
Folder = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="DIR", help="folder for the libraries, found by MLAFORGE_KERNELS (default: the cache)"
    ),
]


def env(json_output: Json = False) -> None:
    """Print versions, device, compiled CPU kernels and variables of this machine."""
    facts = _facts()
    if json_output:
        print(json.dumps(facts, indent=1))
        return
    from mlaforge.rendering.table import text_table

    kernels, variables = facts.pop("kernels"), facts.pop("variables")
    print(text_table([(name, str(value)) for name, value in facts.items()]))
    rows = [("CPU kernels", "processor", "in use", "library")]
    for name, form in kernels.items():
        missing = "not compiled yet" if form["used"] else "not compiled"
        flags = ("yes" if form[question] else "no" for question in ("supported", "used"))
        rows.append((name, *flags, form["library"] or missing))
    print(f"\n{text_table(rows)}")
    if variables:
        print("\n" + "\n".join(f"{name}={value}" for name, value in variables.items()))


def _facts() -> dict[str, Any]:
    """Versions and device as in manifests, Triton, each form of the CPU kernels, and the variables that are set."""
    from importlib import metadata

    from mlaforge.ops import native
    from mlaforge.ops.kernel_library import FORMS, KernelLibrary
    from mlaforge.runtime import environment

    facts: dict[str, Any] = dict(environment())
    try:
        facts["triton"] = metadata.version("triton")
    except metadata.PackageNotFoundError:
        facts["triton"] = "not installed"
    reason = native.why_not()
    facts["kernels"] = {}
    for name in FORMS:
        library = KernelLibrary.of(name).find()
        facts["kernels"][name] = {
            "supported": bool(native.runs(name)),
            "library": str(library) if library else None,
            "used": reason is None and name == native.form(),
        }
    if reason:
        facts["no CPU kernels"] = reason
    # A key is a secret.
    facts["variables"] = {
        name: "(set)" if name.endswith("_KEY") else value
        for name, value in sorted(os.environ.items())
        if name.startswith("MLAFORGE_")
    }
    return facts


def build_kernels(form: Forms = None, out: Folder = None) -> None:
    """Compile the CPU kernels ahead of their first use, for container images and read-only homes; all forms by
    default."""
    from mlaforge.ops.kernel_library import FORMS, CompilationError, KernelLibrary, cache_folder

    names = list(FORMS) if not form or "all" in form else list(dict.fromkeys(form))
    if unknown := [name for name in names if name not in FORMS]:
        raise UserError(f"form {unknown[0]!r} of the CPU kernels is unknown; use all, {', '.join(FORMS)}")
    for name in names:
        try:
            print(KernelLibrary.of(name).build(out or cache_folder()), flush=True)
        except CompilationError as error:
            raise UserError(f"{name}: {error}") from None


def tune(
    config: TuneConfig,
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="model directory, .gguf file or hub id")] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="table to write (the cache's)")] = None,
) -> None:
    """Tune kernels at the shapes of MODEL, into the table that the engine loads on this device; an interrupted run
    resumes."""
    from mlaforge.tuning import tune as stage

    quiet()
    tuning = stage.run(model, config, out)
    print(f"{tuning.table()}\n{tuning.path}")


def sweep(what: str, config: BenchConfig) -> None:
    """Run `bench kernels --sweep`."""
    from mlaforge.bench import results, run
    from mlaforge.tuning import sweep as stage

    if what != run.KERNELS:
        raise UserError(f"--sweep measures kernels, not {what}: mlaforge bench kernels --sweep")
    folder = run.new_folder(config)
    body = stage.run(config, folder)
    if config.summary is not None:
        results.add_table(Path(config.summary), config.table or "sweep", stage.short(body))
    print(f"{stage.table(body)}\n{folder}")
