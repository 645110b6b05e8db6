"""Calls of tools that a request forces: the schema that binds the answer, and the answer read as calls.

As in vLLM the model writes a JSON list of {"name", "parameters"} under `tool_choice: required`, and the arguments alone
where one tool is named, whatever form its own template gives to calls.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from typing import Any

from mlaforge.serving.wire import ApiError

# From the end of one call's arguments, or the beginning, to the beginning of the next one's. Properties are written in
# the schema's order, and parameters are an object.
_HEAD = re.compile(r'[\s\[\]},]*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"parameters"\s*:\s*(?=\{)')
# Where schemas keep what they refer to, always from the outermost.
_DEFINITIONS = ("$defs", "definitions")


def arguments_schema(name: str, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """The schema of the arguments of the tool of this name. Raises ApiError (400) where they would be no object."""
    schema = {"type": "object", **(parameters or {"properties": {}})}
    if schema["type"] != "object":
        raise ApiError(400, f"tools: the parameters of {name} must be of type object", "tools")
    return schema


def calls_schema(tools: Mapping[str, Mapping[str, Any] | None], parallel: bool) -> dict[str, Any]:
    """The schema of a list of calls, at least one, no more unless `parallel`. Raises ApiError (400)."""
    calls: list[dict[str, Any]] = []
    shared: dict[str, dict[str, Any]] = {place: {} for place in _DEFINITIONS}
    for name, parameters in tools.items():
        schema = arguments_schema(name, parameters)
        for place in _DEFINITIONS:
            definitions = schema.pop(place, {})
            if not isinstance(definitions, Mapping):
                raise ApiError(400, f"tools: {place} of {name} must be an object", "tools")
            for word, definition in definitions.items():
                if shared[place].setdefault(word, definition) != definition:
                    raise ApiError(400, f"tools: two of them define {place}.{word}, differently", "tools")
        properties = {"name": {"type": "string", "enum": [name]}, "parameters": schema}
        calls.append({
            "type": "object", "properties": properties, "required": [*properties], "additionalProperties": False,
        })  # fmt: skip
    most = {} if parallel else {"maxItems": 1}
    return {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}, **shared}


def begun_call(index: int, name: str) -> dict[str, Any]:
    """The first piece of a call, with no arguments yet."""
    function = {"name": name, "arguments": ""}
    return {"index": index, "id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


class CallsReader:
    """Reads a list of calls as it comes: `read` says what a piece of text adds to `tool_calls`."""

    def __init__(self) -> None:
        self.calls = 0
        # Not read yet: the beginning of a call.
        self._head = ""
        # Of the arguments that are being read: how deep in them, whether in a string, and after a backslash there.
        self._depth = 0
        self._quoted = self._escaped = False

    def read(self, text: str) -> list[dict[str, Any]]:
        added: list[dict[str, Any]] = []
        while text:
            if not self._depth:
                self._head, text = self._head + text, ""
                if (head := _HEAD.match(self._head)) is None:
                    break
                added.append(begun_call(self.calls, json.loads(head[1])))
                self.calls += 1
                text, self._head = self._head[head.end() :], ""
            arguments = text[: self._end(text)]
            text = text[len(arguments) :]
            if not added or added[-1]["index"] != self.calls - 1:
                added.append({"index": self.calls - 1, "function": {"arguments": ""}})
            added[-1]["function"]["arguments"] += arguments
        return added

    def _end(self, text: str) -> int:
        """How much of the text belongs to the arguments that are being read."""
        for at, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = character == "\\", character != '"'
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    return at + 1
        return len(text)
