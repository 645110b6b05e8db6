"""`chat`, `generate --chat` and `LLM.chat` with a harmony model: answers are the final text, as served."""

import json
import sys
import types

import pytest

from mlaforge.cli.answers import NO_ANSWER, show
from mlaforge.engine.llm import LLM
from mlaforge.engine.request import harmony
from mlaforge.engine.request.output import Completion
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.runtime import UserError
from mlaforge.serving.config import ChatConfig
from mlaforge.serving.generate import Conversation
from support.harmony_tokenizer import HarmonyTokenizer
from support.scripted_engine import ScriptedEngine

oh = pytest.importorskip("openai_harmony")

THOUGHT = "<|channel|>analysis<|message|>Easy, 漢.<|end|>"
ANSWER = f"{THOUGHT}<|start|>assistant<|channel|>final<|message|>It is 4 °C 🙂.<|return|>"
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Köln"}<|call|>'
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def speaking(encoding, monkeypatch):
    """speaking(text) -> the engine of every later LLM, which answers every prompt with this text."""

    def script(text):
        engine = ScriptedEngine(HarmonyTokenizer(encoding), script=encoding.encode(text, allowed_special="all"))
        engine.max_model_len = 4096
        engine.model, engine.speculation = types.SimpleNamespace(format="float32"), None
        monkeypatch.setattr("mlaforge.engine.llm.Engine", lambda *_: engine)
        return engine

    return script


@pytest.fixture
def uninstalled(monkeypatch):
    monkeypatch.setattr(harmony.importlib.metadata, "distributions", lambda name: [])


def printed(done):
    assert done.exit_code == 0, done.stderr
    return done.stdout


# On the command line


def test_the_terminal_shows_the_final_text(speaking, tiny_models, cli):
    speaking(ANSWER)
    assert (
        printed(cli("chat", tiny_models["gpt_oss"], stdin="Hi\n/new\nHi\n"))
        == "> It is 4 °C 🙂.\n> > It is 4 °C 🙂.\n> "
    )


def test_reasoning_is_not_part_of_later_prompts(speaking, tiny_models, encoding):
    engine = speaking(ANSWER)
    requests = []
    add = engine.add
    engine.add = lambda request_id, ids, params: (requests.append((ids, params)), add(request_id, ids, params))
    talk = Conversation(str(tiny_models["gpt_oss"]), ChatConfig(system="Be brief."))
    for text in ("Hi", "And now?"):
        assert "".join(piece.text for piece in talk.answer(text)) == "It is 4 °C 🙂."
    assert [message["content"] for message in talk.messages[1:]] == [
        "Hi",
        "It is 4 °C 🙂.",
        "And now?",
        "It is 4 °C 🙂.",
    ]
    first, second = (encoding.decode(ids) for ids, _ in requests)
    assert "<|start|>developer<|message|># Instructions\n\nBe brief." in first and first.endswith("<|start|>assistant")
    second_turn = (
        "<|start|>assistant<|channel|>final<|message|>It is 4 °C 🙂.<|end|><|start|>user<|message|>And now?<|end|>"
    )
    assert second_turn in second and "Easy" not in second
    # The same stop tokens as in the server: <|return|> and <|call|>.
    assert {params.stop_token_ids for _, params in requests} == {(200002, 200012)}


def test_an_interrupted_answer_is_not_in_the_history(speaking, tiny_models):
    engine = speaking(ANSWER)
    talk = Conversation(str(tiny_models["gpt_oss"]), ChatConfig())
    answer = talk.answer("Hi")
    pieces = [next(answer) for _ in range(6)]
    assert "".join(piece.reasoning_content for piece in pieces) == "Easy, " and not any(piece.text for piece in pieces)
    answer.close()
    assert talk.messages == [] and not engine.has_work and engine.counts["aborted_requests"] == 1


def test_a_terminal_shows_reasoning_dimmed(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    show(
        Completion(0, [], text, reasoning_content=thought)
        for thought, text in (("Ea", ""), ("sy.", ""), ("", "4"), ("", " °C"))
    )
    assert capsys.readouterr().out == "\x1b[2mEa\x1b[0m\x1b[2msy.\x1b[0m\n4 °C"
    show([Completion(0, [], "", reasoning_content="Hm")])
    assert capsys.readouterr().out == f"\x1b[2mHm\x1b[0m\n{NO_ANSWER}"


def test_generate_shows_the_final_text(speaking, tiny_models, cli, tmp_path):
    engine = speaking(ANSWER)
    assert printed(cli("generate", tiny_models["gpt_oss"], tmp_path / "out", "--chat")).endswith(
        "]\nIt is 4 °C 🙂.\n\n"
    )
    (run,) = json.loads((tmp_path / "out" / "manifest.json").read_text())["metrics"]["runs"]
    assert (run["text"], run["reasoning_content"], run["new_tokens"]) == (
        "It is 4 °C 🙂.",
        "Easy, 漢.",
        len(engine.script),
    )
    # Without --chat the prompt is plain text, and so is the continuation.
    assert "analysisEasy" in printed(cli("generate", tiny_models["gpt_oss"]))


def test_an_answer_without_final_text_is_reported(speaking, tiny_models, cli):
    speaking(ANSWER)
    cut = ("--max-new-tokens", 5)
    assert printed(cli("chat", tiny_models["gpt_oss"], *cut, stdin="Hi\n")) == f"> {NO_ANSWER}\n> "
    assert printed(cli("generate", tiny_models["gpt_oss"], "--chat", *cut)).endswith(f"]\n{NO_ANSWER}\n\n")


@pytest.mark.parametrize("verb", [("chat",), ("generate", "--chat")], ids=["chat", "generate"])
def test_no_harmony_uses_the_template(verb, speaking, uninstalled, tiny_models, cli):
    speaking(ANSWER)
    assert "analysisEasy" in printed(cli(*verb, tiny_models["gpt_oss"], "--no-harmony", stdin="Hi\n"))


@pytest.mark.parametrize("verb", [("chat",), ("generate", "--chat")], ids=["chat", "generate"])
def test_a_missing_package_is_reported(verb, speaking, uninstalled, tiny_models, refused):
    speaking(ANSWER)
    words = "this model speaks harmony: pip install '.[harmony]' in mlaforge's checkout, or use --no-harmony"
    refused(words, *verb, tiny_models["gpt_oss"])


# In a script


def test_chat_accepts_several_conversations(speaking):
    engine = speaking(ANSWER)
    llm = LLM("gpt-oss")
    for messages, params in (
        ([HI], None),
        (HI, SamplingParams(max_tokens=100, n=2)),
        ([HI, [*HI, *HI]], [SamplingParams(max_tokens=100)] * 2),
    ):
        outputs = llm.chat(messages, params or SamplingParams(max_tokens=100))
        conversations = messages if isinstance(messages[0], list) else [messages]
        assert [output.prompt_token_ids for output in outputs] == list(map(llm.chat_prompt, conversations))
        for completion in (completion for output in outputs for completion in output.outputs):
            assert (completion.text, completion.reasoning_content) == ("It is 4 °C 🙂.", "Easy, 漢.")
            assert (completion.token_ids, completion.finish_reason) == (engine.script, "stop")


def test_streamed_pieces_equal_the_whole_answer(speaking):
    speaking(ANSWER)
    pieces = [output.outputs[0] for output in LLM("gpt-oss").stream_chat(HI, SamplingParams(max_tokens=100))]
    assert "".join(piece.text for piece in pieces) == "It is 4 °C 🙂." and sum(bool(piece.text) for piece in pieces) > 3
    assert "".join(piece.reasoning_content for piece in pieces) == "Easy, 漢."


@pytest.mark.parametrize(
    ("text", "shown"), [("No channel.", "No channel."), (THOUGHT[:20], ""), (CALL, CALL)], ids=["none", "cut", "a call"]
)
def test_unparsable_answers_are_flagged(text, shown, speaking):
    """Including a call without any tools in the request."""
    speaking(text + "<|return|>" * (text == "No channel."))
    (output,) = LLM("gpt-oss").chat(HI, SamplingParams(max_tokens=40))
    (answer,) = output.outputs
    assert answer.text.startswith(shown) and bool(answer.text) == bool(shown)
    assert answer.harmony_parse_error and not answer.tool_calls and answer.finish_reason == "stop"


def test_channels_are_text_without_harmony(speaking):
    speaking(ANSWER)
    (output,) = LLM("gpt-oss", harmony=False).chat(HI, SamplingParams(max_tokens=4))
    assert output.outputs[0].text == "analysisEasy"


@pytest.mark.parametrize(("message", "words"), [
    ("Hi", "messages.0 must be a message of role and content, not a str"),
    ({"content": "x"}, "messages.0: role None must be system, user, assistant or tool"),
    ({"role": "ipython", "content": "x"}, "messages.0: role 'ipython' must be one of system, developer"),
    ({"role": "user", "content": [{"type": "image_url"}]}, "messages.0.content.0 is of type 'image_url'; a part"),
    ({"role": "assistant", "thinking": "x"}, "messages.0 has 'thinking'; harmony takes content, name"),
    ({"role": "tool", "content": "x"}, "messages.0: tool_call_id names no call of an earlier message"),
    ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}, "tool_calls must be"),
    ({"role": "assistant", "tool_calls": "f"}, "messages.0: tool_calls must be calls of"),
])  # fmt: skip
def test_rejects_invalid_messages(message, words, speaking):
    speaking(ANSWER)
    with pytest.raises(UserError) as caught:
        LLM("gpt-oss").chat_prompt([message])
    assert words in str(caught.value) and "\n" not in str(caught.value)
