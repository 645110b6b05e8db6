"""Options of `eval`."""

from __future__ import annotations

import dataclasses

from mlaforge.config import DTYPES, SHORTEST_WINDOW, Options, option


@dataclasses.dataclass(frozen=True)
class EvalConfig(Options):
    """Options of `eval`."""

    first = ("text", "windows", "teacher", "student", "criteria")

    text: str = option("embedded", "evaluation text: a file, a folder, or embedded (its held-out part)")
    windows: int = option(8, "windows from the start of the text", "windows", least=1)
    seqlen: int = option(2048, "length of a window", "tokens", least=SHORTEST_WINDOW)
    dense: bool = option(False, "attend to all tokens, though the model is sparse")
    topk: int | None = option(
        None, "tokens that a token of a sparse model reads per layer, instead of the model's number", "tokens", least=2
    )
    dtype: str = option("auto", "compute dtype", choices=DTYPES)
    device: str = option("auto", "device: auto, cpu, cuda, cuda:1, ...")
    teacher: str | None = option(
        None,
        "the original model: measure the divergence of MODEL from it, or compare the student with it by --criteria",
    )
    student: str | None = option(None, "with --criteria: the converted or healed model to evaluate")
    criteria: str | None = option(None, "YAML file of criteria for the student in comparison with the teacher")
