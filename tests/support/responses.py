"""Responses API: objects checked by the types of the package openai, streams added up, and a scripted server."""

from __future__ import annotations

import functools
import json
import re
import types
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pydantic
from openai.types.responses import Response, ResponseStreamEvent

from support.harmony_tokenizer import HarmonyTokenizer
from support.scripted_engine import ScriptedEngine
from support.serving import serving

WEATHER = {
    "type": "function", "name": "weather", "description": "Now.", "strict": False,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}  # fmt: skip
THOUGHT, ARGUMENTS = "They want wéather 漢🙂.", '{"city": "Köln"}'
BEGIN = "<|start|>assistant"
CALL = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
FINAL = "<|channel|>final<|message|>It is 4 °C 🙂.<|return|>"
ANALYSIS = f"<|channel|>analysis<|message|>{THOUGHT}<|end|>{BEGIN}"
CALLING = f"{ANALYSIS}<|channel|>commentary<|message|>Let me look.<|end|>{BEGIN}{CALL}"


# Fields that openai 2 requires and openai 3 does not declare.
OLDER = {"ResponseFunctionCallArgumentsDoneEvent": {"name": (str, ...)}}


@functools.cache
def strict(model):
    """Return a pydantic type that accepts the fields of one of openai's types, and no others."""
    origin, arguments = typing.get_origin(model), typing.get_args(model)
    if origin is typing.Annotated:
        return strict(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return typing.Union[tuple(strict(argument) for argument in arguments)]  # noqa: UP007
    if origin is list:
        return list[strict(arguments[0])]
    if not (isinstance(model, type) and issubclass(model, pydantic.BaseModel)):
        return model
    fields = {name: (strict(field.annotation), field) for name, field in model.model_fields.items()}
    fields = OLDER.get(model.__name__, {}) | fields
    config = pydantic.ConfigDict(extra="forbid", protected_namespaces=())
    return pydantic.create_model(model.__name__, __config__=config, **fields)


@functools.cache
def adapter(model):
    return pydantic.TypeAdapter(strict(model))


def parsed(value, model=Response):
    adapter(model).validate_python(value)
    return value


def events_of(answer):
    """Return the events of a stream, checked: SSE lines, types, numbers and order."""
    assert answer.status_code == 200, answer.text
    events = []
    for block in answer.text.strip().split("\n\n"):
        name, data = re.fullmatch(r"event: (\S+)\ndata: (.*)", block).groups()
        events.append(parsed(json.loads(data), ResponseStreamEvent))
        assert events[-1]["type"] == name
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def added_up(events):
    """Return the output that the events add up to; each item is complete before the next begins."""
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    items, is_open = [], False
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert not is_open and event["output_index"] == len(items) and event["item"]["status"] == "in_progress"
            items.append({"text": "", "logprobs": [], "id": event["item"]["id"]})
            is_open = True
            continue
        item = items[-1]
        assert is_open and event["output_index"] == len(items) - 1
        assert event.get("item_id", item["id"]) == item["id"]
        if kind.endswith(".delta"):
            item["text"] += event["delta"]
            item["logprobs"] += event.get("logprobs", [])
        elif kind.endswith(("text.done", "arguments.done")):
            assert item["text"] == event.get("text", event.get("arguments"))
        elif kind == "content_part.done":
            assert event["part"]["text"] == item["text"]
            assert [entry["token"] for entry in event["part"].get("logprobs", [])][: len(item["logprobs"])] == [
                entry["token"] for entry in item["logprobs"]
            ]
        elif kind == "output_item.done":
            is_open = False
            items[-1] = event["item"]
    assert not is_open
    return items


def without_ids(value):
    """Return a JSON value without what differs between two equal answers."""
    if isinstance(value, dict):
        names = {"id", "call_id", "created_at", "completed_at", "previous_response_id", "sequence_number"}
        return {name: without_ids(field) for name, field in value.items() if name not in names}
    return [without_ids(item) for item in value] if isinstance(value, list) else value


def texts(output):
    """Return (type, text) of the items of an output."""
    return [
        (item["type"], item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        for item in output
    ]


class Harmony:
    """A server that answers every prompt with `text`; `prompts` are the texts of the prompts so far."""

    def __init__(self, served, engine, encoding):
        self.served, self._engine, self._encoding = served, engine, encoding
        self.prompts = []
        add = engine.add
        engine.add = lambda request_id, ids, params: (
            self.prompts.append(encoding.decode(ids)), add(request_id, ids, params),
        )  # fmt: skip

    def answers(self, text):
        self._engine.script = self._encoding.encode(text, allowed_special="all")
        return self._engine.script

    def post(self, **body):
        answer = self.served.post("/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        return parsed(answer.json())


@contextmanager
def harmony_serving(encoding: Any) -> Iterator[Harmony]:
    """Run a server with harmony's vocabulary."""
    engine = ScriptedEngine(HarmonyTokenizer(encoding))
    engine.max_model_len = 4096
    with serving(engine) as served:
        yield Harmony(served, engine, encoding)
