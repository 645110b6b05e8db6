"""Incremental detokenization: the text of a growing sequence of tokens, a token at a time."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

# What decoders write for bytes that are no character (yet).
BROKEN = "\ufffd"
# Prompt tokens whose text decides how the first new token is decoded: decoders of sentencepiece strip a space there.
CONTEXT = 6
# Tokens decoded again and again until the window moves.
WINDOW = 16
_SPECIAL: weakref.WeakKeyDictionary[Any, frozenset[int]] = weakref.WeakKeyDictionary()


def _special_ids(tokenizer: Any) -> frozenset[int]:
    """Ids that decoding with skip_special_tokens leaves out; remembered per tokenizer, which lists them slowly."""
    if tokenizer not in _SPECIAL:
        added = tokenizer.added_tokens_decoder.items()
        _SPECIAL[tokenizer] = frozenset(token for token, content in added if content.special)
    return _SPECIAL[tokenizer]


class Detokenizer:
    """`append` returns the text that a token adds; all of it together, with `flush`, is the decoded sequence.

    A window of the last tokens is decoded at every step. It moves on at places where a character ends, so that the
    cost of a token does not depend on the length of the text. U+FFFD at the end of the window is held back: it may be
    the first half of a character. One sequence differs from decoding it as a whole: where a byte that fits nothing
    follows single-byte tokens of complete characters, sentencepiece's decoders take those characters back.

    context_ids   the prompt: the text starts after it, with the space that joins them
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True, context_ids: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._special = _special_ids(tokenizer) if skip_special_tokens else frozenset()
        context = [token for token in context_ids[-4 * CONTEXT :] if self._has_text(token)][-CONTEXT:]
        # A window that begins inside a character is none to trust; a prompt may have U+FFFD of its own, though.
        context = next((c for n in range(len(context)) if BROKEN not in self._decode(c := context[n:])), context)
        # The window, the text of it that was given out, and how many of its tokens ended with a complete character.
        self._ids = context
        self._emitted = self._decode(context)
        self._complete = len(context)

    def _has_text(self, token_id: int) -> bool:
        """False for special tokens that are skipped and ids that the tokenizer lacks (a padded vocabulary).

        They are left out before anything is decoded: a window of them alone would be no context.
        """
        return token_id not in self._special and self._tokenizer.convert_ids_to_tokens(token_id) is not None

    def _decode(self, ids: list[int]) -> str:
        # What is given out cannot be cleaned up afterwards.
        text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) if ids else ""
        assert isinstance(text, str)
        return text

    def append(self, token_id: int) -> str:
        """The text that has become certain by this token; may be empty."""
        if not self._has_text(token_id):
            return ""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if not text.startswith(self._emitted):
            # Single-byte tokens that turned out to be no characters; what was given out stands.
            self._ids = self._ids[self._complete :]
            self._emitted, self._complete = "", 0
            text = self._decode(self._ids)
        certain = text[: max(len(text.rstrip(BROKEN)), len(self._emitted))]
        new = certain[len(self._emitted) :]
        self._emitted = certain
        if certain == text:
            if len(self._ids) > WINDOW and self._complete:
                self._ids = self._ids[self._complete :]
                self._emitted = self._decode(self._ids)
            self._complete = len(self._ids)
        elif len(self._ids) > 2 * WINDOW:
            new += self._give_up_broken(text)
        return new

    def _give_up_broken(self, text: str) -> str:
        """Gives out bytes that are no characters, up to the last place that is certainly between two of them.

        A character has at most four bytes: what comes before the last four tokens cannot change any more.
        """
        for cut in range(len(self._ids) - 4, 0, -1):
            before = self._decode(self._ids[:cut])
            if before + self._decode(self._ids[cut:]) == text and len(before) >= len(self._emitted):
                new = before[len(self._emitted) :]
                self._ids, self._emitted, self._complete = self._ids[cut:], "", 0
                return new
        return ""

    def flush(self) -> str:
        """What was held back. Nothing may be appended after it."""
        return self._decode(self._ids)[len(self._emitted) :]
