"""Anthropic's /v1/messages: conversion of requests, content blocks, streams that equal the full response, errors."""

import itertools
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlaforge.engine.config import EngineConfig
from mlaforge.engine.engine import Engine
from mlaforge.engine.request import harmony
from mlaforge.engine.request.output import Completion, RequestOutput
from mlaforge.engine.request.text_format import TextFormat
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.serving.answer_parsers import CallsParser, ChannelParser, TextAnswerParser
from mlaforge.serving.anthropic_reply import ContentBlocks, MessagesReply
from mlaforge.serving.anthropic_request import MessagesRequest
from mlaforge.serving.replies import ChatForm, Prompt
from mlaforge.serving.wire import ApiError, dumps
from support.anthropic_messages import ask, assistant, events_of, message_of, refused, turns, user
from support.harmony_tokenizer import HarmonyTokenizer
from support.scripted_engine import ScriptedEngine
from support.serving import serving, until

HI = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "Now.", "input_schema": CITY}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Köln"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "4 °C"}
HEADER = "<|start|>assistant<|channel|>"
# Reasoning, a preamble, more reasoning, and a call.
ANSWER = (
    f"<|channel|>analysis<|message|>They want 漢🙂.<|end|>{HEADER}commentary<|message|>Let me look.<|end|>"
    f"{HEADER}analysis<|message|>A tool.<|end|>{HEADER}commentary to=functions.weather <|constrain|>json<|message|>"
    '{"city": "Köln"}<|call|>'
)
FINAL = f"<|channel|>analysis<|message|>Easy.<|end|>{HEADER}final<|message|>It is 4 °C 🙂, I think.<|return|>"


def tokens(encoding, text):
    return encoding.encode(text, allowed_special="all")


def test_conversations():
    thinking = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
    call = {"id": "toolu_1", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
    cached = {"type": "text", "text": "B", "cache_control": {"type": "ephemeral"}}
    failed = {**RESULT, "is_error": True, "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    redacted = {"type": "redacted_thinking", "data": "x"}
    assert turns(user("Hi"), system="S") == [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}]
    assert turns(user("Hi"), system=[{"type": "text", "text": "A"}, cached])[0]["content"] == "A|B"
    assert turns(user("Hi"), assistant(redacted, thinking, "Look.", CALL), user(RESULT, "And?")) == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Look.", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "4 °C"},
        {"role": "user", "content": "And?"},
    ]
    # Consecutive turns of a role are one.
    assert turns(user("a"), user("b", "c"), assistant("d"), assistant("e")) == [
        {"role": "user", "content": "a|b|c"}, {"role": "assistant", "content": "d|e"},
    ]  # fmt: skip
    assert turns(assistant(CALL), user(failed))[1]["content"] == "Error: a\nb"
    assert turns(assistant(CALL), user({**RESULT, "content": None}))[1]["content"] == ""


def test_system_messages_stay_in_their_place():
    """They would not be rendered, or would change the beginning of the prompt and so miss the prefix cache."""
    late = {"role": "system", "content": "9 tokens left"}
    assert turns({"role": "system", "content": "S"}, user("Hi"), assistant(CALL), user(RESULT), late) == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": turns(assistant(CALL))[0]["tool_calls"]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "4 °C"},
        {"role": "user", "content": "9 tokens left"},
    ]
    # Claude Code's first line differs in every request.
    billing = "x-anthropic-billing-header: cc_version=2.1; cch=fa690;"
    for system in ([{"type": "text", "text": text} for text in (billing, "S")], f"{billing}\nS"):
        assert turns(user("Hi"), system=system)[0] == {"role": "system", "content": "S"}


SCHEMA = {"type": "json_schema", "schema": CITY}
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(("fields", "expected"), [
    ({}, {"stop": []}),
    ({"temperature": 0.5, "top_p": 0.9, "top_k": 3}, {"temperature": 0.5, "top_p": 0.9, "top_k": 3}),
    ({"stop_sequences": ["a"]}, {"stop": ["a"]}),
    ({"tool_choice": {"type": "auto"}}, {"tool_choice": "auto", "parallel_tool_calls": True}),
    ({"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
     {"tool_choice": "required", "parallel_tool_calls": False}),
    ({"tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
    ({"tool_choice": {"type": "tool", "name": "weather"}}, {"tool_choice": NAMED}),
    ({"thinking": {"type": "disabled"}, "output_config": {"effort": "max"}}, {"reasoning_effort": "none"}),
    ({"thinking": {"type": "enabled", "budget_tokens": 4000}}, {"reasoning_effort": "low"}),
    ({"thinking": {"type": "enabled", "budget_tokens": 10000}}, {"reasoning_effort": "medium"}),
    ({"thinking": {"type": "enabled", "budget_tokens": 31999}}, {"reasoning_effort": "high"}),
    ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, {"reasoning_effort": "xhigh"}),
    ({"output_config": {"format": SCHEMA}},
     {"response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": CITY}}}),
    ({"output_format": SCHEMA},
     {"response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": CITY}}}),
    ({"messages": [user("a"), assistant("b")]}, {"add_generation_prompt": False, "continue_final_message": True}),
    ({"messages": [user("a"), assistant("b", CALL)]}, {"stop": []}),
])  # fmt: skip
def test_fields(fields, expected):
    request = MessagesRequest.read({**HI, **fields})
    payload = request.chat_payload(request.chat_messages().messages)
    assert {name: payload[name] for name in expected} == expected
    assert "reasoning_effort" in expected or "reasoning_effort" not in payload
    assert ("continue_final_message" in payload) == ("continue_final_message" in expected)
    assert "tools" not in payload and "max_tokens" not in payload
    adaptive = MessagesRequest.read({**HI, "thinking": {"type": "adaptive"}})
    assert "reasoning_effort" not in adaptive.chat_payload([])


def test_what_has_no_effect_is_accepted(served):
    """Fields that clients send; tools of Anthropic's servers and unknown fields get a warning."""
    ignored = {
        "metadata": {"user_id": "u"}, "service_tier": "auto", "container": None, "context_management": {"edits": []},
        "cache_control": {"type": "ephemeral"},
    }  # fmt: skip
    tools = [{**WEATHER, "cache_control": {"type": "ephemeral"}}, {"type": "web_search_20250305", "name": "web_search"}]
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "x"}
    answer = served.post("/v1/messages", json={**HI, **ignored}, headers=headers)
    assert answer.status_code == 200 and "x-mlaforge-warning" not in answer.headers
    answer = served.post("/v1/messages", json={**HI, "tools": tools, "stop_sequence": 1})
    assert answer.headers["x-mlaforge-warning"].startswith(
        "unknown field 'stop_sequence'; did you mean 'stop_sequences'?; "
        "tools: web_search_20250305 runs on Anthropic's servers, and is not offered"
    )
    assert MessagesRequest.read({**HI, "tools": tools}).chat_payload([])["tools"] == [
        {"type": "function", "function": {"name": "weather", "description": "Now.", "parameters": CITY, "strict": None}}
    ]


def test_strict_fields(tokenizer):
    """They refuse what is unknown, not what is documented and has no effect."""
    cached = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    with serving(ScriptedEngine(tokenizer), strict_fields=True) as served:
        payload = {**HI, "messages": [user(cached)], "metadata": {"user_id": "u"}}
        assert served.post("/v1/messages", json=payload).status_code == 200
        message = refused(served.post("/v1/messages", json={**HI, "top_x": 1}), 400, "invalid_request_error")
        assert message == "top_x: Extra inputs are not permitted"


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(("fields", "message"), [
    ({"messages": []}, "messages: List should have at least 1 item after validation, not 0"),
    ({"messages": [user(IMAGE)]}, "messages.0.content.0: content of type 'image' is not supported: this model reads"),
    ({"messages": [user({"type": "document"})]}, "messages.0.content.0: content of type 'document' is not supported"),
    ({"messages": [assistant(CALL), user({**RESULT, "content": [IMAGE]})]},
     "messages.1.content.0.content.0: content of type 'image' is not supported"),
    ({"messages": [user(RESULT)]},
     "messages.0.content.0.tool_use_id: no earlier message has a tool_use block with this id"),
    ({"messages": [user(CALL)]}, "messages.0.content.0: tool_use belongs to a message of role assistant"),
    ({"messages": [user({"type": "text"})]}, "messages.0.content.0.text: Field required"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role: "),
    ({"max_tokens": 0}, "max_tokens: "),
    ({"tools": [{"input_schema": {}}]}, "tools.0.name: Field required"),
    ({"tool_choice": {"type": "any"}}, "tool_choice needs at least one in tools"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice: type tool needs the name of the tool"),
    ({"tool_choice": {"type": "tool", "name": "x"}, "tools": [WEATHER]}, "tool_choice needs one named 'x' in tools"),
    ({"temperature": 3}, "temperature: "),
    ({"system": [IMAGE]}, "system.0."),
])  # fmt: skip
def test_errors_name_the_field(served, fields, message):
    answer = served.post("/v1/messages", json={**HI, **fields})
    assert refused(answer, 400, "invalid_request_error").startswith(message), answer.text


def test_errors_of_templates_have_the_clients_path(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{% for m in messages %}{% if m.role != 'tool' %}{{ m.content }}"
                        "{% for c in m.tool_calls or [] %}{{ c.id }}{% endfor %}{% endif %}{% endfor %}")  # fmt: skip
    conversation = [user("a"), user("b"), assistant(CALL), user(RESULT)]
    with serving(ScriptedEngine(tokenizer)) as served:
        answer = served.post("/v1/messages", json={"messages": conversation, "system": "S", "max_tokens": 5})
        assert refused(answer, 400, "invalid_request_error").startswith("messages.3: the model's chat template leaves")


def test_other_errors(served, tokenizer):
    answer = served.post("/v1/messages", json={**HI, "model": "claude-sonnet-4-5"})
    expected = "the model 'claude-sonnet-4-5' does not exist here; use 'scripted'"
    assert refused(answer, 404, "not_found_error") == expected
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        refused(served.http.get(path), 405, "invalid_request_error")
        long = served.post(path, json={"messages": [user("x " * 600)], "max_tokens": 5})
        # Claude Code compacts the conversation at these words.
        assert refused(long, 400, "invalid_request_error").startswith("prompt is too long: ")
    refused(served.http.get("/v1/messages/batches"), 404, "not_found_error")
    # The client's tool runner sends the whole conversation after this code, and only what is new otherwise.
    threaded = served.post("/v1/messages", json={**HI, "thread": {"type": "create"}})
    assert refused(threaded, 400, "invalid_request_error").startswith("thread is not supported")
    assert threaded.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}
    assert "error" in served.http.get("/v1/messagesx").json() and "type" not in served.http.get("/v1/messagesx").json()
    with serving(ScriptedEngine(tokenizer), max_body=100) as small:
        refused(small.post("/v1/messages", json={**HI, "system": "x" * 100}), 413, "request_too_large")


def test_api_key(tokenizer):
    with serving(ScriptedEngine(tokenizer), api_key="sécret") as served:
        for headers in ({}, {b"x-api-key": b"wrong"}, {b"x-api-key": b""}, {b"authorization": b"Bearer wrong"}):
            refused(served.post("/v1/messages", json=HI, headers=headers), 401, "authentication_error")
        key = "sécret".encode()
        for headers in ({b"x-api-key": key}, {b"authorization": b"Bearer " + key, b"x-api-key": b"other"}):
            assert served.post("/v1/messages", json=HI, headers=headers).status_code == 200


# Responses


def test_text(served):
    chat = served.post("/v1/chat/completions", json=HI).json()
    text, prompt_tokens = chat["choices"][0]["message"]["content"], chat["usage"]["prompt_tokens"]
    assert ask(served, HI) == {
        "type": "message", "role": "assistant", "model": "scripted", "content": [{"type": "text", "text": text}],
        "stop_reason": "max_tokens", "stop_sequence": None,
        "usage": {"input_tokens": prompt_tokens, "cache_creation_input_tokens": 0, "output_tokens": 20},
    }  # fmt: skip
    stopped = ask(served, {**HI, "max_tokens": 100, "stop_sequences": ["zzz", "fox"]})
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "fox")
    assert "fox" not in stopped["content"][0]["text"]
    # Clients ask for more tokens than the context has.
    full = ask(served, {**HI, "max_tokens": 32_000})
    assert full["stop_reason"] == "model_context_window_exceeded"
    assert full["usage"]["input_tokens"] + full["usage"]["output_tokens"] == served.engine.max_model_len
    count = served.post("/v1/messages/count_tokens", json={"messages": HI["messages"]})
    assert count.json() == {"input_tokens": prompt_tokens}
    line = 'mlaforge_requests_total{endpoint="count_tokens",status="200"} 1.0'
    until(lambda: line in served.http.get("/metrics").text)


def test_harmony(encoding):
    engine = ScriptedEngine(HarmonyTokenizer(encoding), script=tokens(encoding, ANSWER))
    payload = {"messages": [user("Weather?")], "max_tokens": 200, "tools": [WEATHER]}
    prompts, add = [], engine.add
    engine.add = lambda request_id, ids, params: (prompts.append(ids), add(request_id, ids, params))
    with serving(engine) as served:
        answer = served.post("/v1/messages", json=payload).json()
        call = answer["content"][-1]
        assert answer["content"] == [
            {"type": "thinking", "thinking": "They want 漢🙂.", "signature": "unsigned"},
            {"type": "text", "text": "Let me look."},
            {"type": "thinking", "thinking": "A tool.", "signature": "unsigned"},
            {**CALL, "id": call["id"]},
        ]
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)
        quiet = ask(served, {**payload, "thinking": {"type": "disabled"}})
        assert [block["type"] for block in quiet["content"]] == ["text", "tool_use"]
        # The answer goes back unchanged, with the tool's result.
        engine.script = tokens(encoding, FINAL)
        loop = [*payload["messages"], {"role": "assistant", "content": answer["content"]}]
        loop.append(user({**RESULT, "tool_use_id": call["id"]}))
        final = ask(served, {**payload, "messages": loop})
        assert [block.get("text") or block["thinking"] for block in final["content"]] == [
            "Easy.", "It is 4 °C 🙂, I think.",
        ]  # fmt: skip
        assert final["stop_reason"] == "end_turn"
        prompt = encoding.decode(prompts[-1])
        assert (
            '<|constrain|>json<|message|>{"city": "Köln"}<|call|>' in prompt and "They want 漢🙂.\n\nA tool." in prompt
        )
        assert "<|start|>functions.weather<|channel|>commentary to=assistant<|message|>4 °C<|end|>" in prompt
        stopped = ask(served, {**payload, "stop_sequences": [", I"]})
        assert (stopped["content"][-1]["text"], stopped["stop_sequence"]) == ("It is 4 °C 🙂", ", I")
        served.settles()


def reply(parser, stream=False):
    form = ChatForm("m", [Prompt([1, 2, 3])], SamplingParams(), None, parser=parser)
    return MessagesReply(form, stream, ContentBlocks(), "max_tokens")


def outputs(ids, text, cuts, finish):
    """Return an answer's outputs: its tokens and text cut at these fractions."""
    cuts = [0.0, *sorted(cuts), 1.0]
    for i, (start, end) in enumerate(itertools.pairwise(cuts)):
        part, piece = (x[int(start * len(x)) : int(end * len(x))] for x in (ids, text))
        last = i == len(cuts) - 2
        new = Completion(0, part, piece, finish_reason=finish if last else None)
        yield RequestOutput("r", [1, 2, 3], [new], last, num_cached_tokens=2)


CALLS = '[{"name": "weather", "parameters": {"city": "Köln"}},\n {"name": "now", "parameters": {}}]'


HERMES = (
    "<think>\nThey want 漢🙂.\n</think>\n\nLet me look.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>\nAnd now?'
)


@pytest.mark.parametrize("kind", ["harmony", "calls", "text"])
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_every_split_of_a_stream_adds_up_to_the_full_response(encoding, kind, data):
    if kind == "harmony":
        tools = [{"type": "function", "function": {"name": "weather"}}]
        whole, text = tokens(encoding, data.draw(st.sampled_from([ANSWER, FINAL]))), ""

        def parser():
            return ChannelParser(harmony.Harmony(encoding), tools, SamplingParams())
    elif kind == "calls":
        whole, text, parser = list(range(40)), CALLS, CallsParser
    else:
        whole, text, text_format = list(range(data.draw(st.integers(1, 60)))), HERMES, TextFormat("hermes", "think")

        def parser():
            return TextAnswerParser(text_format.parser(["weather"], ""), True, True, None)

    cuts = data.draw(st.lists(st.floats(0, 1), max_size=8))
    finish = data.draw(st.sampled_from(["stop", "length"]))
    (output,) = outputs(whole, text, [], finish)
    full = reply(parser).full_response([output])
    streaming = reply(parser, stream=True)
    body = streaming.start()
    body += b"".join(streaming.events(output, dumps) for output in outputs(whole, text, cuts, finish))
    message = message_of(events_of((body + streaming.end()).decode()))
    ids = [block.pop("id") for m in (full, message) for block in m["content"] if block["type"] == "tool_use"]
    assert len(set(ids)) == len(ids)
    assert {**message, "id": full["id"]} == full
    assert full["usage"]["cache_read_input_tokens"] == 2 and full["usage"]["input_tokens"] == 1
    calls = any(block["type"] == "tool_use" for block in full["content"])
    assert full["stop_reason"] == ("max_tokens" if finish == "length" else "tool_use" if calls else "end_turn")
    if kind == "calls":
        assert [block["input"] for block in full["content"]] == [{"city": "Köln"}, {}]
    if kind == "text":
        expected = ["They want 漢🙂.", "Let me look.", {"city": "Köln"}, "And now?"]
        names = {"thinking": "thinking", "text": "text", "tool_use": "input"}
        assert [block[names[block["type"]]] for block in full["content"]] == expected


def test_a_call_that_is_cut_off():
    answer = reply(CallsParser)
    cut = CALLS[: CALLS.index("öln")]
    (output,) = outputs(list(range(9)), cut, [], "length")
    full = answer.full_response([output])
    assert full["content"][0]["input"] == {"arguments": '{"city": "K'} and full["stop_reason"] == "max_tokens"


def test_a_stream_that_fails():
    failed = reply(CallsParser, stream=True).error(ApiError(503, "the engine failed"))
    assert events_of(failed.decode()) == [
        {"type": "error", "error": {"type": "overloaded_error", "message": "the engine failed"}}
    ]


def test_forced_calls_and_schemas(tiny_models):
    pytest.importorskip("llguidance")
    choice = {"type": "object", "properties": {"city": {"enum": ["Köln", "Rom"]}}, "required": ["city"]}
    payload = {**HI, "max_tokens": 400, "temperature": 0, "tools": [{**WEATHER, "input_schema": choice}]}
    payload["messages"] = [*HI["messages"], assistant(CALL), user(RESULT)]
    with serving(Engine(tiny_models["llama"], EngineConfig(device="cpu", dtype="float32"))) as served:
        for tool_choice in (
            {"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "weather"},
        ):  # fmt: skip
            answer = ask(served, {**payload, "tool_choice": tool_choice})
            (block,) = answer["content"]
            assert block["name"] == "weather" and block["input"]["city"] in ("Köln", "Rom")
            assert answer["stop_reason"] == "tool_use"
        schema = {"type": "json_schema", "schema": {**choice, "additionalProperties": False}}
        answer = ask(served, {**HI, "max_tokens": 200, "temperature": 0, "output_config": {"format": schema}})
        assert json.loads(answer["content"][0]["text"])["city"] in ("Köln", "Rom")
        assert answer["stop_reason"] == "end_turn"
        served.settles()


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.sampled_from(["\ud800"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["type", "role", "content", "text", "name", "schema"]), inner, max_size=3),
        st.sampled_from([user("x"), CALL, RESULT, WEATHER, IMAGE, {"type": "text"}, {"type": "any"}]),
    ),
    max_leaves=8,
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(MessagesRequest.model_fields)), VALUES, min_size=1, max_size=3))
def test_arbitrary_requests_get_an_answer_or_an_error(served, fields):
    body = json.dumps({**HI, "model": "scripted", **fields}).encode()
    answer = served.post("/v1/messages", content=body, headers={"content-type": "application/json"})
    if answer.status_code != 200:
        kinds = {400: "invalid_request_error", 404: "not_found_error"}
        refused(answer, answer.status_code, kinds[answer.status_code])
