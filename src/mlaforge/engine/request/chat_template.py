"""Prompts from conversations by the model's own chat template, which must not leave out any part of a conversation.

Templates are written per model and ignore what they do not know: a role, a second system message, tools. The answer to
a conversation without one of its messages answers another question. So a conversation is rendered a second time with
marks in its messages and tools, and those whose marks are missing are reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlaforge.engine.request.conversation import (
    MessageError,
    described,
    plain,
    with_arguments_as_objects,
    with_system_alone,
)
from mlaforge.runtime import log

# Reactions to a template that ignores tools.
IGNORED_TOOLS = ("error", "log")
_MARK = "mlaforge_mark_"
Messages = Sequence[Mapping[str, Any]]
_LOGGED: set[str] = set()


def render(tokenizer: Any, messages: Messages, **options: Any) -> list[int]:
    """Return the token ids of a conversation that ends where the model's turn begins; `options` and errors are those of
    `text`."""
    # Templates write the special tokens themselves.
    return list(tokenizer(text(tokenizer, messages, **options), add_special_tokens=False)["input_ids"])


def text(
    tokenizer: Any, messages: Messages, *, tools: Sequence[Mapping[str, Any]] = (),
    reasoning_effort: str | None = None, variables: Mapping[str, Any] | None = None, ignored_tools: str = "error",
) -> str:  # fmt: skip
    """Return a conversation as text; it ends where the model's turn begins, unless `variables` say otherwise.

    messages           OpenAI's: content as text or text parts, the arguments of calls as JSON text or objects. Role
                       developer becomes role system where the template does not know it
    tools              OpenAI's, of type function
    reasoning_effort   passed to the template; a log line reports a template that ignores it
    variables          more arguments of apply_chat_template and of the template itself
    ignored_tools      "error" or "log": the reaction to a template that ignores tools

    Raises MessageError (a UserError) where the template refuses the messages, or leaves out one of them or the tools.
    """
    turns, template_variables = plain(messages, arguments_as_text=False), dict(variables or {})
    described(tools)
    if reasoning_effort is not None:
        template_variables["reasoning_effort"] = reasoning_effort
    rendered, missing = _rendered(tokenizer, turns, tools, template_variables)
    if any(message["role"] == "developer" for message in turns) and (rendered is None or missing):
        turns = with_system_alone(turns)
        rendered, missing = _rendered(tokenizer, turns, tools, template_variables)
    if rendered is None and (objects := with_arguments_as_objects(turns)) != turns:
        turns = objects
        rendered, missing = _rendered(tokenizer, turns, tools, template_variables)
    if rendered is None:
        # Render once more, for the template's own error message.
        return _apply(tokenizer, turns, tools, template_variables)
    for index in missing:
        if index is not None:
            why = f"messages.{index}: the model's chat template leaves out this message of role {turns[index]['role']}"
            raise MessageError(f"{why}; send it as a message of role user", f"messages.{index}")
        why = "the model's chat template ignores tools"
        if ignored_tools == "error":
            accept = "or accept that (serve: without --require-tool-template; LLM: ignored_tools='log')"
            raise MessageError(f"{why}; describe them in a message, {accept}", "tools")
        _log_once(why)
    if reasoning_effort is not None:
        other = "low" if reasoning_effort == "high" else "high"
        if _apply(tokenizer, turns, tools, template_variables | {"reasoning_effort": other}) == rendered:
            _log_once("the model's chat template ignores reasoning_effort")
    return rendered


def ignores_tools(tokenizer: Any) -> bool:
    """Return whether the chat template ignores tools, and log it. Without a template the answer is False."""
    if not tokenizer.chat_template:
        return False
    tool = {"type": "function", "function": {"name": "tool", "description": "A tool.", "parameters": {}}}
    turns = plain([{"role": "user", "content": "Hello."}], arguments_as_text=False)
    ignored = None in _rendered(tokenizer, turns, [tool], {})[1]
    if ignored:
        _log_once("the model's chat template ignores tools")
    return ignored


def _rendered(
    tokenizer: Any, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
) -> tuple[str | None, list[int | None]]:
    """Return the text, or None where the template refuses it, and the numbers of messages that it leaves out; None
    among these stands for the tools."""
    try:
        rendered = _apply(tokenizer, messages, tools, variables)
    except MessageError:
        return None, []
    # Templates may trim or shorten earlier messages. Texts of users and models are mostly rendered as they are.
    seen = {
        i for i, m in enumerate(messages) if m["role"] in ("user", "assistant") and m["content"].strip() in rendered
    }
    unseen = [i for i, message in enumerate(messages) if message["content"].strip() and i not in seen]
    if not unseen and not tools:
        return rendered, []
    marked = [{**m, "content": f"{_MARK}{i}_"} if i in unseen else m for i, m in enumerate(messages)]
    marked_tools = [{"type": "function", "function": {**tool["function"], "name": f"{_MARK}tool"}} for tool in tools]
    try:
        marked_text = _apply(tokenizer, marked, marked_tools, variables)
    except MessageError:
        # The template depends on the contents, so that marks cannot show what it leaves out.
        return rendered, []
    missing: list[int | None] = [i for i in unseen if f"{_MARK}{i}_" not in marked_text]
    return rendered, missing + ([None] if tools and f"{_MARK}tool" not in marked_text else [])


def _apply(
    tokenizer: Any, messages: Messages, tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
) -> str:  # fmt: skip
    import jinja2

    tool_arguments = {"tools": [dict(tool) for tool in tools]} if tools else {}
    try:
        return str(
            tokenizer.apply_chat_template(
                list(messages), **{"add_generation_prompt": True, **variables, **tool_arguments, "tokenize": False}
            )
        )
    # A template is the model's code run on the user's data: its errors are errors in the messages.
    except (
        jinja2.TemplateError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError,
    ) as error:  # fmt: skip
        why = " ".join(str(error).split())[:300]
        raise MessageError(f"the model's chat template refuses these messages: {why}", "messages") from error


def _log_once(line: str) -> None:
    if line not in _LOGGED:
        _LOGGED.add(line)
        log(line)
