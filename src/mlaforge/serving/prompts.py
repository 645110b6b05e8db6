"""Prompts as token ids: refused by their bytes where they are surely too long, tokenized beside everything else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mlaforge.engine.request.sequence import PromptTooLong

# Bodies of up to so many bytes are read by threads of their own, and wait for none that is longer.
SHORT = 64 * 1024
THREADS = 2
# A text with more bytes than so many for each token that there is room for is first tokenized by pieces of so many
# characters, until it is certain that it is too long. A cut makes a few tokens more of a text, never so many.
PLENTY, PIECE, CUT = 8, 16 * 1024, 64


class Prompts:
    """Tokenizes for one model, whose context is `max_model_len` tokens."""

    def __init__(self, tokenizer: Any, max_model_len: int) -> None:
        self._tokenizer, self._max_model_len = tokenizer, max_model_len
        # Bytes of text that a token stands for at most. Its name has a character for each byte, of which normalizing
        # (NFC) may have made one out of three, or one for each character, which has up to four bytes.
        self._longest = 4 * max(map(len, tokenizer.get_vocab()))
        # Several threads use the tokenizer. Its first call takes back what its file sets for training, no later one
        # changes anything.
        tokenizer("x", add_special_tokens=True)
        self._short = ThreadPoolExecutor(THREADS, thread_name_prefix="mlaforge-short-prompts")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="mlaforge-long-prompts")

    async def in_thread(self, size: int, work: Callable[..., Any], *arguments: Any) -> Any:
        """The result of reading a body of `size` bytes, in a thread: a long one keeps no short one waiting."""
        pool = self._short if size <= SHORT else self._long
        return await asyncio.get_running_loop().run_in_executor(pool, work, *arguments)

    def encode(self, text: str, special: bool) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer adds where `special`. Raises PromptTooLong as
        `check` does."""
        self.check(text)
        return self._ids(text, special)

    def check(self, text: str) -> None:
        """Raises PromptTooLong, without tokenizing all of a text, where it is certain that not one token finds room
        beside it."""
        room = max(0, self._max_model_len - 1)
        size = len(text.encode("utf-8", "replace"))
        if (least := size // self._longest) > room:
            raise PromptTooLong(least, 1, self._max_model_len, at_least=True)
        if size > PLENTY * room:
            count = 0
            for start in range(0, len(text), PIECE):
                count += len(self._ids(text[start : start + PIECE], False)) - CUT
                if count > room:
                    raise PromptTooLong(count, 1, self._max_model_len, at_least=True)

    def _ids(self, text: str, special: bool) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=special)["input_ids"])

    def close(self) -> None:
        for pool in (self._short, self._long):
            pool.shutdown(cancel_futures=True)
