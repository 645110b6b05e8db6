"""Parsers of answers by the chat template, and special tokens among their markers."""

import types

import pytest

from mlaforge.engine.request.text_format import REASONING_PARSERS, TOOL_PARSERS, TextFormat
from mlaforge.runtime import UserError

# Excerpts of public chat templates.
JSON_IN_TAGS = (
    "return a json object with function name and arguments within <tool_call></tool_call> XML tags:\\n<tool_call>\\n"
    '{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>'
)
IPYTHON = '{{- "Environment: ipython\\n" }}'
# Model -> excerpt, formats of tool calls and of reasoning.
TEMPLATES = {
    "Qwen2.5": (JSON_IN_TAGS, "hermes", None),
    "Qwen3": (JSON_IN_TAGS + "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}", "hermes", "think"),
    "Qwen3-Coder": ("<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>", None, None),
    "GLM-4.5": ("<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key> {{- '<think></think>' }}", None, "think"),
    "Llama 3.1": (IPYTHON + "{{- '<|python_tag|>' + tool_call.name + '.call(' }}", "llama3_json", None),
    "Llama 3.2": (
        IPYTHON + """{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name """
        """and its value}.' }}""", "llama3_json", None,
    ),
    "Mistral 7B v0.3": ('{{- "[TOOL_CALLS] [" }} {%- for tool_call in message.tool_calls %}', "mistral", None),
    "Mistral Small 3.2": ("{{- '[TOOL_CALLS]' + function.name + '[CALL_ID]' + id + '[ARGS]' }}", "mistral", None),
    "DeepSeek-R1": ("{% set content = content.split('</think>')[-1] %}{{'<｜Assistant｜><think>\\n'}}", None, "think"),
    "SmolLM2": ("{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' }}", None, None),
}  # fmt: skip


@pytest.mark.parametrize("model", TEMPLATES)
def test_the_chat_template_decides(model):
    template, tool_parser, reasoning_parser = TEMPLATES[model]
    text_format = TextFormat.choose(template)
    assert text_format == TextFormat(tool_parser, reasoning_parser)
    assert TextFormat.choose({"default": "", "tool_use": template}) == text_format
    assert text_format.plain is (tool_parser is reasoning_parser is None)


def test_names_decide():
    template = TEMPLATES["Qwen3"][0]
    assert TextFormat.choose(template, "none", "none").plain and TextFormat.choose(None).plain
    for name in TOOL_PARSERS[2:]:
        assert TextFormat.choose(template, name) == TextFormat(name, "think")
    for name in REASONING_PARSERS[2:]:
        assert TextFormat.choose(None, reasoning_parser=name) == TextFormat(None, name)
    with pytest.raises(
        UserError, match="tool_call_parser = 'xml' must be one of auto, none, hermes, llama3_json, mistral"
    ):
        TextFormat.choose(template, "xml")
    with pytest.raises(UserError, match="reasoning_parser = 'hermes' must be one of auto, none, think"):
        TextFormat.choose(template, reasoning_parser="hermes")


class Tokenizer:
    def __init__(self, **tokens):
        self.added_tokens_decoder = {
            token_id: types.SimpleNamespace(content=text, special=special)
            for token_id, (text, special) in enumerate(tokens.values())
        }


def test_special_tokens():
    tokenizer = Tokenizer(
        a=("<|eot_id|>", True), b=("<|python_tag|>", True), c=("<tool_call>", False), d=("<pad>", True)
    )
    objects = TextFormat("llama3_json", "think")
    assert objects.shows_special_tokens(tokenizer) and objects.dropped_tokens(tokenizer) == ("<|eot_id|>", "<pad>")
    assert not TextFormat("hermes", "think").shows_special_tokens(tokenizer)
    assert not objects.for_tools([]).shows_special_tokens(tokenizer)
    assert TextFormat(None, "think").shows_special_tokens(Tokenizer(a=("</think>", True)))


@pytest.mark.parametrize(("prompt", "reasoning"), [
    ("<|im_start|>assistant\n<think>\n", "Hm"), ("<think>", "Hm"), ("<think>\n\n</think>\n\n", ""), ("assistant\n", ""),
])  # fmt: skip
def test_the_prompt_decides_where_the_answer_begins(prompt, reasoning):
    parser = TextFormat("hermes", "think").parser(["f"], prompt)
    assert parser.feed("Hm", True) == ({"reasoning_content": "Hm"} if reasoning else {"content": "Hm"})
    assert TextFormat("hermes", None).parser(["f"], prompt).feed("Hm", True) == {"content": "Hm"}
