"""Incremental parsers of answers: what the new tokens of a choice add to its chat message."""

from __future__ import annotations

from typing import Any, Protocol

from mlaforge.engine.request.harmony import Harmony
from mlaforge.engine.request.output import Completion
from mlaforge.engine.request.text_parser import TextParser
from mlaforge.engine.request.tool_call_deltas import new_call
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.serving.tool_calls import CallsReader


class AnswerParser(Protocol):
    """Incremental parser of one choice.

    failed            whether a part of the text is not valid harmony
    calls             number of tool calls so far, except that of a named tool
    reasoning_tokens  number of tokens of the reasoning so far; None for a format without reasoning
    """

    @property
    def failed(self) -> bool: ...
    @property
    def calls(self) -> int: ...
    @property
    def reasoning_tokens(self) -> int | None: ...

    def read(self, new: Completion) -> dict[str, Any]:
        """Return the message delta of an incremental completion: "content", "reasoning_content" and "tool_calls", as
        far as something is added to them."""


class PlainParser:
    """All text is content."""

    failed = False
    calls = 0
    reasoning_tokens = None

    def read(self, new: Completion) -> dict[str, Any]:
        return {"content": new.text} if new.text else {}


class ChannelParser:
    """Parses tokens, not text: the structure of harmony is in its special tokens."""

    def __init__(self, harmony: Harmony, tools: list[dict[str, Any]], params: SamplingParams) -> None:
        self._parser = harmony.parser(tools, params)

    @property
    def failed(self) -> bool:
        return self._parser.failed

    @property
    def calls(self) -> int:
        return self._parser.calls

    @property
    def reasoning_tokens(self) -> int | None:
        return self._parser.reasoning_tokens

    def read(self, new: Completion) -> dict[str, Any]:
        stopped = isinstance(new.stop_reason, str)
        return self._parser.feed(new.token_ids, new.finish_reason is not None, stopped)


class TextAnswerParser:
    """Parses the reasoning and the tool calls that the text of an answer has.

    parser     parser of the text
    reasoning  whether the format has reasoning
    parallel   whether calls after the first are answered; else they are dropped
    tokenizer  counts the tokens of the reasoning
    """

    failed = False

    def __init__(self, parser: TextParser, reasoning: bool, parallel: bool, tokenizer: Any) -> None:
        self._parser, self._parallel, self._tokenizer = parser, parallel, tokenizer
        self._reasoning: list[str] | None = [] if reasoning else None

    @property
    def calls(self) -> int:
        return self._parser.calls

    @property
    def reasoning_tokens(self) -> int | None:
        if self._reasoning is None:
            return None
        return len(self._tokenizer("".join(self._reasoning), add_special_tokens=False)["input_ids"])

    def read(self, new: Completion) -> dict[str, Any]:
        delta = self._parser.feed(new.text, new.finish_reason is not None)
        if self._reasoning is not None and "reasoning_content" in delta:
            self._reasoning.append(delta["reasoning_content"])
        if not self._parallel and "tool_calls" in delta:
            delta["tool_calls"] = [call for call in delta["tool_calls"] if call["index"] == 0]
            if not delta["tool_calls"]:
                del delta["tool_calls"]
        return delta


class CallsParser:
    """Parses the list of calls that the schema of `tool_choice: required` prescribes."""

    failed = False
    reasoning_tokens = None

    def __init__(self) -> None:
        self._reader = CallsReader()

    @property
    def calls(self) -> int:
        return self._reader.calls

    def read(self, new: Completion) -> dict[str, Any]:
        deltas = self._reader.read(new.text)
        return {"tool_calls": deltas} if deltas else {}


class NamedCallParser:
    """All text is the arguments of one tool. Such an answer ends with `stop`, as with OpenAI and vLLM."""

    failed = False
    calls = 0
    reasoning_tokens = None

    def __init__(self, name: str) -> None:
        self._call = new_call(0, name)

    def read(self, new: Completion) -> dict[str, Any]:
        if not new.text:
            return {}
        call, self._call = self._call, {"index": 0, "function": {}}
        return {"tool_calls": [{**call, "function": {**call["function"], "arguments": new.text}}]}
