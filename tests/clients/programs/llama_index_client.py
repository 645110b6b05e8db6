"""llama-index: OpenAILike, and its agent of functions."""

from cases import MAX_TOKENS, MODEL, QUESTION, URL, Weather, case, check_call, run
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

llm = OpenAILike(
    model=MODEL, api_base=URL, api_key="none", is_chat_model=True, is_function_calling_model=True,
    max_tokens=MAX_TOKENS, max_retries=0, context_window=4096,
)  # fmt: skip
calls: list[str] = []


def get_weather(city: str) -> str:
    """The weather in a city."""
    calls.append(city)
    return "4 °C, cloudy"


tool = FunctionTool.from_defaults(get_weather)


@case
def chat():
    response = llm.chat([ChatMessage("Be brief.", role="system"), ChatMessage(QUESTION)])
    assert response.message.content and response.raw.usage.total_tokens > 0


@case
def chat_in_a_stream():
    *_, last = llm.stream_chat([ChatMessage(QUESTION)])
    assert last.message.content


@case
def complete():
    assert llm.complete(QUESTION).text


@case
async def asynchronous():
    assert (await llm.achat([ChatMessage(QUESTION)])).message.content


@case
def completions_api():
    completing = OpenAILike(model=MODEL, api_base=URL, api_key="none", max_tokens=8, max_retries=0, is_chat_model=False)
    assert isinstance(completing.complete("Paris is").text, str)


def predict(**options):
    response = llm.chat_with_tools([tool], user_msg=QUESTION, **options)
    [call, *_] = llm.get_tool_calls_from_response(response)
    check_call(call.tool_name, call.tool_kwargs)


@case
def tools_auto():
    predict()


@case
def tools_required():
    predict(tool_required=True)


@case
def structured():
    answer = llm.as_structured_llm(Weather).complete(QUESTION)
    assert isinstance(answer.raw, Weather)


@case
def structured_in_a_stream():
    *_, last = llm.as_structured_llm(Weather).stream_chat([ChatMessage(QUESTION)])
    assert last.raw is not None


@case
async def agent_with_a_tool():
    calls.clear()
    result = await FunctionAgent(tools=[get_weather], llm=llm, streaming=False).run(QUESTION)
    assert calls and result.response.content


@case
async def agent_in_a_stream():
    calls.clear()
    result = await FunctionAgent(tools=[get_weather], llm=llm).run(QUESTION)
    assert calls and result.response.content


run("llama-index-llms-openai-like", "llama-index-core")
