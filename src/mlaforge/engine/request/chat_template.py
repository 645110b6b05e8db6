"""A conversation as a prompt, by the model's own chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlaforge.runtime import UserError


def render(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None
) -> list[int]:
    """Token ids of a conversation that ends where the model's turn begins. Raises UserError as `text` does."""
    # Templates write the special tokens themselves.
    return list(tokenizer(text(tokenizer, messages, variables or {}), add_special_tokens=False)["input_ids"])


def text(tokenizer: Any, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """A conversation as text; it ends where the model's turn begins, unless `variables` say otherwise.

    variables   what apply_chat_template and the template itself take beside the messages

    Raises UserError where the template refuses the messages.
    """
    import jinja2

    try:
        return str(
            tokenizer.apply_chat_template(
                list(messages), **{"add_generation_prompt": True, **variables, "tokenize": False}
            )
        )
    # A template is the model's code run on the user's data: whatever it stumbles over is in the messages.
    except (jinja2.TemplateError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        why = " ".join(str(error).split())[:300]
        raise UserError(f"the model's chat template refuses these messages: {why}") from error
