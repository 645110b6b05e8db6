"""`mlaforge draft ...`: the verbs of EAGLE-3 heads. As in cli.py: parse, call a stage, print."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

import typer

from mlaforge import verbs
from mlaforge.options import DraftImportConfig, RegenerateConfig
from mlaforge.verbs import Model, Out, Overwrite, group, quiet

app = group("EAGLE-3 draft heads: the text they learn from, their vocabulary, their training.")
verb = functools.partial(verbs.verb, app)

Target = Annotated[str, typer.Option("--target", metavar="MODEL", help="the model that the head drafts for")]
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


@verb(DraftImportConfig)
def import_(
    src: Annotated[str, typer.Argument(metavar="SRC", help="directory or hub id of an EAGLE-3 head")],
    out: Out,
    target: Target,
    config: DraftImportConfig,
    overwrite: Overwrite = False,
) -> None:
    """Rewrite an EAGLE-3 head as other tools write it, checked against MODEL."""
    from mlaforge import draft_import as stage

    quiet()
    made = stage.run(src, out, target, config, overwrite).metrics
    read = "all tokens" if made["d2t"] is None else f"{made['draft_vocab_size']} tokens, d2t read as {made['d2t']}"
    print(
        f"{out}: {read}; captures at boundaries {made['boundaries']} ({made['convention']}); lm_head is "
        f"{made['lm_head']}, embed_tokens {made['embed_tokens']}"
    )
