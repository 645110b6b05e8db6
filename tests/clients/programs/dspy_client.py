"""dspy: an LM of the provider `openai`, and of `lm_studio`, for which dspy sends schemas."""

import dspy
from cases import MAX_TOKENS, MODEL, QUESTION, TOOL, URL, Weather, case, check_call, run

OPTIONS = {"api_base": URL, "api_key": "none", "max_tokens": 2 * MAX_TOKENS, "cache": False, "num_retries": 0}
lm = dspy.LM(f"openai/{MODEL}", **OPTIONS)
typed_lm = dspy.LM(f"lm_studio/{MODEL}", **OPTIONS)


class Forecast(dspy.Signature):
    """Answer briefly."""

    question: str = dspy.InputField()
    weather: Weather = dspy.OutputField()


@case
def chat():
    [text] = lm(messages=[{"role": "user", "content": QUESTION}])
    assert text


@case
def usage():
    with dspy.context(lm=lm, track_usage=True):
        lm(QUESTION)
    assert lm.history[-1]["usage"]["total_tokens"] > 0


@case
def tools_required():
    [result] = lm(QUESTION, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    [call, *_] = result["tool_calls"]
    check_call(call.function.name, call.function.arguments)


@case
def structured():
    with dspy.context(lm=typed_lm, adapter=dspy.JSONAdapter()):
        assert isinstance(dspy.Predict(Forecast)(question=QUESTION).weather, Weather)


@case
async def structured_asynchronous():
    with dspy.context(lm=typed_lm, adapter=dspy.JSONAdapter()):
        assert isinstance((await dspy.Predict(Forecast).acall(question=QUESTION)).weather, Weather)


@case
def chain_of_thought():
    with dspy.context(lm=typed_lm, adapter=dspy.JSONAdapter()):
        prediction = dspy.ChainOfThought(Forecast)(question=QUESTION)
    assert isinstance(prediction.weather, Weather) and isinstance(prediction.reasoning, str)


@case
async def stream():
    with dspy.context(lm=typed_lm, adapter=dspy.JSONAdapter()):
        program = dspy.streamify(dspy.Predict(Forecast))
        chunks = [chunk async for chunk in program(question=QUESTION)]
    assert isinstance(chunks[-1], dspy.Prediction)


run("dspy")
