"""haystack: OpenAIChatGenerator, alone and in an Agent."""

from cases import MAX_TOKENS, MODEL, QUESTION, URL, Weather, case, check_call, run
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret

USER = [ChatMessage.from_system("Be brief."), ChatMessage.from_user(QUESTION)]


def get_weather(city: str) -> str:
    """The weather in a city."""
    return "4 °C, cloudy"


tool = create_tool_from_function(get_weather)


def generator(streaming_callback=None, **options):
    return OpenAIChatGenerator(
        api_key=Secret.from_token("none"), api_base_url=URL, model=MODEL, max_retries=0, timeout=60,
        streaming_callback=streaming_callback, generation_kwargs={"max_tokens": MAX_TOKENS, **options},
    )  # fmt: skip


def replies(generator, **options):
    return generator.run(USER, **options)["replies"]


@case
def chat():
    [reply] = replies(generator())
    assert reply.text and reply.meta["usage"]["total_tokens"] > 0


@case
def chat_in_a_stream():
    chunks = []
    [reply] = replies(generator(chunks.append, stream_options={"include_usage": True}))
    assert reply.text and len(chunks) > 2 and reply.meta["usage"]["completion_tokens"] > 0


@case
async def asynchronous():
    result = await generator().run_async(USER)
    assert result["replies"][0].text


def tools(streaming_callback=None, **options):
    [reply] = replies(generator(streaming_callback, parallel_tool_calls=False, **options), tools=[tool])
    check_call(reply.tool_calls[0].tool_name, reply.tool_calls[0].arguments)
    results = [ChatMessage.from_tool("4 °C, cloudy", call) for call in reply.tool_calls]
    [answer] = generator(tool_choice="none").run([*USER, reply, *results], tools=[tool])["replies"]
    assert answer.text


@case
def tools_auto():
    tools()


@case
def tools_required():
    tools(tool_choice="required")


@case
def tools_required_in_a_stream():
    tools([].append, tool_choice="required")


@case
def structured():
    [reply] = replies(generator(response_format=Weather))
    assert Weather.model_validate_json(reply.text)


@case
def agent_with_a_tool():
    agent = Agent(chat_generator=generator(), tools=[tool], max_agent_steps=4)
    messages = agent.run([ChatMessage.from_user(QUESTION)])["messages"]
    assert any(message.tool_call_results for message in messages) and messages[-1].text


run("haystack-ai")
