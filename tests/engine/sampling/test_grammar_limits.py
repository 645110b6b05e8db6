"""Too large grammars are rejected before they are compiled."""

import json

import pytest

from mlaforge.engine.sampling.grammar_limits import MAX_BYTES, MAX_DEPTH, MAX_ENUM_VALUES, MAX_PROPERTIES
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.runtime import UserError


def nested(depth):
    schema = {"type": "string"}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


def properties(count):
    return {"properties": {f"p{i}": True for i in range(count)}}


ENDLESS: list = []
ENDLESS += [ENDLESS, ENDLESS]
TOO_LARGE = [
    (properties(30_000), "properties"), (properties(MAX_PROPERTIES + 1), "properties"),
    ({"items": [properties(MAX_PROPERTIES // 2), properties(MAX_PROPERTIES // 2 + 1)]}, "properties"),
    ({"patternProperties": properties(MAX_PROPERTIES + 1)["properties"]}, "properties"),
    ({"enum": list(range(50_000))}, "enum values"), ({"enum": list(range(MAX_ENUM_VALUES + 1))}, "enum values"),
    (nested(MAX_DEPTH + 1), "levels of nesting"), ({"const": [0] * MAX_BYTES}, "bytes"), ({"x": ENDLESS}, "make it"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "what"), TOO_LARGE, ids=lambda part: str(part)[:30])
def test_rejects_large_schemas(schema, what):
    with pytest.raises(UserError, match=rf"json_schema has more than \d+ .*{what}"):
        SamplingParams(json_schema=schema)


def test_rejects_long_texts():
    for schema in ({"const": "x" * MAX_BYTES}, json.dumps({"const": "x" * MAX_BYTES}), " " * MAX_BYTES + "{}"):
        with pytest.raises(UserError, match="json_schema is longer than 128 KiB"):
            SamplingParams(json_schema=schema)
    for regex in ("a" * (MAX_BYTES + 1), "ä" * (MAX_BYTES // 2 + 1)):
        with pytest.raises(UserError, match="regex is longer than 128 KiB"):
            SamplingParams(regex=regex)


@pytest.mark.parametrize("schema", [
    properties(MAX_PROPERTIES), {"enum": list(range(MAX_ENUM_VALUES))}, nested(MAX_DEPTH), {},
    # Properties that are called like keywords.
    {"properties": {"enum": {"type": "string"}, "properties": {"type": "array"}}},
], ids=lambda schema: str(schema)[:40])  # fmt: skip
def test_accepts_schemas_at_the_limits(schema):
    SamplingParams(json_schema=schema)
    SamplingParams(json_schema=json.dumps(schema))
    SamplingParams(regex="a" * MAX_BYTES)
