"""Stop conditions: where a continuation ends, and the text that may be shown until then."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from mlaforge.engine.request.detokenizer import Detokenizer
from mlaforge.engine.sampling.params import SamplingParams


class Progress(NamedTuple):
    """What some tokens added: the text that became certain, how many of them count, and why it ended (if it did).

    `finish_reason` and `stop_reason` are those of engine/request/output.py's Completion.
    """

    text: str
    kept: int
    finish_reason: str | None
    stop_reason: str | int | None


def find_stop(text: str, stops: Sequence[str], after: int) -> tuple[int, int, str] | None:
    """(start, end, stop string) of the first to be complete among those that end beyond `after`.

    Of several that end at one place it is the longest: what reads the text letter by letter would stop there.
    """
    matches: list[tuple[int, int, str]] = []
    for stop in stops:
        start = text.find(stop, max(0, after - len(stop) + 1))
        if start >= 0:
            matches.append((start, start + len(stop), stop))
    return min(matches, key=lambda place: (place[1], place[0])) if matches else None


def held_back(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that is the beginning of a stop string, but not all of one."""
    for length in range(min(len(text), max(map(len, stops), default=1) - 1), 0, -1):
        end = text[-length:]
        if any(len(stop) > length and stop.startswith(end) for stop in stops):
            return length
    return 0


class Stopping:
    """The text and the end of one continuation.

    Ends by, in this order: end of text (eos), stop token id, stop string, max_tokens, the model's context. Of the
    token that ends the text (eos or stop id) no text is shown unless include_stop_str_in_output. min_tokens applies to
    stop strings here; the sampler does not draw ends and stop ids before it.

    All texts returned together are the decoded tokens (decoded as what follows the prompt: its leading space stays),
    cut at the stop string. A request with max_tokens 0 never gets here.

    prompt_ids      the prompt: its length counts for the context, its end decides how the first token is decoded
    eos_token_ids   ends of text; without effect under ignore_eos, unless a grammar binds the text
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
        # A grammar lets the text end where it is complete, and then nothing else: it ends there whatever was asked.
        bound = params.json_schema is not None or params.regex is not None
        self._eos = frozenset(() if params.ignore_eos and not bound else eos_token_ids)
        self._stop_ids = frozenset(params.stop_token_ids)
        self._most = max_model_len - len(prompt_ids)
        if params.max_tokens is not None:
            self._most = min(self._most, params.max_tokens)
        # Text that may become a stop string.
        self._held = ""
        self.generated = 0
        self.finished = False

    @property
    def room(self) -> int:
        """The most tokens that may still come."""
        return self._most - self.generated

    def append(self, token_ids: Sequence[int]) -> Progress:
        """Takes tokens up to the one that ends the text. Nothing may be appended after the end."""
        assert not self.finished, "the continuation has ended"
        pieces: list[str] = []
        for kept, token in enumerate(token_ids, start=1):
            text, finish_reason, stop_reason = self._append(token)
            pieces.append(text)
            if finish_reason is not None:
                self.finished = True
                return Progress("".join(pieces), kept, finish_reason, stop_reason)
        return Progress("".join(pieces), len(token_ids), None, None)

    def _append(self, token: int) -> tuple[str, str | None, str | int | None]:
        self.generated += 1
        ends = token in self._eos
        if ends or token in self._stop_ids:
            shown = self._params.include_stop_str_in_output
            text = self._detokenizer.append(token) if shown else ""
            return self._held + text + self._detokenizer.flush(), "stop", None if ends else token
        at_limit = self.room <= 0
        text = self._detokenizer.append(token)
        if at_limit:
            text += self._detokenizer.flush()
        scanned = len(self._held)
        text = self._held + text
        stops = self._params.stop
        if self.generated > self._params.min_tokens and (place := find_stop(text, stops, scanned)):
            start, end, stop = place
            return text[: end if self._params.include_stop_str_in_output else start], "stop", stop
        if at_limit:
            return text, "length", None
        certain = len(text) - held_back(text, stops)
        self._held = text[certain:]
        return text[:certain], None, None
