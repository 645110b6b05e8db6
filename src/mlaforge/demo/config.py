"""Options of `demo` and `make-gptoss`."""

from __future__ import annotations

import dataclasses

from mlaforge.config import DTYPES, Options, option


@dataclasses.dataclass(frozen=True)
class DemoConfig(Options):
    """Options of `demo`."""

    nsamples: int = option(8, "calibration windows", "windows", least=1)
    eval_windows: int = option(4, "held-out evaluation windows", "windows", least=0)
    prompt: str = option("Explain in two sentences why the sky is blue.", "user message that both models answer")


@dataclasses.dataclass(frozen=True)
class MakeGptOssConfig(Options):
    """Options of `make-gptoss`. With the defaults the result computes the same function as the source."""

    first = ("from_", "windows", "yarn", "sinks", "mxfp4")

    from_: str = option("smollm2", "source: smollm2, or a dense checkpoint of the same architecture")
    geometry: str | None = option(
        None, "write a checkpoint of the public model's sizes with random weights instead", choices=("20b", "120b")
    )
    experts: int = option(4, "experts per layer, copies with permuted hidden units", "experts", least=1)
    top_k: int = option(2, "experts per token", "experts", least=1)
    differ: float = option(0.0, "noise that makes the experts differ, relative to their weights", "fraction", least=0)
    windows: bool = option(False, "give even layers a sliding window of 128 tokens")
    yarn: float | None = option(None, "scale RoPE with YaRN for a context longer by this factor", "factor", least=1)
    sinks: bool = option(False, "add non-zero sinks and biases, measured on the text")
    mxfp4: bool = option(False, "store the experts as MXFP4")
    heal: int = option(
        0, "distil the source into the attention, sinks and biases; one window per step", "steps", least=0
    )
    text: str = option("embedded", "text for sinks and healing: a file, a folder, or embedded; never evaluate on it")
    dtype: str = option("auto", "dtype of the result", choices=DTYPES)
    seed: int = option(0, "seed of every random choice")
