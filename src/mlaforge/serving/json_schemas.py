"""Changes to the JSON schemas of requests before they become grammars."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Keywords whose values are schemas, lists of schemas, or schemas by name. A schema inside allOf, not, if and the like
# describes a part of an object, which must stay open to the properties of the other parts.
_SCHEMAS = ("items", "additionalItems", "additionalProperties", "contains")
_LISTS = ("anyOf", "oneOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_SEVERAL = ("allOf", "if", "dependentSchemas")
# Property names are strings: these schemas of them restrict nothing.
_TRIVIAL_NAMES: tuple[Any, ...] = (True, {}, {"type": "string"})


def closed(schema: Any) -> Any:
    """Return a schema whose objects have no other properties than it names, except where it mentions
    additionalProperties itself. Models invent keys until the limit of tokens where they may. (xgrammar's strict mode
    does the same.)"""
    if not isinstance(schema, Mapping):
        return schema
    result = {name: _closed_keyword(name, value) for name, value in schema.items()}
    is_part = any(name in schema for name in _SEVERAL)
    if isinstance(schema.get("properties"), Mapping) and "additionalProperties" not in schema and not is_part:
        result["additionalProperties"] = False
    return result


def _closed_keyword(name: str, value: Any) -> Any:
    if name in _SCHEMAS:
        return [closed(item) for item in value] if isinstance(value, list) else closed(value)
    if name in _LISTS and isinstance(value, list):
        return [closed(item) for item in value]
    if name in _NAMED and isinstance(value, Mapping):
        return {key: closed(item) for key, item in value.items()}
    return value


def without_trivial_names(schema: Any) -> Any:
    """Return a schema without `propertyNames` that restrict nothing, which zod writes for records and llguidance does
    not know."""
    if isinstance(schema, list):
        return [without_trivial_names(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        name: without_trivial_names(value)
        for name, value in schema.items()
        if not (name == "propertyNames" and value in _TRIVIAL_NAMES)
    }


def lenient(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema of which llguidance ignores the keywords and formats that it lacks."""
    return {**schema, "x-guidance": {"lenient": True, "coerce_one_of": True}}


def open_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of any JSON value of this schema's type, or of any object or list if it has several."""
    kind = schema.get("type", "object")
    return {"type": kind if kind in ("object", "array") else "object"}
