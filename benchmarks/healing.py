"""What healing wins back on real weights, and what each further hour buys: the healing table of README.md.

    python benchmarks/healing.py --data ../shared/data [--folder runs/healing] [--only latent-0.25 ...]

SmolLM2-135M-Instruct in fp32, converted with 65,536 tokens of wiki.valid.tokens and healed by recipes/smollm2-heal.yaml
on the rest of that text; judged on the first 32,768 tokens of wiki.test.raw in windows of
2048 (the protocol of benchmarks/conversion.py), which neither has seen. An hour of one core at most for each; a run
that was cut off goes on.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from mlaforge.checkpoint import loading
from mlaforge.checkpoint.layerwise import LayerStream
from mlaforge.checkpoint.token_losses import perplexity, window_losses
from mlaforge.config import resolve
from mlaforge.conversion import convert
from mlaforge.conversion.config import ConvertConfig
from mlaforge.data import corpus, overlap
from mlaforge.demo import model as demo_model
from mlaforge.healing import heal
from mlaforge.healing.config import HealConfig
from mlaforge.runtime import environment, log

# Layout and budget: what issue 6 asks for, as healed / original perplexity, and what differs from the recipe. The less
# a model has lost, the slower it must learn: at 1e-3 the validation KL of latent-0.5 more than doubled in 5 steps, and
# both refits raised it.
RUNS: dict[str, tuple[float, dict[str, Any]]] = {
    "latent-0.5": (1.02, {"steps": 8, "learning_rate": 2e-4, "refit": "off"}),
    "latent-0.25": (1.20, {}),
    "latent_rope-0.5": (1.10, {"steps": 16}),
}
WINDOWS, SEQLEN = 16, 2048
RECIPE = Path(__file__).parents[1] / "recipes" / "smollm2-heal.yaml"


def judged(directory: Path, text: corpus.Windows, what: str) -> float:
    """Perplexity on the test text; refuses what was tuned on it."""
    remembered = directory / overlap.PASSAGES
    if remembered.is_file():
        overlap.refuse_overlap(text, overlap.read_passages(remembered), what)
    with LayerStream(directory, torch.float32, torch.device("cpu")) as stream:
        return perplexity(window_losses(stream, text.ids, what))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--data", type=Path, default=Path("../shared/data"))
    arguments.add_argument("--folder", type=Path, default=Path("runs/healing"))
    arguments.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS))
    arguments.add_argument("--out", type=Path, default=Path("benchmarks/healing.json"))
    given = arguments.parse_args()
    directory = demo_model.fetch()
    valid, test = (str(given.data / "wikitext-2" / name) for name in ("wiki.valid.tokens", "wiki.test.raw"))
    text = corpus.windows(loading.load_tokenizer(directory), test, WINDOWS, SEQLEN)
    # What a run that was cut off had measured is not measured again.
    result = json.loads(given.out.read_text()) if given.out.exists() else {"rows": {}, "environment": environment()}
    if "original" not in result:
        result["original"] = judged(directory, text, "original")
    for name in given.only:
        layout, budget = name.split("-")
        bar, changes = RUNS[name]
        config = ConvertConfig(
            layout=layout, budget=float(budget), calibration=valid, nsamples=32, seqlen=SEQLEN, eval_windows=0,
            device="cpu",
        )  # fmt: skip
        student, healed = given.folder / name, given.folder / f"{name}-healed"
        convert.run(str(directory), student, config, calibrated=given.folder / "calibration")
        options = resolve(HealConfig, RECIPE, text=valid, device="cpu", **changes)
        made = heal.run(str(directory), str(student), healed, options)
        before, after = (judged(path, text, path.name) for path in (student, healed))
        row = {"bar": bar, "ppl": [before, after], "ratio": [p / result["original"] for p in (before, after)]}
        keys = ("refit", "best", "tokens", "tokens_per_second", "curve")
        row |= {"seconds": made.seconds, "config": made.config, **{key: made.metrics[key] for key in keys}}
        result["rows"][name] = row
        given.out.write_text(json.dumps(result, indent=1) + "\n")
        log(f"{name}: {row['ratio'][0]:.4f} -> {row['ratio'][1]:.4f} (bar {bar})")
    print(table(result))


def table(result: dict[str, Any]) -> str:
    """README.md's tables: the test text before and after, and how validation perplexity falls."""
    lines = ["| cache | converted | healed | bar | tokens seen | hours |", "|---|---|---|---|---|---|"]
    for name, row in result["rows"].items():
        hours, (before, after) = sum(row["seconds"].values()) / 3600, row["ratio"]
        lines.append(f"| {name} | {before:.4f} | {after:.4f} | <= {row['bar']} | {row['tokens']:,} | {hours:.2f} |")
    lines += [
        "",
        "| cache | tokens seen | hours of training | validation ppl / teacher's | KL |",
        "|---|---|---|---|---|",
    ]
    for name, row in result["rows"].items():
        curve = row["curve"]
        for point in curve[:: max(1, len(curve) // 8)]:
            lines.append(
                f"| {name} | {point['tokens']:,} | {point['seconds'] / 3600:.2f} "
                f"| {point['ppl'] / point['teacher_ppl']:.4f} | {point['kl']:.5f} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
