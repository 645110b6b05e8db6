"""What may bind an answer: OpenAI's response_format and vLLM's structured_outputs, as SamplingParams takes it."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from mlaforge.serving.strict import Strict
from mlaforge.serving.wire import ApiError

MAX_CHOICES = 1024
# Field of SamplingParams and its value.
Binding = tuple[str, Any]
ANY_OBJECT: Binding = ("json_schema", {"type": "object"})
# What vLLM takes beside, and what to do instead.
_REFUSED = {
    "grammar": "use regex or json",
    "structural_tag": "use json",
    "whitespace_pattern": "white space is bounded already",
    "disable_any_whitespace": "white space is bounded already",
    "disable_additional_properties": "say additionalProperties: false in the schema",
}


class JsonSchema(Strict):
    name: str = ""
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Strict):
    """OpenAI's."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def binding(self) -> Binding | None:
        """None for plain text. Raises ApiError (400)."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return ANY_OBJECT
        if self.json_schema is None:
            raise ApiError(400, "response_format json_schema needs its json_schema", "response_format")
        return "json_schema", self.json_schema.schema_


class StructuredOutputs(Strict):
    """vLLM's: exactly one of its fields binds the answer."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)] | None = None
    json_object: bool = False

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        asked = {name: each for name, each in value.items() if each is not None and each is not False}
        if refused := sorted(_REFUSED.keys() & asked.keys()):
            raise ValueError(f"{refused[0]} is not supported: {_REFUSED[refused[0]]}")
        return asked

    def binding(self) -> Binding:
        """Raises ApiError (400)."""
        bindings: list[Binding] = []
        if self.json_ is not None:
            bindings.append(("json_schema", self.json_))
        if self.regex is not None:
            bindings.append(("regex", self.regex))
        if self.choice is not None:
            bindings.append(("regex", "|".join(map(re.escape, self.choice))))
        if self.json_object:
            bindings.append(ANY_OBJECT)
        if len(bindings) != 1:
            one = f"structured_outputs needs one of json, regex, choice and json_object, not {len(bindings)}"
            raise ApiError(400, one, "structured_outputs")
        return bindings[0]
