"""`eval`: perplexity on token windows, the number that says what a conversion cost."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import torch
from torch import Tensor

from mlaforge.artifact import Manifest, finished, writing
from mlaforge.checkpoint import loading, reader, resolve
from mlaforge.checkpoint.layerwise import LayerStream, losses
from mlaforge.data import corpus, overlap
from mlaforge.evaluation.config import EvalConfig
from mlaforge.runtime import UserError, progress, resolve_device, resolve_dtype, timed


@torch.no_grad()
def window_losses(stream: LayerStream, windows: Tensor, what: str) -> Tensor:
    """Mean loss of every window of token ids [N, T], in nats per token, fp64 [N]. `what` names it to who watches."""
    hidden = [stream.embed(ids[None]) for ids in windows]
    for index in progress(range(stream.num_layers), what, stream.num_layers):
        with stream.layer(index) as layer:
            for n, states in enumerate(hidden):
                hidden[n] = stream.run(layer, index, states)
    return head_losses(stream, hidden, windows)


@torch.no_grad()
def head_losses(stream: LayerStream, hidden: list[Tensor], windows: Tensor) -> Tensor:
    """The same from the last layer's outputs [1, T, C]."""
    with stream.head() as (norm, head):
        each = [losses(norm, head, h[0], ids).double().mean().cpu() for h, ids in zip(hidden, windows, strict=True)]
    return torch.stack(each)


def perplexity(losses: Tensor) -> float:
    """exp of the mean over windows of one length; infinity or NaN where the losses are."""
    mean = float(losses.mean())
    return math.exp(mean) if not mean > 700.0 else math.inf


def standard_error(losses: Tensor) -> float | None:
    """Of the mean over windows [N], because tokens of one window are not independent; None of a single one."""
    return float(losses.std() / len(losses) ** 0.5) if len(losses) > 1 else None


def run(model: str, out: Path | None, config: EvalConfig, overwrite: bool = False) -> Manifest:
    """Perplexity of a model, original or converted; writes an artifact if `out` is given.

    Raises UserError where a converted model was calibrated on this very text.
    """
    directory = resolve.locate(model)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, loading.stored_dtype(reader.read_config(directory)))
    tokenizer = loading.load_tokenizer(directory)
    text = corpus.windows(tokenizer, config.text, config.windows, config.seqlen, judged=True)
    remembered = directory / overlap.PASSAGES
    if remembered.is_file():
        text = overlap.refuse_overlap(text, overlap.read_passages(remembered), f"of {model}")
    loading.check_tokens(directory, text.ids)
    manifest = Manifest(
        "eval",
        config={k: v for k, v in dataclasses.asdict(config).items() if k in ("text", "windows", "seqlen", "dtype")},
        inputs={"model": {"path": str(model), "sha256": reader.fingerprint(directory)}, "text": text.describe()},
    )
    if out is not None and (done := finished(out, manifest, overwrite)):
        return done
    with timed(manifest.seconds, "eval"), LayerStream(directory, dtype, device) as stream:
        stream.check()
        found = window_losses(stream, text.ids, "evaluate")
    mean, n = float(found.mean()), len(found)
    if not math.isfinite(mean):
        raise UserError(f"the loss of {model} is {mean}: its weights hold NaN or infinity, or it overflows in {dtype}")
    manifest.metrics = {
        "ppl": perplexity(found),
        "nll": mean,
        "nll_stderr": standard_error(found),
        "windows": n,
        "tokens": n * (config.seqlen - 1),
    }
    if out is not None:
        with writing(out, manifest):
            pass
    return manifest
