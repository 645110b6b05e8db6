"""Streaming parser of answers in the harmony format, token by token.

A message is a header (role, channel, recipient, content type), `<|message|>`, a body, and the token that ends it:

    <|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}<|call|>

The prompt ends with the first `<|start|>assistant`. Source: OpenAI's harmony response format,
https://cookbook.openai.com/articles/openai-harmony. Only special tokens are structure, never text that looks like them.
"""

from __future__ import annotations

import codecs
import enum
import re
from collections.abc import Iterable, Sequence
from typing import Any

from mlaforge.engine.request.stop_strings import find_stop, partial_stop_length
from mlaforge.engine.request.tool_call_deltas import add_arguments, new_call

# Namespace of the tools of a request, among recipients.
FUNCTIONS = "functions."
# In the text of a header, these private-use characters stand for special tokens.
_START, _CHANNEL, _CONSTRAIN, _OTHER = "\ue000\ue001\ue002\ue003"
_RECIPIENT = r"to=(?P<{}>[^\s\ue000-\ue003]+)"
_TYPE = r"[\w./+-]+"
_HEADER = re.compile(
    rf"(?:{_START}assistant)?\s*(?:{_RECIPIENT.format('before')})?\s*"
    rf"{_CHANNEL}\s*(?P<channel>analysis|commentary|final)(?:\s+{_RECIPIENT.format('after')})?"
    rf"(?:\s*{_CONSTRAIN}\s*{_TYPE}|\s+{_TYPE})?\s*"
)
# Beginnings of a header, and channels on which a tool may be called.
_BEGINNINGS = (_CHANNEL, "to=", f"{_START}assistant")
_CALLING = ("commentary", "analysis")
# Most tokens of a header. Real ones have fewer than 20 and the name of a tool.
_MAX_HEADER = 100
# Separates messages that are returned as one text.
_PARAGRAPH = "\n\n"


class _State(enum.Enum):
    HEADER = "in a header"
    BODY = "in the body of a message that was parsed"
    BETWEEN = "after a message"
    UNREAD = "in text that cannot be parsed, up to the next <|start|>"


class HarmonyParser:
    """Parses generated tokens to pieces of a chat message: {"content" | "reasoning_content" | "tool_calls": ...}.

    analysis is reasoning; final, and commentary without a recipient, are content, a paragraph each; a message to
    functions.x is a call of the tool x, where `tools` has that name. Any other message, and text outside of messages,
    is content as it stands (special tokens included) up to the next `<|start|>`, where parsing resumes. A header
    without a body is dropped: it is incomplete or malformed. Both set `failed`. `calls` counts the calls,
    `reasoning_tokens` the tokens of analysis. Half a character at the end of a truncated answer is dropped.

    `stops`: strings that end the final message (the engine stops there); the answer ends before them.
    """

    def __init__(self, encoding: Any, tools: Iterable[str] = (), stops: Sequence[str] = ()) -> None:
        import openai_harmony as oh

        def special(text: str) -> int:
            return int(encoding.encode(text, allowed_special="all")[0])

        self._error = oh.HarmonyError
        self._encoding = encoding
        self._tools = frozenset(tools)
        self._message, self._start = special("<|message|>"), special("<|start|>")
        self._ends = frozenset(map(special, ("<|end|>", "<|return|>", "<|call|>", "<|endoftext|>")))
        self._marks = {
            self._start: _START, special("<|channel|>"): _CHANNEL, special("<|constrain|>"): _CONSTRAIN,
        }  # fmt: skip
        self._state = _State.HEADER
        self._header: list[int] = []
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # The field that receives the current message, whether it has received any of it, and which fields have text.
        self._field, self._begun = "content", False
        self._filled: set[str] = set()
        self.failed = False
        self.calls = 0
        self.reasoning_tokens = 0
        # Text of the final message that may be the beginning of a stop string.
        self._stops, self._buffered = tuple(stops), ""
        # Whether the current message is final, and whether a stop string ends with the current token.
        self._final = self._stopping = False

    def feed(self, token_ids: list[int], finished: bool, stopped: bool = False) -> dict[str, Any]:
        """Return what these tokens add. `finished`: they are the last; `stopped`: because of a stop string."""
        added: dict[str, Any] = {}
        for index, token_id in enumerate(token_ids):
            self._stopping = stopped and index == len(token_ids) - 1
            self._process(token_id, added)
        if finished:
            self._flush(added)
            if self._header:
                self.failed, self._header = True, []
        return added

    def _process(self, token_id: int, added: dict[str, Any]) -> None:
        if token_id == self._start:
            self._flush(added)
            # A message that was not ended, or a header without a body.
            self.failed = self.failed or self._state is _State.BODY or bool(self._header)
            self._state, self._header = _State.HEADER, [token_id]
        elif self._state is _State.HEADER:
            self._read_header(token_id, added)
        elif self._state is _State.BODY and token_id in self._ends:
            self._hand_out(self._decoder.decode(b"", final=True), added)
            self._flush(added)
            self._state = _State.BETWEEN
        elif self._state is _State.UNREAD or (self._state is _State.BODY and not self._is_special(token_id)):
            self.reasoning_tokens += self._field == "reasoning_content"
            self._hand_out(self._text(token_id), added)
        else:
            self._leave_unread([token_id], added)

    def _read_header(self, token_id: int, added: dict[str, Any]) -> None:
        if token_id in self._ends and self._header:
            self.failed, self._header = True, []
            self._state = _State.BETWEEN
        elif token_id == self._message:
            if self._open(added):
                self._state, self._header = _State.BODY, []
            else:
                self._leave_unread([*self._header, token_id], added)
        else:
            self._header.append(token_id)
            if len(self._header) > _MAX_HEADER or not _begins(self._header_text()):
                self._leave_unread(self._header, added)

    def _header_text(self) -> str:
        self._decoder.reset()
        return "".join(
            self._marks.get(token_id, _OTHER) if self._is_special(token_id) else self._text(token_id)
            for token_id in self._header
        )

    def _open(self, added: dict[str, Any]) -> bool:
        """Begin the message whose header was read. False where its recipient is unknown."""
        header = _HEADER.fullmatch(self._header_text())
        if header is None or (header["before"] and header["after"]):
            return False
        channel, recipient = header["channel"], header["before"] or header["after"]
        if recipient is None:
            self._begin("reasoning_content" if channel == "analysis" else "content")
            self._final = channel == "final"
            return True
        name = recipient.removeprefix(FUNCTIONS)
        if channel not in _CALLING or not recipient.startswith(FUNCTIONS) or name not in self._tools:
            return False
        self._begin("tool_calls")
        added.setdefault("tool_calls", []).append(new_call(self.calls, name))
        self.calls += 1
        return True

    def _leave_unread(self, token_ids: list[int], added: dict[str, Any]) -> None:
        """Treat these tokens, and all up to the next `<|start|>`, as content."""
        self._flush(added)
        self._state, self._header, self.failed = _State.UNREAD, [], True
        self._begin("content")
        for token_id in token_ids:
            self._hand_out(self._text(token_id), added)

    def _begin(self, field: str) -> None:
        self._field, self._begun, self._final = field, False, False
        self._decoder.reset()

    def _before_stops(self, text: str) -> str:
        """Return the text of the final message that can be shown: without the stop string that ended it, and while it
        goes on without what may become one. Mirrors `Stopping`."""
        scanned, text = len(self._buffered), self._buffered + text
        self._buffered = ""
        if self._stopping and (match := find_stop(text, self._stops, scanned)):
            return text[: match[0]]
        shown = len(text) - partial_stop_length(text, self._stops)
        self._buffered = text[shown:]
        return text[:shown]

    def _flush(self, added: dict[str, Any]) -> None:
        text, self._buffered = self._buffered, ""
        self._write(text, added)

    def _hand_out(self, text: str, added: dict[str, Any]) -> None:
        self._write(self._before_stops(text) if self._final and self._stops else text, added)

    def _write(self, text: str, added: dict[str, Any]) -> None:
        if not text:
            return
        if self._field == "tool_calls":
            add_arguments(added.setdefault("tool_calls", []), self.calls - 1, text)
            return
        if not self._begun and self._field in self._filled:
            text = _PARAGRAPH + text
        self._begun = True
        self._filled.add(self._field)
        added[self._field] = added.get(self._field, "") + text

    def _is_special(self, token_id: int) -> bool:
        return bool(self._encoding.is_special_token(token_id))

    def _text(self, token_id: int) -> str:
        """The text that a token adds."""
        try:
            text = self._encoding.decode([token_id], errors="surrogateescape")
        except self._error:
            text = "\ufffd"  # an id that the vocabulary lacks
        return self._decoder.decode(text.encode("utf-8", "surrogateescape"))


def _begins(text: str) -> bool:
    """Whether this may be the beginning of a header."""
    text = text.lstrip()
    return any(text.startswith(beginning) or beginning.startswith(text) for beginning in _BEGINNINGS)
