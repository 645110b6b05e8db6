"""The text of an answer that arrives in pieces, and the fields of the message that receive it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeVar

from mlaforge.engine.request.json_value import JsonValue
from mlaforge.engine.request.stopping import partial_stop_length
from mlaforge.engine.request.tool_call_deltas import add_arguments, new_call

T = TypeVar("T")
# A part of a parser: it yields where it needs more text.
Reader = Generator[None, None, T]
WHITESPACE = " \t\r\n"


class AnswerText:
    """A reading position in growing text. Text before it goes to a field of the message, or is withheld.

    The methods that read are generators, which yield at the end of the text until `append` adds to it or finishes it.
    `finished`: no more text comes. `calls`: number of tool calls so far. White space before a call is dropped, and that
    after it unless it separates two parts of the content.
    """

    def __init__(self) -> None:
        self.finished = False
        self.calls = 0
        # Text from `_start` on is in no field yet; the reader is at `_position`.
        self._text, self._start, self._position = "", 0, 0
        self._field: str | None = None
        # Whether the message ends with a call, and whether it has content.
        self._after_call = self._has_content = False
        self._added: dict[str, Any] = {}

    def append(self, text: str, finished: bool) -> None:
        """Add new text; `finished`: it is the last."""
        self._text = self._text[self._start :] + text
        self._position -= self._start
        self._start, self.finished = 0, finished

    def added(self) -> dict[str, Any]:
        """Return what was added to the message since the last time."""
        self._hand_out()
        added, self._added = self._added, {}
        return added

    # Reading

    def peek(self) -> Reader[str]:
        """Return the next character, "" at the end of the answer."""
        while self._position == len(self._text) and not self.finished:
            yield
        return self._text[self._position : self._position + 1]

    def skip(self, characters: str = WHITESPACE) -> Reader[None]:
        """Pass all of these characters."""
        while (character := (yield from self.peek())) and character in characters:
            self._position += 1

    def word(self) -> Reader[str]:
        """Pass and return letters, digits, "_", "-" and ".". Requires text to be withheld."""
        before = self._position - self._start
        while (character := (yield from self.peek())) and (character.isalnum() or character in "_-."):
            self._position += 1
        return self._text[self._start + before : self._position]

    def follows(self, marker: str) -> Reader[bool]:
        """Whether the marker comes next; if so, pass it."""
        while (text := self._text[self._position : self._position + len(marker)]) != marker:
            if self.finished or not marker.startswith(text):
                return False
            yield
        self._position += len(marker)
        return True

    def token(self, marker: str) -> Reader[bool]:
        """As `follows`, after white space, which is passed in any case."""
        yield from self.skip()
        return (yield from self.follows(marker))

    def find(self, marker: str, space: str = WHITESPACE) -> Reader[bool]:
        """Go to the next marker, before white space of these characters that precedes it. Return False at the end."""
        while (at := self._text.find(marker, self._position)) < 0 and not self.finished:
            partial = partial_stop_length(self._text[self._position :], [marker])
            self._go_before(len(self._text) - partial, space)
            yield
        if at < 0:
            self._position = len(self._text)
        else:
            self._go_before(at, space)
        return at >= 0

    def read_value(self, receive: Callable[[str], object]) -> Reader[bool]:
        """Pass one JSON value and call `receive` with its pieces. Return False where it is malformed or cut off."""
        value = JsonValue()
        while True:
            begin, self._position = self._position, value.read(self._text, self._position)
            receive(self._text[begin : self._position])
            if value.complete or value.failed or self.finished:
                return value.complete
            yield

    def read_rest(self) -> Reader[None]:
        """Pass all that follows."""
        while True:
            self._position = len(self._text)
            if self.finished:
                return
            yield

    def rewind(self) -> None:
        """Go back to the beginning of the withheld text."""
        self._position = self._start

    def _go_before(self, end: int, space: str) -> None:
        self._position += len(self._text[self._position : end].rstrip(space))

    # Writing

    def send_to(self, field: str | None) -> None:
        """Add the text passed from now on to this field of the message, withheld text too; None withholds it."""
        self._hand_out()
        self._field = field

    def drop(self) -> None:
        """Leave the withheld text before the position out of the message."""
        self._start = self._position

    def begin_call(self, name: str) -> None:
        """Begin a tool call in place of the withheld text."""
        self.drop()
        self._added.setdefault("tool_calls", []).append(new_call(self.calls, name))
        self.calls += 1
        self._after_call = True

    def add_arguments(self, text: str) -> None:
        """Add to the arguments of the last call, in place of the withheld text."""
        self.drop()
        if text:
            add_arguments(self._added.setdefault("tool_calls", []), self.calls - 1, text)

    def _hand_out(self) -> None:
        text = self._text[self._start : self._position]
        if self._after_call and not text.strip(WHITESPACE):
            return  # stays withheld, until text or another call follows
        if self._field is None or not text:
            return
        self.drop()
        if self._after_call and not self._has_content:
            text = text.lstrip(WHITESPACE)
        self._after_call = False
        self._has_content = self._has_content or self._field == "content"
        self._added[self._field] = self._added.get(self._field, "") + text
