"""Schemas and regular expressions: small ones drawn at random, and bombs, small texts whose grammar is huge."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

PATTERNS = (
    "a", "[ab]{3}", "(", "[", "a{", "a{3,1}", "\\", "\\d+", "^a$", "(?i)x", "(?=a)b", "(a)\\1", "a*?", ".{0,100}",
    "\\p{L}", "", "x" * 2000, "(" * 200 + ")" * 200, "[^\\x00-\\x7f]", "\\u0041", "a|", "|", "(?P<n>a)", "[z-a]", "\n",
    "é+",
)  # fmt: skip
KINDS = ("string", "number", "integer", "boolean", "null", "array", "object", "x")


def schema(dice: random.Random, deep: int = 3) -> dict[str, Any]:
    """A JSON schema of common keywords, not always a right one."""
    kind = dice.choice(KINDS[: 5 if deep == 0 else 8])
    body: dict[str, Any] = {"type": kind}
    if kind == "array":
        body["items"] = schema(dice, deep - 1)
        body["maxItems"] = dice.choice((0, 1, 3, -1, 1.5))
    elif kind == "object":
        names = dice.sample(("a", "b", "é", "", "x y", "$ref"), dice.randrange(4))
        body["properties"] = {name: schema(dice, deep - 1) for name in names}
        body |= dice.choice(({}, {"required": names}, {"required": ["zz"]}, {"additionalProperties": False}))
    elif kind in ("number", "integer"):
        more = (
            {},
            {"minimum": 0},
            {"maximum": -1, "minimum": 1},
            {"multipleOf": 7},
            {"multipleOf": 0},
            {"minimum": "x"},
        )
        body |= dice.choice(more)
    elif kind == "string":
        more = (
            {},
            {"maxLength": 5},
            {"pattern": "^a+$"},
            {"pattern": "("},
            {"format": "date"},
            {"format": "x"},
            {"minLength": -1},
        )
        body |= dice.choice(more)
    odd = ({}, {}, {"enum": [1, "a", None]}, {"const": {"a": 1}}, {"$ref": "#"}, {"$ref": "#/$defs/x"},
           {"not": {}}, {"anyOf": [{"type": "null"}, {}]}, {"allOf": []}, {"$ref": "http://127.0.0.1:9/x"},
           {"if": True})  # fmt: skip
    return body | dice.choice(odd)


def _primes(most: int) -> list[int]:
    return [n for n in range(2, most) if all(n % d for d in range(2, n))]


def _json(body: Any) -> dict[str, Any]:
    return {"guided_json": body}


def _nested(depth: int, inner: dict[str, Any], **more: Any) -> dict[str, Any]:
    for _ in range(depth):
        inner = {"type": "array", "items": inner, **more}
    return inner


BOMBS: dict[str, Callable[[], dict[str, Any]]] = {
    "multipleOf": lambda: _json({"type": "integer", "multipleOf": 1_000_003}),
    "multipleOf of all primes": lambda: _json({"allOf": [{"type": "integer", "multipleOf": p} for p in _primes(60)]}),
    "multipleOf of a fraction": lambda: _json({"type": "number", "multipleOf": 1e-9, "minimum": 0, "maximum": 1e9}),
    "allOf of anyOf": lambda: _json({"allOf": [
        {"anyOf": [{"properties": {f"k{i}{j}": {"type": "string"}}} for j in range(4)]} for i in range(14)
    ]}),
    "anyOf of objects": lambda: _json({"anyOf": [
        {"type": "object", "properties": {"a": {"const": i}, f"b{i}": {}}, "required": ["a"]} for i in range(3000)
    ]}),
    "oneOf that overlap": lambda: _json({"oneOf": [{"type": "object", "minProperties": i} for i in range(40)]}),
    "minItems": lambda: _json(_nested(1, {"type": "integer"}, minItems=1_000_000)),
    "minItems in minItems": lambda: _json(_nested(5, {"type": "integer"}, minItems=1000, maxItems=1000)),
    "minLength": lambda: _json({"type": "string", "minLength": 10_000_000}),
    "maxLength": lambda: _json({"type": "string", "maxLength": 10**9}),
    "a pattern that repeats": lambda: _json({"type": "string", "pattern": "((a{0,500}){0,500}){0,500}"}),
    "30,000 properties": lambda: _json({"properties": {f"k{i}": {"type": "integer"} for i in range(30_000)}}),
    "30,000 required": lambda: _json({"type": "object", "required": [f"k{i}" for i in range(30_000)]}),
    "enum of 50,000": lambda: _json({"enum": [f"value {i}" for i in range(50_000)]}),
    "enum of one long text": lambda: _json({"enum": ["x" * 4_000_000]}),
    "patternProperties": lambda: _json({"type": "object", "patternProperties": {f"^.*{i}.*$": {} for i in range(300)}}),
    "references in a ring": lambda: _json(
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    ),
    "references that double": lambda: _json({"$ref": "#/$defs/d0", "$defs": {
        f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]} for i in range(40)
    } | {"d40": {"type": "string"}}}),
    "itself everywhere": lambda: _json({"type": "object", "additionalProperties": {"$ref": "#"}, "minProperties": 50}),
    "90 levels": lambda: _json(_nested(90, {"type": "string"})),
    "a wide range": lambda: _json({"type": "number", "minimum": 1e-300, "maximum": 1e300}),
    "many digits": lambda: _json({"type": "integer", "minimum": 10**300 + 7, "maximum": 10**301 - 3}),
    "nested quantifiers": lambda: {"regex": "((((a+)+)+)+)+b"},
    "counted quantifiers": lambda: {"regex": "((x{1,300}){1,300}){1,300}"},
    "alternatives that overlap": lambda: {"regex": "(" + "|".join("a" * i for i in range(1, 900)) + "){1,900}z"},
    "a distance to look back": lambda: {"regex": "(a|b)*a(a|b){24}"},
    "classes of all letters": lambda: {"regex": "\\p{L}{0,20000}"},
    "intersections": lambda: {"regex": "(.*[0-9].*){12}(.*[a-z].*){12}x"},
    "a megabyte of pattern": lambda: {"regex": "(ab|cd)?" * 125_000},
    "optional letters": lambda: {"regex": "a?" * 3000 + "a" * 3000},
}  # fmt: skip
