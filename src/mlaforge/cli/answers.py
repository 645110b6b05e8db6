"""How answers of models stand in a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import typer

from mlaforge.rendering.page import model_name

# In place of an answer for which the reasoning before it left no room.
NO_ANSWER = "[only reasoning, no answer: --max-new-tokens may be too small]"


def show(answer: Iterable[Any]) -> None:
    """Prints an answer as it is made; on a terminal, dimmed, the reasoning before it too."""
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


def continuations(metrics: dict[str, Any]) -> str:
    """The prompt and each model's continuation, with its speed and measured cache."""
    parts = [f"\n> {metrics['prompt']}"]
    for run in metrics["runs"]:
        text = run["text"].strip() or (NO_ANSWER if run.get("reasoning_content") else "")
        length = (run.get("eagle_speculation") or {}).get("mean_acceptance_length")
        drafts = f", {length:.2f} a step" if length else ""
        loop = f"\n[it repeats itself from token {run['repeats_from']}]" if run.get("repeats_from") else ""
        parts.append(
            f"\n[{model_name(run['model'])}: {run['tokens_per_second']:.1f} tokens/s{drafts}, cache "
            f"{run['cache_bytes']} bytes for {run['cached_tokens']} tokens]\n{text}{loop}"
        )
    return "\n".join(parts) + "\n"
