"""Tool calls and reasoning in the text of an answer: every format, every split, every truncation."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlaforge.engine.request.text_parser import TextParser
from mlaforge.engine.request.tool_call_formats import CALL_FORMATS

TOOLS = ("weather", "get_time")
ROME = '{"city": "Rome"}'


def parse(pieces, tool_format=None, **options):
    """Return content, reasoning and [name, arguments] of all calls."""
    parser = TextParser(TOOLS, tool_format, **options)
    content = reasoning = ""
    calls = []
    for i, piece in enumerate(pieces):
        added = parser.feed(piece, i == len(pieces) - 1)
        assert added.keys() <= {"content", "reasoning_content", "tool_calls"} and all(added.values())
        content += added.get("content", "")
        reasoning += added.get("reasoning_content", "")
        for call in added.get("tool_calls", []):
            if call["index"] == len(calls):
                assert re.fullmatch("call_[0-9a-f]{32}", call["id"]) and call["type"] == "function"
                calls.append([call["function"]["name"], ""])
            else:
                assert call.keys() == {"index", "function"} and call["function"].keys() == {"arguments"}
            calls[call["index"]][1] += call["function"]["arguments"]
    assert parser.calls == len(calls) and not parser.failed
    return content, reasoning, calls


def same_in_pieces(text, tool_format=None, **options):
    """Parse a text whole and character by character, with the same result."""
    whole = parse([text], tool_format, **options)
    assert parse([*text, ""], tool_format, **options) == whole
    return whole


# Format, answer, content and calls.
ANSWERS = {
    "text, and calls one after another": (
        "hermes", f'Let me look.\n<tool_call>\n{{"name": "weather", "arguments": {ROME}}}\n</tool_call>\n<tool_call>\n'
        '{"name": "get_time", "arguments": {}}\n</tool_call>\n', "Let me look.",
        [["weather", ROME], ["get_time", "{}"]],
    ),
    "text before, between and after calls": (
        "hermes", 'a <tool_call>{"name": "get_time"}</tool_call>, b\n<tool_call>{"name": "get_time"}</tool_call>\nc',
        "a, b\nc", [["get_time", "{}"]] * 2,
    ),
    "markers and brackets in strings": (
        "hermes", '<tool_call>{"name": "weather", "arguments": {"city": "</tool_call> \\"}]"}}</tool_call>', "",
        [["weather", '{"city": "</tool_call> \\"}]"}']],
    ),
    "the name last, with other keys": (
        "hermes", f'<tool_call> {{ "id":[{{"a":1}}] , "arguments" : {ROME} , "name" : "weather" }} </tool_call>', "",
        [["weather", ROME]],
    ),
    "arguments as a string": (
        "hermes", '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"\\ud83d\\ude42\\"}"}</tool_call>', "",
        [["weather", '{"city": "🙂"}']],
    ),
    "null and a blank string are no arguments": (
        "hermes", '<tool_call>{"name": "get_time", "arguments": null}</tool_call>'
        '<tool_call>{"arguments": " ", "name": "get_time"}</tool_call>', "", [["get_time", "{}"]] * 2,
    ),
    "a missing brace": (
        "hermes", f'<tool_call>\n{{"name": "weather", "arguments": {ROME}\n</tool_call>', "", [["weather", ROME]],
    ),
    "calls without a marker": (
        "llama3_json", f'\n{{"name": "weather", "parameters": {ROME}}}; {{"type": "function", "name": "get_time", '
        '"parameters": {}}\n{"name": "get_time", "arguments": {}}', "", [["weather", ROME], *[["get_time", "{}"]] * 2],
    ),
    "calls after the tag": (
        "llama3_json", f'Hm <|python_tag|>{{"name": "weather", "parameters": {ROME}}};{{"name": "get_time"}}', "Hm",
        [["weather", ROME], ["get_time", "{}"]],
    ),
    "a list of calls": (
        "mistral", f'One moment.[TOOL_CALLS] [{{"name": "weather", "arguments": {ROME}, "id": "x"}}, '
        '{"arguments": {}, "name": "get_time"}]', "One moment.", [["weather", ROME], ["get_time", "{}"]],
    ),
    "names before the arguments": (
        "mistral", f"[TOOL_CALLS]weather[CALL_ID]a1[ARGS]{ROME}[TOOL_CALLS]get_time{{}} [TOOL_CALLS]get_time[ARGS] "
        "{}", "", [["weather", ROME], *[["get_time", "{}"]] * 2],
    ),
}  # fmt: skip


@pytest.mark.parametrize("answer", ANSWERS)
def test_calls(answer):
    tool_format, text, content, calls = ANSWERS[answer]
    assert same_in_pieces(text, tool_format) == (content, "", calls)


UNKNOWN = '{"name": "other", "arguments": {"x": "<tool_call>{\\"name\\": \\"get_time\\"}"}}'
# Text that is content as written.
CONTENT = {
    "an unknown tool": ("hermes", f"<tool_call>{UNKNOWN}</tool_call>"),
    "no JSON": ("hermes", "<tool_call>\n{'name': 'get_time'}\n</tool_call>"),
    "another format": ("hermes", "<tool_call>\n<function=get_time>\n</function>\n</tool_call>"),
    "a name that is no string": ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
    "arguments that are no object": ("hermes", '<tool_call>{"name": "get_time", "arguments": [1]}</tool_call>'),
    "a string that is no object": ("hermes", '<tool_call>{"name": "get_time", "arguments": "1"}</tool_call>'),
    "half a surrogate pair": ("hermes", '<tool_call>{"name": "get_time", "arguments": "{\\ud83d}"}</tool_call>'),
    "no name": ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    "mismatched brackets": ("hermes", '<tool_call>{"arguments": {"a": [1}, "name": "get_time"}</tool_call>'),
    "a call without a marker": ("hermes", '{"name": "get_time", "arguments": {}}'),
    "JSON that is no call": ("llama3_json", ' {"name": "Rome", "size": {"name": "get_time"}}\n'),
    "JSON with other keys": ("llama3_json", '{"city": 1, "name": "get_time", "parameters": {}}'),
    "JSON before a call": ("llama3_json", '{"name": "Rome"}\n{"name": "get_time", "parameters": {}}'),
    "JSON behind text": ("llama3_json", 'So: {"name": "get_time", "parameters": {}}'),
    "code behind the tag": ("llama3_json", '<|python_tag|>brave_search.call(query="Rome")'),
    "an unknown tool behind the tag": ("llama3_json", f"<|python_tag|>{UNKNOWN};"),
    "text behind the marker": ("mistral", "[TOOL_CALLS] weather is good, other [TOOL_CALLS][1, 2] [ARGS]{}"),
    "an unknown tool in a list": ("mistral", f"[TOOL_CALLS][{UNKNOWN}]"),
    "an unknown name": ("mistral", '[TOOL_CALLS]other[ARGS]{"x": "[TOOL_CALLS]get_time{}"} [TOOL_CALLS]'),
    "beginnings of markers": ("mistral", "[[TOOL_[TOOL_CALL] <tool_call [TOOL_CALLS"),
}


@pytest.mark.parametrize("answer", CONTENT)
def test_what_cannot_be_a_call_is_content(answer):
    tool_format, text = CONTENT[answer]
    assert same_in_pieces(text, tool_format) == (text, "", [])


def test_calls_beside_those_of_unknown_tools():
    known = '{"name": "get_time", "arguments": {}}'
    unknown_tagged = f"<tool_call>{UNKNOWN}</tool_call>"
    for tool_format, text, content in (
        ("hermes", f"{unknown_tagged}\n<tool_call>{known}</tool_call>", unknown_tagged),
        ("mistral", f"[TOOL_CALLS][{known}, {UNKNOWN}, {known}]", f", {UNKNOWN}"),
        ("llama3_json", f"<|python_tag|>{UNKNOWN}; {known}", f"<|python_tag|>{UNKNOWN}"),
    ):  # fmt: skip
        message = same_in_pieces(text, tool_format)
        assert message[0] == content and [name for name, _ in message[2]] == ["get_time"] * text.count(known)


def test_without_tools_calls_are_content():
    text = ANSWERS["text, and calls one after another"][1]
    parser = TextParser((), "hermes")
    assert parser.feed(text[:20], False) == {"content": text[:20]} and parser.feed(text[20:], True) == {
        "content": text[20:]
    }


@pytest.mark.parametrize(("text", "inside", "content", "reasoning"), [
    ("<think>\nEasy.\n\nYes.\n</think>\n\nIt is 4.\n", False, "It is 4.\n", "Easy.\n\nYes."),
    ("\n<think>Easy.</think>It is 4 <think>.", False, "It is 4 <think>.", "Easy."),
    ("<think>\n\n</think>\n\nIt is 4.", False, "It is 4.", ""),
    ("\nEasy.\n</think>\n\nIt is 4.", True, "It is 4.", "Easy."),
    ("<think>\nEasy.\n</think>It is 4.", True, "It is 4.", "Easy."),
    ("Easy, </thin", True, "", "Easy, </thin"),
    ("<think>Easy.\n", False, "", "Easy.\n"),
    (" It is <think>4</think>.", False, " It is <think>4</think>.", ""),
    (" <thin", False, " <thin", ""),
    ("", True, "", ""),
])  # fmt: skip
def test_reasoning(text, inside, content, reasoning):
    assert same_in_pieces(text, reasoning=True, inside=inside) == (content, reasoning, [])


def test_a_call_after_reasoning_about_it():
    call = f'<tool_call>{{"name": "weather", "arguments": {ROME}}}</tool_call>'
    message = same_in_pieces(f"<think>{call}?</think>\n\n{call}", "hermes", reasoning=True)
    assert message == ("", f"{call}?", [["weather", ROME]])


def test_special_tokens_are_dropped():
    text = '<|a|>Hm <|<|python_tag|>{"name"<|b|>: "get_time"}<|a|> <|b'
    dropped = same_in_pieces(text, "llama3_json", dropped=("<|a|>", "<|b|>"))
    assert dropped == ("Hm <| <|b", "", [["get_time", "{}"]])
    dropped = same_in_pieces(text, "llama3_json", dropped=("<|a|>", "<|b|>", "<|python"))
    assert dropped == ('Hm <|_tag|>{"name": "get_time"} <|b', "", [])
    assert TextParser(dropped=("ab", "ba")).feed("xab", False) == {"content": "x"}


# Streaming


def test_arguments_stream_as_soon_as_the_name_is_known():
    parser = TextParser(TOOLS, "hermes")
    assert parser.feed('<tool_call>{"name": "weather", "arguments": ', False) == {}
    (call,) = parser.feed("{", False)["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": "{"}
    for piece in ('"ci', 'ty": [', "1, 2", "]}"):
        added = parser.feed(piece, False)
        assert added == {"tool_calls": [{"index": 0, "function": {"arguments": piece}}]}
    assert parser.feed("}</tool_call>\n", False) == {} and parser.feed("", True) == {}


@pytest.mark.parametrize(
    ("tool_format", "withheld"), [("hermes", "<tool_"), ("llama3_json", "<|py"), ("mistral", "[T")]
)
def test_text_is_withheld_only_before_a_marker(tool_format, withheld):
    parser = TextParser(TOOLS, tool_format, reasoning=True)
    for text, added in (("\n<", ""), ("b", "\n<b"), ("> c", "> c"), (withheld, ""), ("x", withheld + "x")):
        assert parser.feed(text, False).get("content", "") == added


def test_json_that_is_no_call_streams():
    parser = TextParser(TOOLS, "llama3_json")
    assert parser.feed('{"na', False) == {} and parser.feed('me": "Rome"', False) == {"content": '{"name": "Rome"'}
    assert parser.feed(', "x": [', False) == {"content": ', "x": ['}


# Random answers

WORDS = st.text(st.sampled_from('ab é\n<>{}[]",:;/\\|'), max_size=12)
STRINGS = st.one_of(WORDS, st.sampled_from(["</tool_call>", "<tool_call>{", "[TOOL_CALLS]", "<|python_tag|>", "🙂"]))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), STRINGS),
    lambda values: st.one_of(st.lists(values, max_size=3), st.dictionaries(STRINGS, values, max_size=3)),
    max_leaves=6,
)


@st.composite
def calls(draw):
    """(name, text of the arguments, text of the call object)"""
    name = draw(st.sampled_from(TOOLS))
    arguments = json.dumps(
        draw(st.dictionaries(STRINGS, VALUES, max_size=3)), ensure_ascii=draw(st.booleans()),
        indent=draw(st.sampled_from([None, 1])),
    )  # fmt: skip
    written = json.dumps(arguments) if draw(st.booleans()) else arguments
    members = [f'"name": "{name}"', f'"{draw(st.sampled_from(["arguments", "parameters"]))}":{written}', '"id" : "x"']
    return name, arguments, "{" + " , ".join(draw(st.permutations(members))) + "\n}"


@st.composite
def answers(draw, tool_format):
    """(text, its content, its calls)"""
    texts, expected = [draw(WORDS)], []
    content = texts[0]
    for batch in draw(st.lists(st.lists(calls(), min_size=1, max_size=3), max_size=3)):
        expected += [[name, arguments] for name, arguments, _ in batch]
        objects = [text for _, _, text in batch]
        if tool_format == "hermes":
            texts += [f"<tool_call>\n{text}\n</tool_call>\n" for text in objects]
        elif tool_format == "llama3_json":
            texts.append("<|python_tag|>" + draw(st.sampled_from(["; ", "\n"])).join(objects))
        elif draw(st.booleans()):
            texts.append(f"[TOOL_CALLS] [{', '.join(objects)}]")
        else:
            separator = draw(st.sampled_from(["[ARGS]", "[CALL_ID]1x[ARGS]"]))
            texts += [f"[TOOL_CALLS]{name}{separator}{arguments}" for name, arguments, _ in batch]
        texts.append(draw(WORDS.filter(lambda text: not re.match(r"[\s;]*[;{]", text))))
        content += texts[-1]
    return "".join(texts), content, expected


@st.composite
def splits(draw, text):
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("tool_format", CALL_FORMATS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_random_answers_in_random_pieces(tool_format, data):
    text, content, expected = data.draw(answers(tool_format))
    thought = data.draw(st.sampled_from(["", "<think>\nA <tool_call>? [TOOL_CALLS]\n</think>\n"]))
    whole = parse([thought + text], tool_format, reasoning=True)
    assert whole[2] == expected and bool(whole[1]) == bool(thought)
    # White space beside calls is dropped.
    assert "".join(whole[0].split()) == "".join(content.split())
    assert parse(data.draw(splits(thought + text)), tool_format, reasoning=True) == whole


@settings(max_examples=60, deadline=None)
@given(data=st.data(), tool_format=st.sampled_from([None, *CALL_FORMATS]))
def test_text_without_markers_is_unchanged(data, tool_format):
    text = data.draw(st.text(st.sampled_from('ab <>{}[]":,\n|_tolcTO/'), max_size=40))
    assert parse(data.draw(splits(text)), tool_format, reasoning=True) == (text, "", [])


@pytest.mark.parametrize("answer", ANSWERS)
def test_truncation_loses_nothing(answer):
    """Words are in the message wherever the answer is cut off: as content, as a name or in arguments."""
    tool_format, text, _, calls = ANSWERS[answer]
    text = "<think>\nFirst thought</think>\nSecond. " * (tool_format != "llama3_json") + text
    structure = {*re.findall(r"\w+", " ".join(CALL_FORMATS[tool_format].markers)), "think", "name", "arguments", "id"}
    structure |= {"parameters", "type", "function", "null", "a1", "x", "a", "1", "ud83d", "ude42", "n"}
    for end in range(len(text)):
        content, reasoning, partial_calls = parse([text[:end]], tool_format, reasoning=True)
        message = " ".join((content, reasoning, *(part for call in partial_calls for part in call)))
        lost = {word for word in re.findall(r"\w+", text[:end]) if word not in message}
        assert all(any(known.startswith(word) for known in structure) for word in lost), (text[:end], lost)
        for (name, arguments), (full_name, full) in zip(partial_calls, calls, strict=False):
            assert name == full_name and full.startswith(arguments)


def test_arguments_end_where_they_are_malformed():
    text = '<tool_call>{"name": "get_time", "arguments": {"a": [1'
    for rest in ("}}", "</tool_call>", " 'b' ]}}"):
        content = "" if rest == "</tool_call>" else rest.lstrip()
        arguments = '{"a": [1' + " " * rest.startswith(" ")
        assert same_in_pieces(text + rest, "hermes") == (content, "", [["get_time", arguments]])


def test_a_truncated_call_has_truncated_arguments():
    head = '<tool_call>{"name": "weather", "arguments": '
    assert parse([head + '{"city": "Ro'], "hermes") == ("", "", [["weather", '{"city": "Ro']])
    assert parse([head + '"{\\"city\\": \\"\\ud83d\\ude4'], "hermes") == ("", "", [["weather", '{"city": "']])
    assert parse([head], "hermes") == (head, "", [])
