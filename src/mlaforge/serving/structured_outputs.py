"""Constraints on answers: OpenAI's response_format and vLLM's structured_outputs as fields of SamplingParams."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from mlaforge.engine.sampling.grammar_limits import check_schema, check_size
from mlaforge.runtime import UserError
from mlaforge.serving.json_schemas import closed, lenient, normalized, open_schema
from mlaforge.serving.strict import Strict
from mlaforge.serving.wire import ApiError

MAX_CHOICES = 1024
ANY_OBJECT = {"type": "object"}
# Fields of vLLM that are not supported -> alternative.
_REFUSED = {
    "grammar": "use regex or json",
    "structural_tag": "use json",
    "whitespace_pattern": "white space is bounded already",
    "disable_any_whitespace": "white space is bounded already",
    "disable_additional_properties": "set additionalProperties: false in the schema",
}


@dataclasses.dataclass(frozen=True)
class Constraint:
    """What an answer must match.

    field   field of the request
    kind    field of SamplingParams: "json_schema" or "regex"
    value   its value
    strict  whether a schema that cannot be followed completely is refused
    """

    field: str
    kind: str
    value: Any
    strict: bool = True

    def candidates(self) -> list[Any]:
        """Return the values to try in turn: as requested; without keywords that llguidance lacks; any object or
        list."""
        schema = _parsed(self.value) if self.kind == "json_schema" else None
        if schema is None:
            return [self.value]
        schema = normalized(schema)
        if self.strict:
            return [schema]
        return [schema, lenient(schema), open_schema(schema)]


def _parsed(schema: Any) -> Mapping[str, Any] | None:
    """Return a schema as an object; None for one that SamplingParams will refuse. The size is checked first: parsing a
    large text takes seconds, and walking a deep one exceeds Python's recursion limit."""
    try:
        if isinstance(schema, str):
            check_size("json_schema", schema)
            schema = json.loads(schema)
        check_schema(schema)
    except (UserError, ValueError, RecursionError):
        return None
    return schema if isinstance(schema, Mapping) else None


class JsonSchema(Strict):
    name: str = ""
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool = False


class ResponseFormat(Strict):
    """OpenAI's response_format; `schema` beside the type is llama.cpp's and others'."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None

    def constraint(self) -> Constraint | None:
        """Return the constraint, or None for plain text. Raises ApiError (400)."""
        if self.type == "text":
            return None
        if self.json_schema is not None and self.type == "json_schema":
            schema, strict = self.json_schema.schema_, self.json_schema.strict
            return Constraint("response_format", "json_schema", closed(schema) if strict else schema, strict)
        if self.type == "json_schema" and self.schema_ is None:
            raise ApiError(400, "response_format json_schema needs its json_schema", "response_format")
        return Constraint("response_format", "json_schema", self.schema_ or ANY_OBJECT, strict=False)


class StructuredOutputs(Strict):
    """vLLM's structured_outputs: exactly one of its fields is set."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)] | None = None
    json_object: bool = False

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        requested = {name: field for name, field in value.items() if field is not None and field is not False}
        if refused := sorted(_REFUSED.keys() & requested.keys()):
            raise ValueError(f"{refused[0]} is not supported: {_REFUSED[refused[0]]}")
        return requested

    def constraint(self) -> Constraint:
        """Return the constraint. Raises ApiError (400)."""
        constraints: list[tuple[str, Any]] = []
        if self.json_ is not None:
            constraints.append(("json_schema", self.json_))
        if self.regex is not None:
            constraints.append(("regex", self.regex))
        if self.choice is not None:
            constraints.append(("regex", "|".join(map(re.escape, self.choice))))
        if self.json_object:
            constraints.append(("json_schema", ANY_OBJECT))
        if len(constraints) != 1:
            message = f"structured_outputs needs one of json, regex, choice and json_object, not {len(constraints)}"
            raise ApiError(400, message, "structured_outputs")
        return Constraint("structured_outputs", *constraints[0])
