"""Formats of tool calls in the text of an answer. Names are those of vLLM's --tool-call-parser.

Every format writes a call as a JSON object {"name", "arguments"}, or as a name followed by the arguments, and differs
in what stands around it. Sources: the chat templates of Qwen2.5, Qwen3 and Hermes 3 (hermes), of Llama 3.1 and 3.2
(llama3_json), and of Mistral 7B v0.3 to Mistral Small 3.2 (mistral).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection

from mlaforge.engine.request.answer_text import WHITESPACE, AnswerText, Reader

# Names of a call's arguments, and all keys of a call that stands without a marker.
_ARGUMENTS = ("arguments", "parameters")
_KEYS = (*_ARGUMENTS, "name", "id", "type")
_TAG, _END_TAG = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_CALLS, _CALL_ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
# Tags inside <tool_call> of formats that do not write JSON.
_OTHER_TAGS = ("<function=", "<arg_key>")


@dataclasses.dataclass
class _Call:
    """A call while it is read. `begun`: the message has it, because its name and arguments are known."""

    name: str | None = None
    arguments: str | None = None
    begun: bool = False


class CallReader:
    """Reads calls of these tools. Other calls, and what cannot be a call, are content as written.

    A call begins in the message as soon as its name and the beginning of its arguments are known, and stays there even
    if it is malformed or cut off after that.
    """

    def __init__(self, answer: AnswerText, tools: Collection[str]) -> None:
        self.answer, self._tools = answer, tools

    def opened(self, marker: str) -> Reader[bool]:
        """Go behind the next marker and white space after it; withhold both. Return False at the end."""
        if not (yield from self.answer.find(marker)):
            return False
        self.answer.send_to(None)
        yield from self.answer.token(marker)
        yield from self.answer.skip()
        return True

    def calls(self, separators: str, bare: bool = False) -> Reader[None]:
        """Read call objects, with separators and white space between them. `bare`: no marker precedes them."""
        yield from self.answer.skip()
        while (yield from self.call(bare)):
            self.answer.send_to(None)
            yield from self.answer.skip(WHITESPACE + separators)

    def call(self, bare: bool = False) -> Reader[bool]:
        """Read a call object, of an unknown tool too, unless `bare`. Return False where there is none."""
        call, first = _Call(), True
        if not (yield from self.answer.follows("{")):
            return False
        while not (yield from self.answer.token("}")):
            if not first and not (yield from self.answer.token(",")):
                return False
            key, first = (yield from self._string()), False
            if key is None or (bare and key not in _KEYS) or not (yield from self.answer.token(":")):
                return False
            yield from self.answer.skip()
            if not (yield from self._member(key, call, bare)):
                return False
        if call.name in self._tools and not call.begun:
            self._begin(call, "{}")
        if call.begun:
            self.answer.drop()
        return call.name is not None

    def named_call(self) -> Reader[None]:
        """Read a name, its arguments, and the markers between them."""
        call = _Call((yield from self.answer.word()))
        if (yield from self.answer.token(_CALL_ID)):
            yield from self.answer.word()
        yield from self.answer.token(_ARGS)
        yield from self.answer.skip()
        if call.name not in self._tools:
            self.answer.send_to("content")
        yield from self._member(_ARGUMENTS[0], call, bare=False)

    def _member(self, key: str, call: _Call, bare: bool) -> Reader[bool]:
        """Read the value of a key. Return False where it is malformed or cannot belong to a call."""
        if key == "name" and call.name is None:
            call.name = yield from self._string()
            if call.name not in self._tools:
                self.answer.send_to("content")
                return call.name is not None and not bare
            if call.arguments is not None:
                self._begin(call, call.arguments)
            return True
        if key not in _ARGUMENTS or call.begun or call.arguments is not None:
            return (yield from self.answer.read_value(len))
        if call.name in self._tools and (yield from self.answer.peek()) == "{":
            self._begin(call, "")
            return (yield from self.answer.read_value(self.answer.add_arguments))
        pieces: list[str] = []
        complete = yield from self.answer.read_value(pieces.append)
        call.arguments = _object_text("".join(pieces), complete)
        if call.arguments is not None and call.name in self._tools:
            self._begin(call, call.arguments)
        return complete and call.arguments is not None

    def _begin(self, call: _Call, arguments: str) -> None:
        assert call.name is not None
        call.begun = True
        self.answer.begin_call(call.name)
        self.answer.add_arguments(arguments)

    def _string(self) -> Reader[str | None]:
        """Read a JSON string; None where there is none."""
        yield from self.answer.skip()
        pieces: list[str] = []
        if (yield from self.answer.peek()) != '"' or not (yield from self.answer.read_value(pieces.append)):
            return None
        return _decoded("".join(pieces))


def _object_text(value: str, complete: bool) -> str | None:
    """Return arguments as the text of an object; they may also be null, or a string of that text. None for others."""
    if value == "null" or value.startswith("{"):
        return "{}" if value == "null" else value
    # A string that was cut off may end inside an escape sequence, at most twelve characters long.
    ends = (value,) if complete else (value[: len(value) - cut] + '"' for cut in range(12))
    text = next((text for end in ends if (text := _decoded(end)) is not None), None)
    if text is not None and complete and not text.strip():
        return "{}"
    return text if text is not None and text.lstrip().startswith("{") else None


def _decoded(string: str) -> str | None:
    """Decode a JSON string; None for anything else, and for half a surrogate pair, which no encoding can carry."""
    try:
        text = json.loads(string, strict=False)
        str(text).encode()
    except ValueError:
        return None
    return text if isinstance(text, str) else None


def _read_tags(reader: CallReader) -> Reader[None]:
    """<tool_call>CALL</tool_call>"""
    while (yield from reader.opened(_TAG)):
        calls = reader.answer.calls
        yield from reader.call()
        if reader.answer.calls > calls and (yield from reader.answer.token(_END_TAG)):
            reader.answer.drop()
        reader.answer.send_to("content")


def _read_objects(reader: CallReader) -> Reader[None]:
    """CALL; CALL at the beginning of the answer, or after <|python_tag|>"""
    reader.answer.send_to(None)
    yield from reader.calls(";", bare=True)
    reader.answer.send_to("content")
    while (yield from reader.opened(_PYTHON_TAG)):
        yield from reader.calls(";")
        reader.answer.send_to("content")


def _read_lists(reader: CallReader) -> Reader[None]:
    """[TOOL_CALLS][CALL, CALL], or [TOOL_CALLS]NAME[ARGS]ARGUMENTS, each with a marker of its own"""
    while (yield from reader.opened(_CALLS)):
        calls = reader.answer.calls
        bracket = yield from reader.answer.follows("[")
        if not bracket and (yield from reader.answer.peek()) != "{":
            yield from reader.named_call()
        else:
            yield from reader.calls(",")
            if bracket and reader.answer.calls > calls and (yield from reader.answer.follows("]")):
                reader.answer.drop()
        reader.answer.send_to("content")


@dataclasses.dataclass(frozen=True)
class CallFormat:
    """A format of calls.

    markers   its markers, which may be special tokens
    matches   whether a chat template uses this format
    read      reads the content and the calls of an answer
    """

    markers: tuple[str, ...]
    matches: Callable[[str], bool]
    read: Callable[[CallReader], Reader[None]]


def _uses_tags(template: str) -> bool:
    return _TAG in template and not any(tag in template for tag in _OTHER_TAGS)


def _uses_objects(template: str) -> bool:
    example = '{"name": function name, "parameters":'
    return _PYTHON_TAG in template or ("Environment: ipython" in template and example in template)


# By name; a chat template has the first format that matches.
CALL_FORMATS = {
    "hermes": CallFormat((_TAG, _END_TAG), _uses_tags, _read_tags),
    "llama3_json": CallFormat((_PYTHON_TAG,), _uses_objects, _read_objects),
    "mistral": CallFormat((_CALLS, _CALL_ID, _ARGS), lambda template: _CALLS in template, _read_lists),
}
