"""Prompts of conversations: the same in the server and in `LLM.chat`, and complete.

A template that ignores a role, a second system message, tools or an effort changes the meaning of a request.
"""

import types

import pytest

from mlaforge.engine.llm import LLM
from mlaforge.engine.request import chat_template
from mlaforge.runtime import UserError
from mlaforge.serving.chat import Chat
from mlaforge.serving.prompts import Prompts
from mlaforge.serving.protocol import ChatRequest
from mlaforge.serving.wire import ApiError
from support.scripted_engine import ScriptedEngine, load_tokenizer
from support.serving import serving

ALL = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}(" \
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}){% endfor %}{% endfor %}"  # fmt: skip
WITH_TOOLS = "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}" + ALL
# Roles system, user, assistant and tool; as in Llama 2 and Mistral only a first system message is read.
FIRST_SYSTEM = (
    "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}{% endif %}{% for m in messages %}"
    "{% if m.role in ('user', 'assistant', 'tool') %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
RAISING = "{% for m in messages %}{% if m.role == 'developer' %}{{ raise_exception('no such role') }}{% endif %}" \
    "<{{ m.role }}>{{ m.content }}{% endfor %}"  # fmt: skip
USER = {"role": "user", "content": "Hi."}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Köln"}'}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def prompt_of(tokenizer, monkeypatch):
    """prompt_of(template, messages, ...) -> the prompt or the error, which must be equal in the server and LLM.chat."""

    def build(template, messages, tools=(), ignored_tools="error", **more):
        tokenizer.chat_template = template
        engine = types.SimpleNamespace(tokenizer=tokenizer, model_name="m")
        monkeypatch.setattr("mlaforge.engine.llm.Engine", lambda *_: engine)
        chat = Chat(tokenizer, None, Prompts(tokenizer, 4096), require_tool_template=ignored_tools == "error")
        payload = {"messages": messages, **({"tools": list(tools)} if tools else {}), **more}
        try:
            served = tokenizer.decode(chat.prompt(ChatRequest.read(payload)))
        except ApiError as error:
            assert error.status == 400
            served = error.message
        try:
            llm_prompt = tokenizer.decode(LLM("m", ignored_tools=ignored_tools).chat_prompt(messages, tools, **more))
        except UserError as error:
            llm_prompt = str(error)
        assert served == llm_prompt
        return llm_prompt

    return build


@pytest.mark.parametrize(("messages", "expected"), [
    ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], "<user>a\nb"),
    ([USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}], "<user>Hi.<assistant>f(city=Köln)"),
    ([USER, {"role": "assistant", "content": "x", "tool_calls": []}], "<user>Hi.<assistant>x"),
    # A call whose arguments the token limit cut off.
    (
        [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"city": "Kö'}}]}],
        '<user>Hi.<assistant>f(arguments={"city": "Kö)',
    ),
    ([{"role": "developer", "content": "Be brief."}, USER], "<developer>Be brief.<user>Hi."),
])  # fmt: skip
def test_server_and_llm_build_the_same_prompt(messages, expected, prompt_of):
    assert prompt_of(ALL, messages) == expected


@pytest.mark.parametrize("template", [FIRST_SYSTEM, RAISING], ids=["ignored", "refused"])
@pytest.mark.parametrize(("messages", "expected"), [
    ([{"role": "developer", "content": "Be brief."}, USER], "<system>Be brief.<user>Hi."),
    (
        [{"role": "system", "content": "You are a bot."}, {"role": "developer", "content": "Be brief."}, USER],
        "<system>You are a bot.\n\nBe brief.<user>Hi.",
    ),
])  # fmt: skip
def test_developer_messages_become_system_messages_if_unsupported(template, messages, expected, prompt_of):
    assert prompt_of(template, messages) == expected


@pytest.mark.parametrize(("messages", "options", "why"), [
    ([USER, {"role": "system", "content": "Be brief."}], {}, "messages.1: the model's chat template leaves out"),
    ([USER, {"role": "developer", "content": "Be brief."}], {}, "messages.1: the model's chat template leaves out"),
    ([USER], {"tools": TOOLS}, "the model's chat template ignores tools; describe them in a message"),
])  # fmt: skip
def test_messages_and_tools_that_a_template_ignores_are_refused(messages, options, why, prompt_of):
    assert prompt_of(FIRST_SYSTEM, messages, **options).startswith(why)
    assert not prompt_of(WITH_TOOLS, messages, **options).startswith(why)


def test_ignored_tools_and_efforts_are_logged(prompt_of, capsys, monkeypatch):
    monkeypatch.setattr(chat_template, "_LOGGED", set())
    assert prompt_of(ALL, [USER], TOOLS, "log") == "<user>Hi."
    assert prompt_of(ALL, [USER], reasoning_effort="low") == "<user>Hi."
    log = capsys.readouterr().err
    assert log.splitlines() == ["the model's chat template ignores tools",
                                 "the model's chat template ignores reasoning_effort"]  # fmt: skip
    assert prompt_of(ALL + "{{ reasoning_effort }}", [USER], reasoning_effort="low") == "<user>Hi.low"
    assert not capsys.readouterr().err


@pytest.mark.parametrize(("message", "why"), [
    ("Hi", "messages.0 must be a message of role and content, not a str"),
    ({"content": "x"}, "messages.0: role None must be system, user, assistant or tool"),
    ({"role": "user", "content": 5}, "messages.0.content must be text or a list of text parts, not a int"),
    ({"role": "user", "content": [{"type": "image_url"}]}, "messages.0.content.0 is of type 'image_url'; a part must"),
    ({"role": "user", "content": ["x"]}, "messages.0.content.0 is of type 'str'; a part must"),
    ({"role": "assistant", "tool_calls": "f"}, "messages.0: tool_calls must be calls of"),
])  # fmt: skip
def test_rejects_invalid_messages(message, why, tokenizer):
    tokenizer.chat_template = ALL
    with pytest.raises(UserError) as caught:
        chat_template.text(tokenizer, [message])
    assert why in str(caught.value) and "\n" not in str(caught.value)


def test_served(tokenizer):
    """An answer with a warning by default; a 400 by option, except for a forced call, whose grammar has the tool's
    schema."""
    tokenizer.chat_template = ALL
    body = {"messages": [USER], "tools": TOOLS, "max_tokens": 4}
    with serving(ScriptedEngine(tokenizer), require_tool_template=True) as served:
        assert "--require-tool-template" in served.refused(served.post("/v1/chat/completions", json=body), 400, "tools")
        assert served.post("/v1/chat/completions", json={**body, "tool_choice": "required"}).status_code == 200
        assert served.post("/v1/chat/completions", json={**body, "tool_choice": "none"}).status_code == 200
    with serving(ScriptedEngine(tokenizer)) as served:
        answer = served.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200 and "ignores tools" in answer.headers["x-mlaforge-warning"]
