"""The Responses API: every object by the types of the package openai, streams that add up to the whole response."""

import json

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import ResponseStreamEvent

from mlaforge.engine.config import EngineConfig
from mlaforge.engine.engine import Engine
from mlaforge.engine.request.output import Completion
from mlaforge.engine.sampling.logprobs import Logprobs
from mlaforge.serving.pieces import Pieces
from mlaforge.serving.response_output import ResponseOutput
from mlaforge.serving.token_text import Offsets
from support.responses import (
    ANALYSIS,
    ARGUMENTS,
    CALL,
    CALLING,
    FINAL,
    THOUGHT,
    WEATHER,
    added_up,
    events_of,
    parsed,
    texts,
    without_ids,
)
from support.scripted_engine import ScriptedEngine
from support.serving import serving

# Responses and streams


@pytest.mark.parametrize(("text", "output"), [
    (FINAL, [("message", "It is 4 °C 🙂.")]),
    (ANALYSIS + FINAL, [("reasoning", THOUGHT), ("message", "It is 4 °C 🙂.")]),
    (CALLING, [("reasoning", THOUGHT), ("message", "Let me look."), ("function_call", ARGUMENTS)]),
    (
        CALLING.replace(CALL, ANALYSIS + CALL),
        [
            ("reasoning", THOUGHT), ("message", "Let me look."), ("reasoning", f"\n\n{THOUGHT}"),
            ("function_call", ARGUMENTS),
        ],
    ),
    ("<|channel|>final<|message|><|return|>", [("message", "")]),
], ids=["answer", "reasoning", "call", "alternating", "nothing"])  # fmt: skip
@pytest.mark.parametrize("options", [{}, {"include": ["reasoning.encrypted_content"], "top_logprobs": 2}], ids=str)
def test_the_stream_adds_up_to_the_response(harmony_server, text, output, options):
    harmony_server.answers(text)
    body = {"input": "Weather?", "tools": [WEATHER], "instructions": "Be brief.", "metadata": {"a": "b"}, **options}
    whole = harmony_server.post(**body)
    assert texts(whole["output"]) == output and whole["status"] == "completed"
    assert whole["tools"] == [WEATHER] and whole["instructions"] == "Be brief." and whole["metadata"] == {"a": "b"}
    reasoning = [item for item in whole["output"] if item["type"] == "reasoning"]
    assert (whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0) is bool(reasoning)
    assert all(("encrypted_content" in item) is bool(options) for item in reasoning)
    events = events_of(harmony_server.served.post("/v1/responses", json={**body, "stream": True}))
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    assert added_up(events) == events[-1]["response"]["output"] and events[-1]["type"] == "response.completed"
    with harmony_server.served.client().responses.stream(model="scripted", **body) as stream:
        final = stream.get_final_response()
    assert without_ids(json.loads(final.model_dump_json(exclude_unset=True, by_alias=True)))["usage"] == whole["usage"]
    assert final.output_text == "".join(text for kind, text in output if kind == "message")


def test_log_probabilities_are_those_of_the_message(harmony_server):
    harmony_server.answers(ANALYSIS + FINAL)
    whole = harmony_server.post(input="x", include=["message.output_text.logprobs"], top_logprobs=1)
    (part,) = whole["output"][1]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in part["logprobs"]).decode() == f"{part['text']}<|return|>"
    assert all(len(entry["top_logprobs"]) == 1 for entry in part["logprobs"])


@pytest.mark.parametrize("cut", [2, 5, 14, 30])
def test_a_limit_of_tokens_makes_the_response_incomplete(harmony_server, cut):
    harmony_server.answers(CALLING)
    body = {"input": "x", "tools": [WEATHER], "max_output_tokens": cut}
    whole = harmony_server.post(**body)
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in whole["output"]][-1:] in (["incomplete"], [])
    events = events_of(harmony_server.served.post("/v1/responses", json={**body, "stream": True}))
    assert events[-1]["type"] == "response.incomplete"
    assert without_ids(added_up(events)) == without_ids(whole["output"])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["content", "reasoning_content", "call", ""]), st.text(max_size=3))))
def test_events_are_the_same_however_deltas_come(pieces):
    """One delta after another, or the events of all of them at once."""

    def delta(kind, text):
        if kind == "call":
            return {"tool_calls": [{"index": 0, "id": "call_1", "function": {"name": "f", "arguments": text}}]}
        return {kind: text} if kind else {}

    outputs = []
    for drain in (True, False):
        output, events = ResponseOutput({}), []
        for piece in pieces:
            output.add(delta(*piece), [])
            if drain:
                events, output.events = events + output.events, []
        output.finish("completed")
        numbered = [{"sequence_number": 0, **event} for event in [*events, *output.events]]
        for event in numbered:
            parsed(event, ResponseStreamEvent)
        assert added_up([{"type": "response.created"}, {"type": "response.in_progress"}, *numbered, {}])
        outputs.append(without_ids(output.as_list()))
    assert outputs[0] == outputs[1]


@given(st.lists(st.integers(1, 9), min_size=1))
def test_pieces_have_one_token_however_many_come_at_once(served, sizes):
    tokenizer, count = served.engine.tokenizer, sum(sizes)
    ids = (tokenizer("the quick brown fox, jumps. ")["input_ids"] * count)[:count]

    def split(sizes):
        pieces, start = Pieces(Offsets(served.service.tokens, True)), 0
        for size in sizes:
            part, start = ids[start : start + size], start + size
            end = "stop" if start == count else None
            yield from pieces.split(Completion(0, part, tokenizer.decode(part), [Logprobs(t, -1.0) for t in part], end))

    pieces = list(split(sizes))
    assert pieces == list(split([count])) == list(split([1] * count))
    assert [(piece.token_ids, piece.text) for piece in pieces] == [
        ([token], tokenizer.decode([token])) for token in ids
    ]
    assert [piece.finish_reason for piece in pieces] == [None] * (count - 1) + ["stop"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failure_is_the_last_event(served):
    engine = ScriptedEngine(served.engine.tokenizer, delay=0.02)
    engine.fail_after = 20
    with serving(engine) as served:
        events = events_of(served.post("/v1/responses", json={"input": "x", "stream": True}))
        assert [event["type"] for event in events].index("response.failed") == len(events) - 1
        response = events[-1]["response"]
        assert response["status"] == "failed" and response["error"]["code"] == "server_error"
        assert [item["status"] for item in response["output"]] == ["incomplete"]
        assert served.http.get(f"/v1/responses/{response['id']}").status_code == 404


# Options


class Sum(pydantic.BaseModel):
    a: int


def test_structured_output_with_the_real_engine(tiny_models):
    pytest.importorskip("llguidance")
    config = EngineConfig(device="cpu", dtype="float32", cache_bytes=2**20)
    with serving(Engine(tiny_models["llama"], config)) as served:
        client, options = served.client(), {"model": served.service.model, "input": "x", "max_output_tokens": 60}
        answer = client.responses.parse(text_format=Sum, **options)
        if answer.status == "completed":
            assert isinstance(answer.output_parsed, Sum)
        assert answer.text.format.name == "Sum" and answer.output_text.startswith("{")
        call = client.responses.create(tools=[WEATHER], tool_choice={"type": "function", "name": "weather"}, **options)
        assert (call.output[0].type, call.output[0].name) == ("function_call", "weather")
        answer = client.responses.create(tools=[WEATHER], tool_choice="required", **options)
        assert all(item.type == "function_call" and item.name == "weather" for item in answer.output)
        answer = client.responses.create(text={"format": {"type": "json_object"}}, **options)
        assert answer.output_text.startswith("{")
        served.settles()


@pytest.mark.parametrize(("body", "param"), [
    ({"background": True}, "background"), ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"), ({"messages": []}, "messages"), ({"max_tokens": 5}, "max_tokens"),
    ({"n": 2}, "n"), ({"moderation": {}}, "moderation"), ({"response_format": {"type": "text"}}, "response_format"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 1000}, "max_output_tokens"), ({"input": []}, "input"), ({"input": 5}, "input"),
    ({"input": [{"type": "web_search_call", "id": "w"}]}, "input.0"), ({"input": ["x"]}, "input.0"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0.content.0"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "input.0.content.0"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name"),
    ({"tool_choice": "required"}, "tool_choice"), ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"reasoning": {"effort": "lots"}}, "reasoning.effort"),
    ({"metadata": {"a": 1}}, "metadata.a"), ({"temperature": 3}, "temperature"), ({"top_logprobs": 21}, "top_logprobs"),
    ({"truncation": "middle"}, "truncation"),
    ({"regex": "a", "structured_outputs": {"regex": "b"}}, "structured_outputs"),
], ids=str)  # fmt: skip
def test_refused_by_name(served, body, param):
    served.refused(served.post("/v1/responses", json={"input": "x", **body}), 400, param)


def test_accepted_and_repeated(served):
    body = {
        "input": "x", "max_output_tokens": 2, "background": False, "user": "u", "safety_identifier": "s",
        "max_tool_calls": 3, "prompt_cache_key": "k", "service_tier": "auto", "metadata": {"k": "v"},
        "temperature": 0.5, "top_p": 0.9, "parallel_tool_calls": False, "text": {"verbosity": "low"},
        "include": ["file_search_call.results"], "reasoning": {"effort": "minimal", "summary": "auto"},
        "truncation": "auto", "top_k": 5, "seed": 1,
        "tools": [WEATHER],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]},
    }  # fmt: skip
    response = parsed(served.post("/v1/responses", json=body).json())
    assert response["reasoning"] == {"effort": "minimal", "summary": None}
    assert response["text"] == {"format": {"type": "text"}} and response["service_tier"] == "default"
    names = {"user", "safety_identifier", "prompt_cache_key", "max_tool_calls", "temperature", "top_p", "tool_choice"}
    assert all(response[name] == body[name] for name in names)


def test_tools_of_a_platform_are_dropped_with_a_warning(served):
    """As Codex sends them: functions beside tools that only OpenAI has."""
    tools = [
        WEATHER,
        {"type": "web_search"},
        {"type": "custom", "name": "apply_patch", "format": {}},
        {"type": "local_shell"},
    ]
    body = {"input": "x", "max_output_tokens": 2, "tools": tools}
    answer = served.post("/v1/responses", json=body)
    assert parsed(answer.json())["tools"] == [WEATHER]
    assert all(kind in answer.headers["x-mlaforge-warning"] for kind in ("web_search", "custom", "local_shell"))
    with serving(served.engine, strict_fields=True) as served:
        assert "'web_search'" in served.refused(served.post("/v1/responses", json=body), 400, "tools")
        first = served.post("/v1/responses", json={"input": "x", "max_output_tokens": 2, "top_logprobs": 1}).json()
        again = {"input": [{"role": "user", "content": "x"}, *first["output"]], "max_output_tokens": 2}
        assert served.post("/v1/responses", json=again).status_code == 200


def test_functions_of_a_namespace(harmony_server):
    """A call names its namespace; sent back, it is the same call to the model."""
    tools = [{"type": "namespace", "name": "mcp", "description": "Tools.", "tools": [WEATHER, {"type": "custom"}]}]
    harmony_server.answers(CALLING.replace("functions.weather", "functions.mcp__weather"))
    whole = harmony_server.post(input="Weather?", tools=tools)
    call = whole["output"][-1]
    assert (call["type"], call["name"], call["namespace"]) == ("function_call", "weather", "mcp")
    assert whole["tools"] == [{**tools[0], "tools": [WEATHER]}]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "4 °C"}
    harmony_server.post(input=[result], previous_response_id=whole["id"], tools=tools)
    assert "type mcp__weather = " in harmony_server.prompts[-1]
    assert f"to=functions.mcp__weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>" in harmony_server.prompts[-1]
