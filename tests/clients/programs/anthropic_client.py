"""The anthropic package for Python: /v1/messages."""

import anthropic
from cases import MAX_TOKENS, MODEL, PARAMETERS, QUESTION, URL, Weather, case, check_call, run

client = anthropic.Anthropic(base_url=URL.removesuffix("/v1"), api_key="none", max_retries=0, timeout=60)
USER = {"role": "user", "content": QUESTION}
OPTIONS = {"model": MODEL, "max_tokens": MAX_TOKENS, "messages": [USER]}
TOOL = {"name": "get_weather", "description": "The weather in a city.", "input_schema": PARAMETERS}

ANY = {"type": "any", "disable_parallel_tool_use": True}


def text(message):
    return "".join(block.text for block in message.content if block.type == "text")


@case
def message():
    answer = client.messages.create(**OPTIONS, system="Be brief.")
    assert text(answer) and answer.stop_reason in ("end_turn", "max_tokens")
    assert answer.usage.input_tokens > 0 and answer.usage.output_tokens > 0


@case
def message_in_a_stream():
    with client.messages.stream(**OPTIONS) as stream:
        assert "".join(stream.text_stream)
        assert stream.get_final_message().usage.output_tokens > 0


@case
def text_blocks():
    blocks = [{"type": "text", "text": QUESTION, "cache_control": {"type": "ephemeral"}}]
    system = [{"type": "text", "text": "Be brief."}]
    assert text(client.messages.create(**{**OPTIONS, "messages": [{"role": "user", "content": blocks}]}, system=system))


@case
async def asynchronous():
    async with anthropic.AsyncAnthropic(base_url=URL.removesuffix("/v1"), api_key="none", max_retries=0) as client:
        assert text(await client.messages.create(**OPTIONS))


@case
def count_tokens():
    assert client.messages.count_tokens(model=MODEL, messages=[USER]).input_tokens > 0


def tool_loop(choice):
    answer = client.messages.create(**OPTIONS, tools=[TOOL], tool_choice=choice)
    calls = [block for block in answer.content if block.type == "tool_use"]
    assert answer.stop_reason == "tool_use"
    check_call(calls[0].name, calls[0].input)
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "4 °C, cloudy"} for call in calls]
    history = [USER, {"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    options = {**OPTIONS, "messages": history}
    assert text(client.messages.create(**options, tools=[TOOL], tool_choice={"type": "none"}))


@case
def tools_auto():
    tool_loop({"type": "auto", "disable_parallel_tool_use": True})


@case
def tools_any():
    tool_loop(ANY)


@case
def tools_named():
    tool_loop({"type": "tool", "name": "get_weather"})


@case
def tools_any_in_a_stream():
    with client.messages.stream(**OPTIONS, tools=[TOOL], tool_choice=ANY) as stream:
        answer = stream.get_final_message()
    [call, *_] = [block for block in answer.content if block.type == "tool_use"]
    check_call(call.name, call.input)


@case
def structured():
    assert isinstance(client.messages.parse(**OPTIONS, output_format=Weather).parsed_output, Weather)


run("anthropic")
