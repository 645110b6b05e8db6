"""Perplexity by bytes of the cache: other formats of a grouped-query cache compared with latents by rank.

    python -m research.front --data ../shared/data [--scratch FOLDER] [--summarize FILE]

SmolLM2-135M-Instruct in bf16 on a CPU, in the windows of benchmarks/kv_cache.py: 16 of 2048 tokens of wiki.test.raw and
4 of Python source. Conversions, and what rivals calibrate, are calibrated on WikiText's validation text. Latents of
plain rows are read through the engine's cache. Formats that the engine lacks (rivals.py) are simulated by rounding in
transformers' cache; `4 bits, whole` checks the simulation against the engine's int4. Every row is compared with the
unrounded cache in the same code: perplexity and divergence. Bytes are those of 2048 tokens, including scales, norms,
first tokens and blocks. An interrupted run resumes; --scratch keeps conversions; front_picture.py plots the table.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.kv_cache import (
    CALIBRATION_WINDOWS,
    DIVERGENCES,
    LENGTH,
    Reference,
    cache_bytes,
    divergence_cells,
    engine_states,
    open_llm,
)
from benchmarks.script import evaluation_texts, parser, run, scratch, wikitext, without_repeats
from mlaforge.bench.results import Results
from mlaforge.checkpoint.loading import load_model
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.conversion import convert
from mlaforge.conversion.config import ConvertConfig
from mlaforge.data import corpus, overlap
from mlaforge.demo import model as demo_model
from mlaforge.rendering.table import markdown_table
from research import rivals

WINDOWS = {"wiki": 16, "code": 4}
# Form and bits of the simulated formats.
SIMULATED = [
    *(("rotated", f"{bits} bits") for bits in (4, 3)), ("blocks", "2 bits"),
    *(("plain code", f"{bits} bits") for bits in (4, 3, 2)), ("rotated", "2 bits"), ("blocks", "4 bits, whole"),
    *(("pair widths", f"{bits} bits") for bits in (4, 3, 2)),
]  # fmt: skip
# Layout and share of plain rows.
CONVERTED = [("latent", 0.75), ("latent", 0.5), ("latent", 0.25), ("latent_rope", 0.5)]


def row_keys() -> Iterator[dict[str, Any]]:
    """Keys of each row."""
    for how in ("engine", "simulated rounding"):
        yield {"how": how, "form": "gqa", "stored": "bf16", "budget": None}
    for form, stored in SIMULATED:
        yield {"how": "simulated rounding", "form": form, "stored": stored, "budget": None}
    for layout, budget in CONVERTED:
        for stored in ("bf16", "int8"):
            yield {"how": "engine", "form": layout, "stored": stored, "budget": budget}


class Simulated:
    """The original in transformers with simulated cache formats."""

    def __init__(self, original: Path, tuned: Tensor, texts: dict[str, Tensor]):
        self.spec = SourceModel.open(original).spec
        self.model = load_model(original, "bfloat16")
        self.tuned = tuned
        self.reference = Reference(original, texts, self._states(texts, None))

    def _states(self, texts: dict[str, Tensor], rival: rivals.Rival | None) -> dict[str, Tensor]:
        return {name: rivals.rounded_states(self.model, rival, ids).float() for name, ids in texts.items()}

    @functools.cached_property
    def bases(self) -> list[tuple[rivals.Basis, rivals.Basis]]:
        return rivals.plain_bases(self.model, self.tuned)

    @functools.cached_property
    def energies(self) -> Tensor:
        # As many tokens as Block-GTQ calibrates with.
        return rivals.pair_energies(self.model, self.tuned[:1])

    def rival(self, row: dict[str, Any]) -> rivals.Rival | None:
        if row["form"] == "gqa":
            return None
        bits = int(row["stored"].split()[0])
        if row["form"] == "blocks" and "whole" in row["stored"]:
            return rivals.Blocks(bits, group=self.spec.layers[0].head_dim, exempt=0)
        if row["form"] == "plain code":
            return rivals.PlainCode(bits, self.model, self.bases)
        if row["form"] == "pair widths":
            return rivals.PairWidths(bits, self.energies)
        return rivals.Blocks(bits) if row["form"] == "blocks" else rivals.Rotated(bits)

    def measured(self, row: dict[str, Any]) -> dict[str, Any]:
        rival, plain = self.rival(row), 2 * LENGTH
        states = self._states(self.reference.texts, rival) if rival else self.reference.states
        size = sum(rival.bytes(layer, LENGTH) if rival else plain * layer.cached for layer in self.spec.layers)
        return {**self.reference.compare(states), "bytes": size}


def measure(options: argparse.Namespace) -> Results:
    original = demo_model.fetch()
    tokenizer = SourceModel.open(original).tokenizer
    results = Results(options.raw, [], resume=True, divergences=DIVERGENCES)
    with scratch(options) as folder:
        validation = wikitext(options.data)[0]
        tuned = corpus.windows(tokenizer, validation, CALIBRATION_WINDOWS, LENGTH, seed=0)
        eval_windows = evaluation_texts(tokenizer, options.data, WINDOWS, LENGTH, folder)
        texts = {name: w.ids for name, w in without_repeats(eval_windows, overlap.passages(tuned)).items()}
        results.body["tokens"] = {name: ids.numel() for name, ids in texts.items()}
        simulated: Simulated | None = None
        reference: Reference | None = None
        for row in results.missing(row_keys()):
            if row["how"] == "simulated rounding":
                simulated = simulated or Simulated(original, tuned.ids, texts)
                measurement = simulated.measured(row)
            else:
                directory = original
                if row["budget"] is not None:
                    directory = folder / f"{row['form']} {row['budget']:g}"
                    config = ConvertConfig(
                        layout=row["form"], budget=row["budget"], calibration=validation, nsamples=CALIBRATION_WINDOWS,
                        seqlen=LENGTH, eval_windows=0, device="cpu", dense=True,
                    )  # fmt: skip
                    convert.run(str(original), directory, config, calibrated=folder / "calibration")
                reference = reference or Reference(original, texts, engine_states(open_llm(original, "bf16"), texts))
                llm = open_llm(directory, row["stored"])
                measurement = {**reference.compare(engine_states(llm, texts)), "bytes": cache_bytes(llm)}
            exact = next((r for r in results.rows if r["how"] == row["how"]), measurement)
            ratio = {name: measurement["ppl"][name] / exact["ppl"][name] for name in texts}
            results.add({**row, **measurement, "ratio": ratio, "bytes_ratio": measurement["bytes"] / exact["bytes"]})
    return results


def short(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows without perplexities."""
    return [{name: value for name, value in row.items() if name != "ppl"} for row in body["rows"]]


def table(rows: list[dict[str, Any]]) -> str:
    heads = ("form", "rows", "rank's share", "how", "bytes of bf16's", "wiki.test ppl ratio", "Python source",
             *DIVERGENCES)  # fmt: skip
    cells = [
        (row["form"], row["stored"], f"{row['budget']:.1%}" if row["budget"] else "–", row["how"],
         f"{row['bytes_ratio']:.1%}", f"{row['ratio']['wiki']:.4f}", f"{row['ratio']['code']:.4f}",
         *divergence_cells(row, "wiki")) for row in rows
    ]  # fmt: skip
    return markdown_table([heads, *cells])


if __name__ == "__main__":
    arguments = parser(__doc__, "research/front.json", "front")
    arguments.add_argument("--scratch", type=Path, help="folder of the conversions")
    run(arguments, measure, short, table)
