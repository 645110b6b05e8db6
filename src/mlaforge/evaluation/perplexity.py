"""`eval`: perplexity on windows of tokens."""

from __future__ import annotations

import dataclasses
import math
from contextlib import nullcontext
from pathlib import Path

from mlaforge.artifact import Manifest, finished, record_names, writing
from mlaforge.checkpoint.converted_config import is_sparse
from mlaforge.checkpoint.layerwise import LayerStream
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.checkpoint.token_losses import perplexity, standard_error, window_losses
from mlaforge.config import by_keywords
from mlaforge.data import corpus, overlap
from mlaforge.evaluation.config import EvalConfig
from mlaforge.runtime import UserError, log, resolve_device, resolve_dtype, timed


def run(model: str, out: Path | None, config: EvalConfig, overwrite: bool = False) -> Manifest:
    """Measure the perplexity of a model, original or converted; write an artifact if `out` is given.

    Raises UserError for text that a converted model was calibrated or healed on.
    """
    source = SourceModel.open(model).with_selection(config.dense, config.topk)
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
        inputs={"model": source.record, "text": text.describe()},
    )
    if out is not None and (previous := finished(out, manifest, overwrite, (source.path, config.text))):
        return previous
    with nullcontext() if out is None else writing(out, manifest):
        with timed(manifest.seconds, "eval"), LayerStream(source, dtype, device) as stream:
            stream.check()
            if is_sparse(source.config) and config.seqlen <= (topk := source.config["index_topk"]):
                log(f"the index is not tested: windows have {config.seqlen} tokens, and {topk} are read (--seqlen)")
            losses = window_losses(stream, text.ids, "evaluate")
        mean, n = float(losses.mean()), len(losses)
        if not math.isfinite(mean):
            raise UserError(
                f"the loss of {model} is {mean}: its weights contain NaN or infinity, or it overflows in {dtype}"
            )
        manifest.metrics = {
            "ppl": perplexity(losses),
            "nll": mean,
            "nll_stderr": standard_error(losses),
            "windows": n,
            "tokens": n * (config.seqlen - 1),
        }
    return manifest


evaluate = by_keywords(run, EvalConfig)
