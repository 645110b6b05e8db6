"""Schemas of clients: those of zod and pydantic are followed, objects are closed, and what cannot be followed is
refused or named."""

import datetime
import decimal
import enum
import ipaddress
import json
import uuid
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import pytest

from mlaforge.engine.config import EngineConfig
from mlaforge.engine.engine import Engine
from mlaforge.runtime import UserError
from mlaforge.serving.json_schemas import closed
from mlaforge.serving.protocol import ChatRequest
from support.serving import serving

pytest.importorskip("llguidance")
# z.toJSONSchema of zod 4.4, by the name of the type.
ZOD = json.loads(Path(__file__).with_name("zod_schemas.json").read_text(encoding="utf-8"))
# Types whose schemas have formats or patterns that no grammar can follow.
LENIENT = {"emoji", "jwt", "Path", "set", "SecretStr", "IPv4Network"}


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Node(pydantic.BaseModel):
    name: str
    children: list["Node"] = []


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int = 9


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]


PYDANTIC = {
    "str": str, "constr": Annotated[str, pydantic.Field(min_length=1, max_length=5)],
    "pattern": Annotated[str, pydantic.Field(pattern="^[a-z]+$")], "int": int,
    "conint": Annotated[int, pydantic.Field(ge=0, lt=10)], "float": float,
    "multiple": Annotated[float, pydantic.Field(multiple_of=0.5)], "bool": bool, "none": None,
    "Decimal": decimal.Decimal,
    "date": datetime.date, "time": datetime.time, "datetime": datetime.datetime, "timedelta": datetime.timedelta,
    "uuid": uuid.UUID, "Path": Path, "IPv4": ipaddress.IPv4Address, "IPv6": ipaddress.IPv6Address,
    "IPv4Network": ipaddress.IPv4Network, "url": pydantic.AnyUrl, "enum": Colour, "literal": Literal["a", 1, True],
    "optional": int | None, "union": int | str, "list": list[int],
    "conlist": Annotated[list[int], pydantic.Field(min_length=1, max_length=3)], "tuple": tuple[int, str],
    "tuple_any": tuple[int, ...], "set": set[int], "dict": dict[str, int], "dict_int": dict[int, str],
    "any": Any, "model": Cat, "recursive": Node,
    "discriminated": Annotated[Cat | Dog, pydantic.Field(discriminator="kind")], "SecretStr": pydantic.SecretStr,
    "json": pydantic.JsonValue, "described": Annotated[str, pydantic.Field(description="d", examples=["x"])],
}  # fmt: skip
TYPES = {f"zod-{name}": schema for name, schema in ZOD.items()} | {
    f"pydantic-{name}": pydantic.create_model("Answer", value=(kind, ...)).model_json_schema()
    for name, kind in PYDANTIC.items()
}


@pytest.fixture(scope="module")
def engine(tiny_models):
    return Engine(tiny_models["llama"], EngineConfig(device="cpu", dtype="float32"))


def params(schema, strict):
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": strict}}
    request = ChatRequest.read({"messages": [{"role": "user", "content": "x"}], "response_format": form})
    return request.params(512, {}, request.grammars())


@pytest.mark.parametrize("name", TYPES)
def test_types_of_zod_and_pydantic_are_followed(engine, name):
    """Strictly, or where a grammar cannot, without the part that it cannot follow."""
    schema = TYPES[name]
    try:
        (strict,) = params(schema, True)
        engine.check_grammar(strict)
        assert name.split("-")[1] not in LENIENT
    except UserError:
        assert name.split("-")[1] in LENIENT, name
        engine.check_grammar(params(schema, False)[1])


@pytest.mark.parametrize(("schema", "result"), [
    ({"properties": {"a": {}}}, {"properties": {"a": {}}, "additionalProperties": False}),
    ({"properties": {"a": {}}, "additionalProperties": True}, {"properties": {"a": {}}, "additionalProperties": True}),
    ({"type": "object"}, {"type": "object"}),
    (
        {"items": {"properties": {"a": {"anyOf": [{"properties": {}}]}}}},
        {"items": {
            "properties": {"a": {"anyOf": [{"properties": {}, "additionalProperties": False}]}},
            "additionalProperties": False,
        }},
    ),
    # Parts of one object would exclude each other's properties.
    ({"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},) * 2,
    # A property may be called "properties".
    (
        {"properties": {"properties": {"type": "string"}}},
        {"properties": {"properties": {"type": "string"}}, "additionalProperties": False},
    ),
    ({"$defs": {"A": {"properties": {}}}}, {"$defs": {"A": {"properties": {}, "additionalProperties": False}}}),
    (True, True),
])  # fmt: skip
def test_open_objects_are_closed(schema, result):
    assert closed(schema) == result


def test_what_cannot_be_followed_is_refused_or_named(engine):
    with serving(engine) as served:

        def answer(schema, **options):
            form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, **options}}
            body = {"messages": [{"role": "user", "content": "x"}], "response_format": form, "max_tokens": 30}
            return served.post("/v1/chat/completions", json=body)

        distinct = {"type": "array", "items": {"enum": [1]}, "uniqueItems": True, "minItems": 1, "maxItems": 1}
        assert "uniqueItems" in served.refused(answer(distinct, strict=True), 400)
        lenient = answer(distinct)
        assert "uniqueItems" in lenient.headers["x-mlaforge-warning"]
        assert json.loads(lenient.json()["choices"][0]["message"]["content"]) == [1]
        # No value satisfies it: the answer is any object.
        impossible = {"type": "object", "properties": {"a": False}, "required": ["a"]}
        assert "unsatisfiable" in served.refused(answer(impossible, strict=True), 400)
        opened = answer(impossible)
        assert "unsatisfiable" in opened.headers["x-mlaforge-warning"]
        assert opened.json()["choices"][0]["message"]["content"].startswith("{")
        assert "x-mlaforge-warning" not in answer({"enum": [1]}).headers
        # Arguments of a forced tool.
        for strict, status in ((True, 400), (False, 200)):
            tool = {"type": "function", "function": {"name": "f", "parameters": impossible, "strict": strict}}
            body = {"messages": [{"role": "user", "content": "x"}], "tools": [tool], "tool_choice": "required"}
            forced = served.post("/v1/chat/completions", json=body | {"max_tokens": 20})
            assert forced.status_code == status
        assert "unsatisfiable" in forced.headers["x-mlaforge-warning"]
        served.settles()


@pytest.mark.parametrize("schema", [
    '{"items":' * 400 + "{}" + "}" * 400, "[" * 100_000, '{"enum": [' + "[]," * 100_000 + "1]}", "null", "5", "{",
], ids=["deep", "deeper", "large", "null", "number", "no JSON"])  # fmt: skip
def test_schemas_as_text_are_refused_before_they_are_walked(engine, schema):
    with serving(engine) as served:
        for field in ({"guided_json": schema}, {"structured_outputs": {"json": schema}}):
            answer = served.post("/v1/completions", json={"prompt": "x", "max_tokens": 1} | field)
            assert "json_schema" in served.refused(answer, 400)
