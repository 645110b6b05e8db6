"""Drops the texts of special tokens from text that arrives in pieces."""

from __future__ import annotations

import functools
import re


class SpecialTokenFilter:
    """Withholds the end of the text while it may be the beginning of such a token."""

    def __init__(self, tokens: tuple[str, ...]) -> None:
        self._pattern, self._beginnings = _compiled(tokens)
        self._longest = max(map(len, tokens), default=0)
        self._text = ""

    def feed(self, text: str, finished: bool) -> str:
        """Return the text that is final and of no such token; `finished`: it is the last."""
        if not self._longest:
            return text
        text = self._text + text
        last = max((match.end() for match in self._pattern.finditer(text)), default=0)
        sizes = range(0 if finished else min(len(text) - last, self._longest - 1), 0, -1)
        withheld = next((size for size in sizes if text[-size:] in self._beginnings), 0)
        self._text = text[len(text) - withheld :]
        return self._pattern.sub("", text[: len(text) - withheld])


# Vocabularies have up to a thousand special tokens.
@functools.lru_cache(maxsize=16)
def _compiled(tokens: tuple[str, ...]) -> tuple[re.Pattern[str], frozenset[str]]:
    pattern = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))
    return pattern, frozenset(token[:size] for token in tokens for size in range(1, len(token)))
