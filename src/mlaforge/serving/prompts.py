"""Tokenization of prompts in threads, with an early refusal of prompts whose size shows that they are too long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mlaforge.engine.request.sequence import PromptTooLong

# Bodies of up to this many bytes are read by separate threads, so that they do not wait for longer ones.
SHORT = 64 * 1024
THREADS = 2
# A text with more than BYTES_PER_TOKEN bytes for each token of the context is first tokenized in pieces of PIECE
# characters, until the count proves that it is too long. Cutting a text adds fewer than CUT tokens per piece.
BYTES_PER_TOKEN, PIECE, CUT = 8, 16 * 1024, 64


class Prompts:
    """Tokenizer of one model with a context of `max_model_len` tokens."""

    def __init__(self, tokenizer: Any, max_model_len: int) -> None:
        self._tokenizer, self._max_model_len = tokenizer, max_model_len
        # Maximum number of text bytes per token. A vocabulary entry has a character for each byte, of which normalizing
        # (NFC) may have merged three into one, or one for each character, which has up to four bytes.
        self._max_token_bytes = 4 * max(map(len, tokenizer.get_vocab()))
        # Several threads use the tokenizer. Its first call resets the training settings of its file; later calls change
        # nothing.
        tokenizer("x", add_special_tokens=True)
        self._short = ThreadPoolExecutor(THREADS, thread_name_prefix="mlaforge-short-prompts")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="mlaforge-long-prompts")

    async def in_thread(self, size: int, work: Callable[..., Any], *arguments: Any) -> Any:
        """Process a body of `size` bytes in a thread; short bodies do not wait for long ones."""
        pool = self._short if size <= SHORT else self._long
        return await asyncio.get_running_loop().run_in_executor(pool, work, *arguments)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text. Raises PromptTooLong as `check` does."""
        self.check(text)
        return self._ids(text, add_special_tokens)

    def check(self, text: str) -> None:
        """Raises PromptTooLong if a text certainly leaves no room for one more token, without tokenizing all of it."""
        max_tokens = max(0, self._max_model_len - 1)
        size = len(text.encode("utf-8", "replace"))
        if (min_count := size // self._max_token_bytes) > max_tokens:
            raise PromptTooLong(min_count, 1, self._max_model_len, at_least=True)
        if size > BYTES_PER_TOKEN * max_tokens:
            count = 0
            for start in range(0, len(text), PIECE):
                count += len(self._ids(text[start : start + PIECE], False)) - CUT
                if count > max_tokens:
                    raise PromptTooLong(count, 1, self._max_model_len, at_least=True)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def close(self) -> None:
        for pool in (self._short, self._long):
            pool.shutdown(cancel_futures=True)
