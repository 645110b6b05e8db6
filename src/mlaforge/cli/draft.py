"""`mlaforge draft ...`: the verbs of EAGLE-3 heads. As in cli/main.py: parse, call a stage, print."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

import typer

from mlaforge.cli import verb as verbs
from mlaforge.cli.verb import Json, Model, Out, Overwrite, group, judged, quiet
from mlaforge.drafting.config import (
    DraftCheckConfig,
    DraftCompareConfig,
    DraftExportConfig,
    DraftImportConfig,
    DraftTrainConfig,
    RegenerateConfig,
    VocabularyConfig,
)

app = group("EAGLE-3 draft heads: the text they learn from, vocabulary, training; those of others, checked, compared.")
verb = functools.partial(verbs.verb, app)

Target = Annotated[str, typer.Option("--target", metavar="MODEL", help="the model that the head drafts for")]
Head = Annotated[Path, typer.Argument(metavar="HEAD", help="directory of an EAGLE-3 head")]
NewDirectory = Annotated[Path, typer.Option("--out", metavar="OUT", help="new directory")]


@verb(RegenerateConfig)
def regenerate(model: Model, out: NewDirectory, config: RegenerateConfig, overwrite: Overwrite = False) -> None:
    """Have MODEL answer prompts, and questions of its own: the text that its draft head learns from."""
    from mlaforge.drafting import regenerate as stage

    quiet()
    metrics = stage.run(model, out, config, overwrite).metrics
    dropped = ", ".join(f"{count} {why}" for why, count in metrics["dropped"].items())
    print(
        f"{out}: {metrics['answers']} answers, {metrics['prompt_tokens']} + {metrics['answer_tokens']} tokens, "
        f"distinct 4-grams {metrics['distinct_4grams'] or 0:.2f}" + (f"; left out: {dropped}" if dropped else "")
    )


@verb(VocabularyConfig)
def vocab(
    model: Model,
    texts: Annotated[list[Path], typer.Argument(metavar="TEXT...", help="what `draft regenerate` wrote with MODEL")],
    out: NewDirectory,
    config: VocabularyConfig,
    overwrite: Overwrite = False,
) -> None:
    """Choose the tokens that a head can propose: those that MODEL says most often."""
    from mlaforge.drafting import vocabulary as stage

    quiet()
    metrics = stage.run(model, texts, out, config, overwrite).metrics
    for size, share in metrics["coverage"].items():
        chosen = "  <- written" if size == str(config.size) else ""
        print(f"{size} tokens: {share['text']:.4f} of the text, {share['held_out']:.4f} of text kept back{chosen}")


@verb(DraftTrainConfig)
def train(model: Model, out: NewDirectory, config: DraftTrainConfig, overwrite: Overwrite = False) -> None:
    """Train an EAGLE-3 head on what MODEL said; under torchrun over many processes."""
    from mlaforge.drafting import train as stage
    from mlaforge.training import distributed

    quiet()
    try:
        metrics = stage.run(model, out, config, overwrite).metrics
    finally:
        distributed.destroy_process_group()
    first, best = metrics["curve"][0], metrics["best"]
    print(
        f"tokens a step of 3 drafted, on answers kept back: {first['acceptance_length']:.3f} -> "
        f"{best['acceptance_length']:.3f} after {best['tokens']} tokens (step {best['step']})"
    )


@verb(DraftImportConfig)
def import_(
    src: Annotated[str, typer.Argument(metavar="SRC", help="directory or hub id of an EAGLE-3 head")],
    out: Out,
    target: Target,
    config: DraftImportConfig,
    overwrite: Overwrite = False,
) -> None:
    """Rewrite an EAGLE-3 head as other tools write it, checked against MODEL."""
    from mlaforge.drafting import import_head as stage

    quiet()
    metrics = stage.run(src, out, target, config, overwrite).metrics
    tokens = f"{metrics['draft_vocab_size']} tokens, d2t read as {metrics['d2t']}" if metrics["d2t"] else "all tokens"
    print(
        f"{out}: {tokens}; captures at boundaries {metrics['boundaries']} ({metrics['convention']}); lm_head is "
        f"{metrics['lm_head']}, embed_tokens {metrics['embed_tokens']}"
    )


@verb(DraftExportConfig)
def export(head: Head, out: Out, config: DraftExportConfig, overwrite: Overwrite = False) -> None:
    """Copy HEAD in another storage format: fp16 for vLLM and others, or int8."""
    from mlaforge.drafting import export_head as stage

    quiet()
    metrics = stage.run(head, out, config, overwrite).metrics
    print(f"{out}: {metrics['parameters']} parameters in {config.dtype}, {metrics['bytes'] / 1e6:.1f} MB")


@verb(DraftCheckConfig)
def check(head: Head, target: Target, config: DraftCheckConfig, json_output: Json = False) -> None:
    """How often HEAD says what MODEL says, with the states it is given and with their neighbours: exit code 1 unless
    its own are the right ones."""
    from mlaforge.drafting import check as stage

    quiet()
    agreement = stage.run(head, target, config)
    judged(agreement, stage.table, agreement["right"] == stage.AS_STORED, json_output)


@verb(DraftCompareConfig)
def compare(
    head: Head,
    target: Target,
    config: DraftCompareConfig,
    reference: Annotated[
        Path | None,
        typer.Option("--reference", metavar="FILE", help="stages of another runtime (safetensors); else PyTorch's"),
    ] = None,
    json_output: Json = False,
) -> None:
    """Numeric parity of HEAD in the engine, part by part, with another runtime or with plain PyTorch in float64: exit
    code 1 where the logits differ too much."""
    from mlaforge.drafting import parity as stage

    quiet()
    differences = stage.run(head, target, reference, config)
    judged(differences, stage.table, not differences["failed"], json_output)
