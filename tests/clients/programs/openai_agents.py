"""openai-agents: the Responses API, its default, and Chat Completions."""

import agents
import openai
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from cases import MAX_TOKENS, MODEL, QUESTION, URL, Weather, case, run

agents.set_tracing_disabled(True)
client = openai.AsyncOpenAI(base_url=URL, api_key="none", max_retries=0, timeout=60)
MODELS = {"responses": OpenAIResponsesModel(MODEL, client), "chat": OpenAIChatCompletionsModel(MODEL, client)}


@function_tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    calls.append(city)
    return "4 °C, cloudy"


calls: list[str] = []


def agent(api, tool_choice=None, **options):
    settings = ModelSettings(
        max_tokens=MAX_TOKENS, tool_choice=tool_choice, include_usage=True,
        parallel_tool_calls=False if "tools" in options else None,
    )  # fmt: skip
    return Agent(name="a", instructions="Be brief.", model=MODELS[api], model_settings=settings, **options)


async def answer(api):
    result = await Runner.run(agent(api), QUESTION)
    assert result.final_output and result.context_wrapper.usage.total_tokens > 0


async def stream(api):
    result = Runner.run_streamed(agent(api), QUESTION)
    kinds = [event.data.type async for event in result.stream_events() if event.type == "raw_response_event"]
    assert "response.output_text.delta" in kinds and result.final_output


async def tools(api, tool_choice, streamed=False):
    calls.clear()
    caller = agent(api, tool_choice, tools=[get_weather])
    if streamed:
        result = Runner.run_streamed(caller, QUESTION, max_turns=4)
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(caller, QUESTION, max_turns=4)
    assert calls and result.final_output


async def structured(api):
    result = await Runner.run(agent(api, output_type=Weather), QUESTION)
    assert isinstance(result.final_output, Weather)


async def two_turns(api):
    first = await Runner.run(agent(api), QUESTION)
    second = await Runner.run(agent(api), [*first.to_input_list(), {"role": "user", "content": "And in Rome?"}])
    assert second.final_output


@case
async def responses():
    await answer("responses")


@case
async def responses_in_a_stream():
    await stream("responses")


@case
async def responses_tools_auto():
    await tools("responses", None)


@case
async def responses_tools_required():
    await tools("responses", "required")


@case
async def responses_tools_in_a_stream():
    await tools("responses", "required", streamed=True)


@case
async def responses_structured():
    await structured("responses")


@case
async def responses_two_turns():
    await two_turns("responses")


@case
async def chat():
    await answer("chat")


@case
async def chat_in_a_stream():
    await stream("chat")


@case
async def chat_tools_auto():
    await tools("chat", None)


@case
async def chat_tools_required():
    await tools("chat", "required")


@case
async def chat_tools_in_a_stream():
    await tools("chat", "required", streamed=True)


@case
async def chat_structured():
    await structured("chat")


@case
async def chat_two_turns():
    await two_turns("chat")


run("openai-agents")
