"""Forced tool calls: the JSON schema of the answer, and its incremental parser.

As in vLLM, the model writes a JSON list of {"name", "parameters"} with `tool_choice: required`, and only the arguments
if one tool is named, independent of the format of calls in its chat template.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from mlaforge.engine.request.tool_call_deltas import add_arguments, new_call
from mlaforge.serving.json_schemas import closed, lenient, normalized
from mlaforge.serving.wire import ApiError

# From the end of one call's arguments, or the beginning, to the beginning of the next call's. Properties are written in
# the schema's order, and parameters are an object.
_HEAD = re.compile(r'[\s\[\]},]*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"parameters"\s*:\s*(?=\{)')
# Keys of the definitions that a schema refers to, always at its top level.
_DEFINITIONS = ("$defs", "definitions")


@dataclasses.dataclass(frozen=True)
class ToolSchemas:
    """Schemas of the arguments of tools, by the tools' names, one of which must be called.

    strict  whether a schema that cannot be followed completely is refused
    """

    parameters: Mapping[str, Mapping[str, Any] | None]
    strict: bool

    def candidates(self) -> list[dict[str, dict[str, Any]]]:
        """Return the schemas to try in turn: as requested, but closed; without keywords that llguidance lacks; any
        object. Raises ApiError (400) for parameters that are not of type object."""
        schemas = {name: _arguments_schema(name, schema) for name, schema in self.parameters.items()}
        if self.strict:
            return [schemas]
        return [
            schemas,
            {name: lenient(schema) for name, schema in schemas.items()},
            {name: {"type": "object"} for name in schemas},
        ]


def _arguments_schema(name: str, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    schema = {"type": "object", **(parameters or {"properties": {}})}
    if schema["type"] != "object":
        raise ApiError(400, f"tools: the parameters of {name} must be of type object", "tools")
    return dict(closed(normalized(schema)))


def calls_schema(tools: Mapping[str, dict[str, Any]], parallel: bool) -> dict[str, Any]:
    """Return the schema of a list of calls: exactly one, or with `parallel` at least one. Raises ApiError (400)."""
    calls: list[dict[str, Any]] = []
    shared: dict[str, dict[str, Any]] = {key: {} for key in (*_DEFINITIONS, "x-guidance")}
    for name, parameters in tools.items():
        schema = dict(parameters)
        for key in shared:
            definitions = schema.pop(key, {})
            if not isinstance(definitions, Mapping):
                raise ApiError(400, f"tools: {key} of {name} must be an object", "tools")
            for definition_name, definition in definitions.items():
                if shared[key].setdefault(definition_name, definition) != definition:
                    raise ApiError(400, f"tools: two tools define {key}.{definition_name} differently", "tools")
        properties = {"name": {"type": "string", "enum": [name]}, "parameters": schema}
        calls.append({
            "type": "object", "properties": properties, "required": [*properties], "additionalProperties": False,
        })  # fmt: skip
    max_items = {} if parallel else {"maxItems": 1}
    return {"type": "array", "minItems": 1, **max_items, "items": {"anyOf": calls}, **shared}


class CallsReader:
    """Incremental parser of a list of calls: `read` returns the deltas of `tool_calls` for a piece of text."""

    def __init__(self) -> None:
        self.calls = 0
        # Incomplete beginning of a call.
        self._head = ""
        # State within the current arguments: nesting depth, inside a string, after a backslash.
        self._depth = 0
        self._quoted = self._escaped = False

    def read(self, text: str) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        while text:
            if not self._depth:
                self._head, text = self._head + text, ""
                if (head := _HEAD.match(self._head)) is None:
                    break
                deltas.append(new_call(self.calls, json.loads(head[1])))
                self.calls += 1
                text, self._head = self._head[head.end() :], ""
            arguments = text[: self._end(text)]
            text = text[len(arguments) :]
            add_arguments(deltas, self.calls - 1, arguments)
        return deltas

    def _end(self, text: str) -> int:
        """Return the number of characters that belong to the current arguments."""
        for position, character in enumerate(text):
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
                    return position + 1
        return len(text)
