"""The extent of one JSON value in text that arrives in pieces."""

from __future__ import annotations

# Characters of JSON outside of strings, beside letters, digits and white space.
_PUNCTUATION = frozenset("{}[]:,.+-_")
_CLOSING = {"{": "}", "[": "]"}


class JsonValue:
    """Finds the end of one JSON value, piece by piece. The first character must not be white space.

    Checks strings and the nesting of brackets, not the grammar between them. `complete`: the end was read; `failed`:
    the next character cannot belong to a JSON value. A number or a word ends where something follows it.
    """

    def __init__(self) -> None:
        self.complete = self.failed = False
        # Brackets that close what is open; inside a string; after a backslash.
        self._closing: list[str] = []
        self._quoted = self._escaped = False

    def read(self, text: str, start: int) -> int:
        """Return where the value ends in `text`, whose characters from `start` on are new; its length if it goes on."""
        for position in range(start, len(text)):
            if self._quoted:
                self._read_quoted(text[position])
            elif not self._accepts(text[position]):
                return position
            if self.complete:
                return position + 1
        return len(text)

    def _read_quoted(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif character == '"':
            self._quoted, self.complete = False, not self._closing
        else:
            self._escaped = character == "\\"

    def _accepts(self, character: str) -> bool:
        """Whether the character belongs to the value, outside of strings."""
        if character == '"':
            self._quoted = True
        elif character in _CLOSING:
            self._closing.append(_CLOSING[character])
        elif not self._closing:
            # A number or a word, or what follows it.
            self.complete = character in ",]}" or character.isspace()
            self.failed = not self.complete and not _plain(character)
            if self.complete:
                return False
        elif character in "}]":
            self.failed = self._closing.pop() != character
            self.complete = not self.failed and not self._closing
        else:
            self.failed = not _plain(character)
        return not self.failed


def _plain(character: str) -> bool:
    return character.isalnum() or character.isspace() or character in _PUNCTUATION
