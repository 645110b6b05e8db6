"""Decoding over a selection on a CPU, beside the original read densely.

    python benchmarks/sparse_speed.py --data ../shared/data --base CHECKOUT [--cases 2048x1x256 8000x1x512 8000x8x512]
        [--longer 8000 16000 32000] [--forms NAME ...] [--out FILE.json]

SmolLM2-135M-Instruct and conversions of it, each with an index; a case is context x batch x tokens that are read. Peers
and rounds are those of benchmarks/engine.py: every peer a process of its own, in each round one after another, until
the 95 % intervals of the ratios to the base are within 5 % or there are --rounds. `base` is the original, dense, on
mlaforge at CHECKOUT (`git worktree add CHECKOUT 51e5217`). --longer: the time of a step by context, 512 tokens being
read, at lengths that the model was not made for. What is calibrated on does not matter to speed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from engine import HERE, SCRATCH, Peer, converted, decode, ratio
from rows import Results, parser, wikitext

from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.data import corpus
from mlaforge.demo import model as demo_model
from mlaforge.runtime import log
from mlaforge.sparsity import sparsify
from mlaforge.sparsity.config import SparsifyConfig

FORMS = {"original": None, "latent": "latent", "latent_rope": "latent_rope", "coded": "latent, 4 bits"}
# Least ratios to the base.
BARS = {
    "2048x1x256": {"coded": 0.9, "latent": 0.8, "latent_rope": 0.95, "original": 1.0},
    "8000x1x512": {"coded": 1.3, "latent": 1.2, "latent_rope": 1.3, "original": 1.4},
    "8000x8x512": {"coded": 1.4, "latent": 1.1, "latent_rope": 2.0, "original": 2.0},
}


def sparse(model: Path, form: str, topk: int, length: int) -> Path:
    """The model in a form, with an index; one index serves all that differs only in its config."""
    dense = model if FORMS[form] is None else converted(model, FORMS[form])
    first = SCRATCH / f"sparse-{form}"
    sparsify.run(str(dense), first, SparsifyConfig(text=corpus.EMBEDDED, nsamples=2, topk=1024, device="cpu"), True)
    out = SCRATCH / f"sparse-{form}-{topk}-{length}"
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(first, out, copy_function=lambda source, to: Path(to).hardlink_to(source))
    config = json.loads((out / "config.json").read_text())
    config |= {"index_topk": topk, "max_position_embeddings": max(length, config["max_position_embeddings"])}
    (out / "config.json").unlink()
    (out / "config.json").write_text(json.dumps(config))
    return out


def measured(
    case: str, prompts: list[list[int]], models: dict[str, Path], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """A row for every peer; `models` are ours, and the base reads the original."""
    script = str(HERE / "engine_peers.py")
    with ExitStack() as stack:
        running = {}
        for name, directory in models.items():
            source = options.base if name == "base" else HERE.parent
            words = [sys.executable, script, "mlaforge", str(directory), "auto"]
            running[name] = Peer(words, {"PYTHONPATH": str(source / "src")}, None, True)
            stack.callback(running[name].close)
            running[name].ask("prefill", prompts)
        times = decode(case, running, options)
    rows = []
    for name, seconds in times.items():
        row = {
            "case": case,
            "form": name,
            "ms_per_step": 1e3 * statistics.median(seconds),
            "rounds_ms": [1e3 * t for t in seconds],
        }
        if "base" in times:
            row |= {"to base": ratio(times["base"], seconds), "bar": BARS.get(case, {}).get(name)}
        rows.append(row)
        log(json.dumps(row))
    return rows


def main() -> None:
    arguments = parser(__doc__, "benchmarks/sparse_speed.json")
    arguments.add_argument("--base", type=Path, required=True, help="a checkout of mlaforge that ratios are to")
    arguments.add_argument("--cases", nargs="*", default=[*BARS])
    arguments.add_argument("--longer", type=int, nargs="*", default=[], help="contexts")
    arguments.add_argument("--forms", nargs="*", choices=[*FORMS], default=[*FORMS])
    arguments.add_argument("--rounds", type=int, default=12, help="at most so many")
    arguments.add_argument("--steps", type=int, default=16)
    options = arguments.parse_args()
    torch.set_num_threads(2)
    model = demo_model.fetch()
    SCRATCH.mkdir(exist_ok=True)
    ids = corpus.windows(SourceModel.open(model).tokenizer, wikitext(options.data)[1], 24, 2048).ids.flatten()
    results = Results(options.out, [], resume=True)
    for case in options.cases:
        context, batch, topk = map(int, case.split("x"))
        if any(row["case"] == case for row in results.rows):
            continue
        prompts = [ids[2048 * i :][:context].tolist() for i in range(batch)]
        models = {"base": model, **{form: sparse(model, form, topk, context + 192) for form in options.forms}}
        results.rows.extend(measured(case, prompts, models, options))
        results.save()
    for context in options.longer:
        # Of one run: what another run took at one of these lengths is not to be compared with.
        case = f"{context} tokens"
        for form in options.forms:
            if not any((row["case"], row["form"]) == (case, form) for row in results.rows):
                models = {form: sparse(model, form, 512, context + 192)}
                results.rows.extend(measured(case, [ids[:context].tolist()], models, options))
                results.save()
    for row in results.rows:
        beside = "" if "to base" not in row else "  to base {:.2f} ± {:.2f}".format(*row["to base"])
        bar = f"  bar {row['bar']}" if row.get("bar") else ""
        print(f"{row['case']:12} {row['form']:12} {row['ms_per_step']:7.1f} ms{beside}{bar}")


if __name__ == "__main__":
    main()
