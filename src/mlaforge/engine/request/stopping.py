"""Stop conditions: where a continuation ends, and which text can be shown before that."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from mlaforge.engine.request.channel_text import ChannelText
from mlaforge.engine.request.detokenizer import Detokenizer
from mlaforge.engine.request.stop_strings import find_stop, partial_stop_length
from mlaforge.engine.sampling.params import SamplingParams


class Progress(NamedTuple):
    """What some tokens added: the text that is final, the number of tokens up to the end, and the reason of the end, if
    any.

    `finish_reason` and `stop_reason` are those of engine/request/output.py's Completion.
    """

    text: str
    num_tokens: int
    finish_reason: str | None
    stop_reason: str | int | None


class Stopping:
    """Text and end of one continuation.

    Conditions, in this order: end of text (eos), stop token id, stop string, max_tokens, the model's context. The token
    that ends the text (eos or stop id) adds no text unless include_stop_str_in_output. min_tokens applies to stop
    strings here; the sampler does not draw eos and stop ids before it.

    The returned texts together are the decoded tokens, cut at the stop string; they are decoded as what follows the
    prompt, so that a leading space stays. A request with max_tokens 0 never gets here.

    prompt_ids      the prompt: its length counts for the context, its end decides how the first token is decoded
    eos_token_ids   ends of text; without effect under ignore_eos, except where a grammar constrains the text
    max_model_len   most tokens of prompt and continuation together
    """

    def __init__(
        self,
        tokenizer: Any,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        eos_token_ids: Collection[int],
        max_model_len: int,
    ):
        self._params = params
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens, prompt_ids)
        # A complete grammar allows nothing but the end of text, so that ignore_eos cannot apply.
        self._eos = frozenset(() if params.ignore_eos and not params.constrained else eos_token_ids)
        self._channel = ChannelText(tokenizer, params.stop_channel) if params.stop and params.stop_channel else None
        self._stop_ids = frozenset(params.stop_token_ids)
        self._max_new_tokens = max_model_len - len(prompt_ids)
        if params.max_tokens is not None:
            self._max_new_tokens = min(self._max_new_tokens, params.max_tokens)
        # Text that may be the beginning of a stop string.
        self._buffered = ""
        self.generated = 0
        self.finished = False

    @property
    def remaining_tokens(self) -> int:
        """The most tokens that can still be generated."""
        return self._max_new_tokens - self.generated

    def append(self, token_ids: Sequence[int]) -> Progress:
        """Append tokens up to the one that ends the text. Nothing may be appended after the end."""
        assert not self.finished, "the continuation has ended"
        pieces: list[str] = []
        for count, token in enumerate(token_ids, start=1):
            text, finish_reason, stop_reason = self._append(token)
            pieces.append(text)
            if finish_reason is not None:
                self.finished = True
                return Progress("".join(pieces), count, finish_reason, stop_reason)
        return Progress("".join(pieces), len(token_ids), None, None)

    def _append(self, token: int) -> tuple[str, str | None, str | int | None]:
        self.generated += 1
        ends = token in self._eos
        if ends or token in self._stop_ids:
            include = self._params.include_stop_str_in_output
            text = self._detokenizer.append(token) if include else ""
            return self._buffered + text + self._detokenizer.flush(), "stop", None if ends else token
        at_limit = self.remaining_tokens <= 0
        text = self._detokenizer.append(token)
        if at_limit:
            text += self._detokenizer.flush()
        scanned = len(self._buffered)
        text = self._buffered + text
        stops = self._params.stop if self._channel is None or self._channel.append(token) else ()
        if self.generated > self._params.min_tokens and (match := find_stop(text, stops, scanned)):
            start, end, stop = match
            return text[: end if self._params.include_stop_str_in_output else start], "stop", stop
        if at_limit:
            return text, "length", None
        certain = len(text) - partial_stop_length(text, stops)
        self._buffered = text[certain:]
        return text[:certain], None, None
