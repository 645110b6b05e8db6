"""The tables of docs/scaling.md: what `mlaforge plan` computes for GPT-OSS, by arrangement of the GPUs. Seconds.

python -m benchmarks.scaling
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mlaforge.checkpoint.source_model import read_spec
from mlaforge.demo import geometry
from mlaforge.families.spec import ModelSpec
from mlaforge.planning.arrangements import Arrangement, arrangements
from mlaforge.planning.code_plan import coded_plan
from mlaforge.planning.costs import GPUS
from mlaforge.planning.plan import Plan, make_plan, unconverted
from mlaforge.planning.ranks import Ranks
from mlaforge.planning.roofline import Row, in_digits
from mlaforge.planning.selection import sparse

MODELS = {name: read_spec(geometry.settings(name.lower())) for name in ("20B", "120B")}
GPU, CONTEXT, BATCH, TOTAL = GPUS["h100"], 32 * 1024, 64, 8
RANKS = (Ranks(1), Ranks(2), Ranks(4), Ranks(8), Ranks(8, 8))
# Full layers are converted: as recipes/ do, and to coded rows, with and without the index that `convert` writes.
FORMS: dict[str, Callable[[ModelSpec], Plan]] = {
    "GQA": unconverted,
    "GQA, fp8": lambda spec: unconverted(spec, "fp8"),
    "`latent_rope` 512 + 64": lambda spec: make_plan(spec, 0.5, "latent_rope", "auto", 512, 64),
    "`latent`, 4 bits": lambda spec: coded_plan(spec, 4.0, "latent", "auto"),
    "`latent`, 4 bits, 1,024 read": lambda spec: sparse(coded_plan(spec, 4.0, "latent", "auto"), 1024),
}


def row(model: str, form: str, ranks: Ranks = RANKS[0]) -> Row:
    """A form of a model on some GPUs."""
    return Row(FORMS[form](MODELS[model]), GPU, CONTEXT, BATCH, 0, ranks=ranks)


def arranged(model: str, form: str) -> list[Arrangement]:
    """The arrangements of RANKS of eight GPUs."""
    possible = arrangements(row(model, form), TOTAL)
    return [next(one for one in possible if one.row.ranks == ranks) for ranks in RANKS]


def lines() -> Iterator[str]:
    """Rows of the tables in docs/scaling.md."""
    for form in FORMS:
        rows = [row("120B", form, ranks) for ranks in RANKS]
        cells = [f"{one.cache_bytes(1) / 2**20:,.0f}; {in_digits(1e3 * one.plain.total)}" for one in rows]
        yield _line(form, *cells)
    for model in MODELS:
        for form in list(FORMS)[:-1]:
            yield _line(f"{model}, {form}", *(one.requests for one in arranged(model, form)))


def _line(*cells: str | int) -> str:
    return f"| {' | '.join(cell if isinstance(cell, str) else f'{cell:,}' for cell in cells)} |"


if __name__ == "__main__":
    print("\n".join(lines()))
