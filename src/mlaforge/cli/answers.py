"""Terminal output of models' answers."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import typer

from mlaforge.rendering.page import model_name

# Shown instead of an answer if the reasoning used up the token limit.
NO_ANSWER = "[only reasoning, no answer: --max-new-tokens may be too small]"


def show(answer: Iterable[Any]) -> None:
    """Print an answer while it streams; on a terminal also the reasoning before it, dimmed."""
    gap = "\n" if sys.stdout.isatty() else ""
    reasoned = answered = False
    for piece in answer:
        if piece.reasoning_content:
            reasoned = True
            if gap:
                print(typer.style(piece.reasoning_content, dim=True), end="", flush=True)
        if piece.text:
            print((gap if reasoned and not answered else "") + piece.text, end="", flush=True)
            answered = True
    if reasoned and not answered:
        print(gap + NO_ANSWER, end="")


# Colours of places by their style; without a terminal, brackets tell them apart.
COLOURS = {"drafted": "yellow", "accepted": "green", "refused": "red", "target": "cyan"}
BRACKETS = {"drafted": "{}", "accepted": "{}", "refused": "[-{}-]", "target": "[+{}+]"}


def show_places(row: str, places: list[tuple[str, str]]) -> None:
    """Print a row of `generate --diffusion`: its name, and the text and style of each place."""
    if sys.stdout.isatty():
        texts = [typer.style(text, fg=COLOURS[style], strikethrough=style == "refused") for text, style in places]
    else:
        texts = [BRACKETS[style].format(text) for text, style in places]
    print(f"{row:9} " + "|".join(texts), flush=True)


def continuations(metrics: dict[str, Any]) -> str:
    """Prompt and each model's continuation, with its speed and measured cache."""
    parts = [f"\n> {metrics['prompt']}"]
    for run in metrics["runs"]:
        text = run["text"].strip() or (NO_ANSWER if run.get("reasoning_content") else "")
        length = (run.get("eagle_speculation") or {}).get("mean_acceptance_length")
        drafts = f", {length:.2f} a step" if length else ""
        loop = f"\n[the text repeats itself from token {run['repeats_from']}]" if run.get("repeats_from") else ""
        parts.append(
            f"\n[{model_name(run['model'])}: {run['tokens_per_second']:.1f} tokens/s{drafts}, cache "
            f"{run['cache_bytes']} bytes for {run['cached_tokens']} tokens]\n{text}{loop}"
        )
    return "\n".join(parts) + "\n"
