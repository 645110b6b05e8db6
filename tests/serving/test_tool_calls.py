"""Forced tool calls: the constraint on the answer, and incremental parsing of calls."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlaforge.engine.config import EngineConfig
from mlaforge.engine.engine import Engine
from mlaforge.serving.protocol import ChatRequest
from mlaforge.serving.tool_calls import CallsReader
from mlaforge.serving.wire import ApiError
from support.responses import ARGUMENTS, CALL
from support.serving import serving

CITY = {
    "type": "object", "properties": {"city": {"$ref": "#/$defs/City"}}, "required": ["city"],
    "additionalProperties": False, "$defs": {"City": {"enum": ["Köln", "Rom"]}},
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now", "parameters": {"properties": {}, "additionalProperties": False}}},
]
PAYLOAD = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "max_tokens": 400}
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def served(tiny_models):
    pytest.importorskip("llguidance")
    with serving(Engine(tiny_models["llama"], EngineConfig(device="cpu", dtype="float32"))) as served:
        yield served
        served.settles()


def valid(call):
    arguments = json.loads(call["arguments"] if isinstance(call, dict) else call.arguments)
    name = call["name"] if isinstance(call, dict) else call.name
    return (name, arguments) in (("weather", {"city": "Köln"}), ("weather", {"city": "Rom"}), ("now", {}))


@pytest.mark.parametrize("parallel", [True, False])
def test_required_tool_calls(served, parallel):
    client, names = served.client(), set()
    payload = {"model": served.service.model, **PAYLOAD, "tool_choice": "required", "parallel_tool_calls": parallel}
    ended = 0
    for seed in range(4):
        (choice,) = client.chat.completions.create(**payload, seed=seed).choices
        if choice.finish_reason == "length" and parallel:
            # A random model may call without end.
            continue
        ended, calls = ended + 1, choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        assert len({call.id for call in calls}) == len(calls) and (parallel or len(calls) == 1)
        assert all(call.type == "function" and valid(call.function) for call in calls)
        names |= {call.function.name for call in calls}
        streamed, reasons = [], []
        for chunk in client.chat.completions.create(**payload, seed=seed, stream=True):
            for piece in chunk.choices[0].delta.tool_calls or ():
                if piece.id is not None:
                    assert piece.index == len(streamed)
                    streamed.append([piece.function.name, ""])
                streamed[piece.index][1] += piece.function.arguments
            reasons.append(chunk.choices[0].finish_reason)
        assert streamed == [[call.function.name, call.function.arguments] for call in calls]
        assert reasons[-1] == "tool_calls"
    assert ended >= 2 and names == {"weather", "now"}


def test_a_named_tool(served):
    payload = {**PAYLOAD, "tool_choice": NAMED}
    (choice,) = served.post("/v1/chat/completions", json=payload).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    # As in OpenAI's and vLLM's APIs for a named tool.
    assert choice["finish_reason"] == "stop" and choice["message"]["content"] is None
    assert valid(call["function"]) and call["function"]["name"] == "weather"
    chunks = served.client().chat.completions.create(model=served.service.model, **payload, stream=True)
    pieces = [piece for chunk in chunks for piece in chunk.choices[0].delta.tool_calls or ()]
    assert pieces[0].function.name == "weather" and all(piece.function.name is None for piece in pieces[1:])
    assert len({piece.id for piece in pieces if piece.id}) == 1 and len(pieces) > 2
    assert json.loads("".join(piece.function.arguments for piece in pieces))["city"] in ("Köln", "Rom")


@pytest.mark.parametrize("most", [1, 5, 30])
def test_a_truncated_call_has_finish_reason_length(served, most):
    payload = {**PAYLOAD, "tool_choice": "required", "max_tokens": most}
    (choice,) = served.post("/v1/chat/completions", json=payload).json()["choices"]
    assert choice["finish_reason"] == "length"


def test_a_call_that_is_cut_off_has_finish_reason_length(harmony_server):
    """In the message, but not complete: a client must not make it."""
    script = harmony_server.answers(CALL)
    body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS}
    for most, expected in ((len(script) - 4, "length"), (len(script) + 1, "tool_calls")):
        answer = harmony_server.served.post("/v1/chat/completions", json=body | {"max_tokens": most})
        (choice,) = answer.json()["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "weather" and choice["finish_reason"] == expected
        assert (call["function"]["arguments"] == ARGUMENTS) == (expected == "tool_calls")


@pytest.mark.parametrize(("changes", "param"), [
    ({"tool_choice": "required", "tools": []}, "tool_choice"), ({"tool_choice": "always"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
    ({"tool_choice": NAMED, "structured_outputs": {"regex": "a"}}, "tool_choice"),
    ({"tool_choice": NAMED, "tools": [{"type": "function", "function": {
        "name": "weather", "parameters": {"type": "array"}}}]}, "tools"),
    ({"tool_choice": "required", "tools": [{"type": "function", "function": {
        "name": "f", "parameters": {"$defs": 5}}}]}, "tools"),
    ({"tool_choice": "required", "tools": [*TOOLS, {"type": "function", "function": {
        "name": "f", "parameters": {"$defs": {"City": {"type": "null"}}}}}]}, "tools"),
], ids=str)  # fmt: skip
def test_rejects_invalid_forced_calls(changes, param):
    with pytest.raises(ApiError) as refused:
        ChatRequest.read({**PAYLOAD, **changes}).grammars()
    assert refused.value.status == 400 and refused.value.param == param


TEXT = st.text(alphabet='ab"\\{}[],: \nü', max_size=6)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(st.tuples(st.sampled_from(["f", "g.h-1"]), st.dictionaries(st.text(max_size=3), JSON, max_size=3)))


@given(calls=CALLS, size=st.integers(1, 9), indent=st.none() | st.integers(0, 2))
def test_calls_are_parsed_in_pieces_of_any_size(calls, size, indent):
    text = json.dumps([{"name": name, "parameters": parameters} for name, parameters in calls], indent=indent)
    reader, whole = CallsReader(), []
    for at in range(0, len(text), size):
        for piece in reader.read(text[at : at + size]):
            if "id" in piece:
                assert piece["index"] == len(whole)
                whole.append([piece["function"]["name"], ""])
            whole[piece["index"]][1] += piece["function"]["arguments"]
    assert [(name, json.loads(arguments)) for name, arguments in whole] == calls and reader.calls == len(calls)
