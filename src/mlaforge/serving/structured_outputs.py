"""Constraints on answers: OpenAI's response_format and vLLM's structured_outputs as fields of SamplingParams."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from mlaforge.serving.strict import Strict
from mlaforge.serving.wire import ApiError

MAX_CHOICES = 1024
# Field of SamplingParams and its value.
Constraint = tuple[str, Any]
ANY_OBJECT: Constraint = ("json_schema", {"type": "object"})
# Fields of vLLM that are not supported -> alternative.
_REFUSED = {
    "grammar": "use regex or json",
    "structural_tag": "use json",
    "whitespace_pattern": "white space is bounded already",
    "disable_any_whitespace": "white space is bounded already",
    "disable_additional_properties": "set additionalProperties: false in the schema",
}


class JsonSchema(Strict):
    name: str = ""
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Strict):
    """OpenAI's response_format."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def constraint(self) -> Constraint | None:
        """Return the constraint, or None for plain text. Raises ApiError (400)."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return ANY_OBJECT
        if self.json_schema is None:
            raise ApiError(400, "response_format json_schema needs its json_schema", "response_format")
        return "json_schema", self.json_schema.schema_


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
        constraints: list[Constraint] = []
        if self.json_ is not None:
            constraints.append(("json_schema", self.json_))
        if self.regex is not None:
            constraints.append(("regex", self.regex))
        if self.choice is not None:
            constraints.append(("regex", "|".join(map(re.escape, self.choice))))
        if self.json_object:
            constraints.append(ANY_OBJECT)
        if len(constraints) != 1:
            message = f"structured_outputs needs one of json, regex, choice and json_object, not {len(constraints)}"
            raise ApiError(400, message, "structured_outputs")
        return constraints[0]
