"""Requests of real clients: extra fields, nulls, other names of the same field, options that have no effect."""

import json

import pytest

from mlaforge.serving import strict
from mlaforge.serving.protocol import ChatRequest
from mlaforge.serving.strict import strict_fields
from mlaforge.serving.wire import ApiError

USER = {"role": "user", "content": "x"}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"properties": {}}}} for name in ("f", "g")]
# A conversation with every part that a message may have.
HISTORY = [
    {"role": "system", "content": [{"type": "text", "text": "s"}]}, USER,
    {
        "role": "assistant", "content": None, "reasoning_content": "r",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "t"},
]  # fmt: skip


def read(**payload):
    return ChatRequest.read({"messages": HISTORY, "tools": TOOLS} | payload)


def params(request):
    return request.params(512, {}, [{}])[0]


def objects(value, path=()):
    """Yield the path of every object in a JSON value, but not inside of JSON schemas."""
    if isinstance(value, dict):
        yield path
    if path[-1:] != ("parameters",):
        for key, item in (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        ):
            yield from objects(item, (*path, key))


PAYLOAD = {"messages": HISTORY, "tools": TOOLS, "stream": True, "stream_options": {"include_usage": True}}
PLACES = [path for path in objects(PAYLOAD) if path[-1:] != ("parameters",)]


@pytest.mark.parametrize("value", [None, "x", {"a": [1]}], ids=str)
@pytest.mark.parametrize("place", PLACES, ids=lambda place: ".".join(map(str, place)) or "top")
def test_extra_fields_are_ignored_at_every_depth(place, value, monkeypatch, capsys):
    """A null equals absence; any other value is logged, and refused by option."""
    monkeypatch.setattr(strict, "_LOGGED", set())
    changed = json.loads(json.dumps(PAYLOAD))
    target = changed
    for key in place:
        target = target[key]
    target["x_extra"] = value
    assert ChatRequest.read(changed).model_dump() == ChatRequest.read(PAYLOAD).model_dump()
    assert ("'x_extra'" in capsys.readouterr().err) is (value is not None)
    if value is not None:
        with strict_fields(True), pytest.raises(ApiError) as refused:
            ChatRequest.read(changed)
        assert "x_extra" in (refused.value.param or "")
    else:
        with strict_fields(True):
            assert ChatRequest.read(changed) == ChatRequest.read(PAYLOAD)


def test_other_names_of_the_same_field():
    renamed = json.loads(json.dumps(HISTORY))
    renamed[2]["reasoning"] = renamed[2].pop("reasoning_content")
    assert read(messages=renamed).messages == read().messages
    assert read(max_tokens=5, max_completion_tokens=3).limit() == 3
    refusal = [USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, USER]
    assert read(messages=refusal).messages[1].text == "no"
    assert read(messages=[USER, {"role": "assistant", "refusal": "no"}, USER]).messages[1].text == "no"
    schema = {"type": "object", "properties": {"a": {"type": "null"}}}
    for form in (
        {"type": "json_object", "schema": schema},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
    ):  # fmt: skip
        assert read(response_format=form).grammars()[0] == {"json_schema": schema}


@pytest.mark.parametrize("name", ["max_tokens", "n", "top_k", "seed", "min_tokens", "top_logprobs"])
def test_whole_numbers_may_be_written_as_floats(name):
    assert getattr(read(**{name: 2.0}), name) == 2 and type(getattr(read(**{name: 2.0}), name)) is int
    for wrong in (2.5, "2", True):
        with pytest.raises(ApiError):
            read(**{name: wrong})


def test_top_p_0_is_greedy():
    assert params(read(top_p=0, temperature=1.5)).greedy and not params(read(top_p=0.1, temperature=1.5)).greedy


@pytest.mark.parametrize(("options", "offered", "forced"), [
    ({}, ["f", "g"], None), ({"tool_choice": "none"}, [], None), ({"tool_choice": "required"}, ["f", "g"], ["f", "g"]),
    ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, ["f", "g"], ["g"]),
    ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
        {"type": "function", "function": {"name": "g"}}]}}}, ["g"], None),
    ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [
        {"type": "function", "name": "f"}]}}}, ["f"], ["f"]),
], ids=str)  # fmt: skip
def test_tool_choices(options, offered, forced):
    request = read(**options)
    assert [tool.function.name for tool in request.offered_tools] == offered
    assert (request.forced_tools and [tool.function.name for tool in request.forced_tools]) == forced
    wrong = {"type": "allowed_tools", "allowed_tools": {"tools": [{"type": "function", "name": "other"}]}}
    with pytest.raises(ApiError, match="allowed_tools names 'other'"):
        read(tool_choice=wrong).offered_tools  # noqa: B018


@pytest.mark.parametrize("field", [
    {"verbosity": "low"}, {"stream": True, "stream_options": {"include_obfuscation": False}}, {"store": True},
    {"reasoning_effort": "none"}, {"reasoning_effort": "minimal"}, {"reasoning_effort": "xhigh"},
    {"parallel_tool_calls": False}, {"tools": TOOLS, "tool_choice": "none"}, {"background": False},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "x"}}]}]},
], ids=str)  # fmt: skip
def test_options_without_effect_are_accepted(served, field):
    answer = served.post("/v1/chat/completions", json={"messages": [USER], "max_tokens": 2} | field)
    assert answer.status_code == 200 and "x-mlaforge-warning" not in answer.headers


@pytest.mark.parametrize("field", [{"background": True}, {"conversation": "c"}, {"audio": {"voice": "x"}}], ids=str)
def test_options_that_would_change_the_answer_are_refused_by_name(served, field):
    answer = served.post("/v1/chat/completions", json={"messages": [USER]} | field)
    assert next(iter(field)) in served.refused(answer, 400, next(iter(field)))


def test_content_that_is_not_text_is_refused_as_openai_does(served):
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
    answer = served.post("/v1/chat/completions", json={"messages": [message]})
    assert "Invalid content type" in served.refused(answer, 400, "messages.0.content.0")
