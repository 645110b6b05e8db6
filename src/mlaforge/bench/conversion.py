"""Quality of conversions: perplexity of the original model and of its conversions on the same text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mlaforge.artifact import Manifest, record_path
from mlaforge.bench import machine
from mlaforge.bench.config import BenchConfig
from mlaforge.bench.roof import layout_of
from mlaforge.checkpoint.layerwise import LayerStream
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.checkpoint.token_losses import perplexity, window_losses
from mlaforge.data import corpus, overlap
from mlaforge.planning.plan import plan_of
from mlaforge.rendering.table import text_table
from mlaforge.runtime import UserError, log, resolve_device

# 32,768 tokens of every text, as in the table of docs/results.md.
WINDOWS, SEQLEN = 16, 2048


def perplexities(
    model: Path | SourceModel, eval_windows: dict[str, corpus.Windows], label: str, device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> dict[str, float]:  # fmt: skip
    """Perplexity of `model` on each text's windows. label: shown in progress messages."""
    with LayerStream(model, dtype, device) as stream:
        return {
            name: perplexity(window_losses(stream, windows.ids, f"{label} on {name}"))
            for name, windows in eval_windows.items()
        }


def run(models: list[str], config: BenchConfig, folder: Path) -> dict[str, Any]:
    """Compare the first model with the others and write `folder/conversion.json`.

    config.context and config.rounds are the length and number of the windows. Raise UserError if any model was tuned on
    one of the texts.
    """
    if len(models) < 2:
        raise UserError("give the original and at least one conversion: mlaforge bench conversion MODEL OUT ...")
    device = resolve_device(config.device)
    sources = {model: SourceModel.open(model) for model in models}
    tokenizer = sources[models[0]].tokenizer
    seqlen, *others = config.context or (SEQLEN,)
    if others:
        raise UserError(f"context = {','.join(map(str, config.context or ()))} must be one length for conversion")
    count = config.rounds or WINDOWS
    texts = config.text or (corpus.EMBEDDED,)
    eval_windows = {Path(text).name: corpus.windows(tokenizer, text, count, seqlen, evaluation=True) for text in texts}
    for model, source in sources.items():
        if (passages_file := source.path / overlap.PASSAGES).is_file():
            tuned_passages = overlap.read_passages(passages_file)
            eval_windows = {
                name: overlap.refuse_overlap(w, tuned_passages, f"of {model}") for name, w in eval_windows.items()
            }
    body: dict[str, Any] = machine.header("conversion", device) | {
        "texts": {name: {"tokens": w.ids.numel(), "windows": len(w.ids)} for name, w in eval_windows.items()},
        "rows": [],
    }  # fmt: skip
    for source in sources.values():
        name, plan, manifest = source.path.name, plan_of(source.config, source.spec), Manifest.load(source.path)
        ppl = perplexities(source, eval_windows, name, device)
        original_ppl = body["rows"][0]["ppl"] if body["rows"] else ppl
        options = manifest.config if manifest and plan.stored != "coded" else {}
        body["rows"].append({
            "model": name, "path": record_path(source.path), "sha256": source.fingerprint,
            "layout": layout_of(plan),
            # A requested rank replaces the budget.
            "budget": options.get("budget") if options.get("kv_lora_rank") is None else None,
            "bits": plan.bits if plan.stored == "coded" else None,
            "cache_fraction": plan.model_fraction(plan.spec.max_position_embeddings),
            "seconds": sum(manifest.seconds.values()) if manifest else None, "ppl": ppl,
            "ratio": {text: ppl[text] / original_ppl[text] for text in eval_windows},
        })  # fmt: skip
        log(f"{name}: perplexity {', '.join(f'{value:.3f} on {text}' for text, value in ppl.items())}")
        machine.write(folder / "conversion.json", body)
    return body


def table(body: dict[str, Any]) -> str:
    """Table with one line per model, for the terminal."""
    heads = [f"{kind} {name}" for name in body["texts"] for kind in ("ppl", "ratio")]
    lines: list[tuple[str, ...]] = [("model", "layout", "cache", "seconds", *heads)]
    for row in body["rows"]:
        pairs = [(f"{row['ppl'][name]:.3f}", f"{row['ratio'][name]:.4f}") for name in body["texts"]]
        cells = [cell for pair in pairs for cell in pair]
        seconds = "–" if row["seconds"] is None else f"{row['seconds']:.0f}"
        lines.append((row["model"], row["layout"], f"{row['cache_fraction']:.1%}", seconds, *cells))
    return text_table(lines)
