"""Numbered prompts, continued by the engine many at a time, and on disk what came of each of them.

What is finished is a line of a .jsonl file at once, so that a killed run loses only what was under way.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from mlaforge.engine.engine import Engine
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.runtime import log

Line = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Ask:
    """A prompt to continue; `note` is whatever its asker wants back with the answer."""

    prompt_ids: list[int]
    params: SamplingParams
    note: Any = None


# What becomes of a number: it is asked, or its line is known.
Begin = Callable[[int], Ask | Line]
# What becomes of an answer's token ids: another question under the same number, or its line.
Answered = Callable[[int, Ask, list[int]], Ask | Line]


class Journal:
    """A file of lines by number; `lines` are those of it, `under_way` the numbers that wait or run, with the token ids
    that have come so far."""

    def __init__(self, path: Path):
        self.path, self.lines, self.under_way = path, dict[int, Line](), dict[int, list[int]]()
        if path.exists():
            # The last line of a killed run may be torn. It is cut off in place: a full disk has room for that.
            written = path.read_bytes()
            whole = written[: written.rfind(b"\n") + 1]
            self.lines = {line["number"]: line for line in map(json.loads, whole.splitlines())}
            os.truncate(path, len(whole))

    def run(
        self, engine: Engine, following: Callable[[], int | None], begin: Begin, answered: Answered, bar: Any,
        done: Callable[[], int],
    ) -> None:  # fmt: skip
        """Goes through the numbers that `following` gives (None: no more for now) until nothing is under way.

        Twice as many wait or run as run together. After every step `bar` stands at what is `done`.
        """
        asked: dict[str, tuple[int, Ask]] = {}
        began, tokens, turns = time.perf_counter(), 0, 0

        def take(number: int, what: Ask | Line, file: TextIO) -> None:
            nonlocal turns
            if isinstance(what, Ask):
                turns += 1
                engine.add(f"{number}, {turns}", what.prompt_ids, what.params)
                asked[f"{number}, {turns}"], self.under_way[number] = (number, what), []
                return
            self.lines[number] = {"number": number, **what}
            self.under_way.pop(number, None)
            file.write(json.dumps(self.lines[number]) + "\n")
            file.flush()

        with self.path.open("a", encoding="utf-8") as file:
            while True:
                while len(asked) < 2 * engine.config.max_num_seqs and (number := following()) is not None:
                    take(number, begin(number), file)
                if not asked:
                    break
                for output in engine.step():
                    output.raise_for_error()
                    (number, ask), new = asked[output.request_id], output.outputs[0].token_ids
                    self.under_way[number] += new
                    tokens += len(new)
                    if output.finished:
                        del asked[output.request_id]
                        take(number, answered(number, ask, self.under_way[number]), file)
                bar.set_postfix(tok_s=f"{tokens / (time.perf_counter() - began):.0f}", refresh=False)
                bar.update(max(0, done() - bar.n))
        if tokens:
            took = time.perf_counter() - began
            log(f"{tokens} tokens in {took:.0f} s: {tokens / took:.0f} a second")
