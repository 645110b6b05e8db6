"""Completions in pieces of one token.

The parser of an answer returns what a piece of it adds to its reasoning, content and calls, but not in which order
where it adds to several. In pieces of one token the order is that of the answer, however many tokens the engine
returned at once.
"""

from __future__ import annotations

from collections.abc import Iterator

from mlaforge.engine.request.output import Completion
from mlaforge.serving.token_text import Offsets


class Pieces:
    """Splits the incremental completions of one continuation."""

    def __init__(self, offsets: Offsets) -> None:
        self._offsets = offsets
        # Characters of earlier completions.
        self._start = 0

    def split(self, new: Completion) -> Iterator[Completion]:
        """Yield a completion for each token with its text; text that the engine returned later than its token comes
        with a later token. Finish and stop reason come with the last."""
        starts = [self._offsets.next(token_id) - self._start for token_id in new.token_ids]
        self._start += len(new.text)
        begin = 0
        for i, end in enumerate(starts[1:]):
            end = max(begin, min(end, len(new.text)))
            logprobs = None if new.logprobs is None else new.logprobs[i : i + 1]
            yield Completion(new.index, new.token_ids[i : i + 1], new.text[begin:end], logprobs)
            begin = end
        logprobs = None if new.logprobs is None else new.logprobs[-1:]
        yield Completion(
            new.index, new.token_ids[-1:], new.text[begin:], logprobs, new.finish_reason, new.stop_reason
        )  # fmt: skip
