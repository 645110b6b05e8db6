"""Streaming parser of the text of an answer: reasoning, content and tool calls.

harmony_parser.py is its counterpart for answers whose structure is in tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mlaforge.engine.request.answer_text import AnswerText, Reader
from mlaforge.engine.request.reasoning import read_reasoning
from mlaforge.engine.request.special_token_filter import SpecialTokenFilter
from mlaforge.engine.request.tool_call_formats import CALL_FORMATS, CallReader


class TextParser:
    """Parses generated text to pieces of a chat message: {"content" | "reasoning_content" | "tool_calls": ...}.

    tools        names of the tools that can be called
    tool_format  a key of CALL_FORMATS; None: calls stay in the content
    reasoning    whether reasoning may precede the content
    inside       whether the prompt ends inside the reasoning
    dropped      special tokens whose text is dropped

    The pieces together do not depend on how the text is cut. Text is withheld only while it may be the beginning of a
    marker, or of a call whose name is not known. Nothing is invalid (`failed` is False): text that cannot be parsed is
    content as written. `calls` counts the calls.
    """

    failed = False

    def __init__(
        self, tools: Iterable[str] = (), tool_format: str | None = None, *, reasoning: bool = False,
        inside: bool = False, dropped: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self._answer, self._filter = AnswerText(), SpecialTokenFilter(dropped)
        self._reader = self._read(frozenset(tools), tool_format, reasoning, inside)

    @property
    def calls(self) -> int:
        return self._answer.calls

    def feed(self, text: str, finished: bool) -> dict[str, Any]:
        """Return what this text adds. `finished`: it is the last."""
        self._answer.append(self._filter.feed(text, finished), finished)
        next(self._reader, None)
        return self._answer.added()

    def _read(self, tools: frozenset[str], tool_format: str | None, reasoning: bool, inside: bool) -> Reader[None]:
        if reasoning:
            yield from read_reasoning(self._answer, inside)
        self._answer.send_to("content")
        if tools and tool_format is not None:
            yield from CALL_FORMATS[tool_format].read(CallReader(self._answer, tools))
        yield from self._answer.read_rest()
