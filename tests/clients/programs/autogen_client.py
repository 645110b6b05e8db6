"""autogen: OpenAIChatCompletionClient, alone and in an AssistantAgent."""

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import CreateResult, ModelFamily, SystemMessage, UserMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from cases import MAX_TOKENS, MODEL, QUESTION, URL, Weather, case, check_call, run

INFO = {
    "vision": False, "function_calling": True, "json_output": True, "structured_output": True,
    "family": ModelFamily.UNKNOWN,
}  # fmt: skip
USER = [SystemMessage(content="Be brief."), UserMessage(content=QUESTION, source="user")]
calls: list[str] = []


async def get_weather(city: str) -> str:
    """The weather in a city."""
    calls.append(city)
    return "4 °C, cloudy"


tool = FunctionTool(get_weather, description="The weather in a city.", name="get_weather")


def client(**options):
    return OpenAIChatCompletionClient(
        model=MODEL, base_url=URL, api_key="none", model_info=INFO, max_retries=0, timeout=60, max_tokens=MAX_TOKENS,
        parallel_tool_calls=False, **options,
    )  # fmt: skip


@case
async def chat():
    result = await client().create(USER)
    assert isinstance(result.content, str) and result.content and result.usage.completion_tokens > 0


@case
async def chat_in_a_stream():
    pieces = [piece async for piece in client(include_usage=True).create_stream(USER)]
    assert isinstance(pieces[-1], CreateResult) and pieces[-1].content and len(pieces) > 2


@case
async def tools_auto():
    result = await client().create(USER, tools=[tool])
    check_call(result.content[0].name, result.content[0].arguments)


@case
async def tools_required():
    result = await client().create(USER, tools=[tool], tool_choice="required")
    check_call(result.content[0].name, result.content[0].arguments)


@case
async def tools_named():
    result = await client().create(USER, tools=[tool], tool_choice=tool)
    check_call(result.content[0].name, result.content[0].arguments)


@case
async def structured():
    result = await client().create(USER, json_output=Weather)
    assert Weather.model_validate_json(result.content)


@case
async def agent_with_a_tool():
    calls.clear()
    agent = AssistantAgent("a", client(), tools=[get_weather], reflect_on_tool_use=True)
    result = await agent.run(task=QUESTION)
    assert calls and result.messages[-1].content


@case
async def agent_with_a_structured_answer():
    agent = AssistantAgent("a", client(), output_content_type=Weather)
    result = await agent.run(task=QUESTION)
    assert isinstance(result.messages[-1].content, Weather)


@case
async def agent_in_a_stream():
    agent = AssistantAgent("a", client(), model_client_stream=True)
    pieces = [message async for message in agent.run_stream(task=QUESTION)]
    assert len(pieces) > 3


run("autogen-ext")
