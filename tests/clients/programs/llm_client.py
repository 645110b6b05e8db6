"""llm: the library, with a model of extra-openai-models.yaml, and its command line."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from cases import MAX_TOKENS, MODEL, QUESTION, URL, Weather, case, run

folder = Path(tempfile.mkdtemp())
os.environ["LLM_USER_PATH"] = str(folder)
(folder / "extra-openai-models.yaml").write_text(
    f"- model_id: served\n  model_name: {MODEL}\n  api_base: {URL}\n  supports_tools: true\n  supports_schema: true\n"
)

import llm  # noqa: E402  it reads LLM_USER_PATH

model = llm.get_model("served")
calls: list[str] = []


def get_weather(city: str) -> str:
    """The weather in a city."""
    calls.append(city)
    return "4 °C, cloudy"


def command(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "llm", "-m", "served", *arguments, "-o", "max_tokens", str(MAX_TOKENS), QUESTION],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-1000:]
    return done.stdout


@case
def chat():
    response = model.prompt(QUESTION, system="Be brief.", stream=False, max_tokens=MAX_TOKENS)
    assert response.text() and response.usage().output > 0


@case
def chat_in_a_stream():
    response = model.prompt(QUESTION, max_tokens=MAX_TOKENS)
    assert "".join(response) and response.usage().output > 0


@case
def conversation():
    conversation = model.conversation()
    for question in (QUESTION, "And now?"):
        assert conversation.prompt(question, max_tokens=MAX_TOKENS).text()


@case
def tools():
    calls.clear()
    assert model.chain(QUESTION, tools=[get_weather], options={"max_tokens": MAX_TOKENS}).text() and calls


@case
def structured():
    assert Weather.model_validate_json(model.prompt(QUESTION, schema=Weather, max_tokens=MAX_TOKENS).text())


@case
def command_line():
    assert command().strip()


@case
def command_line_with_a_schema():
    schema = json.dumps(Weather.model_json_schema())
    assert Weather.model_validate_json(command("--schema", schema))


run("llm")
