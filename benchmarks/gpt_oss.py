"""The bars of GPT-OSS's conversion, on real language: half of the full layers' cache, both layouts.

    python benchmarks/gpt_oss.py --data ../shared/data [--folder runs/gpt-oss] [--out benchmarks/gpt_oss.json]

The original is SmolLM2 rewritten as GPT-OSS (docs/gpt-oss.md) with windows, YaRN, sinks, experts that differ, and
healing; it is made in FOLDER once. Protocol of benchmarks/conversion.py: at most 65,536 calibration tokens of
wiki.valid.tokens, judged on the first 32,768 tokens of wiki.test.raw. About 15 minutes to make it and 30 to convert it
on two cores.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from mlaforge.conversion import convert
from mlaforge.conversion.config import ConvertConfig
from mlaforge.demo import gpt_oss
from mlaforge.demo.config import MakeGptOssConfig
from mlaforge.runtime import environment

# What issue 3 asks for, as converted / original perplexity.
BARS = {"latent": 1.03, "latent_rope": 1.15}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--data", type=Path, default=Path("../shared/data"))
    arguments.add_argument("--folder", type=Path, default=Path("runs/gpt-oss"))
    arguments.add_argument("--original", type=Path, help="a GPT-OSS checkpoint, instead of making one")
    arguments.add_argument("--heal", type=int, default=56, help="steps")
    arguments.add_argument("--calibration-windows", type=int, default=32)
    arguments.add_argument("--windows", type=int, default=16, help="windows of wiki.test.raw")
    arguments.add_argument("--out", type=Path, default=Path("benchmarks/gpt_oss.json"))
    given = arguments.parse_args()
    valid, test = (str(given.data / "wikitext-2" / name) for name in ("wiki.valid.tokens", "wiki.test.raw"))
    original = given.original or given.folder / "original"
    if not given.original:
        options = MakeGptOssConfig(windows=True, yarn=32.0, sinks=True, differ=0.02, heal=given.heal, text=valid)
        gpt_oss.run(original, options)
    rows = []
    print("| layout | original ppl | RoPE cut | MLA ppl | ratio | bar |\n|---|---|---|---|---|---|")
    for layout, bar in BARS.items():
        config = ConvertConfig(
            layout=layout, budget=0.5, calibration=valid, nsamples=given.calibration_windows, evaluation=test,
            eval_windows=given.windows, device="cpu",
        )  # fmt: skip
        found = convert.run(str(original), given.folder / layout, config, calibrated=given.folder / "calibration")
        metrics = {key: value for key, value in found.metrics.items() if key != "layers"}
        rows.append({"layout": layout, "bar": bar, **metrics, "stages": found.seconds})
        cut = f"{metrics['partial_rope_ppl']:.3f}" if "partial_rope_ppl" in metrics else "–"
        print(f"| `{layout}` | {metrics['original_ppl']:.3f} | {cut} | {metrics['mla_ppl']:.3f} "
              f"| {metrics['ratio']:.4f} | <= {bar} |", flush=True)  # fmt: skip
    result = {"rows": rows, "calibration_windows": given.calibration_windows, "environment": environment()}
    given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
