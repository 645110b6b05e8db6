"""litellm: the provider `hosted_vllm`, and `openai` with an api_base."""

import litellm
from cases import MAX_TOKENS, MODEL, QUESTION, TOOL, URL, Weather, case, check_call, run

litellm.telemetry = False
litellm.num_retries = 0
USER = {"role": "user", "content": QUESTION}
OPTIONS = {"api_base": URL, "api_key": "none", "max_tokens": MAX_TOKENS, "timeout": 60}
OPENAI = {"model": f"openai/{MODEL}", "messages": [USER], **OPTIONS}
VLLM = {"model": f"hosted_vllm/{MODEL}", "messages": [USER], **OPTIONS}


def answer(options):
    result = litellm.completion(**options)
    assert result.choices[0].message.content and result.usage.total_tokens > 0


def stream(options):
    chunks = list(litellm.completion(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert litellm.stream_chunk_builder(chunks, messages=[USER]).usage.completion_tokens > 0


def tools(options, choice):
    calling = {**options, "tools": [TOOL], "parallel_tool_calls": False}
    message = litellm.completion(**calling, tool_choice=choice).choices[0].message
    [call, *_] = message.tool_calls
    check_call(call.function.name, call.function.arguments)
    results = [{"role": "tool", "tool_call_id": call.id, "content": "4 °C, cloudy"} for call in message.tool_calls]
    history = [USER, message, *results]
    result = litellm.completion(**{**calling, "messages": history}, tool_choice="none")
    assert result.choices[0].message.content


def structured(options):
    content = litellm.completion(**options, response_format=Weather).choices[0].message.content
    assert Weather.model_validate_json(content)


@case
def openai_chat():
    answer(OPENAI)


@case
def openai_in_a_stream():
    stream(OPENAI)


@case
def openai_tools_auto():
    tools(OPENAI, "auto")


@case
def openai_tools_required():
    tools(OPENAI, "required")


@case
def openai_structured():
    structured(OPENAI)


@case
def hosted_vllm_chat():
    answer(VLLM)


@case
def hosted_vllm_in_a_stream():
    stream(VLLM)


@case
def hosted_vllm_tools_auto():
    tools(VLLM, "auto")


@case
def hosted_vllm_tools_required():
    tools(VLLM, "required")


@case
def hosted_vllm_structured():
    structured(VLLM)


@case
async def asynchronous():
    assert (await litellm.acompletion(**VLLM)).choices[0].message.content


@case
def text_completion():
    options = {"model": f"text-completion-openai/{MODEL}", "prompt": "Paris is", **OPTIONS, "max_tokens": 8}
    assert litellm.text_completion(**options).usage.completion_tokens > 0


@case
def responses():
    result = litellm.responses(model=f"openai/{MODEL}", input=QUESTION, api_base=URL, api_key="none")
    assert result.output


run("litellm")
