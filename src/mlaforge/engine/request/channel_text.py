"""Text of one harmony channel within an answer, for stop strings, which must not match reasoning."""

from __future__ import annotations

from typing import Any

from mlaforge.runtime import UserError

_MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>")


class ChannelText:
    """Tells for each token of an answer whether it is text of a message on `channel`. Raises UserError for a tokenizer
    without harmony's tokens."""

    def __init__(self, tokenizer: Any, channel: str) -> None:
        self._tokenizer, self._channel = tokenizer, channel
        ids = tokenizer.convert_tokens_to_ids(list(_MARKS))
        if len({*ids} - {None, tokenizer.unk_token_id}) < len(_MARKS):
            raise UserError(f"stop_channel = {channel!r} needs a model that speaks harmony")
        self._marks = dict(zip(ids, _MARKS, strict=True))
        # Tokens of the current header after <|channel|>; None outside of headers.
        self._header: list[int] | None = None
        self._inside = False

    def append(self, token_id: int) -> bool:
        """Return whether the next token, `token_id`, is text of the channel."""
        mark = self._marks.get(token_id)
        if mark is None:
            if self._header is not None:
                self._header.append(token_id)
            return self._inside
        if mark == "<|message|>":
            header = self._tokenizer.decode(self._header or [])
            self._inside, self._header = header.split()[:1] == [self._channel], None
        elif mark != "<|constrain|>":
            self._inside, self._header = False, [] if mark == "<|channel|>" else None
        return False
