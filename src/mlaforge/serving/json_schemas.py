"""Changes to the JSON schemas of requests before they become grammars."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

# Keywords whose values are a schema (or a list of schemas), and schemas by name.
_SCHEMAS = frozenset({"items", "additionalItems", "additionalProperties", "contains", "anyOf", "oneOf", "prefixItems"})
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
# Keywords whose schemas describe a part of a value.
_PARTS = frozenset({"allOf", "not", "if", "then", "else", "dependentSchemas"})
# Property names are strings: these schemas of them restrict nothing.
_TRIVIAL_NAMES: tuple[Any, ...] = (True, {}, {"type": "string"})
# Formats that llguidance knows.
_FORMATS = frozenset({
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
})  # fmt: skip
_LOOK_AROUND = re.compile(r"\(\?<?[=!]")
_LARGEST_BOUND = 1e38
_Schema = dict[str, Any]


def _changed(schema: Any, change: Callable[[_Schema], _Schema], parts: bool) -> Any:
    """Return a copy of a schema in which `change` was applied to it and to the schemas inside of it, the innermost
    first; with `parts` also to those of _PARTS."""
    if isinstance(schema, list):
        return [_changed(item, change, parts) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    result = dict(schema)
    for name, value in schema.items():
        if (name in _NAMED or (name == "dependentSchemas" and parts)) and isinstance(value, Mapping):
            result[name] = {key: _changed(item, change, parts) for key, item in value.items()}
        elif name in _SCHEMAS or (name in _PARTS and parts):
            result[name] = _changed(value, change, parts)
    return change(result)


def closed(schema: Any) -> Any:
    """Return a schema whose objects have no other properties than it names, except where it mentions
    additionalProperties itself. Models invent keys until the limit of tokens where they may. (xgrammar's strict mode
    does the same.) Schemas of a part of an object stay open to the properties of the other parts."""

    def close(schema: _Schema) -> _Schema:
        if isinstance(schema.get("properties"), Mapping) and not (schema.keys() & (_PARTS | {"additionalProperties"})):
            schema["additionalProperties"] = False
        return schema

    return _changed(schema, close, parts=False)


def normalized(schema: Any) -> Any:
    """Return an equivalent schema without the keywords of zod and pydantic that llguidance lacks:

    - `propertyNames` that restrict nothing, or that list the names;
    - formats that it does not know, beside a pattern that describes them;
    - patterns with look-around, beside a format that it knows;
    - bounds of numbers as large as those of fp32.
    """
    return _changed(schema, _normalize, parts=True)


def _normalize(schema: _Schema) -> _Schema:
    names = schema.get("propertyNames")
    if names in _TRIVIAL_NAMES:
        del schema["propertyNames"]
    elif isinstance(names, Mapping) and isinstance(names.get("enum"), list) and "properties" not in schema:
        del schema["propertyNames"]
        properties = dict.fromkeys(map(str, names["enum"]), schema.get("additionalProperties", True))
        schema |= {"properties": properties, "additionalProperties": False}
    pattern, form = schema.get("pattern"), schema.get("format")
    if isinstance(pattern, str) and isinstance(form, str):
        if form not in _FORMATS:
            del schema["format"]
        elif _LOOK_AROUND.search(pattern):
            del schema["pattern"]
    for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        if isinstance(bound := schema.get(name), float) and abs(bound) > _LARGEST_BOUND:
            del schema[name]
    return schema


def lenient(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema without patterns that llguidance lacks, of which it ignores other unknown keywords and
    formats."""

    def without_look_around(schema: _Schema) -> _Schema:
        if isinstance(pattern := schema.get("pattern"), str) and _LOOK_AROUND.search(pattern):
            del schema["pattern"]
        return schema

    options = {"lenient": True, "coerce_one_of": True}
    return {**_changed(schema, without_look_around, parts=True), "x-guidance": options}


def open_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of any JSON value of this schema's type, or of any object or list if it has several."""
    kind = schema.get("type", "object")
    return {"type": kind if kind in ("object", "array") else "object"}
