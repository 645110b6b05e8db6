"""pydantic-ai: OpenAIChatModel (`openai-chat:`) and OpenAIResponsesModel (`openai:`)."""

from cases import MAX_TOKENS, MODEL, QUESTION, URL, Weather, case, run
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=URL, api_key="none")
MODELS = {
    "responses": OpenAIResponsesModel(MODEL, provider=provider),
    "chat": OpenAIChatModel(MODEL, provider=provider),
}

SETTINGS = {"max_tokens": MAX_TOKENS, "parallel_tool_calls": False}


def agent(api, **options):
    return Agent(MODELS[api], instructions="Be brief.", model_settings=SETTINGS, **options)


def answer(api):
    result = agent(api).run_sync(QUESTION)
    assert isinstance(result.output, str) and result.output and result.usage.total_tokens > 0


async def stream(api):
    async with agent(api).run_stream(QUESTION) as result:
        pieces = [piece async for piece in result.stream_text(delta=True)]
    assert "".join(pieces) and result.usage.output_tokens > 0


def tools(api):
    caller, calls = agent(api), []

    @caller.tool_plain
    def get_weather(city: str) -> str:
        """The weather in a city."""
        calls.append(city)
        return "4 °C, cloudy"

    result = caller.run_sync(QUESTION)
    assert calls and result.output
    again = caller.run_sync("And in Rome?", message_history=result.all_messages())
    assert again.output


def structured(api, output):
    result = agent(api, output_type=output, retries=0).run_sync(QUESTION)
    assert isinstance(result.output, Weather)


for api in MODELS:
    for function in (answer, stream, tools):

        def bound(function=function, api=api):
            return function(api)

        bound.__name__ = f"{api}_{function.__name__}"
        case(bound)
    for output in (ToolOutput, NativeOutput, PromptedOutput):

        def typed(output=output, api=api):
            return structured(api, output(Weather))

        typed.__name__ = f"{api}_structured_{output.__name__}"
        case(typed)

run("pydantic-ai-slim")
