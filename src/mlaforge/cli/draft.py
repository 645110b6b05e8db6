"""Verbs of `mlaforge draft ...`, on draft heads: parse options, call a stage, print its result."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

import typer

from mlaforge.cli import verb as verbs
from mlaforge.cli.verb import Json, Model, Out, Overwrite, exit_by_verdict, group, quiet
from mlaforge.drafting.config import (
    DraftCheckConfig,
    DraftCompareConfig,
    DraftExportConfig,
    DraftImportConfig,
    DraftTrainConfig,
    RegenerateConfig,
    VocabularyConfig,
)
from mlaforge.runtime import is_first_process

app = group("Draft heads: training text, vocabulary, training, import, export, checks, comparison.")
verb = functools.partial(verbs.verb, app)

Target = Annotated[str, typer.Option("--target", metavar="MODEL", help="target model of the head")]
Head = Annotated[Path, typer.Argument(metavar="HEAD", help="directory of a draft head")]
NewDirectory = Annotated[Path, typer.Option("--out", metavar="OUT", help="new directory")]


@verb(RegenerateConfig)
def regenerate(model: Model, out: NewDirectory, config: RegenerateConfig, overwrite: Overwrite = False) -> None:
    """Generate MODEL's answers to prompts and to questions that it writes: the training text of its draft head."""
    from mlaforge.drafting import regenerate as stage

    quiet()
    metrics = stage.run(model, out, config, overwrite).metrics
    dropped = ", ".join(f"{count} {reason}" for reason, count in metrics["dropped"].items())
    print(
        f"{out}: {metrics['answers']} answers, {metrics['prompt_tokens']} + {metrics['answer_tokens']} tokens, "
        f"distinct 4-grams {metrics['distinct_4grams'] or 0:.2f}" + (f"; left out: {dropped}" if dropped else "")
    )


@verb(VocabularyConfig)
def vocab(
    model: Model,
    texts: Annotated[
        list[Path], typer.Argument(metavar="TEXT...", help="directory that `draft regenerate` wrote with MODEL")
    ],
    out: NewDirectory,
    config: VocabularyConfig,
    overwrite: Overwrite = False,
) -> None:
    """Choose the draft vocabulary of a head: the tokens that MODEL generates most often."""
    from mlaforge.drafting import vocabulary as stage

    quiet()
    metrics = stage.run(model, texts, out, config, overwrite).metrics
    for size, share in metrics["coverage"].items():
        chosen = "  <- written" if size == str(config.size) else ""
        print(f"{size} tokens: {share['text']:.4f} of the text, {share['held_out']:.4f} of held-out text{chosen}")


@verb(DraftTrainConfig, distributed=True)
def train(model: Model, out: NewDirectory, config: DraftTrainConfig, overwrite: Overwrite = False) -> None:
    """Train a draft head on MODEL's answers; with torchrun on several processes."""
    from mlaforge.drafting import train as stage
    from mlaforge.training import distributed

    quiet()
    try:
        metrics = stage.run(model, out, config, overwrite).metrics
    finally:
        distributed.destroy_process_group()
    if not is_first_process():
        return
    first, best = metrics["curve"][0], metrics["best"]
    drafted = metrics.get("draft_tokens", 3)
    print(
        f"tokens per step with {drafted} drafted, on held-out answers: {first['acceptance_length']:.3f} -> "
        f"{best['acceptance_length']:.3f} after {best['tokens']} tokens (step {best['step']})"
    )


@verb(DraftImportConfig)
def import_(
    src: Annotated[str, typer.Argument(metavar="SRC", help="directory or hub id of an EAGLE-3 or DFlash head")],
    out: Out,
    target: Target,
    config: DraftImportConfig,
    overwrite: Overwrite = False,
) -> None:
    """Import an EAGLE-3 or DFlash head in the format of other tools, checked against MODEL."""
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
    """Measure how often HEAD predicts MODEL's tokens, with its recorded capture layers and with neighbouring ones; exit
    code 1 unless the recorded ones are best."""
    from mlaforge.drafting import check as stage

    quiet()
    agreement = stage.run(head, target, config)
    exit_by_verdict(agreement, stage.table, agreement["right"] == stage.AS_STORED, json_output)


@verb(DraftCompareConfig)
def compare(
    head: Head,
    target: Target,
    config: DraftCompareConfig,
    reference: Annotated[
        Path | None,
        typer.Option(
            "--reference", metavar="FILE", help="tensors of another runtime (safetensors); default: PyTorch's"
        ),
    ] = None,
    json_output: Json = False,
) -> None:
    """Compare HEAD in the engine, part by part, with another runtime or with PyTorch in float64; exit code 1 if the
    logits differ too much."""
    from mlaforge.drafting import parity as stage

    quiet()
    differences = stage.run(head, target, reference, config)
    exit_by_verdict(differences, stage.table, not differences["failed"], json_output)
