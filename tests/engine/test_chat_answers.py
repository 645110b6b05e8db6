"""Tool calls and reasoning in `LLM.chat`, `chat` and `generate --chat`, for models without harmony.

A tiny random model answers under a regular expression, which can force all text but special tokens; those are written
by a scripted engine.
"""

import json
import re
import shutil

import pytest

from mlaforge.engine.llm import LLM
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.runtime import UserError
from mlaforge.serving.config import ChatConfig
from mlaforge.serving.generate import Conversation
from support.scripted_engine import ScriptedEngine, load_tokenizer

TURNS = "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}{{ m.role }}: " \
    "{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}"  # fmt: skip
# Templates that end with the model's turn; comments stand for what real ones say of tools and reasoning.
TAGS, OBJECTS = f"{TURNS}{{# <tool_call> </think> #}}assistant:", f"{TURNS}{{# <|python_tag|> #}}assistant:"
WEATHER = [{"role": "user", "content": "Weather in Köln?"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
SMALL = {"device": "cpu", "dtype": "float32", "cache_bytes": 1 << 22}
HEAD = '<tool_call>{"name": "weather", "arguments": {"city": "'


def greedy(regex, **more):
    return SamplingParams(temperature=0.0, max_tokens=200, regex=regex, **more)


@pytest.fixture(scope="module")
def model(tiny_models, tmp_path_factory):
    """model(template) -> the tiny llama with this chat template."""

    def save(template):
        directory = tmp_path_factory.mktemp("chat") / "model"
        shutil.copytree(tiny_models["llama"], directory)
        (directory / "chat_template.jinja").write_text(template)
        return directory

    return save


@pytest.fixture(scope="module")
def llm(model):
    return LLM(model(TAGS), **SMALL)


@pytest.fixture
def scripted(tmp_path, monkeypatch):
    """scripted(template, text, ...) -> an LLM that answers every prompt with this text."""

    def build(template, text, **options):
        tokenizer = load_tokenizer(tmp_path)
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|python_tag|>", "<|eom_id|>"]})
        tokenizer.chat_template = template
        engine = ScriptedEngine(tokenizer, script=tokenizer(text)["input_ids"])
        monkeypatch.setattr("mlaforge.engine.llm.Engine", lambda *_: engine)
        return LLM("m", **options)

    return build


def test_a_tool_is_called(llm):
    params = greedy("<think>Hm</think>\nOk\n" + re.escape(HEAD) + "[A-Z]" + re.escape('"}}</tool_call>'), logprobs=0)
    (output,) = llm.chat(WEATHER, params, tools=TOOLS)
    (answer,) = output.outputs
    assert (answer.text, answer.reasoning_content, answer.finish_reason) == ("Ok", "Hm", "tool_calls")
    (call,) = answer.tool_calls
    city = json.loads(call["function"]["arguments"])["city"]
    assert (call["function"]["name"], len(city), answer.harmony_parse_error) == ("weather", 1, False)
    # Tokens and log probabilities are those of the whole text.
    written = llm.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
    assert re.fullmatch(params.regex, written) and len(answer.logprobs) == len(answer.token_ids)
    # The answer and the result go into the next conversation.
    turn = {"role": "assistant", "content": answer.text, "tool_calls": answer.tool_calls}
    again = llm.tokenizer.decode(llm.chat_prompt([*WEATHER, turn, {"role": "tool", "content": "4 °C"}], TOOLS))
    assert f'{{"city": "{city}"}}' in again and again.endswith("tool: 4 °Cassistant:")


def test_calls_stream(scripted):
    text = f'<think>Hm</think>\nOk\n{HEAD}Köln"}}}}</tool_call>\n{HEAD}Bonn"}}}}</tool_call>\n'
    llm, params = scripted(TAGS, text), SamplingParams(max_tokens=200)
    outputs = llm.chat([WEATHER, WEATHER], params, tools=TOOLS)
    arguments = ['{"city": "Köln"}', '{"city": "Bonn"}']
    for (answer,) in (output.outputs for output in outputs):
        assert (answer.text, answer.reasoning_content, answer.finish_reason) == ("Ok", "Hm", "tool_calls")
        assert [call["function"] for call in answer.tool_calls] == [
            {"name": "weather", "arguments": a} for a in arguments
        ]
    pieces = [piece for output in llm.stream_chat(WEATHER, params, tools=TOOLS) for piece in output.outputs]
    parts = [call["function"]["arguments"] for piece in pieces for call in piece.tool_calls if call["index"] == 1]
    assert "".join(parts) == arguments[1] and len(parts) > 10
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["tool_calls"]
    (cut,) = llm.chat(WEATHER, SamplingParams(max_tokens=len(text) - 40), tools=TOOLS)
    assert cut.outputs[0].finish_reason == "length" and len(cut.outputs[0].tool_calls) == 1


@pytest.mark.parametrize("template", [TURNS, TAGS], ids=["plain", "reasoning"])
def test_without_tools_and_reasoning_the_text_is_unchanged(scripted, template):
    text = f'\n{HEAD}Köln"}}}}</tool_call> <think> \n'
    llm, params = scripted(template, text), SamplingParams(max_tokens=200, logprobs=1)
    (output,) = llm.chat(WEATHER, params)
    (plain,) = llm.generate({"prompt_token_ids": llm.chat_prompt(WEATHER)}, params)
    assert vars(output.outputs[0]) == vars(plain.outputs[0]) and output.outputs[0].text == text


def test_parsers_can_be_switched_off(scripted):
    text = f'<think>a</think>\n{HEAD}Köln"}}}}</tool_call>'
    llm = scripted(TAGS, text, tool_call_parser="none", reasoning_parser="none")
    (output,) = llm.chat(WEATHER, SamplingParams(max_tokens=200), tools=TOOLS)
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == (text, "stop")
    with pytest.raises(UserError, match="tool_call_parser = 'xml' must be one of auto, none, hermes"):
        scripted(TAGS, text, tool_call_parser="xml")


def test_prompts_that_end_inside_the_reasoning(model, cli):
    directory = model(TURNS + "assistant: <think>\n")
    llm = LLM(directory, **SMALL)
    outputs = llm.chat([WEATHER, WEATHER], [greedy("Hm\n</think>\nIt is 4[.]"), greedy("Hm", n=2)])
    answers = [(answer.text, answer.reasoning_content) for output in outputs for answer in output.outputs]
    assert answers == [("It is 4.", "Hm"), ("", "Hm"), ("", "Hm")]
    talk = Conversation(str(directory), ChatConfig(**SMALL))
    talk.params = greedy("Hm\n</think>\nIt is 4[.]")
    assert "".join(piece.reasoning_content for piece in talk.answer("Weather?")) == "Hm"
    assert [message["content"] for message in talk.messages] == ["Weather?", "It is 4."]
    done = cli("generate", directory, "--chat", "--device", "cpu", "--dtype", "float32", "--max-new-tokens", 4)
    assert done.exit_code == 0 and "[only reasoning, no answer" in done.stdout, done.stderr


def test_markers_that_are_special_tokens(scripted):
    llm = scripted(OBJECTS, '<|python_tag|>{"name": "weather", "parameters": {}}<|eom_id|>')
    params = [SamplingParams(max_tokens=80), SamplingParams(max_tokens=80, skip_special_tokens=False)]
    outputs = llm.chat([WEATHER, WEATHER], params, tools=TOOLS)
    for output, rest in zip(outputs, ("", "<|eom_id|>"), strict=True):
        (answer,) = output.outputs
        assert [call["function"] for call in answer.tool_calls] == [{"name": "weather", "arguments": "{}"}]
        assert answer.text == rest
    # Without tools the text is as decoded.
    (output,) = llm.chat(WEATHER, params[0])
    assert output.outputs[0].text == '{"name": "weather", "parameters": {}}'
