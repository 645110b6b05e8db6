"""Harmony end to end: a model with packed experts and the real vocabulary, through `LLM.chat`, `chat` and `serve`.

The model generates fixed answers in channels (support/harmony_checkpoint.py); no component is mocked.
"""

import dataclasses
import datetime
import os
from pathlib import Path

import pytest

from mlaforge.engine.config import EngineConfig
from mlaforge.engine.engine import Engine
from mlaforge.engine.llm import LLM
from mlaforge.engine.request import harmony
from mlaforge.engine.sampling.constraint import Constraint
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.runtime import UserError
from support import harmony_checkpoint
from support.serving import serving

oh = pytest.importorskip("openai_harmony")

HI, WEATHER = [{"role": "user", "content": "Hi"}], [{"role": "user", "content": "Weather in Köln?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Now.", "parameters": CITY}}]
ARGUMENTS = '{"city": "Köln"}'
ANSWER = (
    "<|channel|>analysis<|message|>Easy, 漢.<|end|><|start|>assistant<|channel|>final<|message|>It is 4 °C.<|return|>"
)
BRIEF = "<|channel|>final<|message|>Briefly: 4.<|return|>"
CALL = (
    "<|channel|>analysis<|message|>A tool.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
    f"<|constrain|>json<|message|>{ARGUMENTS}<|call|>"
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=60)
# GPT-OSS's own template, as a file; docs/serving.md says where there is one.
TEMPLATE = os.environ.get("MLAFORGE_GPT_OSS_TEMPLATE")


@pytest.fixture(scope="module")
def checkpoint(encoding, tmp_path_factory):
    chat_format = harmony.Harmony(encoding)

    def said(prompt, answer):
        return prompt, encoding.encode(answer, allowed_special="all")

    texts = [
        said(chat_format.render(HI), ANSWER), said(chat_format.render(HI, (), "low"), BRIEF),
        said(chat_format.render(WEATHER, TOOLS), CALL),
    ]  # fmt: skip
    template = Path(TEMPLATE).read_text(encoding="utf-8") if TEMPLATE else None
    return harmony_checkpoint.save(tmp_path_factory.mktemp("harmony") / "gpt-oss", encoding, texts, template)


@pytest.fixture(scope="module")
def llm(checkpoint):
    return LLM(str(checkpoint), device="cpu", dtype="float32", cache_bytes=1 << 24)


def test_the_tokenizer_equals_harmonys(llm, encoding):
    for text in (
        "Hello, world! It's 12345 °C\r\n\n  漢字かな 🙂 naïveté's  \tx",
        ANSWER,
        CALL,
        " " * 9 + "def f(x):\n",
    ):
        expected = encoding.encode(text, allowed_special="all")
        assert llm.tokenizer(text)["input_ids"] == expected
        assert llm.tokenizer.decode(expected) == text
    assert len(llm.tokenizer) == 201088 and harmony.speaks_harmony(llm.tokenizer)
    assert any(layer.mlp.__class__.__name__ == "Mxfp4Mixture" for layer in llm.engine.model.layers)


def test_channels_in_a_script(llm):
    (output,) = llm.chat(HI, GREEDY)
    (answer,) = output.outputs
    assert (answer.text, answer.reasoning_content) == ("It is 4 °C.", "Easy, 漢.")
    assert (answer.finish_reason, answer.tool_calls) == ("stop", [])
    pieces = [output.outputs[0] for output in llm.stream_chat(HI, GREEDY)]
    assert "".join(piece.text for piece in pieces) == answer.text and sum(bool(piece.text) for piece in pieces) > 3


def test_effort_reaches_the_model(llm):
    (brief,), (long,) = (llm.chat(HI, GREEDY, reasoning_effort=effort) for effort in ("low", None))
    assert (brief.outputs[0].text, brief.outputs[0].reasoning_content) == ("Briefly: 4.", "")
    assert long.outputs[0].reasoning_content == "Easy, 漢."
    with pytest.raises(UserError, match="reasoning_effort 'most' must be one of low, medium, high"):
        llm.chat(HI, GREEDY, reasoning_effort="most")


def test_tools_are_called_in_a_script(llm):
    (output,) = llm.chat(WEATHER, GREEDY, tools=TOOLS)
    (answer,) = output.outputs
    assert (answer.text, answer.reasoning_content, answer.finish_reason) == ("", "A tool.", "tool_calls")
    (call,) = answer.tool_calls
    assert call["function"] == {"name": "weather", "arguments": ARGUMENTS} and call["id"].startswith("call_")
    pieces = [piece for output in llm.stream_chat(WEATHER, GREEDY, tools=TOOLS) for piece in output.outputs]
    parts = [call["function"] for piece in pieces for call in piece.tool_calls]
    assert len(parts) > 3 and "".join(part["arguments"] for part in parts) == ARGUMENTS
    assert [piece.finish_reason for piece in pieces][-1] == "tool_calls"
    # The answer and the result go into the next conversation.
    turn = {"role": "assistant", "reasoning_content": answer.reasoning_content, "tool_calls": answer.tool_calls}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "4 °C"}
    again = llm.tokenizer.decode(llm.chat_prompt([*WEATHER, turn, result], TOOLS))
    assert f"<|constrain|>json<|message|>{ARGUMENTS}<|call|><|start|>functions.weather" in again
    assert again.endswith("<|message|>4 °C<|end|><|start|>assistant")
    with pytest.raises(UserError, match="tools must be a list of"):
        llm.chat(WEATHER, GREEDY, tools=[{"name": "weather"}])


@pytest.mark.slow
def test_chat_and_generate_in_a_terminal(checkpoint, cli):
    """With scripted tokens instead of the model: test_chat_harmony.py."""
    options = ("--device", "cpu", "--dtype", "float32", "--temperature", 0, "--cache-bytes", 1 << 24)
    done = cli("chat", checkpoint, *options, stdin="Hi\n")
    assert done.exit_code == 0 and done.stdout == "> It is 4 °C.\n> ", done.stderr
    brief = ("--prompt", "Hi", "--reasoning-effort", "low")
    done = cli("generate", checkpoint, "--chat", *brief, *options)
    assert done.exit_code == 0 and done.stdout.endswith("]\nBriefly: 4.\n\n"), done.stderr


COLOUR = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}


@pytest.fixture(scope="module")
def served(checkpoint):
    config = EngineConfig(device="cpu", dtype="float32", cache_bytes=1 << 24)
    with serving(Engine(checkpoint, config)) as served:
        yield served
        served.settles()


def test_served(served):
    client = served.client()
    options = {"model": served.service.model, "temperature": 0}
    (choice,) = client.chat.completions.create(messages=HI, **options).choices
    assert (choice.message.content, choice.message.reasoning_content) == ("It is 4 °C.", "Easy, 漢.")
    (choice,) = client.chat.completions.create(messages=HI, reasoning_effort="low", **options).choices
    assert choice.message.content == "Briefly: 4."
    (choice,) = client.chat.completions.create(messages=WEATHER, tools=TOOLS, **options).choices
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", ARGUMENTS)
    assert choice.finish_reason == "tool_calls"
    stream = client.chat.completions.create(messages=WEATHER, tools=TOOLS, stream=True, **options)
    deltas = [chunk.choices[0].delta for chunk in stream if chunk.choices]
    parts = [part.function.arguments for delta in deltas for part in delta.tool_calls or ()]
    assert "".join(parts) == ARGUMENTS and len(parts) > 3
    thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert thought == "A tool."


def answered(served, **payload):
    """Return the only choice, after checking that the streamed one equals it."""
    body = {"temperature": 0, "max_tokens": 60, **payload}
    (choice,) = served.post("/v1/chat/completions", json=body).json()["choices"]
    stream = served.client().chat.completions.create(
        model=served.service.model, messages=body.pop("messages"), stream=True, extra_body=body
    )
    chunks = [chunk.choices[0] for chunk in stream]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == (choice["message"]["content"] or "")
    calls = [part.function.arguments for chunk in chunks for part in chunk.delta.tool_calls or ()]
    assert "".join(calls) == "".join(c["function"]["arguments"] for c in choice["message"].get("tool_calls", ()))
    assert chunks[-1].finish_reason == choice["finish_reason"]
    return choice


def test_a_constraint_binds_the_final_message_only(served, llm):
    pytest.importorskip("llguidance")
    message = answered(served, messages=HI, structured_outputs={"choice": ["a/b\nc", "x/y"]})["message"]
    assert (
        message["content"] in ("a/b\nc", "x/y") and message["reasoning_content"] == message["reasoning"] == "Easy, 漢."
    )
    ((answer,),) = (output.outputs for output in llm.chat(HI, dataclasses.replace(GREEDY, regex="red|blue")))
    assert answer.text in ("red", "blue") and answer.reasoning_content == "Easy, 漢." and answer.finish_reason == "stop"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "paint"}}], ids=str)
def test_a_forced_tool_begins_the_answer(choice, served):
    """The tool takes precedence over response_format. The tiny model fills the limit with white space."""
    pytest.importorskip("llguidance")
    paint = {"type": "function", "function": {"name": "paint", "parameters": COLOUR}}
    options = {"tools": [*TOOLS, paint] if isinstance(choice, dict) else [paint], "tool_choice": choice}
    answer = answered(served, messages=HI, **options, max_tokens=16, response_format={"type": "json_object"})
    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["name"] == "paint" and call["function"]["arguments"].startswith("{")
    assert not answer["message"]["content"] and not answer["message"].get("reasoning_content")


def test_stop_strings_apply_to_the_final_message_only(served, llm):
    for stop, content, reason in (
        ("4 °", "It is ", "4 °"),
        (["Easy", "zz"], "It is 4 °C.", None),
        ("s 4", "It i", "s 4"),
    ):
        choice = answered(served, messages=HI, stop=stop)
        assert choice["message"]["content"] == content and choice["message"]["reasoning_content"] == "Easy, 漢."
        assert choice["finish_reason"] == "stop" and choice.get("stop_reason") == reason
        (output,) = llm.chat(HI, dataclasses.replace(GREEDY, stop=stop))
        assert output.outputs[0].text == content and output.outputs[0].reasoning_content == "Easy, 漢."
    params = dataclasses.replace(GREEDY, stop="4 °", include_stop_str_in_output=True)
    assert llm.chat(HI, params)[0].outputs[0].text == "It is 4 °"


FINAL = "<|channel|>final<|message|>"
PAINT_CALL = "<|channel|>commentary to=functions.paint <|constrain|>json<|message|>"
THOUGHTS = (
    "<|channel|>analysis<|message|>{ 漢\n<|end|><|start|>assistant<|channel|>commentary<|message|>x<|end|>"
    "<|start|>assistant"
)


@pytest.mark.parametrize(("answer", "allowed"), [
    (FINAL + '{"colour": "red"}', True), (FINAL + '{"colour": "green"}', False), (FINAL + "red", False),
    (THOUGHTS + FINAL + '{"colour": "red"}', True),
    ("<|channel|>final <|constrain|>json<|message|>" + '{"colour":"blue"}', True),
    (PAINT_CALL + '{"colour": "red"}', True), (THOUGHTS + PAINT_CALL + '{"colour": "green"}', False),
    ("<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + '{"any": 1}', True),
    ("<|channel|>commentary to=functions.other <|constrain|>json<|message|>{}", False),
])  # fmt: skip
def test_the_grammar_of_an_answer(answer, allowed, llm):
    """A strict tool's arguments match its schema, other tools' are objects."""
    pytest.importorskip("llguidance")
    paint = {"type": "function", "function": {"name": "paint", "parameters": COLOUR, "strict": True}}
    params = llm.harmony.adapted(SamplingParams(json_schema=COLOUR), [*TOOLS, paint])
    llm.engine.check_grammar(params)
    constraint = Constraint(llm.engine.grammars, params)
    try:
        for token in llm.harmony.encoding.encode(answer, allowed_special="all"):
            if not constraint.mask()[token]:
                assert not allowed
                return
            constraint.advance([token])
        assert allowed and constraint.mask()[llm.tokenizer.eos_token_id]
    finally:
        constraint.close()


def test_reasoning_tokens_are_counted(served, llm):
    usage = served.post("/v1/chat/completions", json={"messages": HI, "temperature": 0}).json()["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len(llm.tokenizer("Easy, 漢.")["input_ids"])
    # The budget is spent in the reasoning.
    cut = answered(served, messages=HI, max_tokens=4)
    assert cut["finish_reason"] == "length" and not cut["message"]["content"] and cut["message"]["reasoning_content"]


@pytest.mark.skipif(TEMPLATE is None, reason="MLAFORGE_GPT_OSS_TEMPLATE names no file with the template")
@pytest.mark.parametrize("effort", [None, "high"])
@pytest.mark.parametrize("tools", [(), TOOLS], ids=["none", "tools"])
def test_the_chat_template_agrees_with_harmony(checkpoint, llm, tools, effort):
    """GPT-OSS's chat template (that of llama-cpp-python 0.3.36 was tried) and harmony render the same turns, effort and
    tools."""
    settings = {"tools": list(tools) or None, "reasoning_effort": effort or "medium"}
    text = llm.tokenizer.apply_chat_template(WEATHER, add_generation_prompt=True, tokenize=False, **settings)
    ours = llm.tokenizer.decode(llm.chat_prompt(WEATHER, tools, effort))
    for part in (
        f"Reasoning: {settings['reasoning_effort']}", datetime.date.today().isoformat(), "# Valid channels: analysis",
        "<|start|>user<|message|>Weather in Köln?<|end|><|start|>assistant",
    ):  # fmt: skip
        assert part in text and part in ours
    assert ("type weather = (_: {" in text) is ("type weather = (_: {" in ours) is bool(tools)
    assert ("Calls to these tools must go to the commentary channel" in ours) is bool(tools)
    plain = LLM(str(checkpoint), device="cpu", dtype="float32", cache_bytes=1 << 22, harmony=False)
    assert plain.chat_prompt(WEATHER, tools, effort or "medium") == llm.tokenizer(text)["input_ids"]
