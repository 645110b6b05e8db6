"""Normalization of conversations in OpenAI's format, the same for the server and for `LLM`.

Clients may send content as parts, and the arguments of calls as JSON text, as the API does. Chat templates take content
as text and arguments as objects; harmony takes both as text.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from mlaforge.runtime import UserError

_CALLS = 'must be calls of {"id", "function": {"name", "arguments"}}, the arguments as JSON text or an object'


class MessageError(UserError):
    """A conversation that cannot be rendered for a model. `field` is the path of the error, such as
    messages.0.content."""

    def __init__(self, why: str, field: str) -> None:
        super().__init__(why)
        self.field = field


def plain(messages: Any, arguments_as_text: bool) -> list[dict[str, Any]]:
    """Return the messages with content as one text and the arguments of calls as objects or as JSON text. Arguments
    that are not JSON, because the token limit cut them off, stay text. `reasoning`, vLLM's name, becomes
    reasoning_content. Fields that are None are left out, all others stay as they are. Raises MessageError."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise MessageError('messages must be a list of {"role", "content"} turns, not empty', "messages")
    return [_plain(message, f"messages.{i}", arguments_as_text) for i, message in enumerate(messages)]


def _plain(message: Any, where: str, arguments_as_text: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise MessageError(f"{where} must be a message of role and content, not a {type(message).__name__}", where)
    if not isinstance(role := message.get("role"), str) or not role:
        raise MessageError(f"{where}: role {role!r} must be system, user, assistant or tool", f"{where}.role")
    fields = {name: value for name, value in message.items() if value is not None}
    fields["content"] = _text(message.get("content"), f"{where}.content")
    if (reasoning := fields.pop("reasoning", None)) is not None:
        fields.setdefault("reasoning_content", reasoning)
    if not fields.get("tool_calls", True):
        del fields["tool_calls"]
    if (calls := fields.get("tool_calls")) is not None:
        if isinstance(calls, str | Mapping) or not isinstance(calls, Sequence):
            raise MessageError(f"{where}: tool_calls {_CALLS}", f"{where}.tool_calls")
        fields["tool_calls"] = [_call(call, where, arguments_as_text) for call in calls]
    return fields


def _text(content: Any, where: str) -> str:
    """A message's content as one text; parts are joined by newlines, as in vLLM."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list | tuple):
        raise MessageError(f"{where} must be text or a list of text parts, not a {type(content).__name__}", where)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            right = 'a part must be {"type": "text", "text": ...}: this model reads only text'
            raise MessageError(f"{where}.{i} is of type {kind!r}; {right}", f"{where}.{i}")
        texts.append(part["text"])
    return "\n".join(texts)


def _call(call: Any, where: str, as_text: bool) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise MessageError(f"{where}: tool_calls {_CALLS}", f"{where}.tool_calls")
    arguments = function.get("arguments", "")
    if not isinstance(arguments, str | Mapping):
        raise MessageError(f"{where}: tool_calls {_CALLS}", f"{where}.tool_calls")
    if as_text and isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not as_text and isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments or "{}")
    plain = {name: value for name, value in call.items() if name != "index" and value is not None}
    return {"type": "function", **plain, "function": {"name": function["name"], "arguments": arguments}}


def described(tools: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, Any]]:
    """Return name, description and parameters of OpenAI's tools of type function. Raises MessageError."""
    try:
        functions = [tool["function"] for tool in tools]
        return [(str(f["name"]), f.get("description") or "", f.get("parameters")) for f in functions]
    except (TypeError, LookupError, AttributeError) as error:
        right = '{"type": "function", "function": {"name", "description", "parameters"}}'
        raise MessageError(f"tools must be a list of {right}", "tools") from error


def with_arguments_as_objects(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages for a template that reads the fields of arguments: those that were cut off become an object
    with their text."""
    turns = [dict(message) for message in messages]
    for turn in turns:
        turn["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": {"arguments": text}}}
            if isinstance(text := call["function"]["arguments"], str)
            else call
            for call in turn.get("tool_calls", ())
        ]
        if not turn["tool_calls"]:
            del turn["tool_calls"]
    return turns


def with_system_alone(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages for a template without the role developer: as system, merged into a system message directly
    before it, because many chat templates read only one."""
    turns: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] != "developer":
            turns.append(dict(message))
        elif turns and turns[-1]["role"] == "system":
            turns[-1]["content"] = "\n\n".join(filter(None, (turns[-1]["content"], message["content"])))
        else:
            turns.append({**message, "role": "system"})
    return turns
