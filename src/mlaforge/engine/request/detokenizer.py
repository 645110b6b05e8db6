"""Incremental detokenization: the text of a growing sequence, token by token."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

# What decoders write for bytes that are not, or not yet, a character.
REPLACEMENT = "\ufffd"
# Prompt tokens that decide how the first new token is decoded: sentencepiece decoders strip a leading space.
CONTEXT = 6
# Tokens that are decoded again at every step, until the window moves.
WINDOW = 16
_SPECIAL: weakref.WeakKeyDictionary[Any, dict[int, str]] = weakref.WeakKeyDictionary()


def special_tokens(tokenizer: Any) -> Mapping[int, str]:
    """Return ids and texts of the tokens that decoding with skip_special_tokens leaves out; cached per tokenizer,
    because listing them is slow."""
    if tokenizer not in _SPECIAL:
        added = tokenizer.added_tokens_decoder.items()
        _SPECIAL[tokenizer] = {token: content.content for token, content in added if content.special}
    return _SPECIAL[tokenizer]


class Detokenizer:
    """`append` returns the text that a token adds; all of it together, with `flush`, is the decoded sequence.

    Every step decodes a window of the last tokens. The window moves on where a character ends, so that the cost of a
    token does not depend on the length of the text. U+FFFD at the end of the window is buffered: it may be the first
    half of a character. One case differs from decoding the whole sequence: where an invalid byte follows single-byte
    tokens of complete characters, sentencepiece decoders take those characters back.

    context_ids   the prompt: the text starts after it, with the space that joins them
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True, context_ids: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._special = special_tokens(tokenizer) if skip_special_tokens else {}
        context = [token for token in context_ids[-4 * CONTEXT :] if self._has_text(token)][-CONTEXT:]
        # A window must not begin inside a character. But a prompt may contain U+FFFD itself.
        context = next((c for n in range(len(context)) if REPLACEMENT not in self._decode(c := context[n:])), context)
        # The window, its text that was returned, and how many of its tokens end with a complete character.
        self._ids = context
        self._emitted = self._decode(context)
        self._complete = len(context)

    def _has_text(self, token_id: int) -> bool:
        """False for special tokens that are skipped and for ids that the tokenizer lacks (a padded vocabulary).

        They are removed before decoding: a window of such tokens alone would be no context.
        """
        return token_id not in self._special and self._tokenizer.convert_ids_to_tokens(token_id) is not None

    def _decode(self, ids: list[int]) -> str:
        # Returned text cannot be cleaned up later.
        text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) if ids else ""
        assert isinstance(text, str)
        return text

    def append(self, token_id: int) -> str:
        """Return the text that is final with this token; may be empty."""
        if not self._has_text(token_id):
            return ""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if not text.startswith(self._emitted):
            # Single-byte tokens that are no characters after all; text that was returned stays.
            self._ids = self._ids[self._complete :]
            self._emitted, self._complete = "", 0
            text = self._decode(self._ids)
        certain = text[: max(len(text.rstrip(REPLACEMENT)), len(self._emitted))]
        new = certain[len(self._emitted) :]
        self._emitted = certain
        if certain == text:
            if len(self._ids) > WINDOW and self._complete:
                self._ids = self._ids[self._complete :]
                self._emitted = self._decode(self._ids)
            self._complete = len(self._ids)
        elif len(self._ids) > 2 * WINDOW:
            new += self._flush_invalid_bytes(text)
        return new

    def _flush_invalid_bytes(self, text: str) -> str:
        """Return bytes that are no characters, up to the last place that is certainly between two of them.

        A character has at most four bytes, so that text before the last four tokens cannot change any more.
        """
        for cut in range(len(self._ids) - 4, 0, -1):
            before = self._decode(self._ids[:cut])
            if before + self._decode(self._ids[cut:]) == text and len(before) >= len(self._emitted):
                new = before[len(self._emitted) :]
                self._ids, self._emitted, self._complete = self._ids[cut:], "", 0
                return new
        return ""

    def flush(self) -> str:
        """Return the buffered text. Nothing may be appended after it."""
        return self._decode(self._ids)[len(self._emitted) :]
