"""Entry point of `bench`: resolves benchmark names and the folder of the results."""

from __future__ import annotations

import functools
from datetime import UTC, datetime
from pathlib import Path

from mlaforge.bench import gate, recipe, scenario, summary
from mlaforge.bench.config import BenchConfig
from mlaforge.bench.results import add_table
from mlaforge.config import nearest
from mlaforge.runtime import UserError

KERNELS, CONVERSION, ALL = "kernels", "conversion", "all"
KNOWN = (*recipe.SCENARIOS, ALL, *recipe.OTHERS, KERNELS, CONVERSION)


def new_folder(config: BenchConfig) -> Path:
    """Return the folder of a run that begins now."""
    return Path(config.out) / datetime.now(UTC).strftime("%Y%m%d-%H%M%S")


def run(what: str, models: list[str], config: BenchConfig) -> tuple[Path, str]:
    """Run one benchmark, or scenarios (comma-separated, or `all`), in a new folder of `config.out`.

    Return the folder and tables for the terminal. Raise UserError for an unknown name, scenario.BrokenInvariant if an
    invariant of PERF_MODE does not hold.
    """
    names = recipe.SCENARIOS if what == ALL else tuple(what.split(","))
    for name in names if what not in KNOWN else ():
        if name not in (known := (*recipe.SCENARIOS, *recipe.OTHERS)):
            raise UserError(f"bench {what!r}: {name!r} must be one of {', '.join(known)}{nearest(name, KNOWN)}")
    out = Path(config.out)
    folder = new_folder(config)
    if what == KERNELS:
        from mlaforge.bench import kernels

        return folder, kernels.table(kernels.run(config, folder))
    if what == CONVERSION:
        from mlaforge.bench import conversion

        return folder, conversion.table(conversion.run(models, config, folder))
    permit, tables = functools.partial(gate.permit, out, config.force), []
    if config.table is not None and (config.summary is None or len(names) > 1):
        raise UserError("--table names the table of one scenario in --summary FILE")
    for name in names:
        body = scenario.run(name, models, config, folder, permit)
        tables.append(f"{name}\n{summary.table(body)}")
        if config.summary is not None:
            add_table(Path(config.summary), config.table or name, summary.short(body))
    return folder, "\n\n".join(tables)
