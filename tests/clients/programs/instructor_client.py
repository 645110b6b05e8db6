"""instructor: typed answers by tools, by JSON schema and by JSON mode."""

from collections.abc import Iterable

import instructor
import openai
from cases import MAX_TOKENS, MODEL, QUESTION, URL, Weather, case, run

client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0, timeout=60)
REQUEST = {
    "model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 2 * MAX_TOKENS, "max_retries": 0,
}  # fmt: skip


def typed(mode):
    result = instructor.from_openai(client, mode=mode).chat.completions.create(response_model=Weather, **REQUEST)
    assert isinstance(result, Weather)


@case
def tools():
    typed(instructor.Mode.TOOLS)


@case
def json_schema():
    typed(instructor.Mode.JSON_SCHEMA)


@case
def json():
    typed(instructor.Mode.JSON)


@case
def completion_with_usage():
    wrapped = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    result, completion = wrapped.chat.completions.create_with_completion(response_model=Weather, **REQUEST)
    assert isinstance(result, Weather) and completion.usage.total_tokens > 0


@case
def partial_in_a_stream():
    wrapped = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    *_, last = wrapped.chat.completions.create_partial(response_model=Weather, **REQUEST)
    assert Weather.model_validate(last.model_dump())


@case
def tools_in_a_stream():
    wrapped = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
    *_, last = wrapped.chat.completions.create_partial(response_model=Weather, **REQUEST)
    assert Weather.model_validate(last.model_dump())


@case
def iterable():
    wrapped = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    results = list(wrapped.chat.completions.create(response_model=Iterable[Weather], **REQUEST))
    assert all(isinstance(result, Weather) for result in results)


run("instructor")
