"""Conversations of Anthropic's API: blocks, requests, and what the events of a stream add up to."""

import json

from mlaforge.serving.anthropic_request import MessagesRequest


def events_of(body):
    """Return the events of a stream, whose names must be their types."""
    events = []
    for event in body.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def message_of(events):
    """Return the message that the events add up to, in the manner of Anthropic's clients; check their order."""
    first, ping, *middle, delta, last = events
    assert (first["type"], ping["type"], last["type"]) == ("message_start", "ping", "message_stop")
    message, growing = first["message"], None
    assert message["content"] == [] and message["stop_reason"] is None
    for event in middle:
        if event["type"] == "content_block_start":
            assert growing is None and event["index"] == len(message["content"])
            message["content"].append(growing := event["content_block"])
            arguments = ""
            continue
        assert growing is not None and event["index"] == len(message["content"]) - 1
        if event["type"] == "content_block_stop":
            if growing["type"] == "tool_use":
                growing["input"] = json.loads(arguments or "{}")
            growing = None
        elif event["delta"]["type"] == "input_json_delta":
            arguments += event["delta"]["partial_json"]
        else:
            (name,) = event["delta"].keys() - {"type"}
            assert event["delta"]["type"] == f"{name}_delta"
            growing[name] += event["delta"][name]
    assert growing is None and delta["type"] == "message_delta"
    return {**message, **delta["delta"], "usage": delta["usage"]}


def ask(served, payload):
    """Return the full response, which must equal the streamed one but for ids and what the prefix cache had."""
    full = served.post("/v1/messages", json=payload)
    assert full.status_code == 200, full.text
    stream = served.post("/v1/messages?beta=true", json=payload | {"stream": True})
    assert stream.headers["content-type"].startswith("text/event-stream")
    message, streamed = full.json(), message_of(events_of(stream.text))
    for answer in (message, streamed):
        assert answer.pop("id").startswith("msg_") and answer["type"] == "message" and answer["role"] == "assistant"
        for block in answer["content"]:
            assert block["type"] != "tool_use" or block.pop("id").startswith("toolu_")
        answer["usage"]["input_tokens"] += answer["usage"].pop("cache_read_input_tokens")
    assert message == streamed
    return message


def refused(answer, status, kind):
    """Assert an error in Anthropic's shape and return its message."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"type", "error"} and body["type"] == "error"
    assert set(body["error"]) - {"details"} == {"type", "message"} and body["error"]["type"] == kind, body
    assert "Traceback" not in answer.text
    return body["error"]["message"]


# Requests


def turns(*messages, **fields):
    """Return the chat messages of a conversation, with content as text."""
    request = MessagesRequest.read({"messages": [*messages], **fields})
    chat = request.chat_messages().messages
    return [
        {**m, "content": "|".join(p["text"] for p in m["content"]) if isinstance(m["content"], list) else m["content"]}
        for m in chat
    ]


def user(*blocks):
    return {"role": "user", "content": [{"type": "text", "text": b} if isinstance(b, str) else b for b in blocks]}


def assistant(*blocks):
    return {**user(*blocks), "role": "assistant"}
