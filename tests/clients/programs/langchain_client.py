"""langchain-openai: ChatOpenAI with Chat Completions and with the Responses API, and langchain's agent."""

from cases import MAX_TOKENS, MODEL, QUESTION, URL, Weather, case, check_call, run
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

OPTIONS = {"model": MODEL, "base_url": URL, "api_key": "none", "max_retries": 0, "timeout": 60}
chat_model = ChatOpenAI(**OPTIONS, max_tokens=MAX_TOKENS, stream_usage=True)
responses_model = ChatOpenAI(**OPTIONS, max_tokens=MAX_TOKENS, use_responses_api=True)


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return "4 °C, cloudy"


def answer(model):
    message = model.invoke([("system", "Be brief."), ("human", QUESTION)])
    assert message.text and message.usage_metadata["total_tokens"] > 0


def stream(model):
    chunks = list(model.stream(QUESTION))
    assert len(chunks) > 2 and "".join(chunk.text for chunk in chunks)
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) > 0


def tools(model, choice):
    bound = model.bind_tools([get_weather], tool_choice=choice, parallel_tool_calls=False)
    message = bound.invoke(QUESTION)
    [call, *_] = message.tool_calls
    check_call(call["name"], call["args"])
    results = [ToolMessage("4 °C, cloudy", tool_call_id=call["id"]) for call in message.tool_calls]
    final = model.bind_tools([get_weather], tool_choice="none").invoke([HumanMessage(QUESTION), message, *results])
    assert final.text


def tools_in_a_stream(model):
    chunks = list(model.bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False).stream(QUESTION))
    message = sum(chunks[1:], chunks[0])
    check_call(message.tool_calls[0]["name"], message.tool_calls[0]["args"])


def structured(model, method):
    assert isinstance(model.with_structured_output(Weather, method=method).invoke(QUESTION), Weather)


def agent(model):
    result = create_agent(model, [get_weather]).invoke({"messages": [("human", QUESTION)]}, {"recursion_limit": 8})
    kinds = [message.type for message in result["messages"]]
    assert kinds[:3] == ["human", "ai", "tool"] and result["messages"][-1].text


@case
def chat():
    answer(chat_model)


@case
def chat_in_a_stream():
    stream(chat_model)


@case
async def asynchronous():
    assert (await chat_model.ainvoke(QUESTION)).text


@case
def tools_auto():
    tools(chat_model, "auto")


@case
def tools_any():
    tools(chat_model, "any")


@case
def tools_named():
    tools(chat_model, "get_weather")


@case
def tools_any_in_a_stream():
    tools_in_a_stream(chat_model)


@case
def structured_json_schema():
    structured(chat_model, "json_schema")


@case
def structured_function_calling():
    structured(chat_model, "function_calling")


@case
def agent_with_a_tool():
    agent(chat_model)


@case
def responses():
    answer(responses_model)


@case
def responses_in_a_stream():
    stream(responses_model)


@case
def responses_tools_auto():
    tools(responses_model, "auto")


@case
def responses_tools_any():
    tools(responses_model, "any")


@case
def responses_tools_in_a_stream():
    tools_in_a_stream(responses_model)


@case
def responses_structured():
    structured(responses_model, "json_schema")


@case
def responses_agent_with_a_tool():
    agent(responses_model)


run("langchain-openai", "langchain")
