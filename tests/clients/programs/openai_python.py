"""The openai package for Python: Chat Completions, Completions and Responses."""

import openai
from cases import MAX_TOKENS, MODEL, QUESTION, TOOL, URL, Weather, case, check_call, run

client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0, timeout=60)
USER = {"role": "user", "content": QUESTION}
CHAT = {"model": MODEL, "messages": [USER], "max_tokens": MAX_TOKENS}
RESPONSE = {"model": MODEL, "input": QUESTION, "max_output_tokens": MAX_TOKENS}
FORCED = {"type": "function", "function": {"name": "get_weather"}}
FLAT_TOOL = {"type": "function", **TOOL["function"]}


@case
def models():
    assert MODEL in [model.id for model in client.models.list()]


@case
def chat():
    answer = client.chat.completions.create(**CHAT)
    assert answer.choices[0].message.content and answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens > 0


@case
def stream_with_usage():
    chunks = list(client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert chunks[-1].usage.completion_tokens > 0 and not chunks[-1].choices


@case
async def asynchronous():
    async with openai.AsyncOpenAI(base_url=URL, api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(**CHAT, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


@case
def completions():
    answer = client.completions.create(model=MODEL, prompt="Paris is", max_tokens=8)
    assert isinstance(answer.choices[0].text, str) and answer.usage.completion_tokens > 0


def tool_loop(choice):
    """Call a tool, return its result, and get an answer in words."""
    options = {"tools": [TOOL], "parallel_tool_calls": False}
    message = client.chat.completions.create(**CHAT, **options, tool_choice=choice).choices[0].message
    [call, *_] = message.tool_calls
    check_call(call.function.name, call.function.arguments)
    results = [{"role": "tool", "tool_call_id": call.id, "content": "4 °C, cloudy"} for call in message.tool_calls]
    history = [USER, message, *results]
    answer = client.chat.completions.create(**{**CHAT, "messages": history}, **options, tool_choice="none")
    assert answer.choices[0].message.content


@case
def tools_auto():
    tool_loop("auto")


@case
def tools_required():
    tool_loop("required")


@case
def tools_named():
    tool_loop(FORCED)


@case
def tools_required_in_a_stream():
    options = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    with client.chat.completions.stream(**CHAT, **options) as stream:
        events = {event.type for event in stream}
        [choice] = stream.get_final_completion().choices
    assert "tool_calls.function.arguments.done" in events
    check_call(choice.message.tool_calls[0].function.name, choice.message.tool_calls[0].function.arguments)


@case
def structured():
    answer = client.chat.completions.parse(**CHAT, response_format=Weather)
    assert isinstance(answer.choices[0].message.parsed, Weather)


@case
def structured_in_a_stream():
    with client.chat.completions.stream(**CHAT, response_format=Weather) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Weather)


@case
def json_object():
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "A very short JSON object."}], max_tokens=MAX_TOKENS,
        response_format={"type": "json_object"},
    )  # fmt: skip
    assert answer.choices[0].message.content.lstrip().startswith("{")


@case
def responses():
    answer = client.responses.create(**RESPONSE, instructions="Be brief.")
    assert answer.output_text and answer.status in ("completed", "incomplete")
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens > 0


@case
def responses_in_a_stream():
    with client.responses.stream(**RESPONSE) as stream:
        events = [event.type for event in stream]
        assert stream.get_final_response().output_text
    assert events[0] == "response.created" and "response.output_text.delta" in events


def responses_tool_loop(choice):
    options = {"model": MODEL, "tools": [FLAT_TOOL], "max_output_tokens": MAX_TOKENS, "parallel_tool_calls": False}
    history = [USER]
    answer = client.responses.create(input=history, tool_choice=choice, **options)
    [call, *_] = [item for item in answer.output if item.type == "function_call"]
    check_call(call.name, call.arguments)
    history += answer.output
    history += [
        {"type": "function_call_output", "call_id": item.call_id, "output": "4 °C, cloudy"}
        for item in answer.output
        if item.type == "function_call"
    ]
    assert client.responses.create(input=history, tool_choice="none", **options).output_text


@case
def responses_tools_auto():
    responses_tool_loop("auto")


@case
def responses_tools_required():
    responses_tool_loop("required")


@case
def responses_tools_named():
    responses_tool_loop({"type": "function", "name": "get_weather"})


@case
def responses_structured():
    answer = client.responses.parse(**RESPONSE, text_format=Weather)
    assert isinstance(answer.output_parsed, Weather)


@case
def responses_previous():
    first = client.responses.create(**RESPONSE)
    assert client.responses.create(**{**RESPONSE, "input": "And in Rome?"}, previous_response_id=first.id).output_text


run("openai")
