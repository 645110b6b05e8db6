"""`mlaforge draft ...`: the verbs of EAGLE-3 heads. As in cli.py: parse, call a stage, print."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

import typer

from mlaforge import verbs
from mlaforge.options import DraftTrainConfig, RegenerateConfig, VocabularyConfig
from mlaforge.verbs import Model, Overwrite, group, quiet

app = group("EAGLE-3 draft heads: the text they learn from, their vocabulary, their training.")
verb = functools.partial(verbs.verb, app)

NewDirectory = Annotated[Path, typer.Option("--out", metavar="OUT", help="new directory")]


@verb(RegenerateConfig)
def regenerate(model: Model, out: NewDirectory, config: RegenerateConfig, overwrite: Overwrite = False) -> None:
    """Have MODEL answer prompts, and questions of its own: the text that its draft head learns from."""
    from mlaforge import regenerate as stage

    quiet()
    found = stage.run(model, out, config, overwrite).metrics
    dropped = ", ".join(f"{count} {why}" for why, count in found["dropped"].items())
    print(
        f"{out}: {found['answers']} answers, {found['prompt_tokens']} + {found['answer_tokens']} tokens, distinct "
        f"4-grams {found['distinct_4grams'] or 0:.2f}" + (f"; left out: {dropped}" if dropped else "")
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
    from mlaforge import draft_vocab as stage

    quiet()
    found = stage.run(model, texts, out, config, overwrite).metrics
    for size, share in found["coverage"].items():
        chosen = "  <- written" if size == str(config.size) else ""
        print(f"{size} tokens: {share['text']:.4f} of the text, {share['held_out']:.4f} of text kept back{chosen}")


@verb(DraftTrainConfig)
def train(model: Model, out: NewDirectory, config: DraftTrainConfig, overwrite: Overwrite = False) -> None:
    """Train an EAGLE-3 head on what MODEL said; under torchrun over many processes."""
    from mlaforge import draft_train as stage
    from mlaforge import sharding

    quiet()
    try:
        found = stage.run(model, out, config, overwrite).metrics
    finally:
        sharding.leave()
    first, best = found["curve"][0], found["best"]
    print(
        f"tokens a step of 3 drafted, on answers kept back: {first['acceptance_length']:.3f} -> "
        f"{best['acceptance_length']:.3f} after {best['tokens']} tokens (step {best['step']})"
    )
