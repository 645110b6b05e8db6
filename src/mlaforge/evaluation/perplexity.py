"""`eval`: perplexity on windows of tokens, and divergence from the original model."""

from __future__ import annotations

import dataclasses
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlaforge.artifact import Manifest, finished, record_names, writing
from mlaforge.checkpoint.converted_config import is_sparse
from mlaforge.checkpoint.layerwise import LayerStream
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.checkpoint.token_losses import perplexity, standard_error, window_losses
from mlaforge.config import by_keywords
from mlaforge.data import corpus, overlap
from mlaforge.evaluation.config import EvalConfig
from mlaforge.evaluation.divergence import check_vocabularies, comparisons, final_states, summary
from mlaforge.runtime import UserError, log, resolve_device, resolve_dtype, timed


def run(model: str, out: Path | None, config: EvalConfig, overwrite: bool = False) -> Manifest:
    """Measure the perplexity of a model, original or converted, and its divergence from config.teacher; write an
    artifact if `out` is given.

    Raises UserError for text that a converted model was calibrated or healed on, and for a teacher with another
    vocabulary.
    """
    source = SourceModel.open(model).with_selection(config.dense, config.topk)
    teacher = SourceModel.open(config.teacher) if config.teacher else None
    if teacher is not None:
        check_vocabularies(teacher, source)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, source.dtype)
    text = corpus.windows(source.tokenizer, config.text, config.windows, config.seqlen, evaluation=True)
    passages_file = source.path / overlap.PASSAGES
    if passages_file.is_file():
        text = overlap.refuse_overlap(text, overlap.read_passages(passages_file), f"of {model}")
    source.check_tokens(text.ids)
    manifest = Manifest(
        "eval",
        config={
            k: v for k, v in dataclasses.asdict(config).items() if k in ("windows", "seqlen", "dense", "topk", "dtype")
        }
        | record_names(config, "text"),
        inputs={"model": source.record, "text": text.describe(), **({"teacher": teacher.record} if teacher else {})},
    )
    reads = (source.path, config.text, teacher.path if teacher else None)
    if out is not None and (previous := finished(out, manifest, overwrite, reads)):
        return previous
    with nullcontext() if out is None else writing(out, manifest):
        with timed(manifest.seconds, "eval"), LayerStream(source, dtype, device) as stream:
            stream.check()
            if is_sparse(source.config) and config.seqlen <= (topk := source.config["index_topk"]):
                log(f"the index is not tested: windows have {config.seqlen} tokens, and {topk} are read (--seqlen)")
            divergence: dict[str, Any] = {}
            if teacher is None:
                losses = window_losses(stream, text.ids, "evaluate")
            else:
                losses, divergence = _compared(stream, teacher, text.ids)
        mean, n = float(losses.mean()), len(losses)
        _check_finite(source, mean, dtype)
        manifest.metrics = {
            "ppl": perplexity(losses),
            "nll": mean,
            "nll_stderr": standard_error(losses),
            "windows": n,
            "tokens": n * (config.seqlen - 1),
            # Tokens that a token reads per layer; None: all.
            "topk": source.config["index_topk"] if is_sparse(source.config) else None,
            **divergence,
        }
    return manifest


def _compared(stream: LayerStream, teacher: SourceModel, windows: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Return a model's mean loss of every window of token ids [N, T], fp64 [N], and its divergence from the teacher
    with the standard error of the mean."""
    student_states = final_states(stream, windows, "evaluate")
    with LayerStream(teacher, stream.dtype, stream.device) as original:
        original.check()
        teacher_states = final_states(original, windows, "evaluate the teacher")
    losses, teacher_losses, kl, agrees = torch.stack(comparisons(student_states, teacher_states, windows), dim=1)
    means, teacher_means = losses.double().mean(-1), teacher_losses.double().mean(-1)
    _check_finite(teacher, float(teacher_means.mean()), stream.dtype)
    return means, {
        "teacher_ppl": perplexity(teacher_means),
        "ratio": perplexity(means - teacher_means),
        # Both use the same windows: the variance between windows cancels in the ratio.
        "log_ratio_stderr": standard_error(means - teacher_means),
        **summary(kl, agrees),
        "kl_stderr": standard_error(kl.double().mean(-1)),
    }


def _check_finite(model: SourceModel, loss: float, dtype: torch.dtype) -> None:
    if not math.isfinite(loss):
        raise UserError(
            f"the loss of {model} is {loss}: its weights contain NaN or infinity, or it overflows in {dtype}"
        )


def table(metrics: dict[str, Any]) -> str:
    """Format a manifest's metrics for a terminal: a line for perplexity, and one for divergence if it was measured."""

    def error(value: float | None) -> str:
        return "" if value is None else f" ± {value:.4f}"

    stderr = None if metrics["nll_stderr"] is None else metrics["ppl"] * metrics["nll_stderr"]
    windows = f"standard error over {metrics['windows']} windows, {metrics['tokens']} tokens"
    lines = [f"ppl {metrics['ppl']:.4f}{error(stderr)} ({windows})"]
    if "kl" in metrics:
        lines.append(
            f"teacher ppl {metrics['teacher_ppl']:.4f}, ratio {metrics['ratio']:.4f}; KL(teacher | model) "
            f"{metrics['kl']:.4f}{error(metrics['kl_stderr'])}, 99 % of tokens at most "
            f"{metrics['kl_p99']:.4f}; equal top tokens {metrics['top1']:.2%}"
        )
    return "\n".join(lines)


evaluate = by_keywords(run, EvalConfig)
