"""Batched generation for numbered prompts, with a resumable journal of the results.

Each finished prompt is appended to a .jsonl file at once, so a killed run loses only the prompts in progress.
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
class GenerationRequest:
    """A prompt to continue; `tag` is returned to the caller with the output."""

    prompt_ids: list[int]
    params: SamplingParams
    tag: Any = None


# Number -> its first request, or its finished line where nothing needs to be generated.
Start = Callable[[int], GenerationRequest | Line]
# Number, request and generated token ids -> a follow-up request under the same number, or its finished line.
HandleOutput = Callable[[int, GenerationRequest, list[int]], GenerationRequest | Line]


class Journal:
    """A .jsonl file with one line per number.

    lines: the finished lines by number. in_progress: number -> token ids generated so far, for queued and running
    requests.
    """

    def __init__(self, path: Path):
        self.path, self.lines, self.in_progress = path, dict[int, Line](), dict[int, list[int]]()
        if path.exists():
            # The last line of a killed run may be incomplete. Truncation in place works on a full disk too.
            content = path.read_bytes()
            complete = content[: content.rfind(b"\n") + 1]
            self.lines = {line["number"]: line for line in map(json.loads, complete.splitlines())}
            os.truncate(path, len(complete))

    def run(
        self, engine: Engine, next_number: Callable[[], int | None], start: Start, handle_output: HandleOutput,
        progress: Any, count_done: Callable[[], int],
    ) -> None:  # fmt: skip
        """Process the numbers that `next_number` returns (None: no more for now) until no request is in progress.

        Queued and running requests together are at most 2 · max_num_seqs. `progress` is set to `count_done()` after
        every engine step.
        """
        requests: dict[str, tuple[int, GenerationRequest]] = {}
        started, tokens, added = time.perf_counter(), 0, 0

        def submit(number: int, item: GenerationRequest | Line, file: TextIO) -> None:
            """Add a request to the engine, or write a finished line."""
            nonlocal added
            if isinstance(item, GenerationRequest):
                added += 1
                engine.add(f"{number}, {added}", item.prompt_ids, item.params)
                requests[f"{number}, {added}"], self.in_progress[number] = (number, item), []
                return
            self.lines[number] = {"number": number, **item}
            self.in_progress.pop(number, None)
            file.write(json.dumps(self.lines[number]) + "\n")
            file.flush()

        with self.path.open("a", encoding="utf-8") as file:
            while True:
                while len(requests) < 2 * engine.config.max_num_seqs and (number := next_number()) is not None:
                    submit(number, start(number), file)
                if not requests:
                    break
                for output in engine.step():
                    output.raise_for_error()
                    (number, request), new_ids = requests[output.request_id], output.outputs[0].token_ids
                    self.in_progress[number] += new_ids
                    tokens += len(new_ids)
                    if output.finished:
                        del requests[output.request_id]
                        submit(number, handle_output(number, request, self.in_progress[number]), file)
                progress.set_postfix(tok_s=f"{tokens / (time.perf_counter() - started):.0f}", refresh=False)
                progress.update(max(0, count_done() - progress.n))
        if tokens:
            elapsed = time.perf_counter() - started
            log(f"{tokens} tokens in {elapsed:.0f} s: {tokens / elapsed:.0f} tokens/s")
