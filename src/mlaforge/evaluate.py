"""`eval`: perplexity on token windows, the number that says what a conversion cost."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlaforge import checkpoint, corpus
from mlaforge.artifact import Manifest, finished, writing
from mlaforge.options import EvalConfig
from mlaforge.runtime import UserError, progress, resolve_device, timed

# Rows of logits held at once (each is as long as the vocabulary).
HEAD_ROWS = 512


@torch.no_grad()
def negative_log_likelihood(model: Any, ids: Tensor) -> Tensor:
    """Per-token loss in nats, [T-1] fp32, of one window of token ids [T] under a transformers causal LM."""
    ids = ids.to(model.device)
    hidden = model.model(ids[None], use_cache=False).last_hidden_state[0, :-1]
    head = model.get_output_embeddings()
    losses = [
        torch.nn.functional.cross_entropy(head(rows).float(), targets, reduction="none")
        for rows, targets in zip(hidden.split(HEAD_ROWS), ids[1:].split(HEAD_ROWS), strict=True)
    ]
    return torch.cat(losses)


def window_losses(model: Any, windows: Iterable[Tensor]) -> Tensor:
    """Mean loss of every window [T], in nats per token, fp64 [N]."""
    return torch.stack([negative_log_likelihood(model, ids).double().mean().cpu() for ids in windows])


def perplexity(model: Any, windows: Iterable[Tensor]) -> float:
    """exp of the mean loss over all predicted tokens of windows of one length; not finite where the model is not."""
    return _perplexity(float(window_losses(model, windows).mean()))


def _perplexity(loss: float) -> float:
    return math.exp(loss) if not loss > 700.0 else math.inf


def run(model: str, out: Path | None, config: EvalConfig, overwrite: bool = False) -> Manifest:
    """Perplexity of a model, original or converted; writes an artifact if `out` is given.

    Raises UserError where a converted model was calibrated on this very text.
    """
    if config.windows < 1 or config.seqlen < corpus.SHINGLE:
        least = f"1 and {corpus.SHINGLE}"
        raise UserError(f"windows = {config.windows} and seqlen = {config.seqlen} must be at least {least}")
    directory = checkpoint.locate(model)
    device = resolve_device(config.device)
    tokenizer = checkpoint.load_tokenizer(directory)
    text = corpus.windows(tokenizer, config.text, config.windows, config.seqlen, judged=True)
    remembered = directory / corpus.PASSAGES
    if remembered.is_file():
        text = corpus.refuse_overlap(text, corpus.read_passages(remembered), f"of {model}")
    checkpoint.check_tokens(directory, text.ids)
    manifest = Manifest(
        "eval",
        config={k: v for k, v in dataclasses.asdict(config).items() if k != "device"},
        inputs={"model": {"path": str(model), "sha256": checkpoint.fingerprint(directory)}, "text": text.describe()},
    )
    if out is not None and (done := finished(out, manifest, overwrite)):
        return done
    with timed(manifest.seconds, "eval"):
        loaded = checkpoint.load_model(directory, config.dtype, device)
        losses = window_losses(loaded, progress(text.ids, "evaluate", len(text.ids)))
    mean, n = float(losses.mean()), len(losses)
    if not math.isfinite(mean):
        raise UserError(
            f"the loss of {model} is {mean}: its weights hold NaN or infinity, or it overflows in {loaded.dtype}"
        )
    manifest.metrics = {
        "ppl": _perplexity(mean),
        "nll": mean,
        # Over windows, because tokens of one window are not independent.
        "nll_stderr": float(losses.std() / n**0.5) if n > 1 else None,
        "windows": n,
        "tokens": n * (config.seqlen - 1),
    }
    if out is not None:
        with writing(out, manifest):
            pass
    return manifest
