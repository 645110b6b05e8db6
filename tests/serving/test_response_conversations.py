"""The Responses API: conversations by its store and without, and truncation."""

import json
import re

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import ResponseItem

from mlaforge.serving.response_store import ResponseStore
from support.responses import ARGUMENTS, CALLING, FINAL, THOUGHT, WEATHER, parsed


def test_a_tool_loop_by_store_and_without(harmony_server):
    """previous_response_id, item references, and all items sent back give the same prompt, with the reasoning."""
    harmony_server.answers(CALLING)
    first = harmony_server.post(input="Weather?", tools=[WEATHER], include=["reasoning.encrypted_content"])
    call = first["output"][-1]
    harmony_server.answers(FINAL)
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "4 °C"}
    parts = {**result, "output": [{"type": "input_text", "text": "4 °C"}]}
    question = {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]}
    references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    encrypted = [
        {name: field for name, field in item.items() if item["type"] != "reasoning" or name != "content"}
        for item in first["output"]
    ]
    harmony_server.prompts.clear()
    for body in (
        {"input": [result], "previous_response_id": first["id"]},
        {"input": [question, *first["output"], parts], "store": False},
        {"input": [question, *references, result]},
        {"input": [question, *encrypted, result], "store": False},
    ):
        second = harmony_server.post(tools=[WEATHER], **body)
        assert second["output"][0]["content"][0]["text"] == "It is 4 °C 🙂."
    assert len(harmony_server.prompts) == 4 and len(set(harmony_server.prompts)) == 1
    prompt = harmony_server.prompts[0]
    for text in (f"analysis<|message|>{THOUGHT}", "commentary<|message|>Let me look.", f"{ARGUMENTS}<|call|>"):
        assert text in prompt
    assert prompt.endswith("4 °C<|end|><|start|>assistant")


def test_instructions_and_system_messages_are_one(harmony_server):
    harmony_server.answers(FINAL)
    harmony_server.prompts.clear()
    system = {"type": "message", "role": "developer", "content": "Speak German."}
    first = harmony_server.post(instructions="Be brief.", input=[system, {"role": "user", "content": "Hi"}])
    harmony_server.post(input="Now?", previous_response_id=first["id"], reasoning={"effort": "low", "summary": "auto"})
    assert "# Instructions\n\nBe brief.\n\nSpeak German." in harmony_server.prompts[0]
    # Instructions are not carried over, the messages are.
    assert (
        "# Instructions\n\nSpeak German." in harmony_server.prompts[1] and "Be brief" not in harmony_server.prompts[1]
    )
    assert "final<|message|>It is 4 °C 🙂.<|end|><|start|>user<|message|>Now?" in harmony_server.prompts[1]
    assert "Reasoning: low" in harmony_server.prompts[1]


def test_stored_responses(served):
    client = served.client()
    item = {"role": "user", "content": "Hello"}
    first = client.responses.create(
        model="scripted", input=[item, {"role": "user", "content": "you"}], max_output_tokens=4
    )
    second = client.responses.create(
        model="scripted", input="on", previous_response_id=first.id, max_output_tokens=4, stream=True
    )
    second = list(second)[-1].response
    assert second.previous_response_id == first.id
    assert client.responses.retrieve(second.id).model_dump() == second.model_dump()
    items = [item.model_dump() for item in client.responses.input_items.list(second.id, order="asc", limit=2)]
    assert [item["content"][0]["text"] for item in items] == ["Hello", "you", first.output_text, "on"]
    page = served.http.get(f"/v1/responses/{second.id}/input_items?limit=3").json()
    assert [item["id"] for item in page["data"]] == [item["id"] for item in items[:0:-1]] and page["has_more"]
    for item in page["data"]:
        parsed(item, ResponseItem)
    served.refused(served.http.get(f"/v1/responses/{second.id}/input_items?limit=0"), 400, "limit")
    served.refused(served.http.get(f"/v1/responses/{second.id}?stream=true"), 400, "stream")
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError, match=f"Response with id '{second.id}' not found"):
        client.responses.retrieve(second.id)
    unstored = client.responses.create(model="scripted", input="x", max_output_tokens=1, store=False)
    with pytest.raises(openai.BadRequestError, match="Previous response with id") as refused:
        client.responses.create(model="scripted", input="x", previous_response_id=unstored.id)
    assert (refused.value.param, refused.value.code) == ("previous_response_id", "previous_response_not_found")


@settings(deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 60))), max_responses=st.integers(1, 4),
    max_bytes=st.integers(100, 400),
)  # fmt: skip
def test_the_store_is_bounded(steps, max_responses, max_bytes):
    """It equals a list in order of use; length 0 stands for reading."""
    store, model = ResponseStore(max_responses, max_bytes), []
    for key, length in steps:
        name = f"r{key}"
        known = [entry for entry in model if entry[0] == name]
        if length and not known:
            response = {"id": name, "output": [{"id": f"i{key}", "text": "x" * length}]}
            store.put(response, b"[]")
            model.append((name, len(json.dumps(response, separators=(",", ":"))) + 2))
            while len(model) > max_responses or sum(size for _, size in model) > max_bytes:
                model.pop(0)
        elif known:
            assert store.get(name).output() == [store.item(f"i{key}")]
            model.remove(known[0])
            model.append(known[0])
        else:
            assert store.get(name) is None and store.item(f"i{key}") is None and not store.remove(name)
    assert len(store) == len(model) and store.size == sum(size for _, size in model)
    assert all(store.remove(name) for name, _ in model) and store.size == 0 and store.item("i0") is None


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "o" * 30}
LONG = [{"role": "user", "content": f"{i} {'x' * 60}"} for i in range(9)]
LONG = [*LONG[:3], CALL, OUTPUT, *LONG[3:]]


@pytest.mark.parametrize("limit", [1, 200, 330])
def test_truncation_drops_the_oldest_items(served, limit):
    """The longest remainder that fits; an output goes with its call, and system messages remain."""

    def answer(count, truncation="disabled"):
        rest = [item for item in LONG[count:] if item is not OUTPUT or count <= LONG.index(CALL)]
        items = [{"role": "system", "content": "s" * 40}, *rest]
        body = {"input": items, "truncation": truncation, "max_output_tokens": limit}
        return served.post("/v1/responses", json=body)

    assert answer(0).json()["error"]["code"] == "context_length_exceeded"
    truncated = answer(0, "auto")
    count = int(re.search(r"oldest (\d+) items", truncated.headers["x-mlaforge-warning"])[1])
    tokens = parsed(truncated.json())["usage"]["input_tokens"]
    assert tokens == answer(count).json()["usage"]["input_tokens"] <= 512 - limit
    assert answer(count - 1).status_code == 400


def test_the_last_item_and_its_call_remain(served):
    def answer(length):
        items = [{"role": "user", "content": "x" * 300}, CALL, {**OUTPUT, "output": "o" * length}]
        return served.post("/v1/responses", json={"input": items, "truncation": "auto"})

    assert answer(400).json()["usage"]["input_tokens"] > 400
    served.refused(answer(600), 400, "input")
