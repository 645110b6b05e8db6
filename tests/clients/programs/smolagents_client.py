"""smolagents: OpenAIModel, alone and in its agents."""

from cases import MAX_TOKENS, MODEL, QUESTION, URL, Weather, case, check_call, run
from smolagents import OpenAIModel, ToolCallingAgent, tool

OPTIONS = {"client_kwargs": {"max_retries": 0, "timeout": 60}, "max_tokens": MAX_TOKENS, "parallel_tool_calls": False}
model = OpenAIModel(MODEL, api_base=URL, api_key="none", **OPTIONS)
USER = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
calls: list[str] = []


@tool
def get_weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: Name of the city.
    """
    calls.append(city)
    return "4 °C, cloudy"


@case
def chat():
    message = model.generate(USER)
    assert message.content and message.token_usage.output_tokens > 0


@case
def chat_in_a_stream():
    deltas = list(model.generate_stream(USER))
    assert "".join(delta.content or "" for delta in deltas)
    assert any(delta.token_usage and delta.token_usage.output_tokens > 0 for delta in deltas)


@case
def tools_required():
    message = model.generate(USER, tools_to_call_from=[get_weather])
    check_call(message.tool_calls[0].function.name, message.tool_calls[0].function.arguments)


@case
def structured():
    schema = {"name": "weather", "schema": Weather.model_json_schema(), "strict": True}
    message = model.generate(USER, response_format={"type": "json_schema", "json_schema": schema})
    assert Weather.model_validate_json(message.content)


def steps(**options):
    """Run an agent for some steps: whether it ends by final_answer is up to the model."""
    agent = ToolCallingAgent([get_weather], model, max_steps=2, verbosity_level=0, **options)
    result = agent.run(QUESTION, return_full_result=True)
    errors = [step.get("error") for step in result.steps if step.get("error")]
    assert result.output is not None and result.token_usage.output_tokens > 0, errors
    assert not any("Error in generating" in str(error) for error in errors), errors


@case
def agent():
    steps()


@case
def agent_in_a_stream():
    steps(stream_outputs=True)


run("smolagents")
